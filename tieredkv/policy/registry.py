"""Policies by name. A further policy is a file and a line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..errors import BadConfig
from .arc import ARC
from .base import K, Policy
from .lru import LRU

POLICIES: Mapping[str, Callable[[int], Policy[Any]]] = {"lru": LRU, "arc": ARC}


def make_policy(name: str, capacity_nbytes: int) -> Policy[K]:
    """A new, empty policy.

    Raises:
        BadConfig: no policy of that name; the message lists the names.
    """
    if name not in POLICIES:
        raise BadConfig(f"policy={name!r}: choose one of {', '.join(map(repr, POLICIES))}")
    return POLICIES[name](capacity_nbytes)
