"""Policies by name. A further policy is a file and a line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..errors import BadConfig
from .arc import ARC
from .base import KeysOf, Policy
from .lru import LRU

POLICIES: Mapping[str, Callable[[int, KeysOf], Policy]] = {
    "lru": lambda capacity_nbytes, _: LRU(capacity_nbytes),
    "arc": ARC,
}


def make_policy(name: str, capacity_nbytes: int, keys_of: KeysOf) -> Policy:
    """A new, empty policy.

    Args:
        keys_of: what a policy that remembers who left knows them by.

    Raises:
        BadConfig: no policy of that name; the message lists the names.
    """
    if name not in POLICIES:
        raise BadConfig(f"policy={name!r}: choose one of {', '.join(map(repr, POLICIES))}")
    return POLICIES[name](capacity_nbytes, keys_of)
