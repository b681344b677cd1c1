"""Drives a policy with references to pages, as the mover drives it with blocks."""

from __future__ import annotations

import random
from collections.abc import Iterable

from tieredkv.policy import Policy


def never(key: object) -> bool:
    return False


def request(policy: Policy[int], x: int, page_nbytes: int = 1) -> bool:
    """One reference; whether it was a hit."""
    if x in policy:
        policy.touch((x,))
        return True
    missing = policy.nbytes + page_nbytes - policy.capacity_nbytes
    for victim in policy.victims(missing, never, (x,)):
        policy.evict(victim)
    policy.insert(x, page_nbytes)
    return False


def count_hits(policy: Policy[int], references: Iterable[int]) -> int:
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
