"""Parts in slab files: preallocated files of slots, written and read in runs of adjacent slots."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ..outcomes import Counters
from ..system.fs import Fs
from ..units import PAGE_NBYTES, GiB, MiB
from .arena import DISK_CHUNK_NBYTES, Geometry
from .base import FailedPlace, HeaderBatch, StoreFailed, Verdict
from .slab_file import SlabFile
from .slab_format import (
    SLOT_HEADER_NBYTES,
    Headers,
    aligned_bytes,
    judge,
    new_headers,
    parse_slab_name,
    slab_name,
    stamp,
    valid,
)
from .slab_piece import MAX_SLOTS, Piece
from .workers import Batch, Workers

_PIECE_NBYTES = 4 * MiB
_MAX_OPEN = 128
_CLOSE_S = 1.0
_NUM_THREADS = 8
"""Transfers under way at once, whatever the cores. A disk is fastest at queue depth four to eight, and as some
of them are at their checksum, that many are with the disk."""


class SlabStore:
    """A `PartStore` over slab files in one directory.

    Args:
        fs: the door to files.
        path: the directory; made if it is not there.
        chunk_nbytes: that of the disk tier's arena, so that both count the same chunks.
        disk_io: `"direct"` bypasses the page cache where the file system allows it, `"buffered"` goes
            through it, `"mmap"` writes through it and reads from maps.
        read_only: change nothing, for tools.
        counters: told of reads that failed, also of those that then worked slot by slot.

    Raises:
        OSError: the directory cannot be made or listed.
    """

    blank_drops_all = False

    def __init__(
        self,
        fs: Fs,
        path: str,
        *,
        chunk_nbytes: int = DISK_CHUNK_NBYTES,
        disk_io: str = "direct",
        read_only: bool = False,
        counters: Counters | None = None,
    ) -> None:
        self._fs = fs
        self._path = path
        self._geometry = Geometry(chunk_nbytes, packed=True)
        self._disk_io = disk_io
        self._read_only = read_only
        self._counters = counters or Counters()
        self._slabs: dict[tuple[int, int], SlabFile] = {}
        self._used: dict[SlabFile, None] = {}
        self._lock = threading.Lock()
        self._sync_lock = threading.Lock()
        self._zeros = aligned_bytes(MiB)
        self._readers = Workers("tieredkv-read", _NUM_THREADS)
        self._writers = Workers("tieredkv-write", _NUM_THREADS)
        self._closed = False
        if not read_only:
            fs.make_dir(path)
        for name in fs.list_names(path) if fs.is_dir(path) else ():
            place = parse_slab_name(name)
            if place is not None and place[0] % PAGE_NBYTES == 0:
                self._slab(*place).note_existing()

    # ---- what a PartStore does -----------------------------------------------------------------

    @property
    def allocated_nbytes(self) -> int:
        with self._lock:
            return sum(slab.allocated_nbytes for slab in self._slabs.values())

    @property
    def direct_refused(self) -> bool:
        """`disk_io="direct"` was asked for and a file system that an open slab lies on does not have it."""
        with self._lock:
            return any(slab.refuses_direct for slab in self._slabs.values())

    def reserve(self, part_nbytes: int, chunks: Sequence[int]) -> None:
        per_chunk = self._geometry.slots_per_chunk(SLOT_HEADER_NBYTES + part_nbytes)
        slots = [np.arange(chunk * per_chunk, (chunk + 1) * per_chunk) for chunk in chunks]
        self._reserve(part_nbytes, self._pieces(part_nbytes, _joined(slots)))

    def write(
        self, part_nbytes: int, slots: npt.ArrayLike, headers: Headers, payloads: Sequence[memoryview]
    ) -> npt.NDArray[np.uint64]:
        numbers = np.asarray(slots, np.int64)
        assert numbers.size == len(headers) == len(payloads), (
            f"{numbers.size} slots, {len(headers)} headers, {len(payloads)} payloads"
        )
        assert all(memoryview(payload).nbytes == part_nbytes for payload in payloads), (
            "a payload of another size"
        )
        if self._closed:
            raise self._closed_error()
        stamp(headers, part_nbytes)
        pieces = self._pieces(part_nbytes, numbers)
        self._reserve(part_nbytes, pieces)
        batch = Batch(
            self._writers,
            [partial(piece.write, headers, payloads) for piece in pieces],
        )
        batch.wait()
        if batch.is_refused:
            raise self._closed_error()
        self._close_idle(pieces)
        return np.array(headers["checksum"], np.uint64)

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
        assert all(memoryview(buffer).nbytes == part_nbytes for buffer in into), "a buffer of another size"
        pieces = self._pieces(part_nbytes, numbers)
        headers = new_headers(
            numbers.size
        )  # this call's own: a reader may fill its part long after the deadline

        def piece_late(number: int) -> None:
            for item in range(numbers.size)[pieces[number].items]:
                if on_late is not None:
                    on_late(item)

        found = Batch(
            self._readers,
            [partial(piece.read, headers, into) for piece in pieces],
            piece_late,
        ).wait(timeout_s)
        self._close_idle(pieces)
        read = [outcome or [None] * piece.count for piece, outcome in zip(pieces, found, strict=True)]
        checksums = [checksum for outcome in read for checksum in outcome]
        verdicts = judge(headers, expected, [checksum or 0 for checksum in checksums], part_nbytes)
        for item in (item for item, checksum in enumerate(checksums) if checksum is None):
            verdicts[item] = Verdict.UNREADABLE
        for piece, outcome in zip(pieces, found, strict=True):
            if outcome is None:
                verdicts[piece.items] = [Verdict.TIMED_OUT] * piece.count
        return verdicts

    def read_headers(self, part_nbytes: int, slots: npt.ArrayLike) -> HeaderBatch:
        numbers = np.asarray(slots, np.int64)
        headers = new_headers(numbers.size)
        headers.view(np.uint8)[:] = 0
        pieces = self._pieces(part_nbytes, numbers)
        for piece in pieces:
            piece.read_headers(headers)
        self._close_idle(pieces)
        return HeaderBatch(part_nbytes, numbers, headers, valid(headers))

    def iter_headers(self) -> Iterator[HeaderBatch]:
        with self._lock:
            slabs = sorted(self._slabs.values(), key=lambda slab: (slab.part_nbytes, slab.start))
        for slab in slabs:
            stride = SLOT_HEADER_NBYTES + slab.part_nbytes
            portions = [slab.portion(chunk) for chunk in sorted(slab.chunks)]
            numbers = _joined(
                [np.arange(offset, offset + nbytes, stride) + slab.start for offset, nbytes in portions]
            )
            for first in range(0, numbers.size, MAX_SLOTS):
                some = numbers[first : first + MAX_SLOTS] // stride
                batch = _without_blanks(self.read_headers(slab.part_nbytes, some))
                if batch.slots.size:
                    yield batch

    def blank(self, part_nbytes: int, slots: npt.ArrayLike) -> None:
        pieces = self._pieces(part_nbytes, np.asarray(slots, np.int64))
        for piece in pieces:
            piece.slab.refuse_if_failed()
            nbytes = piece.count * (SLOT_HEADER_NBYTES + part_nbytes)
            with piece.slab.use() as file:
                nbytes = min(nbytes, max(0, file.nbytes() - piece.offset))
                for start in range(0, nbytes, MiB):
                    zeros = self._zeros[: nbytes - start]
                    piece.slab.write(file, [zeros.data], piece.offset + start, zeros.size)
        self._close_idle(pieces)

    def release(self, part_nbytes: int, chunks: Sequence[int]) -> None:
        wanted = set(chunks)
        with self._lock:
            slabs = [slab for (size, _), slab in self._slabs.items() if size == part_nbytes]
        for slab in slabs:
            for chunk in sorted(wanted & slab.chunks) if slab.failed is None else ():
                slab.punch(chunk)

    def held_chunks(self, part_nbytes: int) -> frozenset[int]:
        with self._lock:
            mine = [slab.chunks for (size, _), slab in self._slabs.items() if size == part_nbytes]
        return frozenset().union(*mine)

    def num_chunks(self) -> dict[int, int]:
        counts: dict[int, int] = {}
        with self._lock:
            for (part_nbytes, _), slab in self._slabs.items():
                if slab.chunks:
                    counts[part_nbytes] = max(counts.get(part_nbytes, 0), max(slab.chunks) + 1)
        return counts

    def sync(self) -> None:
        with self._sync_lock:
            with self._lock:
                dirty = [slab for slab in self._slabs.values() if slab.dirty or slab.inherited]
            failed = [slab for slab in dirty if not slab.sync()]
        if failed:
            assert failed[0].failed is not None, f"{failed[0].name} failed without an error"
            raise StoreFailed(failed[0].failed.errno or errno.EIO, [slab.place for slab in failed])
        self._close_idle(())

    def discard(self, place: FailedPlace) -> None:
        key = parse_slab_name(place.name)
        assert key is not None, f"{place.name} is no slab"
        slab = self._slab(*key)
        slab.unlink()
        with self._lock:
            del self._slabs[key]
            self._used.pop(slab, None)
        slab.close()

    def troubles(self) -> dict[str, OSError]:
        with self._lock:
            return {slab.name: slab.trouble for slab in self._slabs.values() if slab.trouble is not None}

    def check(self) -> None:
        with self._lock:
            for (part_nbytes, index), slab in self._slabs.items():
                assert slab.name == slab_name(part_nbytes, index), (
                    f"{slab.name} kept as {part_nbytes}, {index}"
                )
                outside = [chunk for chunk in slab.chunks if slab.portion(chunk)[1] <= 0]
                assert not outside, f"{slab.name} counts chunks {outside} of other slabs"
                assert slab.is_open or not slab.dirty, f"{slab.name} is closed and not synced"

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._readers.close(_CLOSE_S)
        self._writers.close(_CLOSE_S)
        for slab in self._slabs.values():
            slab.close()

    def _closed_error(self) -> OSError:
        return OSError(errno.EBADF, "the slabs are closed", self._path)

    # ---- pieces --------------------------------------------------------------------------------

    def _slab(self, part_nbytes: int, index: int) -> SlabFile:
        with self._lock:
            slab = self._slabs.get((part_nbytes, index))
            if slab is None:
                span = _slab_nbytes(part_nbytes)
                slab = self._slabs[part_nbytes, index] = SlabFile(
                    self._fs,
                    self._path,
                    slab_name(part_nbytes, index),
                    part_nbytes,
                    index * span,
                    (index + 1) * span,
                    self._geometry.chunk_span(SLOT_HEADER_NBYTES + part_nbytes),
                    self._disk_io,
                    self._read_only,
                    self._counters,
                )
            return slab

    def _pieces(self, part_nbytes: int, numbers: npt.NDArray[np.int64]) -> list[Piece]:
        """The runs of a batch, cut where a slab ends and where a call becomes too large to overlap."""
        stride = SLOT_HEADER_NBYTES + part_nbytes
        slab_nbytes = _slab_nbytes(part_nbytes)
        most = max(1, min(MAX_SLOTS, _PIECE_NBYTES // part_nbytes))
        pieces, first = [], 0
        for _, count, offset in self._geometry.runs(stride, numbers):
            while count:
                index, start = divmod(offset, slab_nbytes)
                taken = min(count, most, (slab_nbytes - start) // stride)
                pieces.append(Piece(self._slab(part_nbytes, index), start, first, taken))
                first, count, offset = first + taken, count - taken, offset + taken * stride
        return pieces

    def _reserve(self, part_nbytes: int, pieces: Iterable[Piece]) -> None:
        wanted: dict[SlabFile, set[int]] = {}
        for piece in pieces:
            nbytes = piece.count * (SLOT_HEADER_NBYTES + part_nbytes)
            wanted.setdefault(piece.slab, set()).update(piece.slab.chunks_of(piece.offset, nbytes))
        for slab, chunks in wanted.items():
            slab.reserve(chunks)

    def _close_idle(self, pieces: Iterable[Piece]) -> None:
        """Keep the number of open files bounded: the slabs not used for longest are closed first."""
        with self._lock:
            for piece in pieces:
                self._used.pop(piece.slab, None)
                self._used[piece.slab] = None
            for slab in list(self._used)[: max(0, len(self._used) - _MAX_OPEN)]:
                if slab.close_if_idle():
                    del self._used[slab]


def _slab_nbytes(part_nbytes: int) -> int:
    """Whole slots up to 1 GiB, one at least. Part of the format: it says which slab a slot lies in."""
    slot_nbytes = SLOT_HEADER_NBYTES + part_nbytes
    return max(1, GiB // slot_nbytes) * slot_nbytes


def _without_blanks(batch: HeaderBatch) -> HeaderBatch:
    written = batch.headers.view(np.uint8).reshape(len(batch.headers), -1).any(axis=1)
    return HeaderBatch(batch.part_nbytes, batch.slots[written], batch.headers[written], batch.sound[written])


def _joined(arrays: Sequence[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    return np.concatenate(arrays) if arrays else np.empty(0, np.int64)
