"""Reads the log back: which segments count, which frames are good, and how the log ends.

The newest segment with a good header tells the truth: its header names the segment before it and the place
there at which that one was cut, and so on back to the checkpoint. Segments off this line were given up by an
earlier recovery or a failed sync. Frames apply up to the first that is not good; nothing behind it does.

Where the next LSN is at or below the highest known synced, by any frame or header, also one behind that end,
the frame there was once synced: the log is corrupt. Above it, a crash tore the end, or damage that looks alike.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import zip_longest
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ..errors import CorruptFormat, NewerFormat, PathUnusable
from ..system import NO_FILE, NOT_NOW, File, Fs
from ..units import PAGE_NBYTES, MiB
from .format import (
    BEFORE_THE_LOG,
    FRAME_ALIGN,
    FRAME_HEADER_NBYTES,
    FRAME_MARKER_AT,
    HEADER_NBYTES,
    MAX_SEGMENT_NBYTES,
    Frame,
    LogPosition,
    SegmentHeader,
    claimed_nbytes,
    decode_frame,
    decode_frames,
    decode_header,
    parse_segment_name,
    segment_name,
)
from .records import DROP, PUT, PackedRun, Run, join_runs

_WINDOW_NBYTES = 2 * MiB  # with more, each window costs new pages of memory
_MAX_RUN_RECORDS = 1 << 14
_MAX_GATHERED_RECORDS = 1 << 15
_PackedAt: TypeAlias = tuple[int, PackedRun]
_FramedAt: TypeAlias = tuple[int, list[PackedRun]]
Lsns: TypeAlias = npt.NDArray[np.int64]
_UNREADABLE = b"\xff"  # stands for bytes the disk would not give: no frame, and not the zeros of an end


class Head(str, Enum):
    """What a segment's header page is."""

    GOOD = "good"
    NEWER = "of a newer format"
    BLANK = "never written"
    TORN = "never completed, or damaged before any frame"
    DAMAGED = "damaged"


@dataclass(frozen=True)
class SegmentInfo:
    """One file of the log. `header` is there when `head` is GOOD; otherwise `trouble` says what was met.

    `is_unread`: the system would not give it, so it may be as good as ever; `may_come`: it might another time.
    """

    number: int
    nbytes: int
    head: Head
    header: SegmentHeader | None = None
    trouble: str = ""
    is_unread: bool = False
    may_come: bool = False


class End(str, Enum):
    """How a log ends: at blank space, at a frame that was never synced, or at one that was."""

    CLEAN = "clean"
    TORN = "torn or damaged"
    CORRUPT = "corrupt"

    def __str__(self) -> str:
        return self.value


class LogEnd(NamedTuple):
    """Where the log ends, and the bytes from there on that are not blank."""

    end: End = End.CLEAN
    number: int = 0
    offset: int = 0
    nbytes: int = 0

    def __str__(self) -> str:
        if self.end is End.CLEAN:
            return str(self.end)
        return f"{self.end} in segment {self.number} at byte {self.offset} ({self.nbytes} bytes)"


def scan_segments(fs: Fs, wal_dir: str) -> list[SegmentInfo]:
    """Every file with a segment's name, by number. Reads only; a missing directory is empty."""
    if not fs.is_dir(wal_dir):
        return []
    numbers = (parse_segment_name(name) for name in fs.list_names(wal_dir))
    return [_scan(fs, wal_dir, number) for number in sorted(n for n in numbers if n is not None)]


def _scan(fs: Fs, wal_dir: str, number: int) -> SegmentInfo:
    nbytes = 0
    try:
        with _opened(fs, wal_dir, number) as file:
            nbytes = file.nbytes()
            return SegmentInfo(number, nbytes, *_read_head(file, number))
    except OSError as error:
        trouble = f"cannot be read: {error.strerror}"
        return SegmentInfo(
            number, nbytes, Head.DAMAGED, trouble=trouble,
            is_unread=error.errno not in NO_FILE, may_come=error.errno in NOT_NOW,
        )  # fmt: skip


def _read_head(file: File, number: int) -> tuple[Head, SegmentHeader | None, str]:
    raw = bytearray(HEADER_NBYTES)
    try:
        header = decode_header(bytes(raw[: file.preadv([raw], 0)]))
        if header.number != number:
            raise CorruptFormat(f"by its header it is segment {header.number}")
        if not header.is_plausible:
            raise CorruptFormat("its header has numbers that no store can have reached")
    except NewerFormat as error:
        return Head.NEWER, None, str(error)
    except CorruptFormat as error:
        return _head_of_remains(file), None, str(error)
    return Head.GOOD, header, ""


