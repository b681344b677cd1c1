"""A tier in memory: one aligned allocation, seen as tensors by copies and as bytes by disk I/O."""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch

from ..errors import BadConfig
from ..units import PAGE_NBYTES, format_nbytes
from .arena import Arena, Slots
from .stream import CopyStream

_MAPS: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
_NOT_OURS: list[mmap.mmap] = []


def _keep_in_child() -> None:
    """A forked child has no memory behind the maps it inherits, and may get its own at their addresses.

    So an inherited map must never be closed there: it would take the child's memory away.
    """
    _NOT_OURS.extend(_MAPS)


os.register_at_fork(after_in_child=_keep_in_child)


class TensorTier:
    """The parts of one memory tier, on the device or in host memory, with the arena that hands out slots.

    Host memory is mapped and stays untouched until a slot is written, so that a large budget costs nothing
    before it is used; it is not inherited by forked children. Pinning does touch all of it.

    Args:
        name: `"device"` or `"host"`, for messages.
        budget_nbytes: the most this tier may hold; whole chunks of it are allocated at once.
        min_chunk_nbytes: the largest part that the tier must hold.
        device: where the memory is, a CUDA device or the CPU.
        pinned: ask CUDA to pin host memory. A refusal leaves it unpinned; `pin_refusal` then says why.
        stream: serves the copies to and from this tier.

    Raises:
        BadConfig: the memory cannot be had; the message names tier and size.
    """

    def __init__(
        self,
        name: str,
        budget_nbytes: int,
        *,
        min_chunk_nbytes: int = PAGE_NBYTES,
        device: torch.device,
        pinned: bool,
        stream: CopyStream,
    ) -> None:
        self.name = name
        self.device = device
        self.stream = stream
        self.arena = Arena(budget_nbytes, min_chunk_nbytes=min_chunk_nbytes, shared=True)
        self.pinned = False
        self.pin_refusal: str | None = None
        self._bytes: memoryview | None = None
        self._map: mmap.mmap | None = None
        nbytes = self.arena.capacity_nbytes
        try:
            self.buffer = self._map_host(nbytes) if device.type == "cpu" else _device_memory(nbytes, device)
        except (OSError, MemoryError, torch.OutOfMemoryError) as error:
            raise BadConfig(f"the {name} tier cannot have {format_nbytes(nbytes)}: {error}") from error
        if pinned and device.type == "cpu" and nbytes:
            self.pin_refusal = _pin(self.buffer)
            self.pinned = self.pin_refusal is None

    @property
    def host_addressable(self) -> bool:
        """Whether `memory` works: the bytes can be read and written by the CPU and by disk I/O."""
        return self._bytes is not None

    def parts(self, part_nbytes: int, first_slot: int, count: int) -> torch.Tensor:
        """`uint8[count, part_nbytes]` view of `count` slots that lie end to end."""
        offset = self._offset_of_run(part_nbytes, first_slot, count)
        return self.buffer[offset : offset + count * part_nbytes].view(count, part_nbytes)

    def memory(self, part_nbytes: int, slots: Slots) -> list[memoryview]:
        """The bytes of each slot, writable, 4096-aligned. Only where `host_addressable`."""
        bytes_ = self._bytes
        assert bytes_ is not None, f"the {self.name} tier lies in {self.device} memory"
        offsets = self.arena.geometry.offsets(part_nbytes, slots).tolist()
        return [bytes_[offset : offset + part_nbytes] for offset in offsets]

    def run_memory(self, part_nbytes: int, first_slot: int, count: int) -> memoryview:
        """The bytes of `count` slots that lie end to end."""
        assert self._bytes is not None, f"the {self.name} tier lies in {self.device} memory"
        offset = self._offset_of_run(part_nbytes, first_slot, count)
        return self._bytes[offset : offset + count * part_nbytes]

    def zero_free(self) -> None:
        """Overwrite whatever no live slot holds of the memory that was ever used: bytes stay where parts left."""
        runs = [(n, run) for n in self.arena.strides for run in self.arena.runs(n, self.arena.live_slots(n))]
        live = sorted((offset, count * stride) for stride, (_, count, offset) in runs)
        at = 0
        for offset, nbytes in [*live, (self.arena.reached_nbytes, 0)]:
            self.buffer[at:offset].zero_()
            at = offset + nbytes
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def check(self) -> None:
        """The arena agrees with itself and with the memory that is really there."""
        self.arena.check()
        assert self.buffer.numel() == self.arena.capacity_nbytes, (
            f"{self.buffer.numel()} bytes for an arena of {self.arena.capacity_nbytes}"
        )

    def close(self) -> None:
        """Give the memory back, at the latest when its last view is gone. A second call does nothing."""
        if self.pinned:
            torch.cuda.synchronize()
            _cudart().cudaHostUnregister(self.buffer.data_ptr())
            self.pinned = False
        self.buffer = torch.empty(0, dtype=torch.uint8)
        self._bytes = None
        if self._map is not None:
            with contextlib.suppress(BufferError):  # a view is still held: the map goes with it
                self._map.close()
            self._map = None

    def _offset_of_run(self, part_nbytes: int, first_slot: int, count: int) -> int:
        geometry = self.arena.geometry
        per_chunk = geometry.slots_per_chunk(part_nbytes)
        fits = (
            first_slot % per_chunk + count <= per_chunk or geometry.chunk_span(part_nbytes) % part_nbytes == 0
        )
        assert fits, f"{count} slots from {first_slot} do not lie end to end, {per_chunk} a chunk"
        return geometry.offset(part_nbytes, first_slot)

    def _map_host(self, nbytes: int) -> torch.Tensor:
        if nbytes == 0:
            self._bytes = memoryview(bytearray())
            return torch.empty(0, dtype=torch.uint8)
        # private, since shared memory is neither given back nor made of huge pages by default
        self._map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # direct I/O and a fork at the same time can leave the bytes that were read in the child's copy
        for advice in ("MADV_DONTFORK", "MADV_HUGEPAGE"):
            if hasattr(mmap, advice):
                with contextlib.suppress(OSError):  # a kernel without it
                    self._map.madvise(getattr(mmap, advice))
        _MAPS.add(self._map)
        self._bytes = memoryview(self._map)
        # through numpy, whose array keeps the map from closing under a view; torch.frombuffer would not
        return torch.from_numpy(np.frombuffer(self._map, np.uint8))


