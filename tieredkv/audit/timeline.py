"""The timeline of a store: its segments and how each ends, its checkpoints and what they vouch for, what
recovery would rebuild, and what would be lost and why. Reads only, also a store that somebody has open: it is
then seen as a crash at this moment would leave it.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..errors import CorruptFormat
from ..outcomes import Tier
from ..system import Fs
from ..table.checkpoint import checkpoint_name, read_checkpoint
from ..table.recovery import WAL
from ..table.state import State
from ..wal.format import CheckpointRef, LogPosition, SegmentHeader
from ..wal.reader import End, SegmentInfo, SegmentReader
from .kept_log import KeptLog, count_kinds, kind_name, stray_runs
from .report import Reading, read

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class SegmentLine:
    """One file of the log.

    `standing`: "counts", "given up" (an opening or a failed sync left it off the chain), "unreadable". `end` is
    where its good frames end: "clean", "torn or damaged" or "corrupt", with the offset and the bytes from there.
    """

    number: int
    nbytes: int
    standing: str
    open_number: int
    checkpoint_lsn: int
    first_lsn: int
    last_lsn: int
    durable_lsn: int
    num_frames: int
    records: dict[str, int]
    end: str
    end_offset: int
    rest_nbytes: int
    trouble: str = ""


@dataclass(frozen=True)
class CheckpointLine:
    """One checkpoint. It vouches for everything at or below its LSN, if it is `whole` and a segment names it."""

    lsn: int
    nbytes: int
    whole: bool
    in_use: bool
    named_by: tuple[int, ...]
    num_blocks: int
    num_parts: int
    num_namespaces: int
    num_sessions: int
    trouble: str = ""


@dataclass(frozen=True)
class Loss:
    """Something that recovery would not bring back, and why. LSNs are 0 where none are known."""

    what: str
    why: str
    first_lsn: int = 0
    last_lsn: int = 0
    nbytes: int = 0
    records: dict[str, int] | None = None


@dataclass(frozen=True)
class Rebuilt:
    """What recovery would rebuild: a checkpoint, the records behind it, and what slot headers prove."""

    checkpoint_lsn: int
    num_replayed: int
    last_lsn: int
    num_blocks: int
    num_parts: int
    num_namespaces: int
    num_sessions: int
    num_salvaged: int


@dataclass(frozen=True)
class Timeline:
    """`exit_code`: 0 clean, 1 loss that recovery mends, 2 damage."""

    path: str
    segments: tuple[SegmentLine, ...]
    checkpoints: tuple[CheckpointLine, ...]
    first_lsn: int
    last_lsn: int
    durable_lsn: int
    log_end: str
    rebuilt: Rebuilt
    lost: tuple[Loss, ...]
    damage: tuple[str, ...]
    exit_code: int


def timeline(
    path: str | os.PathLike[str], progress: Progress = lambda _done, _total: None, fs: Fs | None = None
) -> Timeline:
    """Read the store at `path`.

    Args:
        progress: told how many bytes of the log of how many are read.

    Raises:
        NotAStore, NewerFormat, PathUnusable: as `audit.read`.
    """
    reading = read(path, fs)
    kept = KeptLog(reading.fs, reading.path, reading.found, reading.log.after_lsn)
    segments = tuple(_segments(reading, kept.line, progress))
    lost = tuple(_lost(reading, segments))
    torn = reading.log.end.end is End.TORN
    return Timeline(
        path=reading.path,
        segments=segments,
        checkpoints=tuple(_checkpoints(reading)),
        first_lsn=kept.first_lsn,
        last_lsn=reading.log.last_lsn,
        durable_lsn=min(reading.log.durable_lsn, reading.log.last_lsn),
        log_end=str(reading.log.end),
        rebuilt=_rebuilt(reading),
        lost=lost,
        damage=tuple(reading.damage),
        exit_code=2 if reading.damage else 1 if lost or torn else 0,
    )


# ---- segments ------------------------------------------------------------------------------------


def _segments(reading: Reading, line: list[SegmentHeader], progress: Progress) -> Iterator[SegmentLine]:
    cuts: dict[int, LogPosition | None] = {h.number: None for h in line[-1:]}
    cuts |= {after.previous.number: after.previous for after in line[1:]}
    total = sum(segment.nbytes for segment in reading.found.segments)
    done = 0
    for segment in reading.found.segments:
        yield _segment(reading, segment, cuts)
        done += segment.nbytes
        progress(done, total)


def _segment(reading: Reading, segment: SegmentInfo, cuts: dict[int, LogPosition | None]) -> SegmentLine:
    header = segment.header
    if header is None:
        return _unreadable(segment, f"{segment.head.value}: {segment.trouble}")
    try:
        with contextlib.closing(SegmentReader(reading.fs, f"{reading.path}/{WAL}", header)) as reader:
            counts, num_frames = _walk(reader, cuts.get(header.number))
            rest = reader.rest_nbytes()
    except OSError as error:
        return _unreadable(segment, f"cannot be read: {error.strerror}")
    standing = "counts" if header.number in cuts else "given up"
    end, trouble = _end_of(reading, reader, rest, cuts)
    return SegmentLine(
        number=header.number, nbytes=segment.nbytes, standing=standing, open_number=header.open_number,
        checkpoint_lsn=header.checkpoint.lsn, first_lsn=header.first_lsn, last_lsn=reader.last_lsn,
        durable_lsn=reader.durable_lsn, num_frames=num_frames, records=dict(counts), end=str(end),
        end_offset=reader.offset, rest_nbytes=rest, trouble=trouble,
    )  # fmt: skip


def _unreadable(segment: SegmentInfo, trouble: str) -> SegmentLine:
    return SegmentLine(
        number=segment.number, nbytes=segment.nbytes, standing="unreadable", open_number=0, checkpoint_lsn=0,
        first_lsn=0, last_lsn=0, durable_lsn=0, num_frames=0, records={}, end=str(End.CORRUPT), end_offset=0,
        rest_nbytes=segment.nbytes, trouble=trouble,
    )  # fmt: skip


def _walk(reader: SegmentReader, cut: LogPosition | None) -> tuple[Counter[str], int]:
    """Count what the segment holds, up to where the next one cut it."""
    counts: Counter[str] = Counter()
    num_frames = 0
    while cut is None or reader.position != cut:
        frame = reader.peek()
        if frame is None or (cut is not None and frame.last_lsn > cut.lsn):
            break
        try:
            runs = frame.runs()
        except CorruptFormat:
            break
        reader.accept(frame)
        num_frames += 1
        for run in runs:
            counts[kind_name(run.kind)] += run.num_records
    return counts, num_frames


def _end_of(
    reading: Reading, reader: SegmentReader, rest_nbytes: int, cuts: dict[int, LogPosition | None]
) -> tuple[End, str]:
    """How a segment ends, and a word on it."""
    number, log_end = reader.header.number, reading.log.end
    cut = cuts.get(number)
    if cut is not None and reader.position != cut:
        return End.CORRUPT, f"reached LSN {reader.last_lsn}, the next segment follows LSN {cut.lsn}"
    if cut is not None:
        return (End.TORN, "given up by the opening after it") if rest_nbytes else (End.CLEAN, "")
    if number == log_end.number and log_end.offset == reader.offset:
        return log_end.end, ""
    return (End.TORN if rest_nbytes else End.CLEAN), ""


# ---- checkpoints ---------------------------------------------------------------------------------


def _checkpoints(reading: Reading) -> Iterator[CheckpointLine]:
    named: dict[CheckpointRef, list[int]] = {}
    for header in reading.found.headers:
        named.setdefault(header.checkpoint, []).append(header.number)
    known = {ref.lsn for ref in named}
    for lsn in reading.found.checkpoints:
        if lsn not in known:
            nbytes = reading.fs.file_nbytes(f"{reading.path}/{checkpoint_name(lsn)}")
            why = "no segment names it: the next opening removes it"
            yield CheckpointLine(lsn, nbytes, False, False, (), 0, 0, 0, 0, why)
    for ref in sorted(named, key=lambda ref: ref.lsn):
        if ref.lsn in reading.found.checkpoints or ref == reading.checkpoint:
            yield _checkpoint(reading, ref, tuple(named[ref]))


def _checkpoint(reading: Reading, ref: CheckpointRef, named_by: tuple[int, ...]) -> CheckpointLine:
    state, trouble = State(), ""
    state.clear()
    try:
        if ref.lsn:
            state.restore(read_checkpoint(reading.fs, reading.path, ref))
    except CorruptFormat as error:
        trouble = str(error)
        state.clear()
    return CheckpointLine(
        lsn=ref.lsn, nbytes=ref.nbytes, whole=not trouble, in_use=ref == reading.checkpoint, named_by=named_by,
        num_blocks=len(state.table), num_parts=num_parts(state), num_namespaces=len(state.catalog.namespaces),
        num_sessions=len(state.catalog.sessions), trouble=trouble,
    )  # fmt: skip


def num_parts(state: State) -> int:
    """Parts on DISK."""
    return int((state.table.slot[Tier.DISK][:, state.table.live_rows()] >= 0).sum())


# ---- the outcome ---------------------------------------------------------------------------------


def _rebuilt(reading: Reading) -> Rebuilt:
    state, log = reading.state, reading.log
    return Rebuilt(
        checkpoint_lsn=log.after_lsn, num_replayed=log.num_records, last_lsn=log.last_lsn,
        num_blocks=len(state.table), num_parts=num_parts(state),
        num_namespaces=len(state.catalog.namespaces), num_sessions=len(state.catalog.sessions),
        num_salvaged=reading.num_salvaged,
    )  # fmt: skip


def _lost(reading: Reading, segments: tuple[SegmentLine, ...]) -> Iterator[Loss]:
    log = reading.log
    if log.end.end is not End.CLEAN:
        counts: Counter[str] = Counter()
        lsns: list[int] = []
        for first_lsn, run in stray_runs(reading.fs, f"{reading.path}/{WAL}", reading.found, log):
            count_kinds(counts, run)
            lsns += [first_lsn, first_lsn + len(run) - 1]
        torn = "a crash cut it off before it was synced, or it was damaged: the two look alike"
        synced = f"it was synced (to LSN {log.synced_lsn}) and is damaged now"
        yield Loss(
            f"the end of segment {log.end.number} from byte {log.end.offset} on",
            torn if log.end.end is End.TORN else synced,
            log.last_lsn + 1 if log.end.end is End.CORRUPT or lsns else 0,
            max([0, *lsns, log.synced_lsn if log.end.end is End.CORRUPT else 0]),
            log.end.nbytes, dict(counts),
        )  # fmt: skip
    if reading.checkpoint is None:
        yield Loss(
            "every session, and every block whose slot header does not verify",
            "no checkpoint is whole, or the log does not reach back to one",
        )
    for segment in segments:
        if segment.standing == "unreadable":
            yield Loss(f"segment {segment.number}", segment.trouble, nbytes=segment.nbytes)
