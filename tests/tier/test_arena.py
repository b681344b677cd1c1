from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tieredkv.errors import CorruptFormat
from tieredkv.tier.arena import Arena, default_chunk_nbytes
from tieredkv.units import GiB, MiB

PAGE = 4096


def make(num_pages: int, chunk_pages: int, shared: bool = True) -> Arena:
    return Arena(num_pages * PAGE, chunk_nbytes=chunk_pages * PAGE, shared=shared)


def test_default_chunk_is_a_sixteenth_at_most_64_mib_at_least_one_part() -> None:
    assert default_chunk_nbytes(100 * GiB) == 64 * MiB
    assert default_chunk_nbytes(160 * PAGE + 5) == 10 * PAGE
    assert default_chunk_nbytes(160 * PAGE, 100 * PAGE) == 100 * PAGE
    assert default_chunk_nbytes(1000 * PAGE, 25 * PAGE) == 50 * PAGE


def test_allocation_gives_one_run_across_chunks_without_a_tail() -> None:
    arena = make(32, 8)
    slots = arena.allocate(2 * PAGE, 10)
    assert arena.runs(2 * PAGE, slots) == [(0, 10, 0)]
    assert arena.used_nbytes == 24 * PAGE and arena.num_free(2 * PAGE) == 6
    arena.check()


def test_runs_break_at_a_chunk_tail_and_keep_their_order() -> None:
    arena = make(64, 8)
    assert arena.runs(3 * PAGE, [0, 1, 2, 3, 5, 4]) == [
        (0, 2, 0),
        (2, 2, 8 * PAGE),
        (5, 1, 19 * PAGE),
        (4, 1, 16 * PAGE),
    ]
    assert arena.runs(3 * PAGE, []) == []


def test_fewer_slots_when_the_budget_is_out_and_none_for_a_size_over_a_chunk() -> None:
    arena = make(32, 8)
    assert arena.allocate(PAGE, 100).size == 32
    assert arena.allocate(PAGE, 1).size == 0
    assert arena.allocate(16 * PAGE, 1).size == 0 and arena.num_free(16 * PAGE) == 0
    arena.check()


def test_the_run_that_fits_best_is_taken() -> None:
    arena = make(32, 32)
    slots = arena.allocate(PAGE, 32)
    arena.free(PAGE, np.concatenate([slots[2:5], slots[10:20], slots[25:29]]))
    assert arena.allocate(PAGE, 4).tolist() == [25, 26, 27, 28]
    assert arena.allocate(PAGE, 3).tolist() == [2, 3, 4]
    assert arena.allocate(PAGE, 12).tolist() == list(range(10, 20))
    arena.check()


def test_an_empty_chunk_goes_back_and_serves_another_size() -> None:
    arena = make(16, 8)
    slots = arena.allocate(PAGE, 16)
    assert arena.num_free(2 * PAGE) == 0
    assert arena.free(PAGE, slots[:7]) == []
    assert arena.free(PAGE, slots[7:8]) == [(PAGE, 0)]
    assert arena.num_free(2 * PAGE) == 4
    assert arena.offset(2 * PAGE, int(arena.allocate(2 * PAGE, 1)[0])) == 0
    arena.check()


def test_pools_on_disk_number_their_own_chunks() -> None:
    arena = make(32, 8, shared=False)
    assert arena.allocate(PAGE, 9).tolist() == list(range(9))
    assert arena.allocate(2 * PAGE, 5).tolist() == list(range(5))
    assert arena.free(PAGE, range(8)) == [], "its pool keeps an empty chunk: the file space is not punched"
    assert arena.free_slots(PAGE).tolist() == [*range(8), *range(9, 16)]
    assert arena.allocate(PAGE, 9).tolist() == [*range(8), 9]
    arena.check()


