"""Appends frames to the newest segment of the log."""

from __future__ import annotations

import contextlib
import errno
import threading
from collections import deque
from collections.abc import Sequence

from ..system import File, Fs
from ..units import MiB
from .format import (
    BEFORE_THE_LOG,
    HEADER_NBYTES,
    MAX_SEGMENT_NBYTES,
    CheckpointRef,
    LogPosition,
    SegmentHeader,
    decode_header,
    encode_frame,
    encode_header,
    segment_name,
)
from .records import Run

UNFINISHED = ".tmp"
"""Behind the name of a segment that is being written whole; the next opening removes what a crash leaves of one."""

_BLANK = memoryview(bytes(MiB))


class LogWriter:
    """One open segment at a time, in a directory `wal_dir` that exists.

    `start`, `append`, `rotate`, `abandon` and `close` belong to one thread at a time, the committer. `sync`
    may run beside `append` in another thread. Frames are kept until a sync has covered them, so that they
    can be written again after a sync that failed.

    `position` is where the log stands that the first segment follows, `next_number` the first unused
    segment number; recovery tells both.

    Space ahead of the tail is blanked in steps. It reads zeros anyway, but what was only reserved is turned into
    data by the first write, and a sync then waits for the file system's own journal; over blanked space it does not.
    """

    def __init__(
        self,
        fs: Fs,
        wal_dir: str,
        *,
        segment_nbytes: int,
        next_number: int = 1,
        position: LogPosition = BEFORE_THE_LOG,
    ) -> None:
        assert HEADER_NBYTES < segment_nbytes <= MAX_SEGMENT_NBYTES, f"a segment of {segment_nbytes} bytes"
        self._fs = fs
        self._dir = wal_dir
        self._segment_nbytes = segment_nbytes
        self._next_number = next_number
        self._synced = position
        self._tail = position
        self._tail_nbytes = self._blanked_nbytes = segment_nbytes
        self._file: File | None = None
        self._header: SegmentHeader | None = None
        self._broken = False  # an append failed: what lies at the tail is unknown
        self._unsynced: deque[tuple[LogPosition, int, tuple[Run, ...]]] = deque()
        self._sync_lock = threading.Lock()  # held while `_file` is synced or replaced

    @property
    def segment_number(self) -> int:
        """Of the newest segment started; 0 before the first."""
        return self._header.number if self._header else 0

    @property
    def tail_nbytes(self) -> int:
        """Bytes of the segment in use, its header included."""
        return self._tail_nbytes

    @property
    def room_nbytes(self) -> int:
        """Bytes left in the segment for frames; 0 while none is open."""
        return self._segment_nbytes - self._tail_nbytes

    @property
    def segment_nbytes(self) -> int:
        """What every segment takes on disk, full or not."""
        return self._segment_nbytes

    @property
    def max_frame_nbytes(self) -> int:
        """The largest frame that fits an empty segment (`format.frame_nbytes` of its runs)."""
        return self._segment_nbytes - HEADER_NBYTES

    def start(
        self,
        first_lsn: int,
        *,
        open_number: int,
        checkpoint: CheckpointRef,
        durable_lsn: int,
        repeat: Sequence[tuple[int, tuple[Run, ...]]] = (),
    ) -> SegmentHeader:
        """Begin a segment after the last synced frame; it and its name are durable on return.

        Args:
            repeat: frames that `abandon` gave, the first of which has `first_lsn`. The segment gets its name with all
                of them in it, for its header cuts the log where they stood before.

        Raises:
            OSError: nothing was begun; its number is used up.
        """
        assert self._tail is self._synced, f"frames from LSN {self._synced.lsn + 1} on are not synced"
        assert first_lsn > self._synced.lsn, f"LSN {first_lsn} is not above {self._synced.lsn}"
        header = SegmentHeader(
            number=self._next_number,
            first_lsn=first_lsn,
            durable_lsn=durable_lsn,
            open_number=open_number,
            previous=self._synced,
            checkpoint=checkpoint,
            segment_nbytes=self._segment_nbytes,
        )
        self._next_number += 1
        raw = encode_header(header)
        header = decode_header(raw)
        frames, end = _encode_all(header, repeat, durable_lsn)
        file = self._create(self._path(header.number), raw, frames)
        with self._sync_lock:
            self._close_file()
            self._file, self._header = file, header
            self._tail_nbytes = self._blanked_nbytes = HEADER_NBYTES + len(frames)
            self._tail = self._synced = end
            self._unsynced.clear()
        return header

    def rotate(self, *, open_number: int, checkpoint: CheckpointRef, durable_lsn: int) -> SegmentHeader:
        """End the segment, synced, and start the next; as `start`. A failure leaves the old one open."""
        self.sync()
        return self.start(
            self._tail.lsn + 1, open_number=open_number, checkpoint=checkpoint, durable_lsn=durable_lsn
        )

    def _create(self, path: str, header: bytes, frames: bytes) -> File:
        first_path = f"{path}{UNFINISHED}" if frames else path
        file = self._fs.open_file(first_path, create=True)
        try:
            file.allocate(0, self._segment_nbytes)
            file.pwritev([header, frames] if frames else [header], 0)
            file.datasync()
            if frames:
                self._fs.rename(first_path, path)
            self._fs.sync_dir(self._dir)
        except BaseException:
            file.close()
            for name in {first_path, path}:
                with contextlib.suppress(OSError):
                    self._fs.unlink(name)
            raise
        return file

    def append(self, runs: Sequence[Run], first_lsn: int, durable_lsn: int) -> int:
        """Write one frame at the tail, without a sync; returns its bytes. No runs: it carries `durable_lsn`.

        The caller made sure that it fits (`room_nbytes`) and does not change the records before a sync.

        Raises:
            OSError: the segment takes no more frames; `abandon` it.
        """
        header, file, tail = self._header, self._file, self._tail
        if header is None or file is None or self._broken:
            raise OSError(errno.EIO, "no log segment takes frames")
        assert first_lsn == tail.lsn + 1, f"LSN {first_lsn} does not follow {tail.lsn}"
        assert durable_lsn <= tail.lsn, f"durable LSN {durable_lsn} is above the last, {tail.lsn}"
        frame, chain = encode_frame(header, tail.chain, first_lsn, durable_lsn, runs)
        assert len(frame) <= self.room_nbytes, f"a frame of {len(frame)} bytes, {self.room_nbytes} are left"
        end = self._tail_nbytes + len(frame)
        blank = self._blank_behind(end)
        try:
            file.pwritev([frame, blank], self._tail_nbytes)
        except OSError:
            self._broken = True
            raise
        self._tail_nbytes = end
        self._blanked_nbytes = max(self._blanked_nbytes, end + len(blank))
        position = LogPosition(header.number, first_lsn + sum(map(len, runs)) - 1, chain)
        self._unsynced.append((position, first_lsn, tuple(runs)))
        self._tail = position  # last: `sync` forgets frames up to the tail it saw
        return len(frame)

    def _blank_behind(self, end: int) -> memoryview:
        """Zeros to write behind a frame that ends at `end`: none while there is blank space."""
        if end <= self._blanked_nbytes:
            return _BLANK[:0]
        return _BLANK[: min(self._segment_nbytes // 16, self._segment_nbytes - end)]

    def sync(self) -> int:
        """Make every frame appended before this call durable; returns the last LSN among them.

        Raises:
            OSError: final for this segment. Frames since the last good sync are in `unsynced`.
        """
        with self._sync_lock:
            tail = self._tail
            if tail is self._synced:
                return tail.lsn
            if self._file is None:
                raise OSError(errno.EIO, "no log segment is open")
            self._file.datasync()
            self._synced = tail
            while self._unsynced.popleft()[0] is not tail:
                pass
            return tail.lsn

    def unsynced(self) -> list[tuple[int, tuple[Run, ...]]]:
        """First LSN and runs of each frame that no good sync covers, oldest first."""
        return [(first_lsn, runs) for _, first_lsn, runs in list(self._unsynced)]

    def abandon(self) -> list[tuple[int, tuple[Run, ...]]]:
        """Leave the segment as it is after a failure: the log ends at its last good sync.

        Returns the frames to repeat after the next `start`, whose first LSN must be theirs.
        """
        with self._sync_lock:
            frames = self.unsynced()
            self._unsynced.clear()
            self._close_file()
            self._tail = self._synced
            return frames

    def unlink_segment(self, number: int) -> None:
        """Remove an old segment; durable after the next `Fs.sync_dir` of the directory."""
        assert number != self.segment_number or self._file is None, f"segment {number} is open"
        self._fs.unlink(self._path(number))

    def close(self) -> None:
        """Close the segment; what was not synced stays with the operating system."""
        with self._sync_lock:
            self._close_file()

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file, self._broken, self._tail_nbytes = None, False, self._segment_nbytes

    def _path(self, number: int) -> str:
        return f"{self._dir}/{segment_name(number)}"

    def check(self) -> None:
        """Assert that the tail, the synced place and the frames kept between them agree."""
        with self._sync_lock:
            frames = list(self._unsynced)
            assert (self._tail is self._synced) == (not frames), f"{len(frames)} frames between tail and sync"
            expected = self._synced.lsn + 1
            for position, first_lsn, runs in frames:
                assert first_lsn == expected, f"a kept frame starts at LSN {first_lsn}, not {expected}"
                expected += sum(map(len, runs))
                assert position.lsn == expected - 1, (
                    f"a kept frame ends at {position.lsn}, not {expected - 1}"
                )
            assert self._tail.lsn == expected - 1, f"the tail is at {self._tail.lsn}, not {expected - 1}"
            assert self._tail_nbytes <= self._segment_nbytes


def _encode_all(
    header: SegmentHeader, frames: Sequence[tuple[int, tuple[Run, ...]]], durable_lsn: int
) -> tuple[bytes, LogPosition]:
    """The frames one behind the other as they follow the header, and where they end."""
    pieces, lsn, chain = list[bytearray](), header.first_lsn - 1, header.checksum
    for first_lsn, runs in frames:
        assert first_lsn == lsn + 1, f"LSN {first_lsn} does not follow {lsn}"
        frame, chain = encode_frame(header, chain, first_lsn, durable_lsn, runs)
        pieces.append(frame)
        lsn = first_lsn + sum(map(len, runs)) - 1
    return b"".join(pieces), LogPosition(header.number, lsn, chain)
