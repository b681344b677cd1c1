"""Parts as values of one LMDB file: for small parts, and for people who want one file.

Every batch is one synced write transaction, so that `sync` has nothing left to do. LMDB reads through a map
and has no page checksums: a payload file that is damaged or shortened from outside can end the process with
SIGBUS, and a hung disk holds whoever waits inside LMDB. Neither can happen to `SlabStore`.
"""

from __future__ import annotations

import contextlib
import errno
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import lmdb
import numpy as np
import numpy.typing as npt

from ..system.fs import Fs
from ..units import MiB
from .arena import DISK_CHUNK_NBYTES, Geometry
from .base import FailedPlace, HeaderBatch, StoreFailed, Verdict
from .slab_format import SLOT_HEADER_NBYTES, Headers, checksums_of, judge, new_headers, seal, stamp, valid
from .workers import Batch, Workers

PAYLOAD_NAME = "parts.lmdb"
_LOCK_NAME = PAYLOAD_NAME + "-lock"

_KEY = struct.Struct(">QQ")
_PIECE_NBYTES = 8 * MiB
_PIECE_SLOTS = 256
_NUM_READERS = 2
_CLOSE_S = 1.0
_MIN_MAP_NBYTES = MiB
_ALL_CHUNKS = range(1 << 31)


