"""Who goes next: pure questions to the table. Eviction takes tails before heads and strands nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .block.layout import BlockLayout
from .outcomes import Tier
from .table.block_table import BlockTable
from .table.key_index import Rows

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Parts:
    """Parts of blocks: group `groups[i]` of block `rows[i]`, in an order that whoever made them says."""

    rows: Rows
    groups: npt.NDArray[np.int64]

    @classmethod
    def of(cls, pairs: Iterable[tuple[int, int]]) -> Parts:
        """From `(row, group)` pairs."""
        both = np.array([*pairs], dtype=np.int64).reshape(-1, 2)
        return cls(both[:, 0].astype(np.int32), both[:, 1])

    @classmethod
    def joined(cls, pieces: Iterable[Parts]) -> Parts:
        each = [NO_PARTS, *pieces]
        return cls(np.concatenate([p.rows for p in each]), np.concatenate([p.groups for p in each]))

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self.rows.tolist(), self.groups.tolist(), strict=True)

    def __getitem__(self, which: slice | Flags | npt.NDArray[np.int64]) -> Parts:
        return Parts(self.rows[which], self.groups[which])


NO_PARTS = Parts(np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.int64))


def held(table: BlockTable, rows: Rows) -> Flags:
    """Which of these blocks are pinned or moving: not to be evicted, moved or overwritten."""
    return (table.pins[rows] > 0) | (table.moving[rows] > 0)


def tail_in_tier(
    table: BlockTable, tier: Tier, row: int, gone: Flags, ways: dict[int, list[int]] | None = None
) -> int:
    """From a block that the policy named, down its chain to the last block with parts in `tier`; -1 without one.

    On DISK also past blocks that are in memory alone: they come to DISK later, and then what lies behind them is
    reached again. Above it nothing hangs on that order, for what leaves is still below.

    Args:
        row: itself not gone.
        gone: by row, those that count as gone already; between calls with the same `ways` more may go, tails first.
            What turns out to lead to no part in `tier` is added.
        ways: by row, the ways down that earlier calls walked: a chain of which one block after another goes is
            walked once.
    """
    ways = {} if ways is None else ways
    here, way = row, list[int]()
    while True:
        if here in ways:
            way = ways[here]
            while way and gone[way[-1]]:
                way.pop()
            if not way:
                return -1
            here = way[-1]
        else:
            way.append(here)
            ways[here] = way
        below = next((c for c in table.children(here) if _leads_to(table, tier, c, gone)), -1)
        if below >= 0:
            here = below
        elif _is_in(table, tier, here):
            return here
        else:
            gone[here] = True


def _leads_to(table: BlockTable, tier: Tier, row: int, gone: Flags) -> bool:
    """Has the block, or on DISK one of those behind it, parts in `tier`? Those that have not count as gone then."""
    todo, seen = [row], list[int]()
    while todo:
        here = todo.pop()
        if gone[here]:
            continue
        if _is_in(table, tier, here):
            return True
        seen.append(here)
        if tier is Tier.DISK:
            todo += table.children(here)
    gone[seen] = True
    return False


def _is_in(table: BlockTable, tier: Tier, row: int) -> bool:
    return bool((table.slot[tier, :, row] >= 0).any())


def num_leaving_whole(
    table: BlockTable, layout_of: Callable[[int], BlockLayout], tier: Tier, rows: Rows, gone: Flags
) -> int:
    """How many of `rows`, from the first, can leave `tier` one after another, each with all its parts at once."""
    layout = layout_of(int(rows[0]))
    whole = ~held(table, rows) & ~gone[rows] & (table.namespace[rows] == table.namespace[rows[0]])
    windows = np.flatnonzero(layout.num_window_blocks)
    if windows.size:
        loose = np.flatnonzero(table.slot[tier][windows[:, None], rows].max(axis=0) >= 0)
        whole[loose] &= restorable(table, layout, rows[loose])
    order = np.argsort(rows)
    at, child = np.arange(len(rows)), table.first_child[rows]
    while at.size:
        at, child = at[child >= 0], child[child >= 0]
        place = order.take(np.searchsorted(rows, child, sorter=order), mode="clip")
        before = gone[child] | ((rows[place] == child) & (place < at))
        below = table.slot[tier][:, child].max(axis=0) >= 0
        if tier is Tier.DISK:  # what is in memory alone may lead to more
            below |= table.first_child[child] >= 0
        whole[at[~before & below]] = False
        child = table.next_sibling[child]
    return int(np.argmin(np.append(whole, False)))


def needs_window(table: BlockTable, row: int, num_blocks: int) -> bool:
    """Does any held anchor need the window part of `row`, with windows of `num_blocks` blocks?"""
    level = [row]
    for _ in range(num_blocks):
        if any(table.holders[r] > 0 for r in level):
            return True
        level = [child for r in level for child in table.children(r)]
    return False


def leaving_groups(table: BlockTable, layout: BlockLayout, row: int, groups: list[int]) -> list[int]:
    """Of the groups that a tier holds of `row`, those that leave first: window parts of no anchor, else all."""
    if is_restorable(table, layout, row):
        return groups
    loose = [
        g for g in groups if (need := layout.num_window_blocks[g]) and not needs_window(table, row, need)
    ]
    return loose or groups


def unneeded_window_parts(table: BlockTable, layout: BlockLayout, row: int) -> list[tuple[int, int]]:
    """After the anchor at `row` lost its last holder: `(row, group)` parts that no held anchor needs."""
    parts = []
    for group, num_blocks in enumerate(layout.num_window_blocks):
        for above in table.ancestors(row, num_blocks):
            if (table.slot[:, group, above] >= 0).any() and not needs_window(table, above, num_blocks):
                parts.append((above, group))
    return parts


def is_restorable(table: BlockTable, layout: BlockLayout, row: int) -> bool:
    """Is the boundary after `row` restorable as far as `row` and its window parts go?"""
    return bool(restorable(table, layout, np.array([row], dtype=np.int32))[0])


def restorable(table: BlockTable, layout: BlockLayout, rows: Rows) -> Flags:
    """`is_restorable` of each."""
    good = np.ones(len(rows), dtype=np.bool_)
    for group, need in enumerate(layout.num_window_blocks):
        at, above = np.arange(len(rows)), rows
        for _ in range(need or 1):
            good[at[table.slot[:, group, above].max(axis=0) < 0]] = False
            above = table.parent[above]
            at, above = at[above >= 0], above[above >= 0]
            if not at.size:
                break
    return good


def stranded(
    table: BlockTable, layout_of: Callable[[int], BlockLayout], rows: Iterable[int]
) -> tuple[list[int], list[int]]:
    """Blocks that no restorable boundary needs, seen from blocks that lost a last copy.

    From each of `rows`, if it lost its full part, first everything below it, which cannot be reached; then upward
    while the boundary after a block is not restorable and no other branch hangs there.

    Returns:
        The blocks that go, and those that would, but for being pinned or moving, or for a block below that a
        call still uses though nothing of it is there: to be looked at again.
    """
    rows = list(rows)
    cut = _cut_off(table, layout_of, rows)
    gone: dict[int, None] = {}
    held: dict[int, None] = {}
    for row in rows:
        below = list(table.children(row)) if row in cut else []
        while below:
            here = below.pop()
            if here in gone:  # with all that is below it
                continue
            below.extend(table.children(here))
            (held if table.is_held(here) else gone)[here] = None
        above = row
        while above >= 0 and above not in gone:  # else it was gone upward from there before
            below = [child for child in table.children(above) if child not in gone]
            stands = above not in cut and is_restorable(table, layout_of(above), above)
            if stands or not all(is_bare(table, child) for child in below):
                break
            if below or table.is_held(above):
                held[above] = None
                break
            gone[above] = None
            above = int(table.parent[above])
    return list(gone), list(held)


def _cut_off(table: BlockTable, layout_of: Callable[[int], BlockLayout], rows: Sequence[int]) -> set[int]:
    """Those of `rows` whose full part is nowhere, so that nothing below them can be reached."""
    each, found = np.array(rows, dtype=np.int32), set[int]()
    for number in np.unique(table.namespace[each]).tolist():
        mine = each[table.namespace[each] == number]
        full = layout_of(int(mine[0])).full_group
        if full is not None:
            found.update(mine[table.slot[:, full, mine].max(axis=0) < 0].tolist())
    return found


def is_bare(table: BlockTable, row: int) -> bool:
    """Has the block no part anywhere, and none below it?"""
    return not (table.slot[:, :, row] >= 0).any() and table.first_child[row] < 0


def first_gaps(table: BlockTable, layout_of: Callable[[int], BlockLayout], rows: Sequence[int]) -> set[int]:
    """For each of `rows` the block nearest the head, of it and those above, whose full part is nowhere, or itself."""
    gap_of: dict[int, int] = {}  # of each block above too, so that what chains share is walked once; -1: none
    for row in rows:
        way, above = list[int](), row
        while above >= 0 and above not in gap_of:
            way.append(above)
            above = int(table.parent[above])
        gap, full = gap_of.get(above, -1), layout_of(row).full_group
        lacks = [False] * len(way) if full is None else (table.slot[:, full, way].max(axis=0) < 0).tolist()
        for here, is_gap in zip(reversed(way), reversed(lacks), strict=True):
            gap = here if gap < 0 and is_gap else gap
            gap_of[here] = gap
    return {gap_of[row] if gap_of[row] >= 0 else row for row in rows}


def heads_first(table: BlockTable, parts: Parts) -> Parts:
    """The same parts, chain by chain, none before one of a block that it follows."""
    seen, rank = set[int](), dict[int, int]()
    for row in parts.rows.tolist():
        way = list[int]()
        while row >= 0 and row not in seen:
            seen.add(row)
            way.append(row)
            row = int(table.parent[row])
        rank.update({here: len(rank) + n for n, here in enumerate(reversed(way))})
    return parts[np.argsort([rank[row] for row in parts.rows.tolist()], kind="stable")]


def heads_in_memory(table: BlockTable, layout_of: Callable[[int], BlockLayout], parts: Parts) -> Parts:
    """Full parts in memory alone, none of `parts`, of their blocks and those above, heads first: what is on DISK can
    be reached after a restart only behind them.
    """
    seen = {row for row, group in parts if group == layout_of(row).full_group}
    found = list[tuple[int, int]]()
    for row in parts.rows.tolist():
        way = list[tuple[int, int]]()
        above = int(table.parent[row]) if row in seen else row
        while above >= 0 and above not in seen:
            full = layout_of(above).full_group
            if full is None or not _is_in_memory_alone(table, above, full):
                break
            seen.add(above)
            way.append((above, full))
            above = int(table.parent[above])
        found += reversed(way)
    return Parts.of(found) if found else NO_PARTS


def _is_in_memory_alone(table: BlockTable, row: int, group: int) -> bool:
    *above, disk = table.slot[:, group, row].tolist()
    return max(above) >= 0 and (disk < 0 or bool(table.leaving[group, row]))


def ways_to(table: BlockTable, rows: Rows) -> Flags:
    """By row: is it one of `rows`, or above one?"""
    on_the_way = np.zeros(len(table.namespace), dtype=np.bool_)
    for row in rows.tolist():
        while row >= 0 and not on_the_way[row]:
            on_the_way[row] = True
            row = int(table.parent[row])
    return on_the_way


def last_copies(table: BlockTable, tier: Tier, parts: Parts) -> Flags:
    """Which of these parts lie in `tier` or nowhere."""
    others = np.array([t for t in Tier if t != tier])[:, None]
    last: Flags = table.slot[others, parts.groups, parts.rows].max(axis=0) < 0
    return last
