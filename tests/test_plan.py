"""Who goes next, on trees small enough to see: pure questions to a table."""

from __future__ import annotations

import random

import numpy as np
import pytest
from core_helpers import FULL, MIXED, TWO_WINDOWS, WINDOW_ONLY, prompt

from tieredkv.block.anchors import restorable
from tieredkv.block.hashing import chain
from tieredkv.outcomes import Tier
from tieredkv.plan import (
    Parts,
    first_gaps,
    heads_first,
    heads_in_memory,
    is_restorable,
    last_copies,
    leaving_groups,
    needs_window,
    num_leaving_whole,
    stranded,
    tail_in_tier,
    unneeded_window_parts,
    ways_to,
)
from tieredkv.table.block_table import BlockTable

ROOT = b"\3" * 32


def grown(layout, num_blocks: int = 8, tier: Tier = Tier.DEVICE, seed: int = 0):  # type: ignore[no-untyped-def]
    """A table with one chain, all parts in `tier`."""
    table = BlockTable(num_groups=len(layout.groups))
    rows = table.register(1, chain(ROOT, prompt(seed, 16 * num_blocks), 16))
    table.slot[tier, :, rows] = 1
    return table, rows


def branch(table: BlockTable, layout, rows, at: int, num_blocks: int, seed: int = 9):  # type: ignore[no-untyped-def]
    tokens = np.concatenate((prompt(0, 16 * 8)[: 16 * at], prompt(seed, 16 * num_blocks)))
    more = table.register(1, chain(ROOT, tokens, 16))[at:]
    table.slot[Tier.DEVICE, :, more] = 1
    return more


def test_the_tail_below_a_victim() -> None:
    table, rows = grown(FULL)
    gone = np.zeros(len(table.namespace), dtype=np.bool_)
    assert tail_in_tier(table, Tier.DEVICE, int(rows[2]), gone) == rows[7]
    table.slot[Tier.DEVICE, :, rows[6:]] = -1
    assert tail_in_tier(table, Tier.DEVICE, int(rows[2]), gone) == rows[5]
    gone[rows[5]] = True
    assert tail_in_tier(table, Tier.DEVICE, int(rows[2]), gone) == rows[4]
    assert tail_in_tier(table, Tier.DISK, int(rows[2]), gone) == -1


def test_the_tail_on_disk_lies_behind_blocks_that_are_in_memory_alone() -> None:
    table, rows = grown(FULL, tier=Tier.DISK)
    table.slot[Tier.DISK, :, rows[4:6]] = -1  # they left, and those behind them came back first
    gone = np.zeros(len(table.namespace), dtype=np.bool_)
    assert tail_in_tier(table, Tier.DISK, int(rows[2]), gone) == rows[7]
    gone[rows[6:]] = True
    assert tail_in_tier(table, Tier.DISK, int(rows[2]), gone) == rows[3]
    assert gone[rows[4:6]].all(), "they lead to nothing, and nobody asks again"


def test_blocks_above_that_are_in_memory_alone_go_to_disk_too() -> None:
    table, rows = grown(FULL)
    table.slot[Tier.DISK, :, rows[:2]] = 1
    more = branch(table, FULL, rows, 4, 2)

    def heads(*behind: int) -> list[tuple[int, int]]:
        return [*heads_in_memory(table, lambda _row: FULL, Parts.of((row, 0) for row in behind))]

    assert heads(*rows[:3]) == [] and heads(rows[1]) == []
    assert heads(rows[5], rows[7]) == [(row, 0) for row in rows[[2, 3, 4, 6]].tolist()]
    assert heads(more[1]) == [(row, 0) for row in [*rows[2:4].tolist(), int(more[0])]]
    assert heads(more[0], more[1], rows[3]) == [(int(rows[2]), 0)]
    table.slot[Tier.DEVICE, :, rows[3]] = -1
    assert heads(more[0]) == [], "what is nowhere cannot come"
    table.slot[Tier.DISK, :, rows[2]], table.leaving[:, rows[2]] = 1, True
    assert heads(rows[3]) == [(int(rows[2]), 0)], "what leaves comes again"
    windows, chain = grown(WINDOW_ONLY)
    assert not heads_in_memory(
        windows, lambda _row: WINDOW_ONLY, Parts.of((row, 0) for row in chain[5:].tolist())
    )


def test_a_block_of_which_another_part_goes_to_disk_takes_its_full_part_along() -> None:
    table, rows = grown(MIXED)
    table.slot[Tier.DISK, 0, rows[:5]] = 1
    parts = Parts.of([(int(rows[5]), 1), (int(rows[7]), 0)])
    found = heads_in_memory(table, lambda _row: MIXED, parts)
    assert [*found] == [(int(rows[5]), 0), (int(rows[6]), 0)]