def test_chunks_are_taken_ahead_as_far_as_the_budget_goes() -> None:
    arena = make(40, 8, shared=False)
    assert arena.allocate(PAGE, 3).tolist() == [0, 1, 2]
    assert arena.take_chunks(PAGE, 5) == [], "so many are free"
    assert arena.take_chunks(PAGE, 20) == [1, 2] and arena.num_live(PAGE) == 3
    assert arena.allocate(PAGE, 21).tolist() == list(range(3, 24)) and arena.used_nbytes == 24 * PAGE
    assert arena.take_chunks(2 * PAGE, 100) == [0, 1] and arena.used_nbytes == 40 * PAGE
    arena.check()


def test_chunks_on_disk_are_packed_whole_slots() -> None:
    arena = make(20, 8, shared=False)
    assert arena.slots_per_chunk(3 * PAGE) == 2 and arena.chunk_span(3 * PAGE) == 6 * PAGE
    assert arena.allocate(3 * PAGE, 9).tolist() == list(range(6))
    assert arena.runs(3 * PAGE, range(6)) == [(0, 6, 0)] and arena.used_nbytes == 18 * PAGE
    arena.check()
    large = make(20, 8, shared=False)  # a part larger than a chunk takes a chunk of its own
    assert large.allocate(9 * PAGE, 3).tolist() == [0, 1] and large.used_nbytes == 18 * PAGE
    large.check()


def test_claims_may_exceed_the_budget_and_say_by_how_much() -> None:
    arena = make(16, 8, shared=False)
    arena.claim(PAGE, [40, 0, 7])
    arena.claim(2 * PAGE, [1])
    assert arena.over_budget_nbytes == 8 * PAGE and arena.num_live(PAGE) == 3
    assert arena.allocate(PAGE, 100).size == 13
    arena.budget_nbytes = 64 * PAGE
    assert arena.over_budget_nbytes == 0 and arena.num_free(4 * PAGE) == 10
    arena.check()


@pytest.mark.parametrize("slots", [[3, 4, 3], [5], [-1], [1 << 40]])
def test_a_claim_that_cannot_be_is_refused_whole(slots: list[int]) -> None:
    arena = make(16, 8, shared=False)
    arena.claim(PAGE, [5])
    with pytest.raises(CorruptFormat):
        arena.claim(PAGE, [*slots, 9])
    assert arena.num_live(PAGE) == 1
    with pytest.raises(CorruptFormat):
        make(16, 8).claim(9 * PAGE, [0])
    arena.check()


def test_a_shared_chunk_is_not_claimed_for_two_sizes() -> None:
    arena = make(16, 8)
    arena.claim(PAGE, [0])
    with pytest.raises(CorruptFormat, match="another"):
        arena.claim(2 * PAGE, [0])
    arena.check()


def test_the_sparsest_chunk_of_another_size_can_be_sealed_and_emptied() -> None:
    arena = make(32, 8)
    slots = arena.allocate(PAGE, 24)
    arena.allocate(2 * PAGE, 1)
    arena.free(PAGE, np.concatenate([slots[1:7], slots[10:12]]))
    found = arena.sparsest_chunk(2 * PAGE)
    assert found is not None and found[:2] == (PAGE, 0) and found[2].tolist() == [0, 7]
    skipped = arena.sparsest_chunk(2 * PAGE, skip={(PAGE, 0)})
    assert skipped is not None and skipped[1] == 1
    arena.seal(PAGE, 0)
    assert arena.num_free(PAGE) == 2
    moved = arena.allocate(PAGE, 2)
    assert moved.tolist() == [10, 11]
    assert arena.free(PAGE, found[2]) == [(PAGE, 0)]
    assert arena.num_free(2 * PAGE) == 7
    arena.unseal(PAGE, 0)
    arena.check()
    assert make(8, 8).sparsest_chunk(PAGE) is None


def test_unsealing_offers_the_slots_again() -> None:
    arena = make(8, 8)
    slots = arena.allocate(PAGE, 8)
    arena.seal(PAGE, 0)
    arena.free(PAGE, slots[:3])
    assert arena.num_free(PAGE) == 0 and arena.allocate(PAGE, 1).size == 0
    arena.unseal(PAGE, 0)
    assert arena.allocate(PAGE, 9).size == 3
    arena.check()