def _head_of_remains(file: File) -> Head:
    nbytes = file.nbytes()
    if nbytes > MAX_SEGMENT_NBYTES:
        return Head.DAMAGED
    end = _Window(file, nbytes).end_of_data(0)
    return Head.BLANK if end == 0 else Head.TORN if end <= HEADER_NBYTES else Head.DAMAGED


class SegmentReader:
    """Reads the frames of one segment in bounded memory.

    `last_lsn`, `chain` and `offset` are the place reached: behind the last frame accepted. `durable_lsn` is the
    highest that these frames say.
    """

    def __init__(self, fs: Fs, wal_dir: str, header: SegmentHeader) -> None:
        """Raises OSError where the file cannot be opened."""
        self.header = header
        self.last_lsn = header.first_lsn - 1
        self.chain = header.checksum
        self.durable_lsn = header.durable_lsn
        self.offset = HEADER_NBYTES
        self._file = fs.open_file(f"{wal_dir}/{segment_name(header.number)}")
        self._nbytes = min(self._file.nbytes(), header.segment_nbytes)
        self._window = _Window(self._file, self._nbytes)

    @property
    def position(self) -> LogPosition:
        """The place reached, as the next segment's header would name it."""
        return LogPosition(self.header.number, self.last_lsn, self.chain)

    def peek(self) -> Frame | None:
        """The frame at the place reached, None if none there verifies and continues the chain."""
        frame = self._frame_at(self.offset)
        if frame is None or frame.previous != self.chain or frame.first_lsn != self.last_lsn + 1:
            return None
        return frame

    def ahead(self) -> list[Frame]:
        """The frames from the place reached on that verify and continue the chain: those in memory, or else one."""
        raw = self._window.tail(self.offset, FRAME_HEADER_NBYTES)
        if frames := decode_frames(self.header, raw, self.chain, self.last_lsn + 1):
            return frames
        frame = self.peek()
        return [frame] if frame else []

    def accept(self, frame: Frame) -> None:
        """Move the place reached behind `frame`, which lies there."""
        self.last_lsn = frame.first_lsn + frame.num_records - 1
        self.chain = frame.checksum
        self.offset += FRAME_HEADER_NBYTES + len(frame.body)
        if frame.durable_lsn > self.durable_lsn:
            self.durable_lsn = frame.durable_lsn

    def frames(self) -> Iterator[Frame]:
        """Frames in order, accepted one by one, up to the first that is not good."""
        while (frame := self.peek()) is not None:
            self.accept(frame)
            yield frame

    def stray_frames(self) -> Iterator[tuple[int, Frame]]:
        """Offset and frame of those from the place reached on that verify, whatever lies between them."""
        at = self.offset
        while (found := self._window.find(self.header.marker, at + FRAME_MARKER_AT)) is not None:
            start = found - FRAME_MARKER_AT
            frame = self._frame_at(start) if start % FRAME_ALIGN == 0 else None
            at = start + (frame.nbytes if frame else 1)
            if frame:
                yield start, frame

    def rest_nbytes(self) -> int:
        """Bytes from `offset` up to the last that is not zero; length that the file lacks counts too."""
        if self._nbytes < self.header.segment_nbytes:
            return self.header.segment_nbytes - self.offset
        return self._window.end_of_data(self.offset) - self.offset

    def _frame_at(self, offset: int) -> Frame | None:
        raw = self._window.tail(offset, FRAME_HEADER_NBYTES)
        frame = decode_frame(self.header, raw)
        if frame is None:
            nbytes = claimed_nbytes(self.header, raw)
            if len(raw) < nbytes <= self._nbytes - offset:  # it may go on beyond the window
                frame = decode_frame(self.header, self._window.tail(offset, nbytes))
        return frame

    @property
    def num_read_errors(self) -> int:
        """Reads that failed, also where the bytes came when they were asked for page by page."""
        return self._window.num_errors

    def refresh(self) -> None:
        """Forget what was read ahead: the file may have grown frames since."""
        self._window = _Window(self._file, self._nbytes)

    def close(self) -> None:
        self._file.close()


