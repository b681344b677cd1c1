"""Makes room in a tier: who leaves, where to, and what goes with it.

Metadata changes under one lock; copies and I/O happen outside it. What is leaving is `moving`: not evicted,
moved or overwritten by anyone else. Each tier has one maker of room at a time, and rooms are only ever
entered downward (DEVICE, HOST, DISK), so waiting for the tier below cannot deadlock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from functools import partial

import numpy as np

from .block.layout import BlockLayout
from .outcomes import Counters, Tier
from .plan import (
    NO_PARTS,
    Flags,
    Parts,
    first_gaps,
    held,
    last_copies,
    leaving_groups,
    num_leaving_whole,
    stranded,
    tail_in_tier,
    ways_to,
)
from .residency import Residency, Slots
from .spiller import Cause, Spiller
from .table.block_table import BlockTable
from .table.journal import DONE, Ticket
from .table.key_index import Rows
from .table.trace import Event
from .tier.slab_format import SLOT_HEADER_NBYTES
from .tier.tensor import TensorTier, copy_slots

_NO_SLOTS: Slots = np.zeros(0, dtype=np.int64)
_NO_ROWS: Rows = np.zeros(0, dtype=np.int32)
_FEW = 16


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
        self._incoming: dict[Tier, Rows] = {}  # what the maker of each tier makes room for
        self._held_up: set[tuple[int, bytes]] = set()  # rows with their keys, for a row may change hands
        if spiller is not None:
            spiller.reserve = partial(self.reserve, Tier.DISK)
            spiller.on_moved = self.look_again

    def reserve(
        self,
        tier: Tier,
        part_nbytes: int,
        count: int,
        until: float,
        incoming: Rows = _NO_ROWS,
        *,
        num_soon: Callable[[], int] = lambda: 0,
    ) -> Slots:
        """Up to `count` slots in `tier`, evicting for those that are not free; fewer at `until` (monotonic).

        Args:
            incoming: the blocks that the room is for, in the order in which the policy will see them inserted.
            num_soon: tells how many more will be asked for soon; whoever must evict makes room for them too.

        Returns:
            int64 slots, the caller's until placed or freed.
        """
        resident = self._residents[tier]
        stride = part_nbytes + (SLOT_HEADER_NBYTES if tier is Tier.DISK else 0)
        with self._lock:
            got = [resident.arena.allocate(stride, count)]
        missing = count - len(got[0])
        try:
            if missing and self._makers[tier].acquire(timeout=_left(until)):
                try:
                    self._incoming[tier] = incoming
                    soon_nbytes = min(num_soon() * stride, resident.arena.budget_nbytes // 8)
                    self._make(resident, stride, missing, until, incoming, soon_nbytes, got)
                finally:
                    self._incoming.pop(tier, None)
                    self._makers[tier].release()
        except BaseException:  # an interrupt, or no memory: what was reserved goes back
            with self._lock:
                for slots in got:
                    resident.free(stride, slots)
            raise
        return np.concatenate(got)

    def _make(
        self,
        resident: Residency,
        stride: int,
        missing: int,
        until: float,
        incoming: Rows,
        soon_nbytes: int,
        got: list[Slots],
    ) -> None:
        """Evict for `missing` slots, and `soon_nbytes` more; what came of it is appended to `got`."""
        freed = 0
        while missing:
            self._surrender(resident, stride)
            with self._lock:
                got.append(resident.arena.allocate(stride, missing))
                missing -= len(got[-1])
                freed = 0 if len(got[-1]) else freed
                if not missing or time.monotonic() > until:
                    break
                # A chunk's worth left by policy and still no slot: the free space is in pools of other sizes.
                scattered = freed >= resident.arena.chunk_span(stride)
                leaving = self._choose_chunk(resident, stride) if scattered else NO_PARTS
                leaving = leaving or self._choose(resident, missing * stride + soon_nbytes, incoming)
                leaving = leaving or self._choose_chunk(resident, stride)
                if not leaving:
                    if not self._await_spill(resident, until):
                        break
                    continue
            freed = 0 if scattered else freed + int(resident.strides_of(leaving).sum())
            if not self._let_go(resident, leaving, until):
                break

    def _await_spill(self, resident: Residency, until: float) -> bool:
        """Wait a little for parts that are being spilled, which may leave memory then; False if there are none.

        The lock is held since they were in the way of a choice, or their end might be missed.
        """
        if self._spiller is None or resident.tier is Tier.DISK:
            return False
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
                leaving = self._choose(resident, step, _NO_ROWS) if over else NO_PARTS
                leaving = leaving or (self._choose_chunk(resident, 0) if over else NO_PARTS)
            if not leaving or not self._let_go(resident, leaving, until):
                break
            self._surrender(resident, 0)
        with self._lock:
            resident.policy.capacity_nbytes = max(resident.arena.budget_nbytes, resident.policy.nbytes)

    # ---- who -----------------------------------------------------------------------------------

    def _choose(self, resident: Residency, nbytes: int, incoming: Rows) -> Parts:
        """Parts that go next, at the tails of the chains that the policy names; now moving (lock held).

        Where the tails of the first victims are all held, more victims are asked for.
        """
        asked, leaving, needed = nbytes, NO_PARTS, self._needed_by_what_comes(resident)
        while not leaving:
            victims = resident.victims(asked, incoming)
            leaving = self._tails(resident, nbytes, victims[~needed[victims]])
            if asked >= resident.policy.nbytes:
                break
            asked *= 4
        self._start_moves(leaving)
        return leaving

    def _tails(self, resident: Residency, nbytes: int, victims: Rows) -> Parts:
        """Parts of the named chains, tails first; a block above a tail goes only after all of the tail.

        Mostly the policy names tails before what lies above them: as far as it does, they are taken together.
        """
        table, pieces, got = self._table, list[Parts](), 0
        gone = np.zeros(len(table.namespace), dtype=np.bool_)
        begun: dict[int, list[int]] = {}  # tails that give up some parts, and which
        ways: dict[int, list[int]] = {}
        at, step = 0, len(victims)
        while at < len(victims) and got < nbytes:
            rows = victims[at : at + step]
            rows = rows[: num_leaving_whole(table, self._layout_of, resident.tier, rows, gone)]
            if len(rows):
                enough = np.searchsorted(np.cumsum(resident.nbytes_of(rows)), nbytes - got) + 1
                rows = rows[: int(enough)]
                gone[rows] = True
                pieces.append(resident.parts_of(rows))
                at, step = at + len(rows), 2 * step
            else:
                pieces.append(self._tail(resident, int(victims[at]), gone, begun, ways))
                at, step = at + 1, _FEW
            got += int(resident.strides_of(pieces[-1]).sum())
        return Parts.joined(pieces)

    def _tail(
        self,
        resident: Residency,
        row: int,
        gone: Flags,
        begun: dict[int, list[int]],
        ways: dict[int, list[int]],
    ) -> Parts:
        """What leaves next for the sake of one victim: at the tail of its chain, unless that is held."""
        table = self._table
        while row >= 0 and gone[row]:  # a block above it was named before: its chain goes on upward
            row = int(table.parent[row])
        tail = tail_in_tier(table, resident.tier, row, gone, ways) if row >= 0 else -1
        if tail < 0 or table.is_held(tail):
            return NO_PARTS
        left = [g for g in resident.groups_of(tail) if g not in begun.get(tail, ())]
        first = tail not in begun
        groups = leaving_groups(table, self._layout_of(tail), tail, left) if first else left
        if groups == left:
            gone[tail] = True
        else:
            begun[tail] = groups
        return Parts.of((tail, group) for group in groups)

    def _choose_chunk(self, resident: Residency, stride: int) -> Parts:
        """All parts in the sparsest chunk of another size that can be emptied; now moving (lock held)."""
        skipped = self._chunks_that_stay(resident)
        while (found := resident.arena.sparsest_chunk(stride, skipped)) is not None:
            other, chunk, slots = found
            if parts := self._parts_in(resident, other, slots):
                self._start_moves(parts)
                return parts
            skipped.add((other, chunk))
        return NO_PARTS

    def _chunks_that_stay(self, resident: Residency) -> set[tuple[int, int]]:
        """Chunks, by stride and number, with a part of a block that is held or that comes need (lock held)."""
        rows = self._table.live_rows()
        needed = self._needed_by_what_comes(resident)
        parts = resident.parts_of(rows[held(self._table, rows) | needed[rows]])
        strides, found = resident.strides_of(parts), set[tuple[int, int]]()
        slots = self._table.slot[resident.tier, parts.groups, parts.rows]
        for stride in np.unique(strides).tolist():
            chunks = np.unique(slots[strides == stride] // resident.arena.slots_per_chunk(stride))
            found.update((stride, chunk) for chunk in chunks.tolist())
        return found

    def _needed_by_what_comes(self, resident: Residency) -> Flags:
        """By row: what comes to the last tier that there is is reached only behind these blocks (lock held)."""
        if resident.tier is Tier.DISK and self._spiller is not None:
            return ways_to(self._table, self._spiller.rows_on_their_way())
        is_last = resident.tier is max(self._residents)
        return self._needed_in_memory() if is_last else ways_to(self._table, _NO_ROWS)

    def _needed_in_memory(self) -> Flags:
        """By row: without a disk, what room is being made for is reached only behind these (lock held)."""
        incoming = self._incoming.values() if self._spiller is None else ()
        return ways_to(self._table, np.concatenate([_NO_ROWS, *incoming]))

    def _parts_in(self, resident: Residency, stride: int, slots: Slots) -> Parts:
        table = self._table
        rows = table.live_rows()
        groups, at = np.nonzero(np.isin(table.slot[resident.tier][:, rows], slots))
        parts = Parts(rows[at], groups)
        return parts[resident.strides_of(parts) == stride]

    def _start_moves(self, parts: Parts) -> None:
        self._table.moving[np.unique(parts.rows)] += 1

    def _end_moves(self, parts: Parts) -> None:
        self._table.moving[np.unique(parts.rows)] -= 1
        self._lock.notify_all()

    # ---- where to ------------------------------------------------------------------------------

    def _let_go(self, resident: Residency, leaving: Parts, until: float) -> bool:
        """Take `leaving` out of its tier, after a copy to the tier below where it has none there.

        Returns:
            False if nothing leaves, nor would if it were tried again.
        """
        try:
            self._copy_down(resident, leaving, until)
        except BaseException:  # an interrupt, or no memory: it stays
            with self._lock:
                self._end_moves(leaving)
            raise
        if resident.tier is Tier.DISK:
            return self._leave_disk(leaving, until)
        with self._lock:
            return self._leave_memory(resident, leaving)

    def _copy_down(self, resident: Residency, leaving: Parts, until: float) -> None:
        """As far as the tiers below take it; of what leaves the disk only token ids are kept."""
        if resident.tier is Tier.DISK:
            assert self._spiller is not None, "only a cache with a disk tier evicts from it"
            self._spiller.remember_tokens(leaving)
            return
        if resident.tier is Tier.DEVICE and Tier.HOST in self._residents:
            self._demote(leaving, until)
        with self._lock:
            homeless = leaving[last_copies(self._table, resident.tier, leaving)]
        if homeless and self._spiller is not None:
            self._spiller.spill_now(homeless, until)

    def _demote(self, leaving: Parts, until: float) -> None:
        """Copy to HOST what is not there yet, as far as HOST takes it."""
        table, device, host = self._table, self._memories[Tier.DEVICE], self._memories[Tier.HOST]
        with self._lock:
            wanted = leaving[table.slot[Tier.HOST, leaving.groups, leaving.rows] < 0]
            strides = self._residents[Tier.DEVICE].strides_of(wanted)
        for part_nbytes in np.unique(strides).tolist():
            parts = wanted[strides == part_nbytes]
            slots = self.reserve(Tier.HOST, part_nbytes, len(parts), until, parts.rows)
            parts = parts[: len(slots)]
            with self._lock:
                sources = table.slot[Tier.DEVICE, parts.groups, parts.rows].astype(np.int64)
            slots[np.argsort(sources)] = np.sort(slots)  # in the same order: few copies, and large ones
            try:
                copy_slots(device.stream, part_nbytes, device, sources, host, slots)
                await_copies(device, self._deadline_s, self._counters)
            except BaseException:  # an interrupt: what was reserved goes back, once nothing writes there
                await_copies(device, self._deadline_s, self._counters)
                with self._lock:
                    self._residents[Tier.HOST].free(part_nbytes, slots)
                raise
            with self._lock:
                for group in np.unique(parts.groups).tolist():
                    mine = np.flatnonzero(parts.groups == group)[::-1]  # tails came first
                    self._residents[Tier.HOST].place(parts.rows[mine], group, slots[mine])
                self._residents[Tier.HOST].tell(Event.DEMOTE, parts)

    def _leave_memory(self, resident: Residency, leaving: Parts) -> bool:
        """Lock held."""
        self._end_moves(leaving)
        # Pinned or being spilled since it was chosen: it stays.
        leaving = leaving[~held(self._table, leaving.rows)]
        last = last_copies(self._table, resident.tier, leaving)
        stays = last & self._needed_in_memory()[leaving.rows]
        resident.leave(leaving[~stays], evicted=True)
        resident.tell(Event.EVICT, leaving[~stays])
        self._drop_lost(leaving.rows[last & ~stays])
        self._table.free_if_empty(leaving.rows)
        self.look_again()
        return not (len(stays) and stays.all())

    def _leave_disk(self, leaving: Parts, until: float) -> bool:
        assert self._spiller is not None, "only a cache with a disk tier evicts from it"
        table, rows = self._table, np.unique(leaving.rows)
        with self._lock:
            table.uses[rows] += 1  # until it is known what hangs on them
            self._end_moves(leaving)
            # Pinned, or needed by what set out, since it was chosen: it stays.
            stays = held(table, leaving.rows)
            stays |= self._needed_by_what_comes(self._residents[Tier.DISK])[leaving.rows]
            leaving = leaving[~stays]
            ticket = self._spiller.drop(leaving, Cause.EVICTED) if leaving else DONE
        try:
            is_done = ticket.wait(_left(until))
        finally:
            with self._lock:
                lost = leaving.rows[table.slot[:, leaving.groups, leaving.rows].max(axis=0) < 0]
                ticket = self._drop_lost(lost)
                table.uses[rows] -= 1
                table.free_if_empty(rows)
                self.look_again()
        ticket.wait(_left(until))
        return is_done

    def _drop_lost(self, rows: Rows) -> Ticket:
        """Blocks that lost a last copy, in the order in which they lost it (lock held)."""
        lost = list(dict.fromkeys(rows.tolist()))
        if lost:
            self._counters.add("dropped_blocks", len(lost))
        return self.drop_stranded(lost) if lost else DONE

    # ---- what goes with it ---------------------------------------------------------------------

    def drop_stranded(self, lost: Iterable[int]) -> Ticket:
        """What the loss of last copies made unreachable goes too, in every tier (lock held)."""
        table = self._table
        rows, held = stranded(table, self._layout_of, [r for r in lost if table.namespace[r] >= 0])
        self._held_up.update((row, table.key_of(row)) for row in held)
        if rows:
            self._counters.add("stranded_blocks", len(rows))
        groups = np.arange(table.num_groups)
        parts = Parts(np.repeat(np.array(rows, dtype=np.int32), len(groups)), np.tile(groups, len(rows)))
        return self.release(parts, Cause.EVICTED)

    def look_again(self) -> None:
        """Blocks that should have gone while they were held go when free, if nobody needs them (lock held)."""
        table = self._table
        free = {(row, key) for row, key in self._held_up if not table.is_held(row)}
        if free:
            self._held_up -= free
            rows = [row for row, key in free if table.namespace[row] >= 0 and table.key_of(row) == key]
            self.drop_stranded(first_gaps(table, self._layout_of, rows))

    def release(self, parts: Parts, cause: Cause) -> Ticket:
        """Take `parts` out of every tier, those of held blocks excepted (lock held).

        Returns:
            Done when the disk's slots are free.
        """
        table = self._table
        free = parts[~held(table, parts.rows)]
        on_disk = free[table.slot[Tier.DISK, free.groups, free.rows] >= 0]
        for tier, resident in self._residents.items():
            if tier is not Tier.DISK:
                here = free[table.slot[tier, free.groups, free.rows] >= 0]
                resident.leave(here, evicted=cause is Cause.EVICTED)
                resident.tell(Event.EVICT if cause is Cause.EVICTED else Event.LEAVE, here)
        ticket: Ticket = DONE
        if on_disk and self._spiller is not None:
            ticket = self._spiller.drop(on_disk, cause)
        table.free_if_empty(free.rows)
        return ticket


def await_copies(device: TensorTier, deadline_s: float, counters: Counters) -> None:
    """Wait until every copy queued so far has landed; a device that takes too long is counted."""
    ticket = device.stream.ticket()
    while not ticket.wait(deadline_s):
        counters.add("copies_past_deadline")


def _left(until: float) -> float:
    return max(0.0, until - time.monotonic())
