"""Who leaves a full tier: the protocol that every policy follows.

A policy orders keys and nothing else. It never frees, copies or logs, knows no tier and no table, and runs
without a store. Choosing victims is a query; taking one out is a second call, made by whoever has moved the
bytes. Calls are not synchronised: the caller holds its metadata lock.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Protocol, TypeVar

K = TypeVar("K", bound=Hashable)


class Policy(Protocol[K]):
    """Order among the residents of one tier, whose bytes it counts.

    Use runs from old to new in the order of the calls, so a caller that names the tail of a chain before its
    head, in `insert` and `touch` alike, has tails leave first. Calling `touch`, `resize` or `evict` for a key
    that is not resident is a programmer error (KeyError).
    """

    @property
    def capacity_nbytes(self) -> int:
        """What the residents may add up to. When it is lowered, the caller evicts down to it."""

    @capacity_nbytes.setter
    def capacity_nbytes(self, nbytes: int) -> None: ...

    @property
    def nbytes(self) -> int:
        """What the residents add up to."""

    def __contains__(self, key: object) -> bool:
        """Whether the key is resident; a ghost is not."""

    def __len__(self) -> int:
        """How many keys are resident."""

    def touch(self, keys: Iterable[K]) -> None:
        """Residents were hit, in this order: the last is now the most recently used."""

    def reorder(self, keys: Iterable[K]) -> None:
        """As `touch`, for residents that nobody asked for again: the order changes, no hit is counted.

        For blocks that came one by one, head first, while their chain was pinned.
        """

    def insert(self, key: K, nbytes: int) -> None:
        """A new resident, most recently used. The caller has evicted until `nbytes` fit."""

    def resize(self, key: K, nbytes: int) -> None:
        """A resident now has `nbytes`, above zero; its place in the order stays."""

    def victims(self, nbytes: int, pinned: Callable[[K], bool], incoming: Sequence[K] = ()) -> list[K]:
        """Residents in the order they should leave, until they add up to `nbytes`; changes nothing.

        The list is shorter if too few are unpinned, and holds until the next call that changes the policy.
        `incoming` are the keys, not resident, for which room is made, in the order they will be inserted.
        """

    def evict(self, key: K) -> None:
        """A resident left to make room; need not be one that was named. May be remembered as a ghost."""

    def remove(self, key: K) -> None:
        """A key is gone for another reason: forgotten, resident or ghost. Unknown keys are ignored."""

    def check(self) -> None:
        """Recounts everything; AssertionError with both numbers where two accounts differ."""