def copy_slots(
    stream: CopyStream, part_nbytes: int, source: TensorTier, slots: Slots, target: TensorTier, places: Slots
) -> None:
    """Queue a copy of `source`'s slots to `target`'s, in one piece wherever both lie end to end."""
    order = np.argsort(slots)
    slots, places = slots[order], places[order]
    starts = {0, *_ends(source, part_nbytes, slots), *_ends(target, part_nbytes, places)}
    for at, end in pairwise(sorted(starts)):
        stream.copy(
            target.parts(part_nbytes, int(places[at]), end - at),
            source.parts(part_nbytes, int(slots[at]), end - at),
        )


def _ends(memory: TensorTier, part_nbytes: int, slots: Slots) -> Iterator[int]:
    """Where the runs of `slots` end."""
    return accumulate(count for _, count, _ in memory.arena.runs(part_nbytes, slots))


def _device_memory(nbytes: int, device: torch.device) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def _pin(buffer: torch.Tensor) -> str | None:
    """Pin `buffer` where it lies; returns why that was refused, or None."""
    if not torch.cuda.is_available():
        return "CUDA is not available"
    outcome = _cudart().cudaHostRegister(buffer.data_ptr(), buffer.numel(), 0)
    return None if int(outcome) == 0 else f"cudaHostRegister: {outcome}"


def _cudart() -> Any:
    return torch.cuda.cudart()