class LogRead:
    """One pass over the log behind `after_lsn`: iterate `runs` to its end, then ask how the log ended.

    The pass raises PathUnusable where a segment cannot be opened now, and may be another time.

    Attributes, final once `runs` is exhausted:
        position: the last place that counts; the next segment's header links to it.
        last_lsn: of the last record given; `after_lsn` if there was none.
        durable_lsn: the highest that any frame or header says is synced, payloads included.
        synced_lsn: the highest whose frame is known synced: a segment is synced where the next one cuts it.
        seen_lsn: the highest seen anywhere; new records go above it.
        num_records, num_segments: given, and read for it.
        num_read_errors: reads that failed, also where nothing is missing for it.
        end: where and how the log ends.
        damage: one line for each thing that is not as it was written.
    """

    def __init__(self, fs: Fs, wal_dir: str, segments: Sequence[SegmentInfo], after_lsn: int) -> None:
        self._fs = fs
        self._dir = wal_dir
        self._headers = {s.number: s.header for s in segments if s.header is not None}
        newest = max(self._headers, default=0)
        self._torn = [s for s in segments if s.head is Head.TORN and s.number > newest]
        self._lost = [s for s in segments if s.head is Head.DAMAGED and s.number > newest]
        self.after_lsn = self.last_lsn = after_lsn
        self.damage = [f"segment {s.number}: {s.trouble}" for s in self._lost]
        self.line = self._find_line(newest)
        self.position = self.line[0].previous if self.line else BEFORE_THE_LOG
        headers = self._headers.values()
        self.durable_lsn = max([after_lsn, *(h.durable_lsn for h in headers)])
        self.synced_lsn = max([self.durable_lsn, *(h.previous.lsn for h in headers)])
        # a segment without its header holds fewer records than bytes
        self.seen_lsn = max([self.synced_lsn, *(h.first_lsn - 1 for h in headers)])
        self.seen_lsn += sum(s.nbytes for s in self._lost)
        self.num_records = self.num_segments = self.num_read_errors = 0
        self.end = LogEnd()

    def _find_line(self, newest: int) -> list[SegmentHeader]:
        """Segments to read, oldest first: from the newest back to the one that reaches `after_lsn`."""
        line: list[SegmentHeader] = []
        number = newest
        while number:
            header = self._headers[number]
            line.append(header)
            if header.previous.lsn <= self.after_lsn:
                break
            before = header.previous.number
            number = before
            if before not in self._headers or before >= header.number:
                self.damage.append(f"segment {before} is missing, so those after it cannot be applied")
                line.clear()
                number = max((n for n in self._headers if n < min(before, header.number)), default=0)
        return line[::-1]

    def runs(self) -> Iterator[tuple[int, Run]]:
        """Records above `after_lsn` in LSN order: first LSN and run, merged across frames."""
        group: list[PackedRun] = []
        first = count = 0
        for lsn, run in self._packed_runs():
            fits = group and run.kind == group[0].kind and lsn == first + count and count < _MAX_RUN_RECORDS
            if group and not fits:
                yield from self._joined(first, group)
                group = []
            if not group:
                first, count = lsn, 0
            group.append(run)
            count += run.num_records
        if group:
            yield from self._joined(first, group)

    def gathered(self) -> Iterator[tuple[int | Lsns, Run]]:
        """The same records for a replay: runs of many although kinds take turns in the log, with the first LSN, or
        each one's where they do not follow one another.

        Block records are gathered between records of other kinds, puts before drops: a drop names the put that
        it ends, so it ends the same puts as in LSN order.
        """
        late: dict[int, list[_PackedAt]] = {PUT: [], DROP: []}
        count = 0
        for lsn, run in self._packed_runs():
            group = late.get(run.kind)
            if group is not None:
                group.append((lsn, run))
                count += run.num_records
            if group is None or count >= _MAX_GATHERED_RECORDS:
                yield from self._given(late)
                count = 0
            if group is None:
                yield from self._joined(lsn, [run])
        yield from self._given(late)

    def _given(self, late: dict[int, list[_PackedAt]]) -> Iterator[tuple[int | Lsns, Run]]:
        for group in late.values():
            if not group:
                continue
            lsns = _lsns_of(group)
            run = join_runs([packed for _, packed in group])
            group.clear()
            fresh = lsns > self.after_lsn
            if not fresh.all():
                lsns, run = lsns[fresh], Run(run.kind, np.asarray(run.records)[fresh])
            if len(lsns):
                self.num_records += len(lsns)
                first, last = int(lsns[0]), int(lsns[-1])
                self.last_lsn = max(self.last_lsn, last)
                yield first if last - first + 1 == len(lsns) else lsns, run

    def _joined(self, first_lsn: int, group: Sequence[PackedRun]) -> Iterator[tuple[int, Run]]:
        skip = max(0, self.after_lsn + 1 - first_lsn)
        run = join_runs(group).after(skip)
        if len(run):
            self.num_records += len(run)
            self.last_lsn = first_lsn + skip + len(run) - 1
            yield first_lsn + skip, run

    def _packed_runs(self) -> Iterator[_PackedAt]:
        for frame_lsn, runs in self._framed_runs():
            lsn = frame_lsn
            for run in runs:
                yield lsn, run
                lsn += run.num_records

    def _framed_runs(self) -> Iterator[_FramedAt]:
        cuts = [header.previous for header in self.line[1:]]
        for header, cut in zip_longest(self.line, cuts):
            try:
                reader = SegmentReader(self._fs, self._dir, header)
            except OSError as error:
                if error.errno in NOT_NOW:
                    raise PathUnusable(f"{error.filename or self._dir}: {error.strerror}") from error
                self.damage.append(f"segment {header.number} cannot be read: {error.strerror}")
                return self._conclude(LogEnd(End.CORRUPT, header.number, 0, header.segment_nbytes))
            with contextlib.closing(reader):
                self.num_segments += 1
                yield from self._segment_runs(reader, cut)
                self.position = reader.position
                self._see(reader.durable_lsn, reader.last_lsn)
                end = self._stop(reader, cut is not None) if reader.position != cut else None
                self.num_read_errors += reader.num_read_errors
                if end is not None:
                    return self._conclude(end)
        return self._conclude(LogEnd())

    def _segment_runs(self, reader: SegmentReader, cut: LogPosition | None) -> Iterator[_FramedAt]:
        """Each frame's first LSN and runs, of one segment, up to `cut` if another follows it."""
        cut_lsn, cut_chain = (cut.lsn, cut.chain) if cut else (sys.maxsize, None)
        while reader.chain != cut_chain:
            frames = reader.ahead() or self._past_vouched_damage(reader)
            for frame in frames:
                last_lsn = frame.last_lsn
                if last_lsn > cut_lsn or reader.chain == cut_chain:
                    return
                try:
                    runs = frame.runs() if last_lsn > self.after_lsn else []
                except CorruptFormat as error:
                    self.damage.append(f"LSN {frame.first_lsn}: {error}")
                    return
                reader.accept(frame)
                yield frame.first_lsn, runs
            if not frames:
                return

    def _past_vouched_damage(self, reader: SegmentReader) -> list[Frame]:
        """Where the checkpoint holds everything that damage took, `reader` at the first good frame behind it."""
        reached = reader.last_lsn
        if reached >= self.after_lsn:
            return []
        for offset, frame in reader.stray_frames():
            if reached < frame.first_lsn <= self.after_lsn + 1:
                where = f"segment {reader.header.number} at byte {reader.offset}"
                self.damage.append(f"{where}: damaged below the checkpoint, nothing lost")
                reader.offset = offset
                return [frame]
        return []

    def _see(self, durable_lsn: int, last_lsn: int) -> None:
        self.durable_lsn = max(self.durable_lsn, durable_lsn)
        self.synced_lsn = max(self.synced_lsn, durable_lsn)
        self.seen_lsn = max(self.seen_lsn, last_lsn, durable_lsn)

    def _stop(self, reader: SegmentReader, more_follows: bool) -> LogEnd:
        """Name the end that `reader` has come to. What lies behind it counts as seen, and no more."""
        nbytes = reader.rest_nbytes()
        for _, frame in reader.stray_frames() if nbytes else ():
            self._see(frame.durable_lsn, frame.last_lsn)
        end = End.CORRUPT if more_follows else End.TORN if nbytes else End.CLEAN
        return LogEnd(end, reader.header.number, reader.offset, nbytes)

    def _conclude(self, end: LogEnd) -> None:
        for header in self._headers.values():
            if header.number > end.number:
                self._see_all(header)
        if self._lost:
            end = LogEnd(End.CORRUPT, self._lost[0].number, 0, self._lost[0].nbytes)
        elif self.synced_lsn > max(self.last_lsn, self.position.lsn):
            end = end._replace(end=End.CORRUPT)
        elif end.end is End.CLEAN and self._torn:
            end = LogEnd(End.TORN, self._torn[0].number, 0, HEADER_NBYTES)
        if end.end is End.CORRUPT:
            self.damage.append(f"the log is {end}: reached LSN {self.last_lsn}, synced was {self.synced_lsn}")
        self.end = end

    def _see_all(self, header: SegmentHeader) -> None:
        with contextlib.suppress(OSError):
            reader = SegmentReader(self._fs, self._dir, header)
            with contextlib.closing(reader):
                for _, frame in reader.stray_frames():
                    self._see(frame.durable_lsn, frame.last_lsn)


