"""Restorable boundaries: which prefix of a chain can be restored, and what a boundary needs.

All layers must restore at the same boundary n: every full part below n, the window parts of the last
`num_window_blocks` blocks before n, and the recurrent part at n, that of the one block before it. Pure functions
over presence arrays, one row a block, head first.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .layout import BlockLayout

Presence = npt.NDArray[np.bool_]
"""bool `[num_groups, num_blocks]`: is this block's part of this group there, in any tier."""


def restorable(layout: BlockLayout, present: Presence) -> npt.NDArray[np.bool_]:
    """For each boundary after block i, whether a prefix ending there can be restored.

    Returns:
        bool `[num_blocks]`; entry i speaks of boundary i + 1.
    """
    num_blocks = present.shape[1]
    good = np.ones(num_blocks, dtype=np.bool_)
    for group, need in enumerate(layout.num_window_blocks):
        here = present[group]
        if need == 0:
            good &= np.logical_and.accumulate(here)
            continue
        missing = np.concatenate(([0], np.cumsum(~here)))
        first = np.maximum(np.arange(1, num_blocks + 1) - need, 0)
        good &= missing[1:] == missing[first]
    return good


def longest_restorable(layout: BlockLayout, present: Presence, limit: int) -> int:
    """The largest restorable boundary at or below `limit` blocks; 0 if there is none."""
    boundaries = np.flatnonzero(restorable(layout, present)[:limit])
    return int(boundaries[-1]) + 1 if boundaries.size else 0


def num_full_blocks(layout: BlockLayout, present: Presence) -> int:
    """How many blocks from the head have their full part: what attention alone could reuse."""
    if layout.full_group is None:
        return 0
    return int(np.logical_and.accumulate(present[layout.full_group]).sum())


def needed_parts(layout: BlockLayout, boundary: int) -> list[tuple[int, int, int]]:
    """What a restore at `boundary` (in blocks) reads: `(group, first block, end block)` by group."""
    return [
        (group, max(0, boundary - need) if need else 0, boundary)
        for group, need in enumerate(layout.num_window_blocks)
    ]


def kept_window_blocks(layout: BlockLayout, group: int, anchors: Sequence[int], num_blocks: int) -> Presence:
    """Which blocks' window parts are needed by any of `anchors` (boundaries in blocks).

    Returns:
        bool `[num_blocks]`.
    """
    kept = np.zeros(num_blocks, dtype=np.bool_)
    need = layout.num_window_blocks[group]
    for boundary in anchors:
        kept[max(0, boundary - need) : boundary] = True
    return kept
