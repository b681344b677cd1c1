"""Moves parts between a caller and the tiers: `store` copies in, `promote` brings up what a prefix needs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from .block.layout import BlockLayout
from .outcomes import Counters, Reason, Tier
from .prefix import Segment
from .residency import Residency, Slots
from .room import Room, await_copies
from .span import GroupKV, pieces
from .table.block_table import BlockTable
from .table.key_index import Rows
from .table.trace import Event
from .tier.base import PartStore, Verdict
from .tier.slab_format import EXPECTED_DTYPE
from .tier.tensor import TensorTier, copy_slots
from .units import PAGE_NBYTES

_READS_OFF_S = 1.0

_REASONS = {
    Verdict.CORRUPT: Reason.CORRUPT,
    Verdict.OTHER: Reason.SUPERSEDED,
    Verdict.UNREADABLE: Reason.CORRUPT,
    Verdict.TIMED_OUT: Reason.TIMED_OUT,
}


@dataclass(frozen=True)
class Failure:
    """A part that could not be brought up, and why."""

    row: int
    group: int
    reason: Reason


@dataclass
class _Bringing:
    """One group's parts on their way up: where each lies now, and its device slot if it got one."""

    rows: Rows
    tiers: npt.NDArray[np.int64]
    sources: Slots
    targets: Slots


