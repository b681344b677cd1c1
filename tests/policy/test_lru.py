from __future__ import annotations

import os
import sys
import tracemalloc

from page_models import PageLRU
from trace_replay import generated_trace, never, request

from tieredkv.policy import LRU


def filled(num_keys: int) -> LRU[int]:
    policy: LRU[int] = LRU(num_keys)
    for key in range(num_keys):
        policy.insert(key, 1)
    return policy


def test_same_pages_in_the_same_order_as_a_list() -> None:
    policy: LRU[int] = LRU(30)
    model = PageLRU(30)
    for x in generated_trace(seed=3, num_references=3000, num_pages=90):
        assert request(policy, x) == model.request(x)
        assert policy.victims(30, never) == model.pages[: len(policy)]
    policy.check()


def test_the_last_touched_leaves_last() -> None:
    policy = filled(5)
    policy.touch([0, 3, 1])
    assert policy.victims(5, never) == [2, 4, 0, 3, 1]
    policy.reorder([2])
    assert policy.victims(5, never) == [4, 0, 3, 1, 2]


def test_victims_looks_no_further_than_it_needs() -> None:
    policy = filled(1000)
    asked: list[int] = []

    def pinned(key: int) -> bool:
        asked.append(key)
        return key < 3

    assert policy.victims(2, pinned) == [3, 4]
    assert asked == [0, 1, 2, 3, 4]


def test_memory_per_resident() -> None:
    keys = [os.urandom(16) for _ in range(100_000)]
    tracemalloc.start()
    policy: LRU[bytes] = LRU(4096 * len(keys))
    for key in keys:
        policy.insert(key, 4096)
    nbytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert nbytes / len(keys) < 140, f"{nbytes / len(keys):.0f} bytes a resident on {sys.version}"
