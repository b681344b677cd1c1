from __future__ import annotations

import sys
import tracemalloc

import numpy as np
from page_models import PageLRU
from trace_replay import Pages, generated_trace, request

from tieredkv.policy import LRU


def filled(num_keys: int) -> Pages:
    policy = Pages("lru", num_keys)
    policy.insert_all(dict.fromkeys(range(num_keys), 1))
    return policy


def test_same_pages_in_the_same_order_as_a_list() -> None:
    policy, model = Pages("lru", 30), PageLRU(30)
    for x in generated_trace(seed=3, num_references=3000, num_pages=90):
        assert request(policy, x) == model.request(x)
        assert policy.victims(30) == model.pages[: len(policy)]
    policy.check()


def test_the_last_touched_leaves_last() -> None:
    policy = filled(5)
    policy.touch([0, 3, 1])
    assert policy.victims(5) == [2, 4, 0, 3, 1]
    policy.reorder([2])
    assert policy.victims(5) == [4, 0, 3, 1, 2]
    policy.touch([4, 0, 4])
    assert policy.victims(5) == [3, 1, 2, 0, 4], "of one that was hit twice, the later counts"


def test_victims_looks_hardly_further_than_it_needs() -> None:
    policy = filled(100_000)
    asked: list[int] = []

    def pinned(key: int) -> bool:
        asked.append(key)
        return key < 3

    assert policy.victims(2, pinned) == [3, 4]
    assert asked == list(range(64))


def test_what_was_left_behind_is_moved_together() -> None:
    policy = filled(500)
    for _ in range(100):
        policy.touch(range(499, -1, -1))
        policy.check()
    assert policy.victims(500) == list(range(499, -1, -1))
    assert policy.policy._queue.size < 4096, "the queue holds every use there ever was"  # type: ignore[attr-defined]


def test_a_queue_of_the_dead_is_walked_once() -> None:
    policy = filled(100_000)
    policy.evict(*range(99_990))
    asked: list[int] = []
    for _ in range(3):
        assert policy.victims(1, lambda key: asked.append(key) is not None) == [99_990]
    assert len(asked) < 100


def test_memory_per_resident() -> None:
    tracemalloc.start()
    policy = LRU(4096 * 100_000)
    for first in range(0, 100_000, 1000):
        policy.insert(np.arange(first, first + 1000, dtype=np.int32), np.full(1000, 4096))
    nbytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert nbytes / 100_000 < 30, f"{nbytes / 100_000:.0f} bytes a resident on {sys.version}"