def read_log(fs: Fs, wal_dir: str, after_lsn: int) -> LogRead:
    """The log behind `after_lsn`.

    Raises:
        NewerFormat: a segment is of a later format.
    """
    segments = scan_segments(fs, wal_dir)
    refuse_newer(segments)
    return LogRead(fs, wal_dir, segments, after_lsn)


def refuse_newer(segments: Sequence[SegmentInfo]) -> None:
    """Raise NewerFormat if one of `segments` is of a later format."""
    for segment in segments:
        if segment.head is Head.NEWER:
            raise NewerFormat(f"log segment {segment.number}: {segment.trouble}")


@contextlib.contextmanager
def _opened(fs: Fs, wal_dir: str, number: int) -> Iterator[File]:
    file = fs.open_file(f"{wal_dir}/{segment_name(number)}")
    try:
        yield file
    finally:
        file.close()


def _lsns_of(group: Sequence[_PackedAt]) -> Lsns:
    """The LSN of each record in `group`."""
    counts = np.array([packed.num_records for _, packed in group])
    firsts = np.array([lsn for lsn, _ in group])
    starts = np.cumsum(counts) - counts
    return np.repeat(firsts - starts, counts) + np.arange(counts.sum())


def _num_used(cells: npt.NDArray[np.uint8]) -> int:
    """How many bytes are left without the zeros at the end."""
    start, end = 0, len(cells)
    while end - start > PAGE_NBYTES:  # by halves, for blank space is much longer than what is used
        middle = (start + end) // 2
        if cells[middle:end].any():
            start = middle
        else:
            end = middle
    used = np.flatnonzero(cells[start:end])
    return start + int(used[-1]) + 1 if used.size else start


