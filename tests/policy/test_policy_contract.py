"""What every registered policy owes its caller."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from trace_replay import Pages, keys_of

from tieredkv.errors import BadConfig
from tieredkv.policy import POLICIES, make_policy

pytestmark = pytest.mark.parametrize("name", POLICIES)

KEYS = st.integers(0, 25)
SIZES = st.integers(1, 30)


class PolicyMachine(RuleBasedStateMachine):
    """A policy against a dict of residents. Only which of them leaves is the policy's business."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.policy = Pages(name, 100)
        self.residents: dict[int, int] = {}
        self.pins: set[int] = set()

    def victims(self, nbytes: int, incoming: tuple[int, ...] = ()) -> list[int]:
        victims = self.policy.victims(nbytes, self.pins.__contains__, incoming)
        assert victims == self.policy.victims(nbytes, self.pins.__contains__, incoming), (
            "a query changed state"
        )
        sizes = [self.residents[key] for key in victims]
        assert len(set(victims)) == len(victims) and not self.pins & set(victims)
        assert sum(sizes[:-1]) < max(nbytes, 1), f"{victims} are more than {nbytes} bytes need"
        if sum(sizes) < nbytes:
            assert set(victims) == self.residents.keys() - self.pins, "unpinned residents were held back"
        return victims

    def make_room(self, nbytes: int, incoming: tuple[int, ...] = ()) -> bool:
        missing = self.policy.nbytes + nbytes - self.policy.capacity_nbytes
        victims = self.victims(missing, incoming)
        if sum(self.residents[key] for key in victims) < missing:
            return False
        self.policy.evict(*victims)
        for key in victims:
            del self.residents[key]
        return True

    @rule(sizes=st.dictionaries(KEYS, SIZES, min_size=1, max_size=6))
    def miss(self, sizes: dict[int, int]) -> None:
        new = {key: nbytes for key, nbytes in sizes.items() if key not in self.residents}
        if self.make_room(sum(new.values()), tuple(new)):
            self.policy.insert_all(new)
            self.residents |= new

    @rule(keys=st.lists(KEYS))
    def hit(self, keys: list[int]) -> None:
        self.policy.touch(key for key in keys if key in self.residents)

    @rule(keys=st.lists(KEYS))
    def reorder(self, keys: list[int]) -> None:
        self.policy.reorder(key for key in keys if key in self.residents)

    @rule(key=KEYS, nbytes=SIZES)
    def resize(self, key: int, nbytes: int) -> None:
        if key not in self.residents:
            return
        self.pins.add(key)
        if self.make_room(nbytes - self.residents[key]):
            self.policy.resize(key, nbytes)
            self.residents[key] = nbytes
        self.pins.discard(key)

    @rule(key=KEYS)
    def evict_another(self, key: int) -> None:
        if self.residents.pop(key, 0):
            self.policy.evict(key)

    @rule(key=KEYS)
    def remove(self, key: int) -> None:
        if self.residents.pop(key, 0):
            self.policy.remove(key)

    @rule(keys=st.sets(KEYS, max_size=8))
    def pin(self, keys: set[int]) -> None:
        self.pins = keys

    @rule(nbytes=st.integers(0, 200))
    def set_capacity(self, nbytes: int) -> None:
        self.policy.capacity_nbytes = nbytes
        self.policy.check()
        self.pins.clear()
        assert self.make_room(0)

    @invariant()
    def agrees_with_the_dict(self) -> None:
        self.policy.check()
        assert self.policy.nbytes == sum(self.residents.values()) <= self.policy.capacity_nbytes
        assert len(self.policy) == len(self.residents)
        assert {key for key in range(26) if key in self.policy} == self.residents.keys()


def test_random_use_agrees_with_a_dict(name: str) -> None:
    run_state_machine_as_test(
        lambda: PolicyMachine(name), settings=settings(max_examples=60, stateful_step_count=40, deadline=None)
    )


def test_tails_leave_before_heads(name: str) -> None:
    policy = Pages(name, 8)
    tail_to_head = [7, 6, 5, 4, 3, 2, 1, 0]
    policy.insert_all(dict.fromkeys(tail_to_head, 1))
    assert policy.victims(8) == tail_to_head
    policy.reorder(tail_to_head)
    assert policy.victims(8) == tail_to_head
    policy.touch(tail_to_head)
    assert policy.victims(8) == tail_to_head


def test_nothing_asked_nothing_chosen(name: str) -> None:
    policy = Pages(name, 10)
    assert policy.victims(5) == []
    policy.insert(1, 10)
    assert policy.victims(0) == policy.victims(-5) == []
    assert policy.victims(5, lambda key: True) == []


def test_a_strangers_touch_evict_or_resize_is_a_programmer_error(name: str) -> None:
    policy = Pages(name, 10)
    for call in (
        lambda: policy.touch([1]),
        lambda: policy.evict(1),
        lambda: policy.remove(1),
        lambda: policy.resize(1, 2),
    ):
        with pytest.raises(KeyError):
            call()
    policy.insert(1, 5)
    for wrong in (lambda: policy.insert(1, 5), lambda: policy.insert(2, 0), lambda: policy.resize(1, 0)):
        with pytest.raises(AssertionError):
            wrong()
    policy.check()


def test_inserting_without_room_is_a_programmer_error(name: str) -> None:
    policy = Pages(name, 10)
    policy.insert(1, 5)
    with pytest.raises(AssertionError, match="11 bytes in 10"):
        policy.insert(2, 6)


def test_an_unknown_name_lists_the_known_ones(name: str) -> None:
    with pytest.raises(BadConfig, match=f"'{name}'"):
        make_policy("belady", 10, keys_of)
