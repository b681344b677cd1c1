"""Restorable boundaries against a model that asks for each boundary, block by block."""

from __future__ import annotations

import numpy as np
import pytest
from core_helpers import LAYOUTS, SIZE, group_of
from hypothesis import given
from hypothesis import strategies as st

from tieredkv import BlockLayout
from tieredkv.block.anchors import (
    kept_window_blocks,
    longest_restorable,
    needed_parts,
    num_full_blocks,
    restorable,
)

layouts = st.sampled_from(list(LAYOUTS.values()))


def can_restore(layout: BlockLayout, present: np.ndarray, boundary: int) -> bool:
    """From the definition: every token that a query at `boundary` sees is in a part that is there, and its state."""
    for number, group in enumerate(layout.groups):
        if group.kind == "recurrent" and boundary and not present[number, boundary - 1]:
            return False
        for position in range(boundary * layout.block_size):
            seen = group.kind == "full" or boundary * layout.block_size - position < group.window
            if seen and not present[number, position // layout.block_size]:
                return False
    return True


@st.composite
def presences(draw: st.DrawFn) -> tuple[BlockLayout, np.ndarray, int]:
    layout = draw(layouts)
    num_blocks = draw(st.integers(0, 9))
    holes = draw(st.lists(st.tuples(st.integers(0, len(layout.groups) - 1), st.integers(0, 8)), max_size=10))
    present = np.ones((len(layout.groups), num_blocks), dtype=np.bool_)
    for group, block in holes:
        present[group, block : block + 1] = False
    return layout, present, draw(st.integers(0, 10))


@given(presences())
def test_the_largest_boundary_that_the_definition_allows(case: tuple[BlockLayout, np.ndarray, int]) -> None:
    layout, present, limit = case
    good = [can_restore(layout, present, b + 1) for b in range(present.shape[1])]
    assert restorable(layout, present).tolist() == good
    model = max((b + 1 for b, fine in enumerate(good) if fine and b < limit), default=0)
    assert longest_restorable(layout, present, limit) == model


@given(presences())
def test_needed_parts_are_enough_and_none_too_many(case: tuple[BlockLayout, np.ndarray, int]) -> None:
    layout, present, _ = case
    for boundary in range(present.shape[1] + 1):
        only = np.zeros_like(present)
        for group, first, end in needed_parts(layout, boundary):
            only[group, first:end] = True
        assert can_restore(layout, only, boundary)
        for group, block in zip(*np.nonzero(only), strict=True):
            fewer = only.copy()
            fewer[group, block] = False
            assert not can_restore(layout, fewer, boundary)


@given(presences())
def test_full_blocks_from_the_head(case: tuple[BlockLayout, np.ndarray, int]) -> None:
    layout, present, _ = case
    count = 0
    if layout.full_group is not None:
        while count < present.shape[1] and present[layout.full_group, count]:
            count += 1
    assert num_full_blocks(layout, present) == count


@pytest.mark.parametrize(("window", "blocks"), [(1, 1), (2, 1), (17, 1), (18, 2), (33, 2), (40, 3)])
def test_a_window_reaches_back_that_many_blocks(window: int, blocks: int) -> None:
    assert group_of("window", [0], window=window).num_window_blocks(SIZE) == blocks


def test_kept_window_blocks_are_those_that_anchors_need() -> None:
    kept = kept_window_blocks(LAYOUTS["mixed"], 1, [2, 7], 8)
    assert kept.tolist() == [True, True, False, False, True, True, True, False]
    assert not kept_window_blocks(LAYOUTS["mixed"], 1, [], 8).any()
