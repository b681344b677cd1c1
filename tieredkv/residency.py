"""What lies in one tier: the arena's slots, the policy's keys and the table's column, kept as one fact."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from .outcomes import Tier
from .plan import Flags, Parts, held
from .policy import Policy
from .table.block_table import BlockTable
from .table.key_index import Rows
from .table.trace import NO_TRACE, Event, NoTrace
from .tier.arena import Arena

Slots = npt.NDArray[np.int64]


class Residency:
    """One tier's residents. Every method is called with the metadata lock held.

    Args:
        stride_nbytes: `(row, group) → bytes of a slot` of that block's part in this tier.
        punch: gives the space of `(stride, chunk)` pairs back to the file system; I/O, no lock held.
    """

    def __init__(
        self,
        tier: Tier,
        table: BlockTable,
        arena: Arena,
        policy: Policy,
        stride_nbytes: Callable[[int, int], int],
        punch: Callable[[Sequence[tuple[int, int]]], None] = lambda _chunks: None,
    ) -> None:
        self.tier = tier
        self.table = table
        self.arena = arena
        self.policy = policy
        self.num_evictions = 0
        self.hit_tokens = 0
        self._stride_nbytes = stride_nbytes
        self.punch = punch
        self.trace: NoTrace = NO_TRACE

    def groups_of(self, row: int) -> list[int]:
        """Groups of which this tier holds the block's part."""
        groups: list[int] = np.flatnonzero(self.table.slot[self.tier, :, row] >= 0).tolist()
        return groups

    def stride_nbytes(self, row: int, group: int) -> int:
        """Bytes of a slot for this part."""
        return self._stride_nbytes(row, group)

    def parts_of(self, rows: Rows) -> Parts:
        """Every part of these blocks that lies here, block by block."""
        at, groups = np.nonzero(self.table.slot[self.tier][:, rows].T >= 0)
        return Parts(rows[at], groups)

    def strides_of(self, parts: Parts) -> npt.NDArray[np.int64]:
        """Bytes of a slot for each part."""
        kinds = self.table.namespace[parts.rows].astype(np.int64) * self.table.num_groups + parts.groups
        strides = np.zeros(len(parts), dtype=np.int64)
        for kind in np.unique(kinds).tolist():
            mine = kinds == kind
            first = int(np.argmax(mine))
            strides[mine] = self._stride_nbytes(int(parts.rows[first]), int(parts.groups[first]))
        return strides

    def nbytes_of(self, rows: Rows) -> npt.NDArray[np.int64]:
        """Bytes of each block's slots here."""
        here = self.table.slot[self.tier][:, rows] >= 0
        namespaces = self.table.namespace[rows]
        total = np.zeros(len(rows), dtype=np.int64)
        for namespace in np.unique(namespaces).tolist():
            for group, mine in enumerate(here & (namespaces == namespace)):
                if mine.any():
                    total[mine] += self._stride_nbytes(int(rows[np.argmax(mine)]), group)
        return total

    def place(self, rows: Rows, group: int, slots: Slots) -> None:
        """The parts of `rows` lie in `slots` from now on. The slots are the caller's, allocated before."""
        self.table.slot[self.tier, group, rows] = slots
        self.enter(rows)

    def enter(self, rows: Rows) -> None:
        """Tell the policy of blocks that have a part here, new or one more; a chain's tail ages first."""
        rows = _distinct(rows[::-1])
        nbytes, known = self.nbytes_of(rows), self.policy.holds(rows)
        self.policy.resize(rows[known], nbytes[known])
        self.policy.insert(rows[~known], nbytes[~known])

    def enter_all(self) -> None:
        """After recovery: tell the policy of every block here, the oldest put first."""
        table = self.table
        rows = table.live_rows()
        here = table.slot[self.tier][:, rows] >= 0
        newest = np.where(here, table.put_seq[:, rows], 0).max(axis=0)
        order = np.argsort(newest, kind="stable")
        rows = rows[order[here.any(axis=0)[order]]]
        self.policy.insert(rows, self.nbytes_of(rows))

    def leave(self, parts: Parts, *, evicted: bool) -> None:
        """Free the slots of these parts, as far as they are here; `evicted` for want of space."""
        slots = self.table.slot[self.tier, parts.groups, parts.rows].astype(np.int64)
        parts, slots = parts[slots >= 0], slots[slots >= 0]
        self.table.slot[self.tier, parts.groups, parts.rows] = -1
        self.free_each(self.strides_of(parts), slots)
        self.left(parts.rows, evicted=evicted)

    def tell(self, event: Event, parts: Parts) -> None:
        """Tell the trace what happened to these parts, before any of the rows is freed."""
        if len(parts) and self.trace is not NO_TRACE:
            self.trace.note(event, self.tier, parts.rows, parts.groups)

    def left(self, rows: Rows, *, evicted: bool) -> None:
        """Tell the policy that blocks lost parts here, in this order."""
        rows = _distinct(rows)
        rows = rows[self.policy.holds(rows)]
        nbytes = self.nbytes_of(rows)
        some = nbytes > 0
        self.policy.resize(rows[some], nbytes[some])
        if evicted:
            self.policy.evict(rows[~some])
            self.num_evictions += int((~some).sum())
        else:
            self.policy.remove(rows[~some])

    def free(self, stride_nbytes: int, slots: Slots) -> None:
        """Give back slots that no row names any more."""
        self.arena.free(stride_nbytes, slots)

    def free_each(self, strides: npt.NDArray[np.int64], slots: Slots) -> None:
        """`free` for slots of several sizes."""
        for stride in np.unique(strides).tolist():
            self.free(stride, slots[strides == stride])

    def touch(self, rows: Rows, was: Flags) -> None:
        """A hit on a chain's `rows`, given head to tail: the tail is touched first, so it ages first.

        Args:
            was: which of them `has` said were here before. The others the hit brought: they were inserted for it,
                and are only put in order, for one use counts once.
        """
        self.policy.touch(self._here(rows[was])[::-1])
        self.settle(rows[~was])
        if self.tier is Tier.DEVICE:  # every tier is told of a hit; the trace, once
            self.trace.note(Event.TOUCH, self.tier, rows)

    def settle(self, rows: Rows) -> None:
        """A chain's `rows`, head to tail, came in one by one: put them in order, which is no hit."""
        self.policy.reorder(self._here(rows)[::-1])

    def has(self, rows: Rows) -> Flags:
        """Which blocks have a part here: bool `[n]`."""
        here: Flags = self.table.slot[self.tier][:, rows].max(axis=0) >= 0
        return here

    def _here(self, rows: Rows) -> Rows:
        return rows[self.has(rows)]

    def victims(self, nbytes: int, incoming: Rows) -> Rows:
        """Blocks that the policy would let go for `nbytes`, none pinned or moving; those of lower rank first."""
        table, fresh = self.table, incoming[~self.policy.holds(incoming)]
        chosen, gone = [np.zeros(0, dtype=np.int32)], np.zeros(len(table.rank), dtype=np.bool_)
        for rank in np.unique(table.rank).tolist() if table.rank.any() else [0]:

            def stays(rows: Rows, rank: int = rank) -> Flags:
                return held(table, rows) | gone[rows] | (table.rank[rows] > rank)

            chosen.append(self.policy.victims(nbytes, stays, fresh))
            nbytes -= int(self.nbytes_of(chosen[-1]).sum())
            if nbytes <= 0:
                break
            gone[chosen[-1]] = True
        return np.concatenate(chosen)

    def oldest_first(self) -> Rows:
        """Every block here in the order in which the policy would let them go, if none were held."""
        nobody = np.zeros(0, dtype=np.int32)
        return self.policy.victims(self.policy.nbytes, lambda rows: np.zeros(len(rows), np.bool_), nobody)

    def check(self) -> None:
        """Arena, policy and table tell the same story."""
        self.arena.check()
        self.policy.check()
        rows = self.table.live_rows()
        here = rows[(self.table.slot[self.tier][:, rows] >= 0).any(axis=0)]
        assert len(here) == len(self.policy), f"{self.tier.name}: {len(here)} blocks, {len(self.policy)} keys"
        nbytes = int(self.nbytes_of(here).sum())
        assert nbytes == self.policy.nbytes, f"{self.tier.name}: {nbytes} bytes, policy {self.policy.nbytes}"


def _distinct(rows: Rows) -> Rows:
    """Each once, where it stood first."""
    _, first = np.unique(rows, return_index=True)
    return rows if len(first) == len(rows) else rows[np.sort(first)]