def test_heads_come_first_and_chains_stay_together() -> None:
    table, rows = grown(FULL)
    more = branch(table, FULL, rows, 4, 2)
    mixed = [int(rows[7]), int(more[1]), int(rows[5]), int(rows[2]), int(more[0]), int(rows[0])]
    found = heads_first(table, Parts.of((row, 0) for row in mixed))
    assert found.rows.tolist() == [*rows[[0, 2, 5, 7]].tolist(), *more.tolist()]
    both = heads_first(table, Parts.of((int(row), group) for group in (1, 0) for row in rows[:2][::-1]))
    assert [*both] == [(row, group) for row in rows[:2].tolist() for group in (1, 0)]
    assert not len(heads_first(table, found[:0]))


def test_ways_to_others() -> None:
    table, rows = grown(FULL)
    more = branch(table, FULL, rows, 4, 2)
    assert not ways_to(table, rows[:0]).any()
    assert np.flatnonzero(ways_to(table, rows[5:6])).tolist() == sorted(rows[:6].tolist())
    both = ways_to(table, np.array([more[1], rows[1]], dtype=np.int32))
    assert np.flatnonzero(both).tolist() == sorted([*rows[:4].tolist(), *more.tolist()])


@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.DISK])
def test_a_way_down_that_is_remembered_leads_to_the_same_tail(tier: Tier) -> None:
    for seed in range(50):
        rng = random.Random(seed)
        table, rows = grown(FULL, tier=tier)
        more = [branch(table, FULL, rows, at, rng.randrange(1, 4), seed=10 + at) for at in (2, 5)]
        everybody = np.concatenate([rows, *more])
        table.slot[:, :, everybody] = -1
        there = [row for row in everybody.tolist() if rng.random() < 0.8]
        table.slot[tier, :, there] = 1
        gone, ways = np.zeros(len(table.namespace), dtype=np.bool_), dict[int, list[int]]()
        while not gone[there].all():
            victim = rng.choice([row for row in there if not gone[row]])
            tail = tail_in_tier(table, tier, victim, gone, ways)
            assert tail == tail_in_tier(table, tier, victim, gone.copy()), f"seed {seed}"
            assert tail in there and not gone[tail], f"seed {seed}"
            gone[tail] = True


def test_none_leaves_disk_at_once_before_what_may_lie_behind_it() -> None:
    table, rows = grown(FULL, tier=Tier.DISK)
    table.slot[Tier.DISK, :, rows[4]] = -1
    gone = np.zeros(len(table.namespace), dtype=np.bool_)
    assert num_leaving_whole(table, lambda _row: FULL, Tier.DISK, rows[:4][::-1].copy(), gone) == 0
    assert num_leaving_whole(table, lambda _row: FULL, Tier.DISK, rows[::-1].copy(), gone) == 8


def test_how_many_leave_together() -> None:
    table, rows = grown(MIXED)
    more = branch(table, MIXED, rows, 4, 2)
    gone = np.zeros(len(table.namespace), dtype=np.bool_)

    def count(*wanted: int) -> int:
        return num_leaving_whole(
            table, lambda _row: MIXED, Tier.DEVICE, np.array(wanted, dtype=np.int32), gone
        )

    tail_first = rows[::-1].tolist()
    assert count(*tail_first) == 4, "the branch is still there"
    assert count(*more[::-1].tolist(), *tail_first) == 10
    assert count(*tail_first[:2], tail_first[3]) == 2, "what lies below the last of them is not named"
    table.pins[rows[6]] = 1
    assert count(*tail_first) == 1
    table.pins[rows[6]] = 0
    gone[more] = True
    assert count(*tail_first) == 8
    table.slot[Tier.DEVICE, 1, rows[5]] = -1  # the ends of its last blocks are no anchors any more
    assert count(*tail_first) == 0, "a window part of no anchor goes before the rest"
    table.holders[rows[7]] = 1
    assert count(*tail_first) == 0, "whatever holds that anchor, it is looked at one by one"


@pytest.mark.parametrize("layout", [FULL, MIXED, TWO_WINDOWS, WINDOW_ONLY])
def test_restorable_agrees_with_the_anchors(layout) -> None:  # type: ignore[no-untyped-def]
    rng = random.Random(1)
    for _ in range(200):
        table, rows = grown(layout)
        for _ in range(rng.randrange(5)):
            table.slot[:, rng.randrange(len(layout.groups)), rng.choice(rows.tolist())] = -1
        good = restorable(layout, table.present(rows, len(layout.groups)))
        there = layout.full_group is None or (table.slot[:, layout.full_group, rows] >= 0).any(axis=0)
        full_heads = np.logical_and.accumulate(np.broadcast_to(there, 8)).tolist()
        found = [
            is_restorable(table, layout, int(row)) and whole
            for row, whole in zip(rows, full_heads, strict=True)
        ]
        assert found == good.tolist()


