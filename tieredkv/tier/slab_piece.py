"""Adjacent slots of one slab, moved together between the file and callers' memory, and hashed on the way."""

from __future__ import annotations

import errno
import mmap
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from ..system.fs import File
from ..units import KiB
from .slab_file import SlabFile
from .slab_format import (
    SLOT_HEADER_NBYTES,
    Buffer,
    Headers,
    aligned_bytes,
    checksums_of,
    seal,
)

MAX_SLOTS = 256
"""Of a piece."""

_SPARSE_NBYTES = 64 * KiB
"""Slots up to this size are read whole where only their headers are wanted."""


@dataclass(frozen=True)
class Piece:
    """`count` slots of `slab`, from its byte `offset` on, for the items of a batch from `first` on."""

    slab: SlabFile
    offset: int
    first: int
    count: int

    @property
    def items(self) -> slice:
        return slice(self.first, self.first + self.count)

    @property
    def nbytes(self) -> int:
        return self.count * self.slab.slot_nbytes

    def write(self, headers: Headers, payloads: Sequence[memoryview]) -> None:
        """Seal this piece's headers of a batch, and write them with their payloads.

        Raises:
            OSError: some of it may have been written.
        """
        mine, parts = headers[self.items], payloads[self.items]
        mine["checksum"] = checksums_of(parts)
        seal(mine)
        with self.slab.use() as file:
            try:
                self.slab.write(file, _interleaved(mine, parts), self.offset, self.nbytes)
            except OSError as error:
                if not _is_refused(file, error):
                    raise
                packed = _scratch.slots(self.count, self.slab.slot_nbytes)
                _pack(packed, mine, parts)
                self.slab.write(file, [packed.data], self.offset, packed.size)

    def read(self, headers: Headers, into: Sequence[memoryview]) -> list[int | None]:
        """Fill this piece's headers and buffers of a batch; slots that cannot be read together are read one by one.

        Returns:
            The checksum of each payload as read, None where the slot cannot be read whole.
        """
        mine, parts = headers[self.items], into[self.items]
        try:
            with self.slab.use() as file:
                checksums = self._fetch(file, mine, parts)
        except OSError as error:
            self.slab.note_read_error(error)
            if self.count == 1:
                return [None]
            return [single.read(headers, into)[0] for single in self._singles()]
        missing = self.count - len(checksums)
        if missing:
            self.slab.note_read_error(
                OSError(errno.EIO, "the file ends before the slot does", self.slab.name)
            )
        return [*checksums, *[None] * missing]

    def read_headers(self, headers: Headers) -> None:
        """Fill this piece's headers of a batch; those that cannot be read stay as they are."""
        mine, slot_nbytes = _rows(headers[self.items]), self.slab.slot_nbytes
        try:
            with self.slab.use() as file:
                if self.count > 1 and slot_nbytes <= _SPARSE_NBYTES:
                    slots = _scratch.slots(self.count, slot_nbytes)
                    nbytes = file.preadv([slots.data], self.offset)
                    num_read = (nbytes + self.slab.part_nbytes) // slot_nbytes
                    mine[:num_read] = slots[:num_read, :SLOT_HEADER_NBYTES]
                else:
                    for number, header in enumerate(mine):
                        file.preadv([header.data], self._slot(number))
        except OSError as error:
            self.slab.note_read_error(error)
            for single in self._singles() if self.count > 1 else ():
                single.read_headers(headers)

    def _singles(self) -> list[Piece]:
        return [Piece(self.slab, self._slot(number), self.first + number, 1) for number in range(self.count)]

    def _slot(self, number: int) -> int:
        """The byte at which a slot of this piece begins."""
        return self.offset + number * self.slab.slot_nbytes

    # ---- each fills headers and parts, and gives the checksums of the slots that the file has whole ----

    def _fetch(self, file: File, headers: Headers, parts: Sequence[memoryview]) -> list[int]:
        if self.slab.is_mapped:
            return self._copy_mapped(file, headers, parts)
        if file.direct:
            return self._read_at_once(file, headers, parts)
        cached = self._read_cached(file, headers, parts)
        there = len(cached)
        if there == self.count:
            return cached
        rest = Piece(self.slab, self._slot(there), self.first + there, self.count - there)
        return cached + rest._read_at_once(self.slab.past_cache(file), headers[there:], parts[there:])

    def _read_at_once(self, file: File, headers: Headers, parts: Sequence[memoryview]) -> list[int]:
        slot_nbytes = self.slab.slot_nbytes
        try:
            num_read = file.preadv(_interleaved(headers, parts), self.offset) // slot_nbytes
        except OSError as error:
            if not _is_refused(file, error):
                raise
            packed = _scratch.slots(self.count, slot_nbytes)
            num_read = file.preadv([packed.data], self.offset) // slot_nbytes
            _unpack(packed[:num_read], headers, parts)
        return [*map(xxhash.xxh3_64_intdigest, parts[:num_read])]

    def _read_cached(self, file: File, headers: Headers, parts: Sequence[memoryview]) -> list[int]:
        """Of the slots at the head that the page cache has whole.

        One page is asked for first: the system begins to fetch what it lacks of what is asked for.
        """
        if file.preadv([_rows(headers)[0].data], self.offset, nowait=True) < SLOT_HEADER_NBYTES:
            return []
        num_read = (
            file.preadv(_interleaved(headers, parts), self.offset, nowait=True) // self.slab.slot_nbytes
        )
        return [*map(xxhash.xxh3_64_intdigest, parts[:num_read])]

    def _copy_mapped(self, file: File, headers: Headers, parts: Sequence[memoryview]) -> list[int]:
        """Through numpy, which lets other threads run meanwhile: a page of a map may have to come from disk."""
        slot_nbytes, end = self.slab.slot_nbytes, self.offset + self.nbytes
        mapped = _array_of(self.slab.mapped(file, end))[self.offset : end]
        num_read = len(mapped) // slot_nbytes
        slots = mapped[: num_read * slot_nbytes].reshape(num_read, slot_nbytes)
        checksums: list[int] = []
        for slot, header, part in zip(slots, _rows(headers), parts, strict=False):
            np.copyto(header, slot[:SLOT_HEADER_NBYTES])
            np.copyto(_array_of(part), slot[SLOT_HEADER_NBYTES:])
            checksums.append(xxhash.xxh3_64_intdigest(part))
        return checksums


