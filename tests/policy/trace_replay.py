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


def count_hits(policy: Pages, references: Iterable[int]) -> int:
    return sum(request(policy, x) for x in references)


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