def test_an_emptied_chunk_of_files_is_unsealed_and_still_counts() -> None:
    arena = Arena(8 * PAGE, chunk_nbytes=4 * PAGE, shared=False)
    slots = arena.allocate(PAGE, 1)
    arena.seal(PAGE, 0)
    arena.free(PAGE, slots)
    arena.unseal(PAGE, 0)
    arena.check()
    assert arena.used_nbytes == 4 * PAGE and arena.retire_spare(0) == [(PAGE, 0)]


def test_a_retired_chunk_counts_until_it_is_reinstated() -> None:
    arena = make(32, 8, shared=False)
    slots = arena.allocate(PAGE, 12)
    arena.free(PAGE, slots[:8])
    assert arena.retire_spare(PAGE) == [] and arena.retire_spare(2 * PAGE) == [(PAGE, 0)]
    arena.retire(PAGE, [0, 1])  # the first is empty and waits to be punched, the second holds 4
    assert arena.used_nbytes == 16 * PAGE and arena.num_free(PAGE) == 16
    assert arena.num_live_in(PAGE, [0, 1, 7]) == 4 and arena.free_slots(PAGE).size == 0
    assert arena.allocate(PAGE, 3).tolist() == [16, 17, 18]
    assert arena.free(PAGE, slots[8:]) == []
    arena.check()
    arena.reinstate(PAGE, [0])
    assert arena.used_nbytes == 16 * PAGE
    arena.reinstate(PAGE, [1])
    assert arena.used_nbytes == 8 * PAGE and arena.num_free(PAGE) == 29
    arena.check()


def test_a_failed_slab_gives_no_numbers_and_costs_nothing_for_those_it_never_used() -> None:
    arena = make(32, 8, shared=False)
    arena.retire(PAGE, [0, 1])
    assert arena.used_nbytes == 0 and arena.allocate(PAGE, 1).tolist() == [16]
    arena.reinstate(PAGE, [0, 1])
    assert arena.allocate(PAGE, 9).size == 9 and arena.num_live(PAGE) == 10
    arena.check()


def test_a_shared_budget_shrinks_and_comes_back_but_never_grows() -> None:
    arena = make(32, 8)
    arena.budget_nbytes = 8 * PAGE
    assert arena.allocate(PAGE, 100).size == 8
    arena.budget_nbytes = 32 * PAGE
    assert arena.allocate(PAGE, 100).size == 24
    with pytest.raises(AssertionError):
        arena.budget_nbytes = 40 * PAGE


def test_freeing_what_is_not_live_is_a_programming_error() -> None:
    arena = make(8, 8)
    slots = arena.allocate(PAGE, 2)
    for wrong in ([5], [8], [-1]):
        with pytest.raises(AssertionError):
            arena.free(PAGE, wrong)
    with pytest.raises(AssertionError):
        arena.free(PAGE, [slots[0], slots[0]])


def test_a_fragmented_pool_of_a_million_slots_is_fast() -> None:
    arena = make(1 << 20, 1 << 14)
    slots = arena.allocate(PAGE, 1 << 20)
    arena.free(PAGE, slots[np.random.default_rng(1).random(slots.size) < 0.5])
    began = time.perf_counter()
    for _ in range(100):
        taken = arena.allocate(PAGE, 64)
        assert taken.size == 64
        arena.free(PAGE, taken)
    each_us = (time.perf_counter() - began) / 100 * 1e6
    print(f"{each_us:.0f} us for 64 slots, taken and freed")
    assert each_us < 3000


