"""Opens a store directory: survey, refuse, restore a checkpoint, replay the log, tidy up.

Everything that can refuse comes before anything on disk changes, and what changes then is only what is not
needed any more; so a crash at any moment of it leaves a directory that recovers to the same state.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..errors import CorruptFormat, DamagedStore, NotAStore, PathUnusable
from ..outcomes import RecoveryReport
from ..speeds import SPEEDS
from ..system import Clock, Fs, Lock, SystemClock
from ..tier import slab_format
from ..tier.lmdb_store import PAYLOAD_NAME
from ..wal.format import CheckpointRef, LogPosition, SegmentHeader, segment_name
from ..wal.reader import End, Head, LogRead, Lsns, SegmentInfo, refuse_newer, scan_segments
from ..wal.records import Run
from ..wal.writer import UNFINISHED
from .checkpoint import (
    CheckpointUnread,
    checkpoint_name,
    is_lmdb,
    is_temporary_name,
    parse_checkpoint_name,
    prune_checkpoints,
    read_checkpoint,
)

LOCK, WAL, SLABS, TRACE = "LOCK", "wal", "slabs", "trace"
_OURS = {LOCK, f"{LOCK}.tmp", WAL, SLABS, TRACE, SPEEDS, f"{SPEEDS}.tmp"}
BROKEN = ".broken"
"""Behind the name of what was put aside, and a number where that is taken."""

_ANYWHERE = {"lost+found"}  # at the root of a file system made for the store


class Recoverable(Protocol):
    """What recovery rebuilds."""

    def clear(self) -> None:
        """Forget everything: the empty table."""
        ...

    def restore(self, arrays: Mapping[str, Any]) -> None:
        """Take over a checkpoint's arrays; raises CorruptFormat where they make no sense."""
        ...

    def apply(self, lsns: int | Lsns, run: Run) -> object:
        """Apply records as live use does, by the first LSN or each one's; between others, puts before drops."""
        ...


@dataclass(frozen=True)
class Survey:
    """What lies in a directory, found by reading alone. `segments` and `checkpoints` (LSNs) in order."""

    names: tuple[str, ...]
    segments: tuple[SegmentInfo, ...]
    checkpoints: tuple[int, ...]
    num_payload_files: int

    @property
    def headers(self) -> list[SegmentHeader]:
        """Good segment headers, oldest first."""
        return [segment.header for segment in self.segments if segment.header is not None]

    @property
    def unread(self) -> list[SegmentInfo]:
        """Segments that the system would not give: what their headers name is not known."""
        return [segment for segment in self.segments if segment.is_unread]

    @property
    def is_new(self) -> bool:
        """Whether nothing was ever committed here; also a store whose making was cut short."""
        used = any(segment.head in (Head.GOOD, Head.DAMAGED) for segment in self.segments)
        return not used and not self.checkpoints and not self.num_payload_files

    def candidates(self) -> list[CheckpointRef]:
        """Checkpoints to try, newest first, as the newest header of each tells.

        One that a newer header does not build on was rejected by an earlier recovery, or written again.
        """
        refs: list[CheckpointRef] = []
        for header in reversed(self.headers):
            if not refs or header.checkpoint.lsn < refs[-1].lsn:
                refs.append(header.checkpoint)
        return refs


@dataclass(frozen=True)
class Recovered:
    """Where the journal goes on.

    Attributes:
        report: what `open` tells; counts of blocks and sessions are for the state's owner to fill in.
        next_lsn: above every LSN seen anywhere.
        durable_lsn: the highest LSN applied that is known synced, slabs included.
        next_segment: the first unused segment number.
        open_number: above that of any segment header, also of those that cannot be read.
        position: what the next segment's header links to.
        checkpoint: the one in use.
        must_checkpoint: the directory does not hold all that was recovered in a form that recovers again:
            write a checkpoint at `next_lsn - 1` and begin the first segment naming it.
        segments: the files of the log, oldest first, those without a good header included.
        num_read_errors: of the log, those included after which a second read gave everything.
    """

    report: RecoveryReport
    next_lsn: int
    durable_lsn: int
    next_segment: int
    open_number: int
    position: LogPosition
    checkpoint: CheckpointRef
    must_checkpoint: bool
    segments: tuple[SegmentInfo, ...]
    num_read_errors: int = 0


def survey(fs: Fs, store_dir: str) -> Survey:
    """Look at a directory that may be a store, or may not exist. Changes nothing.

    Raises:
        PathUnusable: it is no directory, or cannot be read.
        NewerFormat: its log is of a later format.
        NotAStore: it holds other things, and nothing of ours.
    """
    try:
        names = fs.list_names(store_dir)
        segments = scan_segments(fs, f"{store_dir}/{WAL}")
        slabs, lmdb = payload_names(fs, store_dir)
        payloads = [*slabs, *lmdb]
    except FileNotFoundError:
        names, segments, payloads = [], [], list[str]()
    except OSError as error:
        raise PathUnusable(f"{store_dir}: {error.strerror}") from error
    refuse_newer(segments)
    checkpoints = sorted(lsn for name in names if (lsn := parse_checkpoint_name(name)) is not None)
    found = Survey(tuple(names), tuple(segments), tuple(checkpoints), len(payloads))
    foreign = [name for name in names if not _is_ours(name)]
    if foreign and not found.headers and not _has_data(fs, store_dir, checkpoints, payloads):
        raise NotAStore(
            f"{store_dir} holds other things ({foreign[0]!r}) and no store; choose an empty directory"
        )
    return found