class _Scratch(threading.local):
    """Aligned memory of each thread's own, kept between calls."""

    def __init__(self) -> None:
        self._bytes = aligned_bytes(0)

    def slots(self, count: int, slot_nbytes: int) -> npt.NDArray[np.uint8]:
        """`uint8[count, slot_nbytes]`."""
        if self._bytes.size < count * slot_nbytes:
            self._bytes = aligned_bytes(count * slot_nbytes)
        return self._bytes[: count * slot_nbytes].reshape(count, slot_nbytes)


_scratch = _Scratch()


def _rows(headers: Headers) -> npt.NDArray[np.uint8]:
    """`uint8[n, 4096]`, the same bytes."""
    return headers.view(np.uint8).reshape(len(headers), SLOT_HEADER_NBYTES)


def _interleaved(headers: Headers, parts: Sequence[memoryview]) -> list[Buffer]:
    """Header, payload, header, payload ... as one gather or scatter list."""
    body = headers.view(np.uint8).data
    buffers: list[Buffer] = []
    for number, part in enumerate(parts):
        start = number * SLOT_HEADER_NBYTES
        buffers += (body[start : start + SLOT_HEADER_NBYTES], part)
    return buffers


def _pack(slots: npt.NDArray[np.uint8], headers: Headers, parts: Sequence[memoryview]) -> None:
    slots[:, :SLOT_HEADER_NBYTES] = _rows(headers)
    for slot, part in zip(slots, parts, strict=True):
        np.copyto(slot[SLOT_HEADER_NBYTES:], _array_of(part))


def _unpack(slots: npt.NDArray[np.uint8], headers: Headers, parts: Sequence[memoryview]) -> None:
    for slot, header, part in zip(slots, _rows(headers), parts, strict=False):
        np.copyto(header, slot[:SLOT_HEADER_NBYTES])
        np.copyto(_array_of(part), slot[SLOT_HEADER_NBYTES:])


def _array_of(buffer: memoryview | mmap.mmap | None) -> npt.NDArray[np.uint8]:
    return np.frombuffer(b"" if buffer is None else buffer, np.uint8)


def _is_refused(file: File, error: OSError) -> bool:
    """Whether a direct transfer may have been refused for where a caller's memory lies; ours is aligned."""
    return file.direct and error.errno == errno.EINVAL
