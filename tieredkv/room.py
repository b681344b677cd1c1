"""Makes room in a tier: who leaves, where to, and what goes with it.

Metadata changes under one lock; copies and I/O happen outside it. What is leaving is `moving`: not evicted,
moved or overwritten by anyone else. Each tier has one maker of room at a time, and rooms are only ever
entered downward (DEVICE, HOST, DISK), so waiting for the tier below cannot deadlock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from .block.layout import BlockLayout
from .outcomes import Counters, Tier
from .plan import first_gap, last_copies, leaving_groups, stranded, tail_in_tier
from .residency import Residency, Slots
from .spiller import Cause, Parts, Spiller
from .table.block_table import BlockTable
from .table.journal import DONE, Ticket
from .table.key_index import Rows
from .table.trace import Event
from .tier.slab_format import SLOT_HEADER_NBYTES
from .tier.tensor import TensorTier

_NO_SLOTS: Slots = np.zeros(0, dtype=np.int64)


class Room:
    """Reserves slots in any tier, evicting by policy: the device to HOST, HOST to DISK, DISK to nowhere."""

    def __init__(
        self,
        *,
        lock: threading.Condition,
        table: BlockTable,
        residents: dict[Tier, Residency],
        memories: dict[Tier, TensorTier],
        spiller: Spiller | None,
        layout_of: Callable[[int], BlockLayout],
        counters: Counters,
        deadline_s: float,
    ) -> None:
        self._lock = lock
        self._table = table
        self._residents = residents
        self._memories = memories
        self._spiller = spiller
        self._layout_of = layout_of
        self._counters = counters
        self._deadline_s = deadline_s
        self._makers = {tier: threading.Lock() for tier in Tier}
        self._held_up: set[tuple[int, bytes]] = set()  # rows with their keys, for a row may change hands
        if spiller is not None:
            spiller.reserve = lambda nbytes, count, until: self.reserve(Tier.DISK, nbytes, count, until)
            spiller.on_moved = self.look_again

    def reserve(
        self, tier: Tier, part_nbytes: int, count: int, until: float, incoming: Sequence[bytes] = ()
    ) -> Slots:
        """Up to `count` slots in `tier`, evicting for those that are not free; fewer at `until` (monotonic).

        Args:
            incoming: keys of the blocks that the room is for, as the policy will see them inserted.

        Returns:
            int64 slots, the caller's until placed or freed.
        """
        resident = self._residents[tier]
        stride = part_nbytes + (SLOT_HEADER_NBYTES if tier is Tier.DISK else 0)
        with self._lock:
            got = resident.arena.allocate(stride, count)
        if len(got) == count or not self._makers[tier].acquire(timeout=_left(until)):
            return got
        try:
            return np.concatenate((got, self._make(resident, stride, count - len(got), until, incoming)))
        finally:
            self._makers[tier].release()

    def _make(
        self, resident: Residency, stride: int, missing: int, until: float, incoming: Sequence[bytes]
    ) -> Slots:
        pieces, freed = [_NO_SLOTS], 0
        while missing:
            self._surrender(resident, stride)
            with self._lock:
                pieces.append(resident.arena.allocate(stride, missing))
                missing -= len(pieces[-1])
                if not missing or time.monotonic() > until:
                    break
                # A chunk's worth left by policy and still no slot: the free space is in pools of other sizes.
                scattered = freed >= resident.arena.chunk_span(stride)
                leaving = self._choose_chunk(resident, stride) if scattered else []
                leaving = leaving or self._choose(resident, missing * stride, incoming)
                leaving = leaving or self._choose_chunk(resident, stride)
            if not leaving and not self._await_spill(resident, until):
                break
            freed = 0 if scattered else freed + self._bytes(resident, leaving)
            self._let_go(resident, leaving, until)
        return np.concatenate(pieces)

    def _await_spill(self, resident: Residency, until: float) -> bool:
        """Wait a little for parts that are being spilled, which may leave memory then; False if there are none."""
        if self._spiller is None or resident.tier is Tier.DISK:
            return False
        with self._lock:
            return self._spiller.is_spilling and self._lock.wait(_left(until))

    def _surrender(self, resident: Residency, except_stride: int) -> None:
        """Give empty chunks of other sizes back to the budget, their disk space first."""
        with self._lock:
            spare = resident.arena.retire_spare(except_stride)
        if not spare:
            return
        resident.punch(spare)
        with self._lock:
            for stride, chunk in spare:
                resident.arena.reinstate(stride, [chunk])

    def trim(self, tier: Tier, until: float) -> None:
        """Evict until a tier that recovery found above its budget keeps it."""
        resident = self._residents[tier]
        while time.monotonic() < until:
            with self._lock:
                over = resident.arena.over_budget_nbytes
                # Down to the budget, then in small steps until chunks come free: an emptied chunk could hold
                # the window parts that everything else needs.
                excess = resident.arena.live_nbytes - resident.arena.budget_nbytes
                step = max(excess, resident.arena.chunk_nbytes // 8)
                leaving = self._choose(resident, step, ()) if over else []
                leaving = leaving or (self._choose_chunk(resident, 0) if over else [])
            if not leaving:
                break
            self._let_go(resident, leaving, until)
            self._surrender(resident, 0)
        with self._lock:
            resident.policy.capacity_nbytes = max(resident.arena.budget_nbytes, resident.policy.nbytes)

    def _bytes(self, resident: Residency, parts: Parts) -> int:
        return sum(resident.stride_nbytes(row, group) for row, group in parts)

    # ---- who -----------------------------------------------------------------------------------

    def _choose(self, resident: Residency, nbytes: int, incoming: Sequence[bytes]) -> Parts:
        """Parts that go next, at the tails of the chains that the policy names; now moving (lock held).

        Where the tails of the first victims are all held, more victims are asked for.
        """
        asked, leaving = nbytes, Parts()
        while not leaving:
            leaving = self._tails(resident, nbytes, resident.victims(asked, incoming))
            if asked >= resident.policy.nbytes:
                break
            asked *= 4
        self._start_moves({row for row, _ in leaving})
        return leaving

    def _tails(self, resident: Residency, nbytes: int, victims: Sequence[int]) -> Parts:
        """Parts of the named chains, tails first; a block above a tail goes only after all of the tail."""
        table, leaving, gone, got = self._table, Parts(), set[int](), 0
        begun: dict[int, list[int]] = {}  # tails that give up some parts, and which
        for row in victims:
            while row in gone:  # a block above it was named before: its chain goes on upward
                row = int(table.parent[row])
            tail = tail_in_tier(table, resident.tier, row, gone) if row >= 0 else -1
            if tail < 0 or table.is_held(tail):
                continue
            left = [g for g in resident.groups_of(tail) if g not in begun.get(tail, ())]
            first = tail not in begun
            groups = leaving_groups(table, self._layout_of(tail), tail, left) if first else left
            if groups == left:
                gone.add(tail)
            else:
                begun[tail] = groups
            leaving += [(tail, group) for group in groups]
            got += sum(resident.stride_nbytes(tail, group) for group in groups)
            if got >= nbytes:
                break
        return leaving

    def _choose_chunk(self, resident: Residency, stride: int) -> Parts:
        """All parts in the sparsest chunk of another size that holds none held; now moving (lock held)."""
        skipped: set[tuple[int, int]] = set()
        while (found := resident.arena.sparsest_chunk(stride, skipped)) is not None:
            other, chunk, slots = found
            parts = self._parts_in(resident, other, slots)
            if parts and not any(self._table.is_held(row) for row, _ in parts):
                self._start_moves({row for row, _ in parts})
                return parts
            skipped.add((other, chunk))
        return []

    def _parts_in(self, resident: Residency, stride: int, slots: Slots) -> Parts:
        table, parts = self._table, Parts()
        rows = table.live_rows()
        for group in range(table.num_groups):
            here = rows[np.isin(table.slot[resident.tier, group, rows], slots)]
            parts += [(row, group) for row in here.tolist() if resident.stride_nbytes(row, group) == stride]
        return parts

    def _start_moves(self, rows: Iterable[int]) -> None:
        for row in rows:
            self._table.moving[row] += 1

    def _end_moves(self, rows: Iterable[int]) -> None:
        for row in rows:
            self._table.moving[row] -= 1
        self._lock.notify_all()

    # ---- where to ------------------------------------------------------------------------------

    def _let_go(self, resident: Residency, leaving: Parts, until: float) -> None:
        """Take `leaving` out of its tier, after a copy to the tier below where it has none there."""
        if resident.tier is Tier.DISK:
            self._leave_disk(leaving, until)
            return
        if resident.tier is Tier.DEVICE and Tier.HOST in self._residents:
            self._demote(leaving, until)
        with self._lock:
            homeless = [p for p in leaving if last_copies(self._table, resident.tier, p[0], [p[1]])]
        if homeless and self._spiller is not None:
            self._spiller.spill_now(homeless, until)
        with self._lock:
            self._leave_memory(resident, leaving)

    def _demote(self, leaving: Parts, until: float) -> None:
        """Copy to HOST what is not there yet, as far as HOST takes it."""
        with self._lock:
            wanted = [p for p in leaving if self._table.slot[Tier.HOST, p[1], p[0]] < 0]
        for part_nbytes, parts in self._by_size(wanted).items():
            keys = [self._table.key_of(row) for row, _ in parts]
            slots = self.reserve(Tier.HOST, part_nbytes, len(parts), until, keys)
            for (row, group), slot in zip(parts, slots.tolist(), strict=False):
                source = int(self._table.slot[Tier.DEVICE, group, row])
                self._memories[Tier.DEVICE].stream.copy(
                    self._memories[Tier.HOST].parts(part_nbytes, slot, 1),
                    self._memories[Tier.DEVICE].parts(part_nbytes, source, 1),
                )
            await_copies(self._memories[Tier.DEVICE], self._deadline_s, self._counters)
            with self._lock:
                for (row, group), slot in zip(parts, slots.tolist(), strict=False):
                    self._residents[Tier.HOST].place(_one(row), group, np.array([slot]))
                self._residents[Tier.HOST].tell(Event.DEMOTE, parts[: len(slots)])

    def _by_size(self, parts: Parts) -> dict[int, Parts]:
        sizes: dict[int, Parts] = {}
        for row, group in parts:
            sizes.setdefault(self._layout_of(row).part_nbytes[group], []).append((row, group))
        return sizes

    def _leave_memory(self, resident: Residency, leaving: Parts) -> None:
        by_row: dict[int, list[int]] = {}
        for row, group in leaving:
            by_row.setdefault(row, []).append(group)
        self._end_moves(by_row)
        lost: list[int] = []
        gone = Parts()
        for row, groups in by_row.items():
            # Pinned or being spilled since it was chosen: it stays.
            if self._table.is_held(row):
                continue
            if last_copies(self._table, resident.tier, row, groups):
                lost.append(row)
            resident.leave(row, groups, evicted=True)
            gone += [(row, group) for group in groups]
        resident.tell(Event.EVICT, gone)
        if lost:
            self._counters.add("dropped_blocks", len(lost))
            self.drop_stranded(lost)
        self._table.free_if_empty(np.fromiter(by_row, dtype=np.int32))

    def _leave_disk(self, leaving: Parts, until: float) -> None:
        assert self._spiller is not None, "only a cache with a disk tier evicts from it"
        table, rows = self._table, np.unique(np.array([row for row, _ in leaving], dtype=np.int32))
        with self._lock:
            table.uses[rows] += 1  # until it is known what hangs on them
            ticket = self._spiller.drop(leaving, Cause.EVICTED)
            self._end_moves(rows.tolist())
        ticket.wait(_left(until))
        with self._lock:
            lost = {row for row, group in leaving if (table.slot[:, group, row] < 0).all()}
            self._counters.add("dropped_blocks", len(lost))
            ticket = self.drop_stranded(lost)
            table.uses[rows] -= 1
            table.free_if_empty(rows)
        ticket.wait(_left(until))

    # ---- what goes with it ---------------------------------------------------------------------

    def drop_stranded(self, lost: Iterable[int]) -> Ticket:
        """What the loss of last copies made unreachable goes too, in every tier (lock held)."""
        table = self._table
        rows, held = stranded(table, self._layout_of, [r for r in lost if table.namespace[r] >= 0])
        self._held_up.update((row, table.key_of(row)) for row in held)
        if rows:
            self._counters.add("stranded_blocks", len(rows))
        return self.release([(r, g) for r in rows for g in range(table.num_groups)], Cause.EVICTED)

    def look_again(self) -> None:
        """Blocks that should have gone while they were held go when free, if nobody needs them (lock held)."""
        table = self._table
        free = {(row, key) for row, key in self._held_up if not table.is_held(row)}
        if free:
            self._held_up -= free
            rows = [row for row, key in free if table.namespace[row] >= 0 and table.key_of(row) == key]
            self.drop_stranded({first_gap(table, self._layout_of(row), row) for row in rows})

    def release(self, parts: Parts, cause: Cause) -> Ticket:
        """Take `parts` out of every tier, those of held blocks excepted (lock held).

        Returns:
            Done when the disk's slots are free.
        """
        table = self._table
        free = [(r, g) for r, g in parts if not table.is_held(r)]
        on_disk = [(r, g) for r, g in free if table.slot[Tier.DISK, g, r] >= 0]
        for tier, resident in self._residents.items():
            here = [(r, g) for r, g in free if tier is not Tier.DISK and table.slot[tier, g, r] >= 0]
            for row, group in here:
                resident.leave(row, [group], evicted=cause is Cause.EVICTED)
            resident.tell(Event.EVICT if cause is Cause.EVICTED else Event.LEAVE, here)
        ticket: Ticket = DONE
        if on_disk and self._spiller is not None:
            ticket = self._spiller.drop(on_disk, cause)
        table.free_if_empty(np.unique(np.array([r for r, _ in free], dtype=np.int32)))
        return ticket


def await_copies(device: TensorTier, deadline_s: float, counters: Counters) -> None:
    """Wait until every copy queued so far has landed; a device that takes too long is counted."""
    ticket = device.stream.ticket()
    while not ticket.wait(deadline_s):
        counters.add("copies_past_deadline")


def _left(until: float) -> float:
    return max(0.0, until - time.monotonic())


def _one(row: int) -> Rows:
    rows: npt.NDArray[np.int32] = np.array([row], dtype=np.int32)
    return rows