class _Window:
    """The first `nbytes` of a file through a few MiB of memory. Bytes that cannot be read come as 0xFF."""

    def __init__(self, file: File, nbytes: int) -> None:
        self._file = file
        self._nbytes = nbytes
        self._start = 0
        self._data = bytearray()
        self._view = memoryview(self._data)
        self.num_errors = 0

    def tail(self, offset: int, nbytes: int) -> memoryview:
        """At least `nbytes` from `offset` on, fewer only at the end. Valid for as long as it is held."""
        at = offset - self._start
        end = min(offset + nbytes, self._nbytes) - self._start
        if at < 0 or at > len(self._data) or end > len(self._data):
            self._fill(offset, nbytes)
            at = 0
        return self._view[at:]

    def find(self, pattern: bytes, offset: int) -> int | None:
        """Where `pattern` first lies at or after `offset`."""
        while len(self.tail(offset, len(pattern))) >= len(pattern):
            at = self._data.find(pattern, offset - self._start)
            if at >= 0:
                return self._start + at
            offset = self._start + len(self._data) - len(pattern) + 1
        return None

    def end_of_data(self, offset: int) -> int:
        """Just behind the last byte from `offset` on that is not zero; `offset` if all are."""
        end = offset
        for start in range(offset, self._nbytes, _WINDOW_NBYTES):
            used = _num_used(np.frombuffer(self.tail(start, _WINDOW_NBYTES)[:_WINDOW_NBYTES], dtype=np.uint8))
            end = start + used if used else end
        return end

    def _fill(self, offset: int, nbytes: int) -> None:
        nbytes = max(0, min(max(nbytes, _WINDOW_NBYTES), self._nbytes - offset))
        self._start, self._data = offset, bytearray(nbytes)
        self._view = memoryview(self._data)
        try:
            done = self._file.preadv([self._view], offset)
        except OSError:
            self.num_errors += 1
            done = self._fill_by_page(offset)
        if done < nbytes:  # the file was cut meanwhile
            self._data = self._data[:done]
            self._view = memoryview(self._data)

    def _fill_by_page(self, offset: int) -> int:
        for at in range(0, len(self._data), PAGE_NBYTES):
            page = self._view[at : at + PAGE_NBYTES]
            try:
                self._file.preadv([page], offset + at)
            except OSError:
                page[:] = _UNREADABLE * len(page)
        return len(self._data)
