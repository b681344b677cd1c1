"""Who leaves a full tier: the protocol that every policy follows.

A policy orders numbers and nothing else. It never frees, copies or logs, knows no tier and no table, and runs
without a store. Choosing victims is a query; taking one out is a second call, made by whoever has moved the
bytes. Calls are not synchronised: the caller holds its metadata lock.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int32]
"""Residents: small numbers, used again once their owner is gone; the block table's rows."""

Held = Callable[[Numbers], npt.NDArray[np.bool_]]
"""Which of these residents may not leave."""

KeysOf = Callable[[Numbers], Sequence[Hashable]]
"""What tells these residents, or those to come, from all others, also after they left."""


class Policy(Protocol):
    """Order among the residents of one tier, whose bytes it counts. Every verb takes many at once.

    Use runs from old to new in the order of the calls and within each, so a caller that names the tail of a
    chain before its head, in `insert` and `touch` alike, has tails leave first. Calling `touch`, `reorder`,
    `resize`, `evict` or `remove` for one that is not resident is a programmer error (KeyError).
    """

    @property
    def capacity_nbytes(self) -> int:
        """What the residents may add up to. When it is lowered, the caller evicts down to it."""

    @capacity_nbytes.setter
    def capacity_nbytes(self, nbytes: int) -> None: ...

    @property
    def nbytes(self) -> int:
        """What the residents add up to."""

    def __len__(self) -> int:
        """How many residents there are."""

    def holds(self, numbers: Numbers) -> npt.NDArray[np.bool_]:
        """Which of these are resident; a ghost is not."""

    def touch(self, numbers: Numbers) -> None:
        """Residents were hit, in this order: the last is now the most recently used."""

    def reorder(self, numbers: Numbers) -> None:
        """As `touch`, for residents that nobody asked for again: the order changes, no hit is counted.

        For blocks that came one by one, head first, while their chain was pinned.
        """

    def insert(self, numbers: Numbers, nbytes: npt.NDArray[np.int64]) -> None:
        """New residents, all distinct, the last the most recently used. The caller has evicted until they fit."""

    def resize(self, numbers: Numbers, nbytes: npt.NDArray[np.int64]) -> None:
        """Residents now have `nbytes`, each above zero; their places in the order stay."""

    def victims(self, nbytes: int, held: Held, incoming: Numbers) -> Numbers:
        """Residents in the order they should leave, until they add up to `nbytes`; changes nothing.

        There are fewer if too few may leave. `incoming` are those, not resident, for which room is made, in
        the order they will be inserted.
        """

    def evict(self, numbers: Numbers) -> None:
        """Residents left to make room, in this order; need not be those named. May be remembered as ghosts."""

    def remove(self, numbers: Numbers) -> None:
        """Residents are gone for another reason, and forgotten."""

    def check(self) -> None:
        """Recounts everything; AssertionError with both numbers where two accounts differ."""


def grown(array: npt.NDArray[Any], size: int, fill: int) -> npt.NDArray[Any]:
    """The array itself if it has `size` items, else a longer copy: twice, or a quarter more when large."""
    if size <= array.size:
        return array
    more = array.size if array.size < 1 << 16 else array.size // 4
    longer = np.full(max(size, array.size + more), fill, array.dtype)
    longer[: array.size] = array
    return longer
