"""What lies in one tier: the arena's slots, the policy's keys and the table's column, kept as one fact."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from .block.hashing import keys_of
from .outcomes import Tier
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
        policy: Policy[bytes],
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

    def nbytes_of(self, row: int) -> int:
        """Bytes of the block's slots here."""
        return sum(self._stride_nbytes(row, group) for group in self.groups_of(row))

    def _nbytes_of_each(self, rows: Rows) -> list[int]:
        """`nbytes_of` for many rows; equal numbers are one object, since a policy keeps one for each block."""
        here = self.table.slot[self.tier][:, rows] >= 0
        namespaces = self.table.namespace[rows]
        total = np.zeros(len(rows), dtype=np.int64)
        for namespace in set(namespaces.tolist()):
            for group, mine in enumerate(here & (namespaces == namespace)):
                if mine.any():
                    total[mine] += self._stride_nbytes(int(rows[np.argmax(mine)]), group)
        distinct: dict[int, int] = {}
        return [distinct.setdefault(nbytes, nbytes) for nbytes in total.tolist()]

    def stride_nbytes(self, row: int, group: int) -> int:
        return self._stride_nbytes(row, group)

    def place(self, rows: Rows, group: int, slots: Slots) -> None:
        """The parts of `rows` lie in `slots` from now on. The slots are the caller's, allocated before."""
        self.table.slot[self.tier, group, rows] = slots
        self.enter(rows)

    def enter(self, rows: Rows) -> None:
        """Tell the policy of blocks that have a part here, new or one more; a chain's tail ages first."""
        rows = rows[::-1]
        for key, nbytes in zip(keys_of(self.table.digest[rows]), self._nbytes_of_each(rows), strict=True):
            if key in self.policy:
                self.policy.resize(key, nbytes)
            else:
                self.policy.insert(key, nbytes)

    def enter_all(self) -> None:
        """After recovery: tell the policy of every block here, the oldest put first."""
        table = self.table
        rows = table.live_rows()
        here = table.slot[self.tier][:, rows] >= 0
        newest = np.where(here, table.put_seq[:, rows], 0).max(axis=0)
        order = np.argsort(newest, kind="stable")
        rows = rows[order[here.any(axis=0)[order]]]
        for key, nbytes in zip(keys_of(table.digest[rows]), self._nbytes_of_each(rows), strict=True):
            self.policy.insert(key, nbytes)

    def leave(self, row: int, groups: Sequence[int], *, evicted: bool) -> None:
        """Free the slots of the block's parts of `groups` here; `evicted` for want of space."""
        for group in groups:
            slot = int(self.table.slot[self.tier, group, row])
            if slot >= 0:
                self.table.slot[self.tier, group, row] = -1
                self.free(self._stride_nbytes(row, group), np.array([slot], dtype=np.int64))
        self.left(row, evicted=evicted)

    def tell(self, event: Event, parts: Sequence[tuple[int, int]]) -> None:
        """Tell the trace what happened to `(row, group)` pairs, before any of the rows is freed."""
        if parts and self.trace is not NO_TRACE:
            rows, groups = np.array(parts, dtype=np.int64).T
            self.trace.note(event, self.tier, rows, groups)

    def left(self, row: int, *, evicted: bool) -> None:
        """Tell the policy that a block lost parts here."""
        key = self.table.key_of(row)
        if key not in self.policy:
            return
        nbytes = self.nbytes_of(row)
        if nbytes:
            self.policy.resize(key, nbytes)
        elif evicted:
            self.policy.evict(key)
            self.num_evictions += 1
        else:
            self.policy.remove(key)

    def free(self, stride_nbytes: int, slots: Slots) -> None:
        """Give back slots that no row names any more."""
        self.arena.free(stride_nbytes, slots)

    def touch(self, rows: Rows) -> None:
        """A hit on a chain's `rows`, given head to tail: the tail is touched first, so it ages first."""
        here = rows[(self.table.slot[self.tier][:, rows] >= 0).any(axis=0)]
        self.policy.touch(keys_of(self.table.digest[here[::-1]]))
        if self.tier is Tier.DEVICE:  # every tier is told of a hit; the trace, once
            self.trace.note(Event.TOUCH, self.tier, rows)

    def settle(self, rows: Rows) -> None:
        """A chain's `rows`, head to tail, came in one by one: put them in order, which is no hit."""
        here = rows[(self.table.slot[self.tier][:, rows] >= 0).any(axis=0)]
        self.policy.reorder(keys_of(self.table.digest[here[::-1]]))

    def victims(self, nbytes: int, incoming: Sequence[bytes]) -> list[int]:
        """Rows that the policy would let go for `nbytes`, none of them pinned or moving; of lower rank first."""
        table = self.table
        fresh = [key for key in incoming if key not in self.policy]
        held = (table.pins > 0) | (table.moving > 0)
        rows: list[int] = []
        for rank in np.unique(table.rank).tolist() if table.rank.any() else [0]:
            spared = set(keys_of(table.digest[held | (table.rank > rank)]))
            keys = self.policy.victims(nbytes, spared.__contains__, fresh)
            more = table.rows_of(keys).tolist() if keys else []
            rows += more
            nbytes -= sum(map(self.nbytes_of, more))
            if nbytes <= 0:
                break
            held[more] = True
        return rows

    def check(self) -> None:
        """Arena, policy and table tell the same story."""
        self.arena.check()
        self.policy.check()
        rows = self.table.live_rows()
        here = rows[(self.table.slot[self.tier][:, rows] >= 0).any(axis=0)]
        assert len(here) == len(self.policy), f"{self.tier.name}: {len(here)} blocks, {len(self.policy)} keys"
        nbytes = sum(self.nbytes_of(row) for row in here.tolist())
        assert nbytes == self.policy.nbytes, f"{self.tier.name}: {nbytes} bytes, policy {self.policy.nbytes}"