class ArenaMachine(RuleBasedStateMachine):
    """The arena against a dict of live slots and their bytes."""

    @initialize(shared=st.booleans(), chunk_pages=st.integers(4, 9), num_chunks=st.integers(1, 6))
    def begin(self, shared: bool, chunk_pages: int, num_chunks: int) -> None:
        self.shared = shared
        self.chunk_pages = chunk_pages
        self.arena = make(chunk_pages * num_chunks + 1, chunk_pages, shared)
        self.live: dict[int, set[int]] = {PAGE: set(), 2 * PAGE: set(), 3 * PAGE: set()}
        self.sealed: set[tuple[int, int]] = set()
        self.retired: list[tuple[int, int]] = []

    @rule(pages=st.integers(1, 3), count=st.integers(0, 12))
    def allocate(self, pages: int, count: int) -> None:
        stride = pages * PAGE
        num_free = self.arena.num_free(stride)
        over = self.arena.over_budget_nbytes
        slots = self.arena.allocate(stride, count)
        assert slots.size == min(count, num_free)
        assert not self.live[stride] & set(slots.tolist()) and len(set(slots.tolist())) == slots.size
        per_chunk = self.arena.slots_per_chunk(stride)
        assert not {*self.sealed, *self.retired} & {(stride, slot // per_chunk) for slot in slots.tolist()}
        assert self.arena.over_budget_nbytes == over
        self.live[stride] |= set(slots.tolist())

    @rule(pages=st.integers(1, 3), data=st.data())
    def free(self, pages: int, data: st.DataObject) -> None:
        stride = pages * PAGE
        slots = data.draw(st.lists(st.sampled_from(sorted(self.live[stride]) or [0]), unique=True))
        slots = slots if self.live[stride] else []
        per_chunk = self.arena.slots_per_chunk(stride)
        before = {slot // per_chunk for slot in self.live[stride]}
        self.live[stride] -= set(slots)
        after = {slot // per_chunk for slot in self.live[stride]}
        gone = self.arena.free(stride, slots)
        assert set(gone) == ({(stride, chunk) for chunk in before - after} if self.shared else set())
        self.sealed -= set(gone)

    @rule(pages=st.integers(0, 3))
    def retire_spare(self, pages: int) -> None:
        spare = self.arena.retire_spare(pages * PAGE)
        for stride, chunk in spare:
            per_chunk = self.arena.slots_per_chunk(stride)
            assert stride != pages * PAGE and chunk not in {slot // per_chunk for slot in self.live[stride]}
        assert not spare or not self.shared
        self.retired += spare

    @precondition(lambda self: self.retired)
    @rule()
    def punch(self) -> None:
        stride, chunk = self.retired.pop(0)
        self.arena.reinstate(stride, [chunk])

    @rule(pages=st.integers(1, 3))
    def empty_the_sparsest(self, pages: int) -> None:
        found = self.arena.sparsest_chunk(pages * PAGE, self.sealed)
        if found is None:
            return
        stride, chunk, slots = found
        assert stride != pages * PAGE and set(slots.tolist()) <= self.live[stride]
        self.arena.seal(stride, chunk)
        self.sealed.add((stride, chunk))

    @precondition(lambda self: self.sealed)
    @rule()
    def unseal(self) -> None:
        self.arena.unseal(*self.sealed.pop())

    @rule(pages=st.integers(1, 3), slot=st.integers(0, 60))
    def claim(self, pages: int, slot: int) -> None:
        stride = pages * PAGE
        if self.shared or (stride, slot // self.arena.slots_per_chunk(stride)) in self.retired:
            return
        if slot in self.live[stride]:
            with pytest.raises(CorruptFormat):
                self.arena.claim(stride, [slot])
        else:
            self.arena.claim(stride, [slot])
            self.live[stride].add(slot)

    @rule(num_chunks=st.integers(0, 6))
    def resize(self, num_chunks: int) -> None:
        self.arena.budget_nbytes = min(num_chunks * self.chunk_pages * PAGE, self.arena.capacity_nbytes)

    @invariant()
    def no_two_slots_overlap(self) -> None:
        if not hasattr(self, "arena"):
            return
        self.arena.check()
        seen: set[object] = set()
        for stride, slots in self.live.items():
            assert self.arena.num_live(stride) == len(slots)
            for slot in slots:
                first = self.arena.offset(stride, slot) // PAGE
                pages = {
                    (0 if self.shared else stride, page) for page in range(first, first + stride // PAGE)
                }
                assert not pages & seen
                seen |= pages
        assert self.arena.live_nbytes == sum(stride * len(slots) for stride, slots in self.live.items())


TestArenaMachine = ArenaMachine.TestCase
TestArenaMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
