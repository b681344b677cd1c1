from __future__ import annotations

import numpy as np
import pytest
from page_models import PageARC
from trace_replay import Pages, generated_trace, keys_of, never, request

from tieredkv.policy import ARC


class Arc(Pages):
    def __init__(self, capacity_nbytes: int) -> None:
        self.arc = ARC(capacity_nbytes, keys_of)
        super().__init__(self.arc)


def lists(policy: Arc) -> list[list[object]]:
    return [list(keys.sizes) for keys in (policy.arc._t1, policy.arc._t2, policy.arc._b1, policy.arc._b2)]


def miss_all(policy: Arc, keys: list[int]) -> list[int]:
    """A batch of misses on pages of one byte: all victims first, then all inserts."""
    victims = policy.victims(policy.nbytes + len(keys) - policy.capacity_nbytes, never, keys)
    policy.evict(*victims)
    policy.insert_all(dict.fromkeys(keys, 1))
    policy.check()
    return victims


def warm(frequent: int, recent: int) -> Arc:
    """A full policy: T2 holds 0, 1, ... and T1 holds 100, 101, ..."""
    policy = Arc(frequent + recent)
    for key in range(frequent):
        policy.insert(key, 1)
    policy.touch(range(frequent))
    for key in range(100, 100 + recent):
        policy.insert(key, 1)
    return policy


@pytest.mark.parametrize("page_nbytes", [1, 3 * 4096])
@pytest.mark.parametrize("num_pages", [1, 2, 7, 40])
def test_every_list_is_the_papers_after_every_request(num_pages: int, page_nbytes: int) -> None:
    policy = Arc(num_pages * page_nbytes)
    model = PageARC(num_pages)
    for x in generated_trace(seed=num_pages, num_references=4000, num_pages=100):
        assert request(policy, x, page_nbytes) == model.request(x)
        assert lists(policy) == [model.t1, model.t2, model.b1, model.b2]
        assert policy.arc.p_nbytes == pytest.approx(model.p * page_nbytes)
    policy.check()


def test_a_hit_among_the_recent_ghosts_raises_p_and_among_the_frequent_lowers_it() -> None:
    policy = warm(frequent=4, recent=4)
    assert policy.arc.p_nbytes == 0
    assert miss_all(policy, [200]) == [100]
    assert miss_all(policy, [100]) == [101]
    assert policy.arc.p_nbytes == 1
    assert miss_all(policy, [101]) == [102]
    assert policy.arc.p_nbytes == 2
    assert miss_all(policy, [201]) == [0], "T1 is at its target, so T2 gives"
    assert miss_all(policy, [102]) == [1]
    assert policy.arc.p_nbytes == 3
    assert miss_all(policy, [0]) == [103], "T1 is above its target now"
    assert policy.arc.p_nbytes == 2


def test_an_evicted_key_is_a_ghost_and_a_removed_one_is_forgotten() -> None:
    policy = warm(frequent=2, recent=2)
    policy.evict(100)
    policy.evict(0)
    policy.remove(101)
    assert lists(policy) == [[], [1], [100], [0]]
    policy.insert(100, 1)
    policy.insert(101, 1)
    assert lists(policy) == [[101], [1, 100], [], [0]]
    policy.check()


def test_ghosts_are_bounded_in_bytes() -> None:
    policy = Arc(100)
    for step, x in enumerate(generated_trace(seed=5, num_references=4000, num_pages=60)):
        size = 1 + x * 7 % 23
        if x in policy:
            policy.touch((x,))
            continue
        for victim in policy.victims(policy.nbytes + size - 100, never, (x,)):
            policy.evict(victim)
        policy.insert(x, size)
        policy.check()
        t1, t2, b1, b2 = (sum(1 + k * 7 % 23 for k in keys) for keys in lists(policy))
        assert t1 + b1 <= 100 and t1 + t2 + b1 + b2 <= 200, f"step {step}: {t1} {t2} {b1} {b2}"


def test_a_long_new_prompt_leaves_the_frequent_blocks_alone() -> None:
    policy = warm(frequent=6, recent=2)
    assert miss_all(policy, [200, 201, 202]) == [100, 101, 0]
    policy = warm(frequent=4, recent=4)
    policy.arc._p = 3.0
    assert miss_all(policy, [200, 201, 202]) == [100, 101, 102]


def test_a_batch_chooses_what_single_misses_would() -> None:
    batched = warm(frequent=20, recent=20)
    references = generated_trace(seed=9, num_references=3000, num_pages=80)
    num_compared = 0
    for start in range(0, len(references), 5):
        chunk = list(dict.fromkeys(references[start : start + 5]))
        missing = [x for x in chunk if x not in batched]
        single, before = copy_of(batched), set(residents(batched))
        for x in missing:
            request(single, x)
        victims = miss_all(batched, missing)
        batched.touch(x for x in chunk if x not in missing and x in batched)
        if all(x in single for x in missing):  # single misses may also evict each other
            num_compared += bool(missing)
            assert set(victims) == before - set(residents(single))
    assert num_compared > 200


def residents(policy: Arc) -> list[int]:
    return [key for keys in lists(policy)[:2] for key in keys]


def copy_of(policy: Arc) -> Arc:
    twin = Arc(policy.capacity_nbytes)
    twin.arc._p = policy.arc._p
    for mine, theirs in zip(
        (twin.arc._t1, twin.arc._t2, twin.arc._b1, twin.arc._b2),
        (policy.arc._t1, policy.arc._t2, policy.arc._b1, policy.arc._b2),
        strict=True,
    ):
        for key, nbytes in theirs.sizes.items():
            mine.push(key, nbytes)
    return twin


def test_when_one_list_is_pinned_the_other_gives() -> None:
    policy = warm(frequent=3, recent=3)
    assert policy.victims(2, lambda key: key >= 100) == [0, 1]
    assert policy.victims(6, lambda key: key < 3) == [100, 101, 102]
    policy.arc._p = 6.0
    assert policy.victims(4, never) == [0, 1, 2, 100]


def test_reorder_is_no_hit() -> None:
    policy = warm(frequent=2, recent=3)
    policy.reorder([102, 101, 100, 0])
    assert lists(policy) == [[102, 101, 100], [1, 0], [], []]


def test_a_smaller_capacity_pulls_p_and_the_ghosts_in() -> None:
    policy = warm(frequent=4, recent=4)
    miss_all(policy, [200, 201])
    policy.arc._p = 8.0
    policy.capacity_nbytes = 4
    policy.check()
    assert policy.arc.p_nbytes == 4
    assert policy.nbytes == 8
    for victim in policy.victims(policy.nbytes - 4, never):
        policy.evict(victim)
        policy.check()
    assert policy.nbytes == 4


def test_a_ghost_is_its_key_and_its_number_may_serve_another() -> None:
    keys = {0: "a", 1: "b"}
    policy = ARC(2, lambda numbers: [keys[number] for number in numbers.tolist()])
    one, page = np.array([0], np.int32), np.array([1])
    policy.insert(one, page)
    policy.evict(one)
    keys[0] = "c"
    policy.insert(one, page)
    assert list(policy._t1.sizes) == [0] and list(policy._b1.sizes) == ["a"], "no ghost of what it was before"
    keys[1] = "a"
    policy.insert(np.array([1], np.int32), page)
    assert list(policy._t2.sizes) == [1] and not policy._b1.sizes
    policy.check()
