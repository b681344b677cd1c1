"""The oracle: what it requires after a kill and after a power cut, and that it sees what is wrong."""

from __future__ import annotations

from typing import Any

from tieredkv import TOKENS, BlockLayout, LayerGroup, TensorSpec
from tieredkv.testing.oracle import EVICTED, Event, Expectation, Oracle, Prompt, traces

ONE, TWO = ("01" * 32, 0), ("02" * 32, 0)


def oracle_of(*events: tuple[int, str, dict[str, Any]]) -> Oracle:
    oracle = Oracle()
    oracle.add(Event(*event) for event in events)
    return oracle


def storing(at: int, *parts: tuple[str, int]) -> tuple[int, str, dict[str, Any]]:
    digests = [digest for digest, _ in parts]
    return at, "storing", {"tenant": "a", "tokens": [1] * 17, "digests": digests, "marks": digests}


def test_committed_survives_a_kill_flushed_a_power_cut_and_only_after_it_was_said() -> None:
    oracle = oracle_of(
        storing(1, ONE), (5, "committed", {"parts": [ONE]}), (9, "flushed", {}),
        storing(10, TWO), (12, "committed", {"parts": [TWO]}),
    )  # fmt: skip
    assert oracle.expect(power=False, at=4).required == set()
    assert oracle.expect(power=False, at=5).required == {ONE}
    assert oracle.expect(power=True, at=8).required == set()
    assert oracle.expect(power=True, at=9).required == {ONE}
    assert oracle.expect(power=False).required == {ONE, TWO} and oracle.expect(power=True).required == {ONE}


def test_what_is_about_to_be_dropped_is_not_required_and_a_store_meanwhile_does_not_make_it_so() -> None:
    drop = (7, "dropping", {"parts": [ONE], "cause": 2})
    oracle = oracle_of(
        (5, "committed", {"parts": [ONE]}), drop, storing(8, ONE), (9, "stored", {"parts": [ONE]})
    )
    assert oracle.expect(power=False, at=6).required == {ONE}
    assert oracle.expect(power=False).required == set()


def test_removed_blocks_must_be_gone_until_they_are_stored_again() -> None:
    removal = {"digests": [ONE[0]], "sessions": []}
    oracle = oracle_of(
        storing(1, ONE), (2, "committed", {"parts": [ONE]}), (3, "removing", {**removal, "forgets": False}),
        (6, "removed", removal), storing(8, ONE),
    )  # fmt: skip
    assert oracle.expect(power=True, at=4).gone == {} and oracle.expect(power=False, at=4).required == set()
    assert oracle.expect(power=True, at=6).gone == {ONE[0]: ONE[0]}
    assert oracle.expect(power=True).gone == {}


def test_a_session_may_be_in_the_last_acknowledged_state_or_a_later_one() -> None:
    first, second = ({"tokens": [1] * n, "turns": [], "pinned": False} for n in (1, 2))
    oracle = oracle_of(
        (1, "turning", {"name": "s", "state": first}), (2, "turned", {"name": "s"}), (3, "flushed", {}),
        (4, "turning", {"name": "s", "state": second}), (5, "turned", {"name": "s"}),
    )  # fmt: skip
    assert oracle.expect(power=False, at=1).sessions["s"].allowed(power=False) == [None, first]
    assert oracle.expect(power=False, at=4).sessions["s"].allowed(power=False) == [first, second]
    assert oracle.expect(power=False).sessions["s"].allowed(power=False) == [second]
    assert oracle.expect(power=True).sessions["s"].allowed(power=True) == [first, second]


def test_a_pause_counts_as_a_flush_only_at_the_group_level() -> None:
    oracle = oracle_of((1, "committed", {"parts": [ONE]}), (2, "settled", {}))
    assert oracle.expect(power=True, level="group").required == {ONE}
    assert oracle.expect(power=True, level="flush").required == set()


def test_a_head_evicted_before_its_tail_is_a_disorder() -> None:
    head_first = (
        storing(1, ONE, TWO), (2, "committed", {"parts": [ONE, TWO]}),
        (3, "dropping", {"parts": [ONE], "cause": EVICTED}),
    )  # fmt: skip
    assert oracle_of(*head_first).expect(power=False).disorders
    tail_first = (*head_first[:2], (3, "dropping", {"parts": [TWO, ONE], "cause": EVICTED}))
    assert not oracle_of(*tail_first).expect(power=False).disorders


def test_a_part_that_is_committed_while_its_drop_is_queued_is_not_there_after() -> None:
    late = (
        storing(1, ONE, TWO), (2, "committed", {"parts": [ONE]}), (3, "dropping", {"parts": [TWO], "cause": EVICTED}),
        (4, "committed", {"parts": [TWO]}), (5, "dropping", {"parts": [ONE], "cause": EVICTED}),
    )  # fmt: skip
    assert not oracle_of(*late).expect(power=False).disorders
    assert oracle_of(*late[:4]).expect(power=False).required == {ONE}
    again = (*late[:4], (5, "dropped", {"parts": [TWO]}), (6, "committed", {"parts": [TWO]}))
    assert oracle_of(*again).expect(power=False).required == {ONE, TWO}


def test_the_boundary_needs_full_parts_below_and_window_parts_just_before() -> None:
    tensor = TensorSpec(0, "k", (2, TOKENS, 8), "int32")
    window = TensorSpec(1, "k", (2, TOKENS, 8), "int32")
    layout = BlockLayout(16, (LayerGroup("full", (tensor,)), LayerGroup("window", (window,), window=20)))
    digests = ["a", "b", "c"]
    full = {(d, 0) for d in digests}
    assert Expectation(False, required=full).boundary(layout, digests) == 0
    assert Expectation(False, required=full | {("a", 1), ("b", 1)}).boundary(layout, digests) == 2
    assert Expectation(False, required=full | {("b", 1), ("c", 1)}).boundary(layout, digests) == 3
    assert (
        Expectation(False, required=(full - {("a", 0)}) | {("b", 1), ("c", 1)}).boundary(layout, digests) == 0
    )


def test_traces_find_payloads_and_digests_but_not_a_parent_in_a_slot_header() -> None:
    tensor = TensorSpec(0, "k", (2, TOKENS, 8), "int32")
    layout = BlockLayout(16, (LayerGroup("full", (tensor,)),))
    mark = Prompt("a", tuple(range(17))).marks(16)[0]
    digest = "ab" * 32
    assert traces([bytes(100)], {digest: mark}, layout) == []
    assert traces([bytes(50) + bytes.fromhex(digest)], {digest: mark}, layout) == [digest]
    assert traces([bytes(4096 + 128) + bytes.fromhex(digest) + bytes(9000)], {digest: mark}, layout) == []


def test_tenants_and_tokens_make_marks() -> None:
    tokens = tuple(range(33))
    one, other = Prompt("a", tokens).marks(16), Prompt("b", tokens).marks(16)
    assert len(one) == 2 and not set(one) & set(other)
    assert Prompt("a", (*tokens[:16], *tokens[17:], 9)).marks(16)[0] == one[0]