class LmdbStore:
    """A `PartStore` in one LMDB file. The key of a slot is part size and slot, its value header and payload.

    Args:
        fs: makes the directory; LMDB opens its file itself.
        path: the directory.
        map_nbytes: the most the file may grow to. A value takes 8 KiB more than its part, rounded up to
            pages, and pages that a transaction replaces are free only two transactions later.
        chunk_nbytes: that of the disk tier's arena.
        read_only: change nothing, for tools; no other process may write meanwhile.

    Raises:
        OSError: the directory or the file cannot be made.
    """

    blank_drops_all = True
    direct_refused = False

    def __init__(
        self,
        fs: Fs,
        path: str,
        *,
        map_nbytes: int,
        chunk_nbytes: int = DISK_CHUNK_NBYTES,
        read_only: bool = False,
    ) -> None:
        self._fs = fs
        self._path = path
        self._map_nbytes = max(map_nbytes, _MIN_MAP_NBYTES)
        self._geometry = Geometry(chunk_nbytes, packed=True)
        self._gate = threading.Condition()
        self._num_inside = 0
        self._env: Any = None
        self._failed: OSError | None = None
        self._trouble: OSError | None = None
        self._readers = Workers("tieredkv-read", _NUM_READERS)
        if read_only:
            self._failed = OSError(errno.EROFS, "opened for reading", PAYLOAD_NAME)
            self._env = self._opened_read_only()
        else:
            fs.make_dir(path)
            self._open_or_replace()

    @property
    def allocated_nbytes(self) -> int:
        return self._fs.file_nbytes(f"{self._path}/{PAYLOAD_NAME}")

    def reserve(self, part_nbytes: int, chunks: Sequence[int]) -> None:
        """LMDB finds its space page by page."""

    def write(
        self, part_nbytes: int, slots: npt.ArrayLike, headers: Headers, payloads: Sequence[memoryview]
    ) -> npt.NDArray[np.uint64]:
        numbers = np.asarray(slots, np.int64).tolist()
        assert len(numbers) == len(headers) == len(payloads), (
            f"{len(numbers)} slots, {len(headers)} headers, {len(payloads)} payloads"
        )
        stamp(headers, part_nbytes)
        headers["checksum"] = checksums_of(payloads)
        seal(headers)
        self._put(part_nbytes, numbers, headers, payloads)
        return np.array(headers["checksum"], np.uint64)

    def _put(
        self, part_nbytes: int, numbers: Sequence[int], headers: Headers, payloads: Sequence[memoryview]
    ) -> None:
        """In one transaction; where that does not fit, in two: the pages that the first replaces serve again."""
        try:
            with self._writing() as txn:
                for number, header, payload in zip(numbers, headers, payloads, strict=True):
                    txn.put(_KEY.pack(part_nbytes, number), b"".join((header.tobytes(), payload)))
        except OSError as error:
            if error.errno != errno.ENOSPC or len(numbers) < 2:
                raise
            middle = len(numbers) // 2
            for half in (slice(middle), slice(middle, None)):
                self._put(part_nbytes, numbers[half], headers[half], payloads[half])

    def read(
        self,
        part_nbytes: int,
        slots: npt.ArrayLike,
        expected: npt.NDArray[Any],
        into: Sequence[memoryview],
        timeout_s: float,
        on_late: Callable[[int], None] | None = None,
    ) -> list[Verdict]:
        numbers = np.asarray(slots, np.int64)
        assert numbers.size == len(expected) == len(into), (
            f"{numbers.size} slots, {len(expected)} expected, {len(into)} buffers"
        )
        step = max(1, min(_PIECE_SLOTS, _PIECE_NBYTES // part_nbytes))
        pieces = [slice(first, first + step) for first in range(0, numbers.size, step)]

        def piece_late(number: int) -> None:
            for item in range(numbers.size)[pieces[number]]:
                if on_late is not None:
                    on_late(item)

        found = Batch(
            self._readers,
            [
                partial(self._read_piece, part_nbytes, numbers[piece], expected[piece], into[piece])
                for piece in pieces
            ],
            piece_late,
        ).wait(timeout_s)
        verdicts = [Verdict.TIMED_OUT] * numbers.size
        for piece, outcome in zip(pieces, found, strict=True):
            if outcome is not None:
                verdicts[piece] = outcome
        return verdicts

    def read_headers(self, part_nbytes: int, slots: npt.ArrayLike) -> HeaderBatch:
        numbers = np.asarray(slots, np.int64)
        headers = new_headers(numbers.size)
        rows = headers.view(np.uint8).reshape(numbers.size, -1)
        rows[:] = 0
        try:
            with self._reading() as txn:
                for row, number in zip(rows, numbers.tolist(), strict=True):
                    _copy_header(row, txn.get(_KEY.pack(part_nbytes, number)))
        except OSError as error:
            self._trouble = error
        return HeaderBatch(part_nbytes, numbers, headers, valid(headers))

    def iter_headers(self) -> Iterator[HeaderBatch]:
        after = b""
        while True:
            part_nbytes, numbers = self._slots_after(after)
            if not numbers:
                return
            yield self.read_headers(part_nbytes, numbers)
            after = _KEY.pack(part_nbytes, numbers[-1])

    def blank(self, part_nbytes: int, slots: npt.ArrayLike) -> None:
        with self._gate:
            if not self._gate.wait_for(lambda: self._num_inside == 0, _CLOSE_S):
                raise OSError(errno.EBUSY, "a read does not end", PAYLOAD_NAME)
            self._replace()

    def release(self, part_nbytes: int, chunks: Sequence[int]) -> None:
        per_chunk = self._geometry.slots_per_chunk(SLOT_HEADER_NBYTES + part_nbytes)
        if self._failed is not None:
            return
        with self._writing() as txn:
            cursor = txn.cursor()
            for chunk in chunks:
                end = _KEY.pack(part_nbytes, (chunk + 1) * per_chunk)
                there = cursor.set_range(_KEY.pack(part_nbytes, chunk * per_chunk))
                while there and bytes(cursor.key()) < end:
                    there = cursor.delete()

    def held_chunks(self, part_nbytes: int) -> frozenset[int]:
        per_chunk = self._geometry.slots_per_chunk(SLOT_HEADER_NBYTES + part_nbytes)
        chunks = set()
        with self._reading() as txn:
            cursor = txn.cursor()
            there = cursor.set_range(_KEY.pack(part_nbytes, 0))
            while there and _KEY.unpack(cursor.key())[0] == part_nbytes:
                chunks.add(_KEY.unpack(cursor.key())[1] // per_chunk)
                there = cursor.set_range(_KEY.pack(part_nbytes, (max(chunks) + 1) * per_chunk))
        return frozenset(chunks)

    def num_chunks(self) -> dict[int, int]:
        counts: dict[int, int] = {}
        with self._reading() as txn:
            cursor = txn.cursor()
            there = cursor.last()
            while there:
                part_nbytes, slot = _KEY.unpack(cursor.key())
                per_chunk = self._geometry.slots_per_chunk(SLOT_HEADER_NBYTES + part_nbytes)
                counts[part_nbytes] = slot // per_chunk + 1
                there = cursor.set_range(_KEY.pack(part_nbytes, 0)) and cursor.prev()
        return counts

    def sync(self) -> None:
        """Nothing to do: every write was synced, or failed."""

    def discard(self, place: FailedPlace) -> None:
        self.blank(place.part_nbytes, [])

    def troubles(self) -> dict[str, OSError]:
        return {} if self._trouble is None else {PAYLOAD_NAME: self._trouble}

    def check(self) -> None:
        with self._reading() as txn:
            for key, value in txn.cursor():
                nbytes = SLOT_HEADER_NBYTES + _KEY.unpack(key)[0]
                assert len(value) == nbytes, f"slot {_KEY.unpack(key)} has {len(value)} bytes, not {nbytes}"

    def close(self) -> None:
        self._readers.close(_CLOSE_S)
        with self._gate:
            if self._env is not None and self._num_inside == 0:
                self._env.close()
            self._env = None

    # ---- transactions --------------------------------------------------------------------------

    @contextlib.contextmanager
    def _inside(self) -> Iterator[Any]:
        """The open environment, which is not closed meanwhile."""
        with self._gate:
            if self._env is None:
                raise OSError(errno.EBADF, "the payload file is closed", PAYLOAD_NAME)
            env = self._env
            self._num_inside += 1
        try:
            yield env
        finally:
            with self._gate:
                self._num_inside -= 1
                self._gate.notify_all()

    @contextlib.contextmanager
    def _reading(self) -> Iterator[Any]:
        with self._inside() as env:
            try:
                with env.begin(buffers=True) as txn:
                    yield txn
            except lmdb.Error as error:
                raise OSError(errno.EIO, str(error), PAYLOAD_NAME) from error

    @contextlib.contextmanager
    def _writing(self) -> Iterator[Any]:
        """One synced transaction. Full is an `OSError` that passes; any other failure is final."""
        if self._failed is not None:
            raise StoreFailed(self._failed.errno or errno.EIO, [self._place])
        with self._inside() as env:
            try:
                with env.begin(write=True) as txn:
                    yield txn
            except lmdb.MapFullError as error:
                raise OSError(
                    errno.ENOSPC, "the payload file has reached its map size", PAYLOAD_NAME
                ) from error
            except lmdb.Error as error:
                self._failed = self._trouble = OSError(errno.EIO, str(error), PAYLOAD_NAME)
                raise StoreFailed(errno.EIO, [self._place]) from error

    @property
    def _place(self) -> FailedPlace:
        return FailedPlace(PAYLOAD_NAME, 0, _ALL_CHUNKS)

    def _read_piece(
        self,
        part_nbytes: int,
        numbers: npt.NDArray[np.int64],
        expected: npt.NDArray[Any],
        into: Sequence[memoryview],
    ) -> list[Verdict]:
        headers = new_headers(numbers.size)
        rows = headers.view(np.uint8).reshape(numbers.size, -1)
        rows[:] = 0
        try:
            with self._reading() as txn:
                for row, number, part in zip(rows, numbers.tolist(), into, strict=True):
                    value = txn.get(_KEY.pack(part_nbytes, number))
                    if value is None or len(value) != SLOT_HEADER_NBYTES + part_nbytes:
                        continue
                    _copy_header(row, value)
                    np.copyto(
                        np.frombuffer(part, np.uint8), np.frombuffer(value, np.uint8)[SLOT_HEADER_NBYTES:]
                    )
        except OSError as error:
            self._trouble = error
            return [Verdict.UNREADABLE] * numbers.size
        return judge(headers, expected, checksums_of(into), part_nbytes)

    def _slots_after(self, key: bytes) -> tuple[int, list[int]]:
        """Up to a piece of slots of one part size, from the first key behind `key`."""
        with self._reading() as txn:
            cursor = txn.cursor()
            there = cursor.set_range(key) if key else cursor.first()
            if there and bytes(cursor.key()) == key:
                there = cursor.next()
            part_nbytes, numbers = 0, list[int]()
            while there and len(numbers) < _PIECE_SLOTS:
                part, slot = _KEY.unpack(cursor.key())
                if numbers and part != part_nbytes:
                    break
                part_nbytes = part
                numbers.append(slot)
                there = cursor.next()
            return part_nbytes, numbers

    # ---- the file ------------------------------------------------------------------------------

    def _open_or_replace(self) -> None:
        """Open the file; one that LMDB cannot use is a lost cache and begins anew."""
        try:
            self._env = self._opened()
        except lmdb.Error as error:
            self._trouble = OSError(errno.EIO, f"begun anew: {error}", PAYLOAD_NAME)
            self._replace()

    def _replace(self) -> None:
        """Drop the file, durably, and start an empty one."""
        if self._env is not None:
            self._env.close()
            self._env = None
        for name in (PAYLOAD_NAME, _LOCK_NAME):
            with contextlib.suppress(FileNotFoundError):
                self._fs.unlink(f"{self._path}/{name}")
        self._fs.sync_dir(self._path)
        try:
            self._env = self._opened()
        except lmdb.Error as error:
            raise OSError(errno.EIO, str(error), PAYLOAD_NAME) from error
        self._failed = None

    def _opened_read_only(self) -> Any:
        path = f"{self._path}/{PAYLOAD_NAME}"
        self._fs.open_file(path).close()  # refuses a link, which LMDB would follow
        try:
            return lmdb.open(path, subdir=False, readonly=True, lock=False, readahead=False)
        except lmdb.Error as error:
            raise OSError(errno.EIO, str(error), PAYLOAD_NAME) from error

    def _opened(self) -> Any:
        """The environment; its file, if it was cut short, filled up with zeros that no check will pass.

        Raises:
            lmdb.Error: not a file of LMDB's.
        """
        path = f"{self._path}/{PAYLOAD_NAME}"
        for name in (PAYLOAD_NAME, _LOCK_NAME):  # LMDB would follow a link, and obey the umask
            where = f"{self._path}/{name}"
            self._fs.open_file(where, create=not self._fs.exists(where)).close()
        env = lmdb.open(path, subdir=False, map_size=self._map_nbytes, readahead=False)
        missing = (env.info()["last_pgno"] + 1) * env.stat()["psize"] - self._fs.file_nbytes(path)
        if missing > 0:
            with contextlib.closing(self._fs.open_file(path, writable=True)) as file:
                file.allocate(file.nbytes(), missing)
        self._fs.sync_dir(self._path)
        return env


def _copy_header(row: npt.NDArray[np.uint8], value: memoryview | None) -> None:
    if value is not None and len(value) >= SLOT_HEADER_NBYTES:
        np.copyto(row, np.frombuffer(value, np.uint8, count=SLOT_HEADER_NBYTES))