class Mover:
    """Copies between callers and tiers."""

    def __init__(
        self,
        *,
        lock: threading.Condition,
        table: BlockTable,
        residents: dict[Tier, Residency],
        memories: dict[Tier, TensorTier],
        store: PartStore | None,
        room: Room,
        namespace_digest: Callable[[int], bytes],
        counters: Counters,
        deadline_s: float,
    ) -> None:
        self._lock = lock
        self._table = table
        self._residents = residents
        self._memories = memories
        self._store = store
        self._room = room
        self._namespace_digest = namespace_digest
        self._counters = counters
        self._deadline_s = deadline_s
        self._reads_off_until = 0.0  # monotonic; 0 while reads come back in time

    # ---- store ---------------------------------------------------------------------------------

    def store(
        self,
        layout: BlockLayout,
        rows: Rows,
        missing: npt.NDArray[np.bool_],
        kv: GroupKV,
        until: float,
    ) -> int:
        """Copy the parts marked in `missing` (bool `[num_groups, num_blocks]`) from `kv` to the device.

        Returns:
            How many blocks from the head are in whole; the one after found no room.
        """
        blocks = np.flatnonzero(missing.any(axis=0))
        wave = max(1, self._memories[Tier.DEVICE].arena.budget_nbytes // (4 * layout.block_nbytes))
        for at in range(0, len(blocks), wave):
            here = blocks[at : at + wave]
            with self._lock:
                self._table.moving[rows[here]] += 1
            try:
                taken = self._store_wave(layout, rows, here, missing, kv, until)
            finally:
                with self._lock:
                    self._table.moving[rows[here]] -= 1
            if taken < len(here):
                return int(here[taken])
        return len(rows)

    def _store_wave(
        self,
        layout: BlockLayout,
        rows: Rows,
        blocks: npt.NDArray[np.int64],
        missing: npt.NDArray[np.bool_],
        kv: GroupKV,
        until: float,
    ) -> int:
        """One wave; returns how many of `blocks` went in whole."""
        taken, memory = len(blocks), self._memories[Tier.DEVICE]
        memory.stream.after_current()
        placed: list[tuple[int, npt.NDArray[np.int64], Slots]] = []
        try:
            for group, part_nbytes in enumerate(layout.part_nbytes):
                wanted = blocks[missing[group, blocks]]
                if not len(wanted):
                    continue
                slots = self._room.reserve(Tier.DEVICE, part_nbytes, len(wanted), until, rows[wanted])
                if len(slots) < len(wanted):
                    taken = min(taken, int(np.searchsorted(blocks, wanted[len(slots)])))
                    wanted = wanted[: len(slots)]
                placed.append((group, wanted, slots))
                for at, count in _runs(memory, part_nbytes, slots, wanted):
                    parts = memory.parts(part_nbytes, int(slots[at]), count)
                    self._fill(layout, group, int(wanted[at]), parts, kv)
        except BaseException:  # an interrupt, no memory, tensors without data: what was reserved goes back
            await_copies(memory, self._deadline_s, self._counters)
            with self._lock:
                for group, _, slots in placed:
                    self._residents[Tier.DEVICE].free(layout.part_nbytes[group], slots)
            raise
        memory.stream.before_current(memory.stream.ticket())
        await_copies(memory, self._deadline_s, self._counters)
        with self._lock:
            for group, wanted, slots in placed:
                self._place(rows[wanted], group, slots)
                self._residents[Tier.DEVICE].trace.note(Event.ALLOCATE, Tier.DEVICE, rows[wanted], group)
        return taken

    def _place(self, rows: Rows, group: int, slots: Slots) -> Slots:
        """Put device parts on the books; slots of parts that someone else placed first are returned."""
        device, table = self._residents[Tier.DEVICE], self._table
        fresh = table.slot[Tier.DEVICE, group, rows] < 0
        device.place(rows[fresh], group, slots[fresh])
        double: Slots = slots[~fresh]
        if len(double):
            device.free(device.stride_nbytes(int(rows[0]), group), double)
        self._lock.notify_all()
        return double

    def _fill(
        self,
        layout: BlockLayout,
        group: int,
        first_block: int,
        parts: torch.Tensor,
        kv: GroupKV,
    ) -> None:
        """Copy one group's tensors of consecutive blocks into a run of device slots."""
        size, stream = layout.block_size, self._memories[Tier.DEVICE].stream
        for start, end in layout.gaps[group]:  # else they carry what the slot held before, down to the disk
            stream.copy(parts[:, start:end], torch.zeros(len(parts), end - start, dtype=torch.uint8))
        views = layout.views(parts, group)
        for spec in layout.groups[group].tensors:
            target = views[spec.layer, spec.name]
            for block, piece in pieces(spec, kv[group, spec.layer], first_block, len(parts), size):
                at = block - first_block
                stream.copy(target[at : at + len(piece)], piece)

    # ---- load ----------------------------------------------------------------------------------

    def promote(
        self, layout: BlockLayout, group: int, rows: Rows, first_block: int, until: float
    ) -> tuple[list[Segment], list[Failure]]:
        """Bring up one group's parts of consecutive blocks, whose rows are pinned.

        Parts go to the device as far as it takes them. Beyond that they are used from HOST as they lie, or
        read from DISK into memory that belongs to the result alone.

        Returns:
            The segments in chain order, and what failed its check; after a failure the segments are useless.
        """
        part_nbytes = layout.part_nbytes[group]
        coming = self._locate(rows, group)
        gone = coming.rows[coming.sources < 0]
        if len(gone):  # a drop that was queued before the pin has been applied since
            return [], [Failure(row, group, Reason.EVICTED) for row in gone.tolist()]
        if time.monotonic() < self._reads_off_until and (late := coming.rows[coming.tiers == Tier.DISK]).size:
            self._counters.add("reads_bypassed_parts", len(late))
            return [], [Failure(row, group, Reason.TIMED_OUT) for row in late.tolist()]
        # After a read that hung, the next go to memory of their own: slots are not for a disk to keep.
        takes = (coming.tiers == Tier.HOST) | (self._reads_off_until == 0.0)
        below = np.flatnonzero((coming.tiers != Tier.DEVICE) & takes)
        if len(below):
            slots = self._room.reserve(Tier.DEVICE, part_nbytes, len(below), until, rows[below])
            coming.targets[below[: len(slots)]] = slots
        try:
            scratch, failures = self._bring(part_nbytes, group, coming, until)
        except BaseException:  # an interrupt, or no memory: what was reserved goes back
            await_copies(self._memories[Tier.DEVICE], self._deadline_s, self._counters)
            self._settle(group, coming, [Failure(row, group, Reason.EVICTED) for row in coming.rows.tolist()])
            raise
        self._settle(group, coming, failures)
        segments = self._segments(part_nbytes, coming, scratch, first_block)
        num_parts = sum(len(parts) for _, parts in segments)
        assert failures or num_parts == len(rows), f"{num_parts} parts brought up of {len(rows)}"
        return segments, failures

    def _locate(self, rows: Rows, group: int) -> _Bringing:
        with self._lock:
            slots = self._table.slot[:, group, rows].astype(np.int64)
        tiers = np.argmax(slots >= 0, axis=0)
        sources = slots[tiers, np.arange(len(rows))]
        targets = np.where(tiers == Tier.DEVICE, sources, -1)
        return _Bringing(rows, tiers, sources, targets)

    def _bring(
        self, part_nbytes: int, group: int, coming: _Bringing, until: float
    ) -> tuple[dict[int, torch.Tensor], list[Failure]]:
        """Copy up from HOST, read and check from DISK. Returns parts that live outside the tiers, by index."""
        device = self._memories[Tier.DEVICE]
        up = (coming.tiers == Tier.HOST) & (coming.targets >= 0)
        if up.any():
            host = self._memories[Tier.HOST]
            copy_slots(device.stream, part_nbytes, host, coming.sources[up], device, coming.targets[up])
        on_disk = np.flatnonzero(coming.tiers == Tier.DISK)
        scratch: dict[int, torch.Tensor] = {}
        failures: list[Failure] = []
        if len(on_disk):
            scratch, failures = self._read(part_nbytes, group, coming, on_disk, until)
        await_copies(device, self._deadline_s, self._counters)
        return scratch, failures

    def _read(
        self, part_nbytes: int, group: int, coming: _Bringing, on_disk: npt.NDArray[np.int64], until: float
    ) -> tuple[dict[int, torch.Tensor], list[Failure]]:
        assert self._store is not None, "a part on DISK without a disk tier"
        device, indices = self._memories[Tier.DEVICE], on_disk.tolist()
        direct = device.host_addressable
        has_slot = direct & (coming.targets[on_disk] >= 0)
        own = on_disk[~has_slot].tolist()
        scratch = dict(zip(own, _aligned(len(own), part_nbytes), strict=True))
        slots = coming.targets[on_disk[has_slot]]
        in_place = iter(device.memory(part_nbytes, slots) if len(slots) else ())
        into = [memoryview(scratch[i].numpy()) if i in scratch else next(in_place) for i in indices]
        expected = self._expected(coming.rows[on_disk], group)
        late = self._late(part_nbytes, coming, indices)
        left_s = max(0.0, until - time.monotonic())
        try:
            verdicts = self._store.read(part_nbytes, coming.sources[on_disk], expected, into, left_s, late)
        except BaseException:
            if direct:
                coming.targets[on_disk] = -1  # every read is late now: its slot is given back once it is over
            raise
        self._note_reads(Verdict.TIMED_OUT in verdicts, left_s)
        for index, verdict in zip(indices, verdicts, strict=True):
            if verdict is Verdict.TIMED_OUT and direct:
                coming.targets[index] = -1  # its slot is given back once the read lets go of it
        failures = [
            Failure(int(coming.rows[i]), group, _REASONS[verdict])
            for i, verdict in zip(indices, verdicts, strict=True)
            if verdict is not Verdict.OK
        ]
        for index in [i for i in own if coming.targets[i] >= 0]:
            device.stream.copy(device.parts(part_nbytes, int(coming.targets[index]), 1)[0], scratch[index])
            del scratch[index]
        return scratch, failures

    def _note_reads(self, timed_out: bool, allowed_s: float) -> None:
        """A disk that was given time and did not answer is left alone for a while, then tried again."""
        if not timed_out:
            self._reads_off_until = 0.0
        elif allowed_s > self._deadline_s / 4:
            self._reads_off_until = time.monotonic() + _READS_OFF_S

    def _late(self, part_nbytes: int, coming: _Bringing, indices: Sequence[int]) -> Callable[[int], None]:
        """What gives a device slot back when a read that timed out no longer writes into it."""
        targets = coming.targets.copy()

        def late(item: int) -> None:
            slot = int(targets[indices[item]])
            if slot >= 0 and self._memories[Tier.DEVICE].host_addressable:
                device = self._memories[Tier.DEVICE]
                device.parts(part_nbytes, slot, 1).zero_()  # a removal may have passed by it meanwhile
                with self._lock:
                    self._residents[Tier.DEVICE].free(part_nbytes, np.array([slot], dtype=np.int64))

        return late

    def _expected(self, rows: Rows, group: int) -> npt.NDArray[np.void]:
        expected = np.zeros(len(rows), dtype=EXPECTED_DTYPE)
        with self._lock:
            table = self._table
            expected["digest"] = table.digest[rows]
            expected["group"] = group
            expected["put_seq"] = table.put_seq[group, rows]
            expected["checksum"] = table.checksum[group, rows]
            number = int(table.namespace[rows[0]])
            expected["namespace"] = np.frombuffer(self._namespace_digest(number), dtype=np.uint8)
        return expected

    def _settle(self, group: int, coming: _Bringing, failures: Sequence[Failure]) -> None:
        """Put the promoted parts on the books, and give back the slots of parts that failed."""
        device = self._residents[Tier.DEVICE]
        bad = np.isin(coming.rows, [f.row for f in failures])
        with self._lock:
            moved = (coming.tiers != Tier.DEVICE) & (coming.targets >= 0)
            lost = coming.targets[moved & bad]
            if len(lost):
                device.free(device.stride_nbytes(int(coming.rows[0]), group), lost)
            good = moved & ~bad
            self._place(coming.rows[good], group, coming.targets[good])
            device.trace.note(Event.PROMOTE, Tier.DEVICE, coming.rows[good], group)
            placed = self._table.slot[Tier.DEVICE, group, coming.rows]
            coming.targets = np.where(coming.targets >= 0, placed, -1)

    def _segments(
        self, part_nbytes: int, coming: _Bringing, scratch: Mapping[int, torch.Tensor], first_block: int
    ) -> list[Segment]:
        segments: list[Segment] = []
        on_device = coming.targets >= 0
        index = 0
        while index < len(coming.rows):
            count = 1
            if on_device[index]:
                stop = index + int(np.argmin(np.append(on_device[index:], False)))
                for at, run in _runs(self._memories[Tier.DEVICE], part_nbytes, coming.targets[index:stop]):
                    parts = self._memories[Tier.DEVICE].parts(
                        part_nbytes, int(coming.targets[index + at]), run
                    )
                    segments.append((first_block + index + at, parts))
                count = stop - index
            elif index in scratch:
                segments.append((first_block + index, scratch[index][None]))
            elif coming.tiers[index] == Tier.HOST:
                parts = self._memories[Tier.HOST].parts(part_nbytes, int(coming.sources[index]), 1)
                segments.append((first_block + index, parts))
            index += count
        return segments


def _runs(
    memory: TensorTier, part_nbytes: int, slots: Slots, blocks: npt.NDArray[np.int64] | None = None
) -> Iterator[tuple[int, int]]:
    """`(start, count)` of stretches whose slots lie end to end and whose blocks, if given, are consecutive."""
    at = 0
    for _, length, _ in memory.arena.runs(part_nbytes, slots):
        if blocks is None:
            yield at, length
        else:
            breaks = np.flatnonzero(np.diff(blocks[at : at + length]) != 1) + 1
            edges = [0, *breaks.tolist(), length]
            for first, last in pairwise(edges):
                yield at + first, last - first
        at += length


def _aligned(count: int, part_nbytes: int) -> list[torch.Tensor]:
    """`count` page-aligned uint8 tensors of `part_nbytes`, in one allocation."""
    if not count:
        return []
    buffer = torch.empty(count * part_nbytes + PAGE_NBYTES, dtype=torch.uint8)
    skip = -buffer.data_ptr() % PAGE_NBYTES
    return list(buffer[skip : skip + count * part_nbytes].unflatten(0, (count, part_nbytes)))