def claim(fs: Fs, store_dir: str, seen: Callable[[Survey], None] = lambda _found: None) -> Lock:
    """Make the directory if need be and take its lock, once it is sure that it may be used.

    Args:
        seen: told what was found before the lock was taken, which is looked at again behind it.

    Raises:
        StoreHeld: a living process has it.
        PathUnusable, NewerFormat, NotAStore: as `survey`; nothing was changed.
    """
    seen(survey(fs, store_dir))
    try:
        fs.make_dir(store_dir)
        return fs.lock(f"{store_dir}/{LOCK}")
    except OSError as error:
        raise PathUnusable(f"{store_dir}: {error.strerror}") from error


def recover(
    fs: Fs,
    store_dir: str,
    state: Recoverable,
    *,
    strict: bool = False,
    salvage: Callable[[], int] | None = None,
    clock: Clock | None = None,
) -> Recovered:
    """Bring `state` to what the store last committed, and the directory to where a journal can begin.

    The caller holds the lock. `salvage` is called when the log is corrupt or no checkpoint is whole: it may
    add what it can prove from slot headers, and returns how much that was.

    Raises:
        PathUnusable, NewerFormat, NotAStore: as `survey`; or no segment can be read, or one only another time.
        DamagedStore: damage, and `strict`. Nothing on disk was changed by any of these.
    """
    clock = clock or SystemClock()
    began = clock.monotonic()
    found = survey(fs, store_dir)
    _refuse_unread(found, store_dir)
    damage: list[str] = []
    checkpoint = restore(fs, store_dir, found, state, damage)
    log = LogRead(fs, f"{store_dir}/{WAL}", found.segments, checkpoint.lsn if checkpoint else 0)
    for lsns, run in log.gathered():
        state.apply(lsns, run)
    damage += log.damage
    if strict and damage:
        raise DamagedStore(f"{store_dir} is damaged: " + "; ".join(damage))
    must_checkpoint, num_salvaged = bool(damage), 0
    if salvage is not None and (log.end.end is End.CORRUPT or checkpoint is None):
        num_salvaged = salvage()
    damage += _tidy(fs, store_dir, found)
    damage += (unsynced := _sync_tail(fs, store_dir, log.position))
    must_checkpoint |= bool(unsynced)
    report = RecoveryReport(
        seconds=clock.monotonic() - began,
        new_store=found.is_new,
        checkpoint_lsn=log.after_lsn,
        num_segments=log.num_segments,
        num_replayed=log.num_records,
        last_lsn=log.last_lsn,
        durable_lsn=min(log.durable_lsn, log.last_lsn),
        log_end=str(log.end),
        num_salvaged=num_salvaged,
        damage=tuple(damage),
    )
    return Recovered(
        report=report,
        next_lsn=log.seen_lsn + 1,
        durable_lsn=report.durable_lsn,
        next_segment=_next_segment(found),
        open_number=_open_number(found),
        position=log.position,
        checkpoint=checkpoint or CheckpointRef(),
        must_checkpoint=must_checkpoint,
        segments=found.segments,
        num_read_errors=log.num_read_errors,
    )


def _refuse_unread(found: Survey, store_dir: str) -> None:
    """A log that the system does not give says nothing of what is in it: the store is not begun anew for that.

    Nor is it opened without a segment that another try or another user would get, and lose what that one holds.
    """
    for segment in found.unread:
        if segment.may_come or not found.headers:
            path = f"{store_dir}/{WAL}/{segment_name(segment.number)}"
            raise PathUnusable(f"log segment {path} {segment.trouble}; nothing was changed")


def restore(
    fs: Fs, store_dir: str, found: Survey, state: Recoverable, damage: list[str]
) -> CheckpointRef | None:
    """Load the newest checkpoint that is whole; None if there should be one and none is.

    Raises:
        PathUnusable: none is whole, and one could not be read: the store is not begun anew for that.
    """
    unread: CheckpointUnread | None = None
    for ref in found.candidates():
        state.clear()
        try:
            if ref.lsn:
                state.restore(read_checkpoint(fs, store_dir, ref))
            elif all(header.previous.lsn for header in found.headers):
                raise CorruptFormat("the log does not begin where it was empty")
            return ref
        except CorruptFormat as error:
            damage.append(str(error))
            unread = error if isinstance(error, CheckpointUnread) else unread
    state.clear()
    if unread is not None:
        raise PathUnusable(f"{store_dir}: {unread}")
    if found.is_new:
        return CheckpointRef()
    if not found.headers:
        damage.append("no segment of the log has a good header")
    return None


