"""The block table: digest → where the block's parts are. Arrays plus one index; a row is a block.

Only what `apply` writes is durable: the DISK slots with their checksums. Device and host slots, pins and
moves are facts of this process. Nobody but `apply` changes the durable part, live or in replay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..block.hashing import DIGEST_NBYTES, KEY_NBYTES, Digests, keys_of
from ..outcomes import Tier
from ..wal.records import DROP, PUT, Run
from .column import Column
from .key_index import KeyIndex, Rows, as_slice, is_first, key_words
from .snapshot import Columns, TableSnapshot

_START_ROWS = 1024
_NUM_REMEMBERED = 1 << 14

_ROW_COLUMNS: dict[str, tuple[str, int]] = {
    "namespace": ("i4", -1),
    "parent": ("i4", -1),
    "first_child": ("i4", -1),
    "next_sibling": ("i4", -1),
    "prev_sibling": ("i4", -1),
    "pins": ("i4", 0),
    "moving": ("i4", 0),
    "uses": ("i4", 0),
    "holders": ("i4", 0),
    "rank": ("i1", 0),
}
"""Name: dtype and the value of an empty row. `uses` keeps a row, not its parts; `holders` counts who keeps
the boundary after the block; of lower `rank` is evicted first."""

_PART_COLUMNS: dict[str, str] = {"checksum": "u8", "put_seq": "u8", "lsn": "u8"}


def _blank_columns(num_groups: int) -> dict[str, Column]:
    of_rows = {name: Column((_START_ROWS,), 0, *spec) for name, spec in _ROW_COLUMNS.items()}
    of_parts = {name: Column((num_groups, _START_ROWS), 1, dtype, 0) for name, dtype in _PART_COLUMNS.items()}
    return {
        "digest": Column((_START_ROWS, DIGEST_NBYTES), 0, "u1", 0),
        "slot": Column((len(Tier), num_groups, _START_ROWS), 2, "i4", -1),
        "leaving": Column((num_groups, _START_ROWS), 1, "?", 0),
        **of_rows,
        **of_parts,
    }


def _nobody_looks() -> None:
    pass


class BlockTable:
    """Every block the cache knows, in rows; a free row has namespace -1.

    Attributes:
        before_rows_go: called before rows are given back: whoever noted a row looks up whose it is.
    """

    digest: Digests
    slot: npt.NDArray[np.int32]
    leaving: npt.NDArray[np.bool_]  # off DISK once the log says so
    namespace: npt.NDArray[np.int32]
    parent: npt.NDArray[np.int32]
    first_child: npt.NDArray[np.int32]
    next_sibling: npt.NDArray[np.int32]
    prev_sibling: npt.NDArray[np.int32]
    pins: npt.NDArray[np.int32]
    moving: npt.NDArray[np.int32]
    uses: npt.NDArray[np.int32]
    holders: npt.NDArray[np.int32]
    rank: npt.NDArray[np.int8]
    checksum: npt.NDArray[np.uint64]
    put_seq: npt.NDArray[np.uint64]
    lsn: npt.NDArray[np.uint64]

    def __init__(self, num_groups: int = 1) -> None:
        self.num_groups = num_groups
        self.before_rows_go: Callable[[], None] = _nobody_looks
        self.clear()

    def clear(self) -> None:
        """Forget every row."""
        self.replaying = False
        self._snapshot: TableSnapshot | None = None
        self._capacity = _START_ROWS
        self._next_row = 0
        self._free: list[int] = []
        self._index = KeyIndex()
        self._gone: dict[bytes, None] = {}
        self.tokens: dict[
            int, bytes
        ] = {}  # ids (int32, little endian) of blocks that are not all on DISK yet
        self._wishes: dict[bytes, tuple[int, int]] = {}  # holders and pins that outlive a row, by digest
        self._columns = _blank_columns(self.num_groups)
        self._show_columns()

    def __len__(self) -> int:
        return len(self._index)

    @property
    def nbytes(self) -> int:
        """Bytes of all columns and the index."""
        return sum(column.values.nbytes for column in self._columns.values()) + self._index.nbytes

    def live_rows(self) -> Rows:
        """Every row in use, ascending."""
        return np.flatnonzero(self.namespace[: self._next_row] >= 0).astype(np.int32)

    def ensure_groups(self, num_groups: int) -> None:
        """Make room for blocks of `num_groups` layer groups."""
        if num_groups <= self.num_groups:
            return
        self.num_groups = num_groups
        for name in ("slot", "leaving", *_PART_COLUMNS):
            self._columns[name].widen(num_groups)
        self._show_columns()

    # ---- finding -------------------------------------------------------------------------------

    def find(self, digests: Digests) -> Rows:
        """The row of each digest, -1 where there is none: the key finds it, all 32 bytes prove it."""
        rows = self._index.find(key_words(digests), self._words)
        rows[self._differs(rows, digests)] = -1
        return rows

    def _differs(self, rows: Rows, digests: Digests) -> npt.NDArray[np.bool_]:
        """Where the digest of a row is not the one asked for; whatever where the row is -1."""
        words = np.ascontiguousarray(digests).view("<u8")
        unequal = self._words.take(rows, axis=0) != words
        differs: npt.NDArray[np.bool_] = unequal[:, 0] | unequal[:, 1] | unequal[:, 2] | unequal[:, 3]
        return differs

    def present(self, rows: Rows, num_groups: int) -> npt.NDArray[np.bool_]:
        """Which parts are there in any tier, and stay: bool `[num_groups, len(rows)]`; row -1 has none."""
        above: npt.NDArray[np.bool_] = self.slot[: Tier.DISK, :num_groups, rows].max(axis=0) >= 0
        there: npt.NDArray[np.bool_] = above | self.on_disk(rows)[:num_groups]
        there &= rows >= 0
        return there

    def on_disk(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Which parts DISK holds and no queued drop takes away: bool `[num_groups, len(rows)]`."""
        held: npt.NDArray[np.bool_] = self.slot[Tier.DISK][:, rows] >= 0
        return held & ~self.leaving[:, rows]

    def keys_of(self, rows: Rows) -> Sequence[bytes]:
        return keys_of(self.digest[rows])

    def key_of(self, row: int) -> bytes:
        return self.digest[row, :KEY_NBYTES].tobytes()

    def is_held(self, row: int) -> bool:
        """Pinned or moving: not to be evicted, moved or overwritten."""
        return bool(self.pins[row] > 0 or self.moving[row] > 0)

    # ---- rows ----------------------------------------------------------------------------------

    def register(self, namespace: int, digests: Digests) -> Rows:
        """Rows for one whole chain, head first, made where they are missing and linked to their parents.

        A key held by another digest gives -1 for that block and for every block after it.
        """
        rows = self._index.find(key_words(digests), self._words)
        taken = (rows >= 0) & self._differs(rows, digests)
        end = int(np.argmax(taken)) if taken.any() else len(rows)
        missing = np.flatnonzero(rows[:end] < 0)
        if missing.size:
            end = self._before_collision(digests, missing, end)
            missing = missing[missing < end]
            rows[missing] = self._new_rows(namespace, digests[missing])
        rows[end:] = -1
        self._link_chain(rows[:end])
        return rows

    def _before_collision(self, digests: Digests, missing: npt.NDArray[np.int64], end: int) -> int:
        """Where two new blocks of one chain share a key, the chain ends before the second."""
        again = missing[~is_first(key_words(digests[missing]))]
        return min(end, int(again[0])) if again.size else end

    def _new_rows(self, namespace: int, digests: Digests) -> Rows:
        count = len(digests)
        reused = [self._free.pop() for _ in range(min(count, len(self._free)))]
        fresh = count - len(reused)
        self._reserve(self._next_row + fresh)
        rows = np.arange(self._next_row - len(reused), self._next_row + fresh, dtype=np.int32)
        rows[: len(reused)] = reused
        self._next_row += fresh
        at = as_slice(rows)
        self.digest[at] = digests
        self.namespace[at] = namespace
        self._index.insert(rows, self._words)
        if self._wishes:
            for row, digest in zip(rows.tolist(), digests, strict=True):
                self.holders[row], self.pins[row] = self._wishes.get(digest.tobytes(), (0, 0))
        return rows

    def wish(self, digests: Digests, *, holders: int = 0, pins: int = 0) -> Rows:
        """Count holders of the boundaries after these blocks, or pins on them, whether they are here yet or not.

        Returns:
            Their rows, -1 where a block is not here.
        """
        for digest in map(bytes, digests):
            so_far = self._wishes.pop(digest, (0, 0))
            wanted = so_far[0] + holders, so_far[1] + pins
            assert min(wanted) >= 0, f"wishes of {so_far} changed by {holders} holders, {pins} pins"
            if wanted != (0, 0):
                self._wishes[digest] = wanted
        rows = self.find(digests)
        there = rows[rows >= 0]
        np.add.at(self.holders, there, holders)
        np.add.at(self.pins, there, pins)
        return rows

    def _reserve(self, num_rows: int) -> None:
        if num_rows <= self._capacity:
            return
        # Twice while small; a quarter more when large, for what is blank is real memory
        grown = max(num_rows, self._capacity * 2 if self._capacity < 1 << 16 else self._capacity * 5 // 4)
        for column in self._columns.values():
            column.grow(grown)
        self._capacity = grown
        self._show_columns()

    def _show_columns(self) -> None:
        """The columns as they are now, as attributes."""
        for name, column in self._columns.items():
            setattr(self, name, column.values)
        self._words = self.digest.view("<u8")

    def free_rows(self, rows: Rows) -> None:
        """Give back rows that have no part, no pin and no move; children that are left become orphans."""
        if not len(rows):
            return
        self.before_rows_go()
        self._remember(rows)
        if self._snapshot is not None:
            below = [child for row in rows.tolist() for child in self.children(row)]
            self._about_to_change(np.array([*rows.tolist(), *below], dtype=np.int32))
        self._index.remove(rows, self._words)
        for row in rows.tolist():
            self._unlink(row)
            child = int(self.first_child[row])
            while child >= 0:
                following = int(self.next_sibling[child])
                self.parent[child] = self.next_sibling[child] = self.prev_sibling[child] = -1
                child = following
            self.tokens.pop(row, None)
        for name, (_, empty) in _ROW_COLUMNS.items():
            getattr(self, name)[rows] = empty
        self._free.extend(rows.tolist())
        self.slot[:, :, rows] = -1

    def _remember(self, rows: Rows) -> None:
        """Keep the last keys that went, so that a miss can say `evicted`."""
        for row in rows.tolist():
            self._gone[self.key_of(row)] = None
        while len(self._gone) > _NUM_REMEMBERED:
            del self._gone[next(iter(self._gone))]

    def was_here(self, digest: bytes) -> bool:
        """Was this block here not long ago? Only for the reason of a miss."""
        return digest[:KEY_NBYTES] in self._gone

    def forget_gone(self) -> None:
        """After a removal nothing remembers what was here."""
        self._gone.clear()

    def free_if_empty(self, rows: Rows) -> Rows:
        """Free those of `rows` that hold nothing any more, and then those above them; returns all of them.

        A row stays while a block below it has a row: the chain must not break in two.
        """
        rows = np.unique(rows[rows >= 0])
        rows = rows[self._holds_nothing(rows)]
        bare, todo = set(rows.tolist()), rows[self.first_child[rows] < 0].tolist()
        gone = dict.fromkeys(todo)
        while todo:
            above = int(self.parent[todo.pop()])
            if above < 0 or above in gone or any(child not in gone for child in self.children(above)):
                continue
            if above in bare or self._holds_nothing(np.array([above]))[0]:
                gone[above] = None
                todo.append(above)
        freed = np.array([*gone], dtype=np.int32)
        self.free_rows(freed)
        return freed

    def _holds_nothing(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Live rows without a part, that nobody pins, moves or uses."""
        idle = (self.pins[rows] == 0) & (self.moving[rows] == 0) & (self.uses[rows] == 0)
        idle &= self.namespace[rows] >= 0
        nothing: npt.NDArray[np.bool_] = idle & (self.slot[:, :, rows].max(axis=(0, 1), initial=-1) < 0)
        return nothing

    # ---- the tree of chains --------------------------------------------------------------------

    def _link_chain(self, rows: Rows) -> None:
        """Link each row to the one before it; those already linked stay."""
        if len(rows) < 2:
            return
        children, parents = rows[1:], rows[:-1]
        loose = self.parent[children] < 0
        children, parents = children[loose], parents[loose]
        if not children.size:
            return
        older = self.first_child[parents]
        self._about_to_change(children)
        self.parent[children] = parents
        self.next_sibling[children] = older
        self.prev_sibling[children] = -1
        self.prev_sibling[older[older >= 0]] = children[older >= 0]
        self.first_child[parents] = children

    def _unlink(self, row: int) -> None:
        parent, before, after = (int(c[row]) for c in (self.parent, self.prev_sibling, self.next_sibling))
        if before >= 0:
            self.next_sibling[before] = after
        elif parent >= 0:
            self.first_child[parent] = after
        if after >= 0:
            self.prev_sibling[after] = before

    def settle(self) -> None:
        """End a replay: rows whose parts were all dropped are freed, then the chains are linked.

        Until then no row is given back, so that a `parent` never names another block's row.
        """
        rows = self.live_rows()
        empty = rows[(self.slot[Tier.DISK, :, : self._next_row].max(axis=0) < 0)[rows]]
        gone = np.zeros(self._next_row + 1, dtype=np.bool_)  # the last stands for no parent
        gone[empty] = True
        self.parent[rows[gone[self.parent[rows]]]] = -1
        self._index.remove(empty, self._words)
        for name, (_, value) in _ROW_COLUMNS.items():
            column = getattr(self, name)
            column[empty[column[empty] != value]] = value  # a page that nobody wrote to stays away
        self._free.extend(empty.tolist())
        self.replaying = False
        self.relink()

    def relink(self) -> None:
        """Rebuild the lists of children from `parent`."""
        for column in (self.first_child, self.next_sibling, self.prev_sibling):
            column[:] = -1
        rows = self.live_rows()
        rows = rows[self.parent[rows] >= 0]
        rows = rows[np.argsort(self.parent[rows], kind="stable")]
        parents = self.parent[rows]
        same = parents[1:] == parents[:-1]
        self.next_sibling[rows[:-1][same]] = rows[1:][same]
        self.prev_sibling[rows[1:][same]] = rows[:-1][same]
        heads = np.concatenate(([True], ~same)) if rows.size else np.zeros(0, dtype=np.bool_)
        self.first_child[parents[heads]] = rows[heads]

    def children(self, row: int) -> Iterator[int]:
        child = int(self.first_child[row])
        while child >= 0:
            yield child
            child = int(self.next_sibling[child])

    def ancestors(self, row: int, count: int) -> Iterator[int]:
        """`row` itself and up to `count - 1` rows above it, nearest first."""
        while row >= 0 and count > 0:
            yield row
            row, count = int(self.parent[row]), count - 1

    # ---- durable changes -----------------------------------------------------------------------

    def apply(self, lsns: int | npt.NDArray[np.int64], run: Run) -> Rows:
        """Apply logged records; the only way the durable part changes.

        Args:
            lsns: each record's LSN, or the first's if they follow one another.

        Returns:
            The rows that the records named, -1 where a record named nothing that is here.
        """
        records: Any = run.records
        if run.kind == PUT:
            each = np.arange(lsns, lsns + len(records)) if isinstance(lsns, int) else lsns
            return self._apply_put(each, records)
        assert run.kind == DROP, f"the block table knows kinds {PUT} and {DROP}, not {run.kind}"
        return self._apply_drop(records)

    def _apply_put(self, lsns: npt.NDArray[np.int64], records: Any) -> Rows:
        rows = self._adopt(records)
        held = rows >= 0
        if not held.all():
            rows_held, records, lsns = rows[held], records[held], lsns[held]
        else:
            rows_held = rows
        if not len(rows_held):
            return rows
        self._about_to_change(rows_held)
        of: Any = records["group"].astype(np.int64)
        at: Any = rows_held
        if (of == of[0]).all():
            of, at = int(of[0]), as_slice(rows_held)
        if self.replaying:
            # Rows outlive a removal then, and what was purged has another number when it comes again.
            self.namespace[at] = records["namespace"]
        self.slot[Tier.DISK, of, at] = records["slot"]
        self.checksum[of, at] = records["checksum"]
        self.put_seq[of, at] = records["put_seq"]
        self.lsn[of, at] = lsns
        return rows

    def _adopt(self, records: Any) -> Rows:
        """The row of each put, made for blocks that only the log knows: in a replay, or dropped while written.

        -1 where another digest holds the key.
        """
        digests = np.ascontiguousarray(records["digest"])
        keys = key_words(digests)
        rows = self._index.find(keys, self._words)
        unknown = np.flatnonzero(rows < 0)
        fresh = unknown[is_first((keys[0][unknown], keys[1][unknown]))]
        if 0 < len(fresh) == len(rows):  # as most often in a replay; nothing is picked out and copied then
            return self._make(records["namespace"], digests, records["parent"])
        if len(fresh):
            rows[fresh] = self._make(records["namespace"][fresh], digests[fresh], records["parent"][fresh])
        if len(fresh) < len(unknown):
            rows = self._index.find(keys, self._words)
        rows[self._differs(rows, digests)] = -1
        return rows

    def _make(self, namespaces: npt.NDArray[Any], digests: Digests, parents: Digests) -> Rows:
        """New rows, linked to their parents where those are here; in a replay `settle` completes that."""
        made = np.empty(len(digests), dtype=np.int32)
        if (namespaces == namespaces[0]).all():
            made[:] = self._new_rows(int(namespaces[0]), digests)
        else:
            for namespace in np.unique(namespaces).tolist():
                mine = np.flatnonzero(namespaces == namespace)
                made[mine] = self._new_rows(namespace, digests[mine])
        above = self._above(made, digests, np.ascontiguousarray(parents))
        if self.replaying:
            self.parent[made] = above
            return made
        for row, parent in zip(made.tolist(), above.tolist(), strict=True):
            if parent >= 0 and parent != row:
                self._link_chain(np.array([parent, row], dtype=np.int32))
        return made

    def _above(self, rows: Rows, digests: Digests, parents: Digests) -> Rows:
        """The row of each parent: most often it is the block before."""
        ours, wanted = digests.view("<u8"), parents.view("<u8")
        follows = np.zeros(len(rows), dtype=np.bool_)
        follows[1:] = wanted[1:, 0] == ours[:-1, 0]
        for word in range(1, ours.shape[1]):
            follows[1:] &= wanted[1:, word] == ours[:-1, word]
        above = np.roll(rows, 1)
        others = np.flatnonzero(~follows)
        above[others] = self.find(parents[others])
        return above

    def _apply_drop(self, records: Any) -> Rows:
        rows = self.find(np.ascontiguousarray(records["digest"]))
        groups = records["group"].astype(np.int64)
        match = (rows >= 0) & (groups < self.num_groups)
        at, of = rows[match], groups[match]
        # a second drop of one put finds its slot given back already
        match[match] = (self.put_seq[of, at] == records["put_seq"][match]) & (
            self.slot[Tier.DISK, of, at] >= 0
        )
        rows[~match] = -1
        self._about_to_change(rows[match])
        self.slot[Tier.DISK, groups[match], rows[match]] = -1
        self.leaving[groups[match], rows[match]] = False
        return rows

    def last_put_seq(self) -> int:
        """The highest put number of any part on DISK; 0 without one."""
        return int(np.max(self.put_seq, where=self.slot[Tier.DISK] >= 0, initial=0))

    # ---- checkpoints ---------------------------------------------------------------------------

    def begin_snapshot(self) -> TableSnapshot:
        """Copy the durable part as it is now: every row with a part on DISK. One at a time, until `end_snapshot`."""
        assert self._snapshot is None, "a snapshot is under way"
        there = (self.slot[Tier.DISK, :, : self._next_row] >= 0).any(axis=0)
        there &= self.namespace[: self._next_row] >= 0
        rows = np.flatnonzero(there).astype(np.int32)
        self._snapshot = TableSnapshot(rows, self._next_row, self._durable_columns)
        return self._snapshot

    def end_snapshot(self) -> None:
        self._snapshot = None

    def _durable_columns(self) -> Columns:
        columns: dict[str, npt.NDArray[Any]] = {
            "digest": self.digest, "namespace": self.namespace, "parent": self.parent, "slot": self.slot[Tier.DISK].T
        }  # fmt: skip
        return columns | {name: getattr(self, name).T for name in _PART_COLUMNS}

    def _about_to_change(self, rows: Rows) -> None:
        if self._snapshot is not None:
            self._snapshot.before_change(rows)

    def snapshot(self) -> dict[str, npt.NDArray[Any]]:
        """The durable part as packed arrays, at once."""
        snapshot = self.begin_snapshot()
        while not snapshot.is_whole:
            snapshot.copy_next()
        self.end_snapshot()
        return snapshot.arrays()

    def restore(self, packed: dict[str, npt.NDArray[Any]]) -> None:
        """The inverse of `snapshot`; whatever was here is forgotten. `settle` must follow, after any replay."""
        self.num_groups = max(self.num_groups, packed["slot"].shape[0])
        self.clear()
        count = len(packed["digest"])
        self._reserve(count)
        rows = np.arange(count, dtype=np.int32)
        self._next_row = count
        self.digest[rows] = packed["digest"]
        self.namespace[rows] = packed["namespace"]
        self.parent[rows] = packed["parent"]
        groups = packed["slot"].shape[0]
        self.slot[Tier.DISK, :groups, :count] = packed["slot"]
        for name in _PART_COLUMNS:
            getattr(self, name)[:groups, :count] = packed[name]
        self._index.insert(rows, self._words)
        self.replaying = True

    def check(self) -> None:
        """Every invariant that ties columns and index together."""
        rows = self.live_rows()
        assert len(rows) == len(self._index), f"{len(rows)} rows, {len(self._index)} in the index"
        assert (self.find(self.digest[rows]) == rows).all(), "a row is not found by its own digest"
        assert len(self._free) + len(rows) == self._next_row, "free and live rows do not add up"
        assert all((c[rows] >= 0).all() for c in (self.pins, self.moving, self.uses)), "a negative count"
        assert (self.holders[rows] >= 0).all(), "an anchor with a negative count of holders"
        for row in rows.tolist():
            for child in self.children(row):
                assert self.parent[child] == row, f"row {child} is listed under {row}, not its parent"
        linked = rows[self.parent[rows] >= 0]
        assert (self.namespace[self.parent[linked]] >= 0).all(), "a row's parent is a free row"