def test_windows_of_held_anchors_stay() -> None:
    table, rows = grown(MIXED)
    table.holders[rows[5]] = 1
    assert [needs_window(table, int(row), 3) for row in rows] == [False] * 3 + [True] * 3 + [False] * 2
    table.slot[Tier.DEVICE, 1, rows[7]] = -1  # the end is no anchor any more
    assert leaving_groups(table, MIXED, int(rows[6]), [0, 1]) == [0, 1]
    table.slot[Tier.DEVICE, 1, rows[5]] = -1
    assert leaving_groups(table, MIXED, int(rows[6]), [0, 1]) == [1], "a window part of no anchor goes first"


def test_what_an_anchor_leaves_behind() -> None:
    table, rows = grown(MIXED)
    table.holders[rows[3]] = 1
    assert unneeded_window_parts(table, MIXED, int(rows[5])) == [(int(rows[5]), 1), (int(rows[4]), 1)]
    table.holders[rows[3]] = 0
    assert len(unneeded_window_parts(table, MIXED, int(rows[5]))) == 3


def test_a_lost_full_part_takes_all_below() -> None:
    table, rows = grown(FULL)
    table.slot[:, 0, rows[3]] = -1
    gone, held = stranded(table, lambda _row: FULL, [int(rows[3])])
    assert sorted(gone) == sorted(rows[3:].tolist()) and held == []
    table.slot[:, 0, rows[5]] = -1
    layout_of = lambda _row: FULL  # noqa: E731
    assert (
        first_gaps(table, layout_of, rows[6:7].tolist())
        == {rows[3]}
        == first_gaps(table, layout_of, rows[3:].tolist())
    )
    assert first_gaps(table, layout_of, rows[[2, 6]].tolist()) == {rows[2], rows[3]}


def test_a_lost_window_part_takes_what_only_it_made_restorable() -> None:
    table, rows = grown(MIXED)
    table.slot[:, 1, :] = -1
    table.slot[Tier.DEVICE, 1, rows[:3]] = 1  # anchors at 1 to 3, and at the end
    table.slot[Tier.DEVICE, 1, rows[5:]] = 1
    table.slot[:, 1, rows[6]] = -1
    gone, _ = stranded(table, lambda _row: MIXED, [int(rows[6])])
    assert gone == [], "below it another boundary may need it: the tail goes first"
    gone, _ = stranded(table, lambda _row: MIXED, [int(rows[7])])
    assert sorted(gone) == sorted(rows[3:].tolist())


def test_a_branch_keeps_its_trunk() -> None:
    table, rows = grown(MIXED)
    more = branch(table, MIXED, rows, 4, 3)
    table.slot[:, 1, rows[4:]] = -1
    gone, _ = stranded(table, lambda _row: MIXED, [int(rows[7])])
    assert sorted(gone) == sorted(rows[4:].tolist())
    assert is_restorable(table, MIXED, int(more[2]))


def test_what_is_held_is_told_apart() -> None:
    table, rows = grown(FULL)
    table.slot[:, 0, rows[2]] = -1
    table.pins[rows[5]] = 1
    gone, held = stranded(table, lambda _row: FULL, [int(rows[2])])
    assert held == [int(rows[5])] and int(rows[5]) not in gone and int(rows[7]) in gone


def test_a_bare_block_that_a_call_still_uses_keeps_nothing_for_good() -> None:
    """Nothing of it is there, so that the block above is as good as a tail: it goes once the call has ended."""
    table, rows = grown(MIXED)
    table.slot[:, 1, rows] = -1
    table.slot[:, :, rows[7]] = -1
    gone, held = stranded(table, lambda _row: MIXED, [int(rows[6])])
    assert gone == [] and held == [int(rows[6])]
    table.free_if_empty(rows[7:])
    gone, held = stranded(table, lambda _row: MIXED, [int(rows[6])])
    assert sorted(gone) == sorted(rows[:7].tolist()) and held == []


def test_last_copies() -> None:
    table, rows = grown(MIXED)
    table.slot[Tier.DISK, 0, rows[1]] = 4
    parts = Parts.of([(int(rows[1]), 0), (int(rows[1]), 1)])
    assert last_copies(table, Tier.DEVICE, parts).tolist() == [False, True]