def _tidy(fs: Fs, store_dir: str, found: Survey) -> list[str]:
    """Put aside what lies in the place of a directory or a checkpoint of ours, and unlink what no header names.

    Returns what could not be done.
    """
    wal_dir = f"{store_dir}/{WAL}"
    try:
        for name in found.names:
            path = f"{store_dir}/{name}"
            if fs.is_dir(path) if _is_checkpoint(name) else name in (WAL, SLABS) and not fs.is_dir(path):
                fs.rename(path, free_name(fs, f"{path}{BROKEN}"))
        fs.make_dir(wal_dir)
        for name in fs.list_names(wal_dir):
            if name.endswith(UNFINISHED) and not fs.is_dir(f"{wal_dir}/{name}"):
                fs.unlink(f"{wal_dir}/{name}")
        failures: list[str] = []
        if not found.unread:
            failures = prune_checkpoints(fs, store_dir, {header.checkpoint.lsn for header in found.headers})
        fs.sync_dir(store_dir)
    except OSError as error:
        raise PathUnusable(f"{store_dir}: {error.strerror}") from error
    return failures


def _sync_tail(fs: Fs, store_dir: str, position: LogPosition) -> list[str]:
    """Sync the segment that the next one will follow: what was replayed may be in the page cache alone.

    Returns:
        What failed, if anything did: a checkpoint has to hold then what the segment may not.
    """
    if position.number == 0:
        return []
    try:
        path = f"{store_dir}/{WAL}/{segment_name(position.number)}"
        with contextlib.closing(fs.open_file(path, writable=True)) as file:
            file.datasync()
    except OSError as error:
        return [f"log segment {position.number} could not be synced: {error.strerror}"]
    return []


def _next_segment(found: Survey) -> int:
    """One above the newest good segment, past names that are taken: a stray file must not push it far up."""
    taken = {segment.number for segment in found.segments}
    number = max((header.number for header in found.headers), default=0) + 1
    while number in taken:
        number += 1
    return number


def _open_number(found: Survey) -> int:
    """Each opening began a segment, so those that cannot be read bound how many are not known."""
    headers = found.headers
    newest = headers[-1].number if headers else 0
    unknown = sum(segment.number > newest for segment in found.segments)
    return max((header.open_number for header in headers), default=0) + unknown + 1


def free_name(fs: Fs, path: str) -> str:
    """`path`, or with a number behind it if that is taken."""
    names = (f"{path}{suffix}" for suffix in ("", *range(1, 1000)))
    return next(name for name in names if not fs.exists(name))


def unlink_broken(fs: Fs, store_dir: str) -> None:
    """Remove the copies of damaged log files that recovery and `truncate` leave aside; durable on return."""
    places = (
        (store_dir, f"{WAL}{BROKEN}"),
        (store_dir, f"{SLABS}{BROKEN}"),
        (f"{store_dir}/{WAL}", f".wal{BROKEN}"),
    )
    for folder, mark in places:
        names = [n for n in fs.list_names(folder) if mark in n and not fs.is_dir(f"{folder}/{n}")]
        for name in names:
            fs.unlink(f"{folder}/{name}")
        if names:
            fs.sync_dir(folder)


def _is_ours(name: str) -> bool:
    put_aside, is_aside, _ = name.partition(BROKEN)
    if is_aside:
        return put_aside in (WAL, SLABS) or _is_checkpoint(put_aside)
    return name in _OURS | _ANYWHERE or _is_checkpoint(name)


def _is_checkpoint(name: str) -> bool:
    """By its name, finished or not."""
    return parse_checkpoint_name(name) is not None or is_temporary_name(name)


def payload_names(fs: Fs, store_dir: str) -> tuple[list[str], list[str]]:
    """Slabs, and the payload file of LMDB if it has been written to: an empty one is two pages."""
    slabs_dir = f"{store_dir}/{SLABS}"
    if not fs.is_dir(slabs_dir):
        return [], []
    names = fs.list_names(slabs_dir)
    lmdb = PAYLOAD_NAME in names and fs.file_nbytes(f"{slabs_dir}/{PAYLOAD_NAME}") > 2 * mmap.PAGESIZE
    return [name for name in names if slab_format.parse_slab_name(name)], [PAYLOAD_NAME] * lmdb


def _has_data(fs: Fs, store_dir: str, checkpoints: Sequence[int], payloads: Sequence[str]) -> bool:
    """Whether a checkpoint, the first slot of a slab or the payload file of LMDB is ours by its content."""
    if any(is_lmdb(fs, f"{store_dir}/{checkpoint_name(lsn)}") for lsn in checkpoints):
        return True
    return any(_begins_with_slot(fs, f"{store_dir}/{SLABS}/{name}") for name in payloads)


def _begins_with_slot(fs: Fs, path: str) -> bool:
    if path.endswith(PAYLOAD_NAME):
        return is_lmdb(fs, path)
    raw = bytearray(slab_format.SLOT_HEADER_NBYTES)
    try:
        with contextlib.closing(fs.open_file(path)) as file:
            slab_format.decode(raw[: file.preadv([raw], 0)])
    except (OSError, CorruptFormat):
        return False
    return True
