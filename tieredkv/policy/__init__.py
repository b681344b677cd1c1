"""Who leaves a full tier: policies over numbers, runnable without a store."""

from .arc import ARC
from .base import Policy
from .lru import LRU
from .registry import POLICIES, make_policy

__all__ = ["ARC", "LRU", "POLICIES", "Policy", "make_policy"]
