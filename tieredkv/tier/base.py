"""The disk tier's payload store: slots that outlive the process, in batches with an outcome for each part."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

EXPECTED_DTYPE = np.dtype(
    [
        ("namespace", "u1", 32),
        ("digest", "u1", 32),
        ("put_seq", "<u8"),
        ("checksum", "<u8"),
        ("group", "u1"),
    ]
)
"""What the block table says a slot holds; a read compares the slot with it."""


class Verdict(Enum):
    """What a read of one part found; only `OK` leaves bytes that may be used."""

    OK = "ok"
    CORRUPT = "corrupt"
    """The slot holds this put, or nothing that can be read as a put, and its bytes fail their check."""
    OTHER = "other"
    """A sound header names another namespace, digest, group or put_seq."""
    UNREADABLE = "unreadable"
    """The system refused, or the file ends before the slot does; `troubles()` has the errno."""
    TIMED_OUT = "timed out"
    """Not done at the deadline. The buffer may be written until `on_late` says otherwise."""


class StoreFailed(OSError):
    """A sync or a write failed for good. `failed` names the places that take no more writes."""

    def __init__(self, code: int, failed: Sequence[FailedPlace]) -> None:
        names = ", ".join(place.name for place in failed)
        super().__init__(code or errno.EIO, f"no more writes to {names}", names)
        self.failed = tuple(failed)


@dataclass(frozen=True)
class FailedPlace:
    """A file that takes no more writes, and the chunks of its pool that lie in it.

    What was put there since its last good `sync` cannot become durable; what is older stays readable.
    """

    name: str
    part_nbytes: int
    chunks: range


@dataclass(frozen=True)
class HeaderBatch:
    """Slot headers as found. `sound[i]` says whether `headers[i]` can be believed."""

    part_nbytes: int
    slots: npt.NDArray[np.int64]
    headers: npt.NDArray[Any]
    sound: npt.NDArray[np.bool_]


class PartStore(Protocol):
    """Parts on disk, by part size and slot. Any thread may call; no two calls may name one slot at once,
    but for reads. Slots are numbered as `Geometry` says, with a stride of 4096 + part_nbytes.

    Headers are `slab_format.HEADER_DTYPE`, expectations `slab_format.EXPECTED_DTYPE`.
    """

    blank_drops_all: bool
    """Whether `blank` empties the whole store, and not those slots alone."""

    @property
    def direct_refused(self) -> bool:
        """Transfers past the page cache were asked for, and the file system does not have them."""
        ...

    @property
    def allocated_nbytes(self) -> int:
        """What the store takes from the disk, holes not counted."""
        ...

    def reserve(self, part_nbytes: int, chunks: Sequence[int]) -> None:
        """Find disk space for whole chunks; what `write` finds itself where this was not asked.

        Raises:
            OSError: there may be less.
        """
        ...

    def write(
        self,
        part_nbytes: int,
        slots: npt.ArrayLike,
        headers: npt.NDArray[Any],
        payloads: Sequence[memoryview],
    ) -> npt.NDArray[np.uint64]:
        """Put `payloads[i]`, of part_nbytes each, with `headers[i]` into `slots[i]`; returns their checksums.

        Sets magic, version, payload_nbytes and checksums in `headers`. Every file that holds them exists
        durably when this returns; the bytes are durable after the next `sync`. Payloads must not change
        meanwhile.

        Raises:
            OSError: some may have been written; none may be relied on.
        """
        ...

    def read(
        self,
        part_nbytes: int,
        slots: npt.ArrayLike,
        expected: npt.NDArray[Any],
        into: Sequence[memoryview],
        timeout_s: float,
        on_late: Callable[[int], None] | None = None,
    ) -> list[Verdict]:
        """Fill `into[i]`, of part_nbytes each, from `slots[i]` and check it against `expected[i]`.

        Returns within `timeout_s`. `on_late(i)` is called, perhaps from another thread, once the store no
        longer touches the buffer of a part that timed out; until then that buffer is not the caller's.
        It must not raise. Buffers of parts that are not OK hold anything.
        """
        ...

    def read_headers(self, part_nbytes: int, slots: npt.ArrayLike) -> HeaderBatch:
        """The headers of these slots; those that cannot be read are zeros and not sound."""
        ...

    def iter_headers(self) -> Iterator[HeaderBatch]:
        """The headers of every slot that the store has room for, blank ones left out."""
        ...

    def blank(self, part_nbytes: int, slots: npt.ArrayLike) -> None:
        """Overwrite headers and payloads with zeros. Durable after the next `sync`.

        Raises:
            OSError: some may not be overwritten.
        """
        ...

    def release(self, part_nbytes: int, chunks: Sequence[int]) -> None:
        """Give back the disk space of whole chunks; they read as zeros.

        Raises:
            OSError: some may still hold their bytes.
        """
        ...

    def held_chunks(self, part_nbytes: int) -> frozenset[int]:
        """Numbers of the chunks of that pool that may hold bytes, in use or left behind."""
        ...

    def num_chunks(self) -> dict[int, int]:
        """`part_nbytes → n`: only chunks below n of that pool may hold bytes, in use or left behind."""
        ...

    def sync(self) -> None:
        """Make every write, blank and release that returned before this call durable.

        Raises:
            StoreFailed: not durable, for good, in the places it names; all others are durable.
        """
        ...

    def discard(self, place: FailedPlace) -> None:
        """Nothing in a failed place is wanted any more: remove its file and let its chunks serve again.

        Raises:
            OSError: the file is still there.
        """
        ...

    def troubles(self) -> dict[str, OSError]:
        """The last failure of each file that had one."""
        ...

    def check(self) -> None:
        """The store agrees with its files."""
        ...

    def close(self) -> None:
        """Close all files, syncing nothing. Waits for no read that is late."""
        ...
