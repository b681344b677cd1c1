"""Crashes of a store, simulated on a copy: the log as it was when a crash cut it, recovered, and judged.

A cut at a byte leaves a segment's frames up to there and zeros behind, as a SIGKILL inside that write would; no
later segment and no later checkpoint is there. Recovery runs for real, over a copy in memory. What must
hold at every cut:

- recovery does not fail, and finds no damage that the store does not have anyway;
- it brings back every record of every frame that is whole before the cut, and not one more;
- the table and the sessions are those of a plain replay to that LSN, and the table's invariants hold;
- the log's end is clean between frames, and torn within one;
- recovering once more, from what the first recovery left, gives the same (once for each outcome).

Slots are not looked at: which of them a crash leaves unwritten is for a disk to say, and for `fsck` after it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import xxhash

from ..errors import BadInput, TieredKVError
from ..system import Fs
from ..system.overlay import OverlayFs
from ..table.checkpoint import checkpoint_name, read_checkpoint
from ..table.recovery import WAL, recover
from ..table.state import State
from ..wal.format import (
    FRAME_HEADER_NBYTES,
    HEADER_NBYTES,
    CheckpointRef,
    Frame,
    LogPosition,
    SegmentHeader,
    segment_name,
)
from ..wal.reader import End, SegmentReader
from ..wal.records import DTYPES, Run, decode_runs
from .kept_log import KeptLog
from .report import Reading, read
from .timeline import num_parts

EVERY_RECORD, EVERY_BYTE = "every-record", "every-byte"
_RUN_HEADER_NBYTES = 16
_LENGTH_NBYTES = 4


@dataclass(frozen=True)
class Survivors:
    """What recovery brought back from one cut, or from neighbouring cuts with one outcome.

    Attributes:
        segment, first_offset, last_offset: where the log was cut: bytes from the offset on are not there.
        written_lsn: the last record whose bytes were all written.
        last_lsn: the last record that came back; those between lie in a frame that was cut.
    """

    segment: int
    first_offset: int
    last_offset: int
    written_lsn: int
    last_lsn: int
    num_blocks: int
    num_parts: int
    num_sessions: int
    log_end: str


@dataclass(frozen=True)
class CrashReport:
    """`violations` names each cut at which something did not hold; there should be none."""

    path: str
    what: str
    first_lsn: int
    last_lsn: int
    num_crashes: int
    num_recoveries: int
    survivors: tuple[Survivors, ...]
    violations: tuple[str, ...]
    exit_code: int


@dataclass(frozen=True)
class _Spot:
    """A cut, and what must be there after it: the LSN of the last whole frame, and whether it is inside one."""

    header: SegmentHeader
    offset: int
    written_lsn: int
    whole_lsn: int
    inside: bool


def crash_at(
    path: str | os.PathLike[str],
    where: str | int,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
    fs: Fs | None = None,
) -> CrashReport:
    """Crash a copy of the store at `where`, recover, and judge.

    Args:
        where: `"every-record"`, `"every-byte"`, or an LSN: right after that record's bytes were written.
        progress: told how many crashes of how many are done.

    Raises:
        BadInput: that LSN cannot be rebuilt; it names those that can.
        NotAStore, NewerFormat, PathUnusable: as `audit.read`.
    """
    reading = read(path, fs)
    line = _rebuildable(reading)
    first = line[0].first_lsn
    if isinstance(where, int) and not first - 1 <= where <= reading.log.last_lsn:
        raise BadInput(
            f"a crash at LSN {where} cannot be rebuilt: the previous checkpoint and the log give LSN {first - 1}"
            f" to {reading.log.last_lsn}"
        )
    spots = list(_spots(reading, line, where))
    trial = _Trial(reading, line)
    survivors: list[Survivors] = []
    violations: list[str] = []
    for done, spot in enumerate(spots):
        found, wrong = trial.crash(spot)
        violations += wrong
        if found is not None:
            _join(survivors, found)
        progress(done + 1, len(spots))
    return CrashReport(
        path=reading.path, what=str(where), first_lsn=first - 1, last_lsn=reading.log.last_lsn,
        num_crashes=len(spots), num_recoveries=trial.num_recoveries, survivors=tuple(survivors),
        violations=tuple(violations), exit_code=2 if violations else 0,
    )  # fmt: skip


def _join(survivors: list[Survivors], found: Survivors) -> None:
    """Neighbouring cuts with one outcome are one line."""
    if survivors:
        before = survivors[-1]
        stretched = replace(before, last_offset=found.last_offset, first_offset=found.first_offset)
        if stretched == found:
            survivors[-1] = replace(before, last_offset=found.last_offset)
            return
    survivors.append(found)


# ---- where ---------------------------------------------------------------------------------------


def _rebuildable(reading: Reading) -> list[SegmentHeader]:
    """The segments in which a crash can be rebuilt: from the first on that names a whole checkpoint."""
    if reading.checkpoint is None:
        raise BadInput("no checkpoint of this store is whole: nothing to crash but what --verify shows")
    line = KeptLog(reading.fs, reading.path, reading.found, reading.log.after_lsn).line
    at = len(line)
    while at and _is_base(reading, line[at - 1].checkpoint, line[0]):
        at -= 1
        if line[at].checkpoint.lsn > line[at].previous.lsn:
            break  # an opening mended damage: its checkpoint holds what no replay gives
    if at == len(line):
        raise BadInput(
            "the checkpoint that the newest segment names is not whole: nothing to crash but what --verify shows"
        )
    return line[at:]


def _is_base(reading: Reading, ref: CheckpointRef, oldest: SegmentHeader) -> bool:
    """Whether the checkpoint is there, and the log behind it."""
    if ref == reading.checkpoint:
        return True
    if ref.lsn < oldest.previous.lsn:
        return False
    try:
        read_checkpoint(reading.fs, reading.path, ref)
    except TieredKVError:
        return False
    return True


def _spots(reading: Reading, line: list[SegmentHeader], where: str | int) -> Iterator[_Spot]:
    cuts: list[LogPosition | None] = [header.previous for header in line[1:]]
    for header, cut in zip(line, [*cuts, None], strict=True):
        before = max(header.previous.lsn, header.checkpoint.lsn)  # LSNs may leave a gap behind an opening
        with contextlib.closing(SegmentReader(reading.fs, f"{reading.path}/{WAL}", header)) as reader:
            if where in (EVERY_BYTE, EVERY_RECORD, header.first_lsn - 1):
                yield _Spot(header, HEADER_NBYTES, before, before, False)
            raw = _raw_segment(reading, header)
            while cut is None or reader.position != cut:
                frame = reader.peek()
                if frame is None or (cut is not None and frame.last_lsn > cut.lsn):
                    break
                written = raw[reader.offset : reader.offset + frame.nbytes]
                used = range(frame.nbytes - len(written.lstrip(b"\0")), len(written.rstrip(b"\0")))
                yield from _spots_in(reader, frame, used, where)
                reader.accept(frame)


def _spots_in(reader: SegmentReader, frame: Frame, used: range, where: str | int) -> Iterator[_Spot]:
    """Cuts in one frame, whose bytes before and behind `used` are zeros: it is not begun before, and whole behind."""
    start, before = reader.offset, frame.first_lsn - 1
    ends = _record_ends(frame)
    for lsn, end in enumerate(ends, frame.first_lsn):
        whole = end >= used.stop
        if where in (EVERY_RECORD, lsn):
            yield _Spot(
                reader.header, start + end, lsn, lsn if whole else before, used.start < end < used.stop
            )
    if where == EVERY_BYTE:
        for offset in range(1, frame.nbytes + 1):
            written = before + int(np.searchsorted(ends, offset, side="right"))
            whole = offset >= used.stop
            written = frame.last_lsn if whole else written
            inside = used.start < offset < used.stop
            yield _Spot(reader.header, start + offset, written, frame.last_lsn if whole else before, inside)


def _raw_segment(reading: Reading, header: SegmentHeader) -> bytes:
    raw = bytearray(header.segment_nbytes)
    name = f"{reading.path}/{WAL}/{segment_name(header.number)}"
    with contextlib.closing(reading.fs.open_file(name)) as file:
        file.preadv([raw], 0)
    return bytes(raw)


def _record_ends(frame: Frame) -> list[int]:
    """Where each record's bytes end, counted from the frame's start; the last takes the frame's padding too."""
    at, ends = FRAME_HEADER_NBYTES, list[int]()
    for packed, run in zip(frame.runs(), decode_runs(frame.body, frame.num_records), strict=True):
        at += _RUN_HEADER_NBYTES
        start = at
        for record in run.records:
            at += _LENGTH_NBYTES + len(record) if isinstance(record, bytes) else DTYPES[run.kind].itemsize
            ends.append(at)
        at = start + -(-len(packed.packed) // 8) * 8
    if ends:
        ends[-1] = frame.nbytes
    return ends


# ---- the trial -----------------------------------------------------------------------------------


class _Trial:
    """A copy of the store that is crashed again and again, each time as the files are."""

    def __init__(self, reading: Reading, line: list[SegmentHeader]) -> None:
        self._reading = reading
        self._line = line
        self._copy = OverlayFs(reading.fs)
        self._wal = f"{reading.path}/{WAL}"
        self._segment = (0, b"")
        self._state, self._expected, self._lsn = State(), "", -1
        self._runs: Iterator[tuple[int, Run]] | None = None
        self._left: tuple[int, Run] | None = None
        self._twice: tuple[int, bool] | None = None
        self.num_recoveries = 0

    def crash(self, spot: _Spot) -> tuple[Survivors | None, list[str]]:
        """Cut at `spot` and recover, twice where the outcome is new; what came back, and what did not hold."""
        place = f"segment {spot.header.number}, byte {spot.offset} (LSN {spot.written_lsn} written)"
        self._cut(spot)
        try:
            first = self._recover()
            again = self._recover() if (spot.whole_lsn, spot.inside) != self._twice else first
            self._twice = spot.whole_lsn, spot.inside
        except (TieredKVError, OSError, ValueError, AssertionError, KeyError) as error:
            return None, [f"{place}: recovery failed: {type(error).__name__}: {error}"]
        wrong = list(self._wrong(spot, *first))
        if fingerprint(again[0]) != fingerprint(first[0]):
            wrong.append("a second recovery gives another state")
        state, report = first
        found = Survivors(
            spot.header.number, spot.offset, spot.offset, spot.written_lsn, report.last_lsn, len(state.table),
            num_parts(state), len(state.catalog.sessions), str(report.log_end).partition(" in ")[0],
        )  # fmt: skip
        return found, [f"{place}: {line}" for line in wrong]

    def _cut(self, spot: _Spot) -> None:
        """The files as a crash at `spot` leaves them."""
        header, path, files = spot.header, self._reading.path, self._copy.files
        files.clear()
        for segment in self._reading.found.segments:
            if segment.number > header.number:
                files[f"{self._wal}/{segment_name(segment.number)}"] = None
        for lsn in self._reading.found.checkpoints:
            if lsn > spot.whole_lsn:
                files[f"{path}/{checkpoint_name(lsn)}"] = None
        raw = self._raw(header)
        files[f"{self._wal}/{segment_name(header.number)}"] = bytearray(
            raw[: spot.offset] + bytes(len(raw) - spot.offset)
        )

    def _raw(self, header: SegmentHeader) -> bytes:
        if self._segment[0] != header.number:
            self._segment = header.number, _raw_segment(self._reading, header)
        return self._segment[1]

    def _recover(self) -> tuple[State, Any]:
        self.num_recoveries += 1
        state = State()
        state.clear()
        recovered = recover(self._copy, self._reading.path, state)
        state.settle()
        return state, recovered.report

    def _wrong(self, spot: _Spot, state: State, report: Any) -> Iterator[str]:
        if report.last_lsn != spot.whole_lsn and (report.last_lsn, spot.whole_lsn) != (
            report.checkpoint_lsn,
            0,
        ):
            yield f"recovered to LSN {report.last_lsn}, the last whole frame ends at LSN {spot.whole_lsn}"
        end = End.TORN if spot.inside else End.CLEAN
        if not report.log_end.startswith(str(end)):
            yield f"the log ends {report.log_end}, it should be {end}"
        if report.damage:
            yield "; ".join(report.damage)
        if fingerprint(state) != self._expect(spot):
            yield "the state is not that of a plain replay"
        try:
            state.table.check()
        except AssertionError as error:
            yield f"the table: {error}"

    # ---- what must come back -------------------------------------------------------------------

    def _expect(self, spot: _Spot) -> str:
        """The fingerprint of a plain replay to the spot's last whole frame; spots come in LSN order."""
        if self._lsn != spot.whole_lsn:
            self._replay_to(spot.whole_lsn)
            self._lsn = spot.whole_lsn
            settled = State()
            settled.clear()
            settled.restore(_copied(self._state.snapshot()))
            settled.settle()
            self._expected = fingerprint(settled)
        return self._expected

    def _replay_to(self, lsn: int) -> None:
        if self._runs is None:
            reading, base = self._reading, self._line[0].checkpoint
            self._state.clear()
            if base.lsn:
                self._state.restore(read_checkpoint(reading.fs, reading.path, base))
            kept = KeptLog(reading.fs, reading.path, reading.found, reading.log.after_lsn)
            self._runs = ((at, run) for at, run in kept.runs() if at + len(run) - 1 > base.lsn)
        while True:
            first_lsn, run = self._left or next(self._runs, (0, None))
            self._left = None
            if run is None:
                return
            skip = max(0, self._line[0].checkpoint.lsn + 1 - first_lsn)
            first_lsn, run = first_lsn + skip, run.after(skip)
            if first_lsn > lsn:
                self._left = first_lsn, run
                return
            count = lsn + 1 - first_lsn
            self._state.apply(first_lsn, Run(run.kind, run.records[:count]))
            if count < len(run):
                self._left = first_lsn + count, run.after(count)
                return


def _copied(arrays: dict[str, Any]) -> dict[str, Any]:
    return {name: array.copy() if isinstance(array, np.ndarray) else array for name, array in arrays.items()}


def fingerprint(state: State) -> str:
    """A hash of everything durable, whatever the order of rows."""
    table = state.snapshot()
    digests = table["digest"]
    assert isinstance(digests, np.ndarray), "digests are a column"
    order = np.lexsort(digests.T[::-1])
    digest = xxhash.xxh3_128()
    for name in sorted(table):
        column = table[name]
        if isinstance(column, bytes):
            digest.update(column)
        elif name == "parent":
            parents = np.where(column[order] >= 0, column[order], len(order))
            named = np.concatenate([digests, np.zeros((1, digests.shape[1]), dtype=np.uint8)])
            digest.update(named[parents].tobytes())
        else:
            digest.update((column[order] if name == "digest" else column[..., order]).tobytes())
    return digest.hexdigest()
