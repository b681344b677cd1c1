"""Who goes next: pure questions to the table. Eviction takes tails before heads and strands nothing."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable

import numpy as np

from .block.layout import BlockLayout
from .outcomes import Tier
from .table.block_table import BlockTable


def tail_in_tier(table: BlockTable, tier: Tier, row: int, skip: Container[int] = ()) -> int:
    """From a block that the policy named, down its chain to the last block with parts in `tier`.

    Blocks in `skip` count as gone already.
    """
    while True:
        below = next(
            (c for c in table.children(row) if c not in skip and (table.slot[tier, :, c] >= 0).any()), -1
        )
        if below < 0:
            return row
        row = below


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
    for group, need in enumerate(layout.num_window_blocks):
        for above in table.ancestors(row, need or 1):
            if not (table.slot[:, group, above] >= 0).any():
                return False
    return True


def stranded(
    table: BlockTable, layout_of: Callable[[int], BlockLayout], rows: Iterable[int]
) -> tuple[list[int], list[int]]:
    """Blocks that no restorable boundary needs, seen from blocks that lost a last copy.

    From each of `rows`, if it lost its full part, first everything below it, which cannot be reached; then upward
    while the boundary after a block is not restorable and no other branch hangs there.

    Returns:
        The blocks that go, and those that would, but for being pinned or moving: to be looked at again.
    """
    gone: dict[int, None] = {}
    held: dict[int, None] = {}
    for row in rows:
        below = list(table.children(row)) if lacks_full(table, layout_of(row), row) else []
        while below:
            here = below.pop()
            below.extend(table.children(here))
            (held if table.is_held(here) else gone)[here] = None
        above = row
        while above >= 0:
            branches = any(child not in gone for child in table.children(above))
            if branches or is_restorable(table, layout_of(above), above):
                break
            if table.is_held(above):
                held[above] = None
                break
            gone[above] = None
            above = int(table.parent[above])
    return list(gone), list(held)


def lacks_full(table: BlockTable, layout: BlockLayout, row: int) -> bool:
    """Is the block's full part nowhere, so that nothing below it can be reached?"""
    full = layout.full_group
    return full is not None and not bool((table.slot[:, full, row] >= 0).any())


def first_gap(table: BlockTable, layout: BlockLayout, row: int) -> int:
    """The block nearest the head, of `row` and those above it, whose full part is nowhere; else `row`."""
    gaps = [above for above in table.ancestors(row, len(table)) if lacks_full(table, layout, above)]
    return gaps[-1] if gaps else row


def last_copies(table: BlockTable, tier: Tier, row: int, groups: Iterable[int]) -> list[int]:
    """Of `groups`, those whose part lies in `tier` and nowhere else."""
    others = [t for t in Tier if t != tier]
    return [g for g in groups if not bool(np.any(table.slot[others, g, row] >= 0))]
