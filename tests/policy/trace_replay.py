"""Drives a policy with references to pages, as the mover drives it with blocks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import numpy as np

from tieredkv.policy import Policy, make_policy
from tieredkv.policy.base import Numbers


def never(key: object) -> bool:
    return False


def numbers_of(keys: Iterable[int]) -> Numbers:
    return np.array([*keys], dtype=np.int32)


def keys_of(numbers: Numbers) -> list[int]:
    """Here a number is its own key."""
    return numbers.tolist()


class Pages:
    """A policy whose residents are pages by their own numbers, one at a time or in lists."""

    def __init__(self, policy: str | Policy, capacity_nbytes: int = 0) -> None:
        self.policy = make_policy(policy, capacity_nbytes, keys_of) if isinstance(policy, str) else policy

    def __contains__(self, key: int) -> bool:
        return bool(self.policy.holds(numbers_of([key]))[0])

    def __len__(self) -> int:
        return len(self.policy)

    @property
    def nbytes(self) -> int:
        return self.policy.nbytes

    @property
    def capacity_nbytes(self) -> int:
        return self.policy.capacity_nbytes

    @capacity_nbytes.setter
    def capacity_nbytes(self, nbytes: int) -> None:
        self.policy.capacity_nbytes = nbytes

    def touch(self, keys: Iterable[int]) -> None:
        self.policy.touch(numbers_of(keys))

    def reorder(self, keys: Iterable[int]) -> None:
        self.policy.reorder(numbers_of(keys))

    def insert(self, key: int, nbytes: int) -> None:
        self.policy.insert(numbers_of([key]), np.array([nbytes]))

    def insert_all(self, sizes: dict[int, int]) -> None:
        self.policy.insert(numbers_of(sizes), np.array([*sizes.values()], dtype=np.int64))

    def resize(self, key: int, nbytes: int) -> None:
        self.policy.resize(numbers_of([key]), np.array([nbytes]))

    def victims(
        self, nbytes: int, pinned: Callable[[int], bool] = never, incoming: Iterable[int] = ()
    ) -> list[int]:
        def held(numbers: Numbers) -> np.ndarray:
            return np.array([pinned(key) for key in numbers.tolist()], dtype=np.bool_)

        return self.policy.victims(nbytes, held, numbers_of(incoming)).tolist()

    def evict(self, *keys: int) -> None:
        self.policy.evict(numbers_of(keys))

    def remove(self, *keys: int) -> None:
        self.policy.remove(numbers_of(keys))

    def check(self) -> None:
        self.policy.check()


def request(policy: Pages, x: int, page_nbytes: int = 1) -> bool:
    """One reference; whether it was a hit."""
    if x in policy:
        policy.touch((x,))
        return True
    missing = policy.nbytes + page_nbytes - policy.capacity_nbytes
    if missing > 0:
        policy.evict(*policy.victims(missing, never, (x,)))
    policy.insert(x, page_nbytes)
    return False


class _OneByOne:
    """References to pages of one byte, each miss alone as ARC wants to see it; hits in a row are one touch."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.residents: set[int] = set()
        self.touched: list[int] = []
        self.num_hits = 0

    def request(self, x: int) -> None:
        if x in self.residents:
            self.touched.append(x)
            self.num_hits += 1
            return
        self.finish()
        policy, page = self.policy, numbers_of((x,))
        if policy.nbytes == policy.capacity_nbytes:
            gone = policy.victims(1, none_held, page)
            policy.evict(gone)
            self.residents.difference_update(gone.tolist())
        policy.insert(page, np.ones(1, dtype=np.int64))
        self.residents.add(x)

    def finish(self) -> None:
        if self.touched:
            self.policy.touch(numbers_of(self.touched))
            self.touched = []


class _InBatches:
    """The same for LRU, where many references make one call each of victims, evict, insert and touch.

    Up to `batch` new pages are put in at once, for what LRU would let go first; then all that was asked for since
    is touched in its order. As long as none of those first ones is asked for, that is as if each came alone.
    """

    def __init__(self, policy: Policy, batch: int) -> None:
        self.policy = policy
        self.batch = batch
        self.residents: set[int] = set()
        self.asked: dict[int, None] = {}
        self.missed: dict[int, None] = {}
        self.first: list[int] = []
        self.going: set[int] = set()
        self.num_hits = 0

    def request(self, x: int) -> None:
        if x in self.going:
            self.finish()
        if x in self.missed or x in self.residents:
            self.num_hits += 1
            self.asked.pop(x, None)
        else:
            self.miss(x)
        self.asked[x] = None

    def miss(self, x: int) -> None:
        if not self.missed:
            self.finish()
            self.first = self.policy.victims(self.batch, none_held, numbers_of(())).tolist()
            self.going = set(self.first)
        self.missed[x] = None
        if len(self.missed) == self.batch:
            self.finish()

    def finish(self) -> None:
        policy = self.policy
        if self.missed:
            gone = self.first[: max(0, policy.nbytes + len(self.missed) - policy.capacity_nbytes)]
            policy.evict(numbers_of(gone))
            self.residents.difference_update(gone)
            policy.insert(numbers_of(self.missed), np.ones(len(self.missed), dtype=np.int64))
            self.residents.update(self.missed)
        if self.asked:
            policy.touch(numbers_of(self.asked))
        self.missed, self.asked, self.going = {}, {}, set()


def none_held(numbers: Numbers) -> np.ndarray:
    return np.zeros(len(numbers), dtype=np.bool_)


def count_hits(name: str, num_pages: int, references: Iterable[int]) -> int:
    """How many of the references the policy of that name and capacity has."""
    policy = make_policy(name, num_pages, keys_of)
    replay = _InBatches(policy, max(1, min(num_pages // 16, 256))) if name == "lru" else _OneByOne(policy)
    for x in references:
        replay.request(x)
    replay.finish()
    policy.check()
    return replay.num_hits


def generated_trace(seed: int, num_references: int, num_pages: int) -> list[int]:
    """Skewed references, broken by scans of pages seen once and by loops; from `random()` alone, whose
    sequence Python keeps the same in every version."""
    rng = random.Random(seed)
    references: list[int] = []
    fresh = num_pages
    while len(references) < num_references:
        kind = rng.random()
        if kind < 0.02:
            references.extend(range(fresh, fresh + num_pages // 4))
            fresh += num_pages // 4
        elif kind < 0.04:
            start = int(rng.random() * num_pages)
            references.extend(2 * list(range(start, start + num_pages // 8)))
        else:
            references.extend(int(num_pages * rng.random() ** 4) for _ in range(10))
    return references[:num_references]
