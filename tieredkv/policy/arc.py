"""ARC, after Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003, Figure 4.

The paper's letters: T1 holds residents seen once, T2 those seen at least twice; B1 and B2 remember, as
ghosts, what left T1 and T2; L1 = T1 ∪ B1, L2 = T2 ∪ B2; c is the capacity; p is the target for |T1|. c and p
are in bytes here, and |X| is the bytes of X. With residents of one size, asked for one at a time, this is the
paper to the page. It departs from it where the paper has no answer:

- Sizes. One step of p is the ghost's bytes times the paper's ratio, and ghosts leave from the LRU end while
  |L1| > c or |L1| + |L2| > 2c, so an insert may forget several or none.
- Order. The paper forgets ghosts before it replaces; here the caller evicts first and `insert` trims after,
  which leaves the same lists. So that δ is the paper's, it is measured without the ghosts of the evictions
  that made room for this insert.
- Batches. `victims` plays Figure 4 through for each incoming key in turn, each with an equal share of the
  room, so that new keys count toward T1 before the next victim is chosen: else a long new prompt would empty
  T2. The later inserts of a batch measure their δ with all of its evictions done.
- Keys. A resident is a number, which another takes over once it has left; a ghost is its key.
- Pins. A resident that is held is passed over. Where a list has nothing left to give, the other one gives.
- Free room. REPLACE runs when the caller needs room, not when the lists are full, since blocks also leave by
  `remove` and by eviction ahead of need.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from itertools import islice
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from .base import Held, KeysOf, Numbers

K = TypeVar("K", bound=Hashable)
_FIRST_LOOK, _MOST_LOOK = 4, 256


class _List(Generic[K]):
    """Keys with their bytes, LRU end first."""

    __slots__ = ("nbytes", "sizes")

    def __init__(self) -> None:
        self.sizes: OrderedDict[K, int] = OrderedDict()
        self.nbytes = 0

    def push(self, key: K, nbytes: int) -> None:
        """Puts a key at the MRU end."""
        self.sizes[key] = nbytes
        self.nbytes += nbytes

    def pop(self, key: K) -> int:
        """Takes a key out, wherever it is, and gives its bytes."""
        nbytes = self.sizes.pop(key)
        self.nbytes -= nbytes
        return nbytes

    def pop_lru(self) -> None:
        self.nbytes -= self.sizes.popitem(last=False)[1]

    def check(self, name: str) -> None:
        total = sum(self.sizes.values())
        assert self.nbytes == total, f"{name} counts {self.nbytes} bytes, its keys add up to {total}"
        assert all(nbytes > 0 for nbytes in self.sizes.values()), f"{name} has a key without bytes"


class ARC:
    """Recency and frequency share the tier, and p learns how. See `Policy` for the contract of each verb."""

    def __init__(self, capacity_nbytes: int, keys_of: KeysOf) -> None:
        self._keys_of = keys_of
        self._c = capacity_nbytes
        self._p = 0.0
        self._t1: _List[int] = _List()
        self._t2: _List[int] = _List()
        self._b1: _List[Hashable] = _List()
        self._b2: _List[Hashable] = _List()
        # Bytes of B1 and B2 that came from evictions since the last insert.
        self._new_b1 = self._new_b2 = 0

    @property
    def capacity_nbytes(self) -> int:
        return self._c

    @capacity_nbytes.setter
    def capacity_nbytes(self, nbytes: int) -> None:
        self._c = nbytes
        self._p = min(self._p, nbytes)
        self._trim()

    @property
    def nbytes(self) -> int:
        return self._t1.nbytes + self._t2.nbytes

    @property
    def p_nbytes(self) -> float:
        """p: how many bytes T1 should have."""
        return self._p

    def __len__(self) -> int:
        return len(self._t1.sizes) + len(self._t2.sizes)

    def holds(self, numbers: Numbers) -> npt.NDArray[np.bool_]:
        there = [number in self._t1.sizes or number in self._t2.sizes for number in numbers.tolist()]
        return np.array(there, dtype=np.bool_)

    def touch(self, numbers: Numbers) -> None:
        # Case I: x in T1 ∪ T2. Move x to the MRU end of T2.
        t1, t2 = self._t1, self._t2
        for x in numbers.tolist():
            if x in t1.sizes:
                t2.push(x, t1.pop(x))
            else:
                t2.sizes.move_to_end(x)

    def reorder(self, numbers: Numbers) -> None:
        for x in numbers.tolist():
            self._home(x).sizes.move_to_end(x)

    def insert(self, numbers: Numbers, nbytes: npt.NDArray[np.int64]) -> None:
        for x, key, size in zip(numbers.tolist(), self._keys_of(numbers), nbytes.tolist(), strict=True):
            self._insert(x, key, size)

    def _insert(self, x: int, key: Hashable, nbytes: int) -> None:
        b1, b2 = self._b1, self._b2
        assert nbytes > 0 and x not in self._home(x).sizes, f"insert {x}, {nbytes} bytes"
        if key in b1.sizes or key in b2.sizes:
            # Cases II and III: x in B1 ∪ B2. Adapt p, then move x to the MRU end of T2.
            self._p = self._adapted(self._p, key, b1.nbytes - self._new_b1, b2.nbytes - self._new_b2)
            (b1 if key in b1.sizes else b2).pop(key)
            self._t2.push(x, nbytes)
        else:
            # Case IV: x is new. Move it to the MRU end of T1.
            self._t1.push(x, nbytes)
        self._new_b1 = self._new_b2 = 0
        self._trim()
        assert self.nbytes <= self._c, f"{self.nbytes} bytes in {self._c}"

    def resize(self, numbers: Numbers, nbytes: npt.NDArray[np.int64]) -> None:
        assert (nbytes > 0).all(), f"{numbers} resized to {nbytes} bytes"
        for x, size in zip(numbers.tolist(), nbytes.tolist(), strict=True):
            home = self._home(x)
            home.nbytes += size - home.sizes[x]
            home.sizes[x] = size
        self._trim()

    def victims(self, nbytes: int, held: Held, incoming: Numbers) -> Numbers:
        if nbytes <= 0:
            return np.empty(0, np.int32)
        replace = _Replace(self._t1, self._t2, held)
        p, b1, b2 = self._p, self._b1.nbytes, self._b2.nbytes
        free = max(self._c - self.nbytes, 0)
        filled = 0
        for number, x in enumerate(self._keys_of(incoming), start=1):
            share = (nbytes + free) * number // len(incoming) - filled
            filled += share
            p = self._adapted(p, x, b1, b2)
            gone_t1, gone_t2 = replace.until(filled - free, p, x in self._b2.sizes)
            b1 += gone_t1 - self._b1.sizes.get(x, 0)
            b2 += gone_t2 - self._b2.sizes.get(x, 0)
            if x not in self._b1.sizes and x not in self._b2.sizes:
                replace.t1_nbytes += share
        replace.until(nbytes, p, False)
        return np.array(replace.chosen, np.int32)

    def evict(self, numbers: Numbers) -> None:
        for x, key in zip(numbers.tolist(), self._keys_of(numbers), strict=True):
            if x in self._t1.sizes:
                nbytes = self._t1.pop(x)
                self._b1.push(key, nbytes)
                self._new_b1 += nbytes
            else:
                nbytes = self._t2.pop(x)
                self._b2.push(key, nbytes)
                self._new_b2 += nbytes
        self._trim()

    def remove(self, numbers: Numbers) -> None:
        for x in numbers.tolist():
            self._home(x).pop(x)

    def check(self) -> None:
        self._t1.check("T1")
        self._t2.check("T2")
        self._b1.check("B1")
        self._b2.check("B2")
        residents = np.array([*self._t1.sizes, *self._t2.sizes], np.int32)
        keys_of_all = [*self._keys_of(residents), *self._b1.sizes, *self._b2.sizes]
        num_distinct = len(set(keys_of_all))
        assert len(keys_of_all) == num_distinct, f"{len(keys_of_all)} places for {num_distinct} keys"
        l1, l2 = self._t1.nbytes + self._b1.nbytes, self._t2.nbytes + self._b2.nbytes
        assert l1 <= self._c or not self._b1.sizes, f"|L1| = {l1} > c = {self._c}, with ghosts in B1"
        assert l1 + l2 <= 2 * self._c or not self._b2.sizes, f"|L1| + |L2| = {l1 + l2} > 2c = {2 * self._c}"
        assert 0 <= self._p <= self._c, f"p = {self._p} with c = {self._c}"

    def _home(self, x: int) -> _List[int]:
        return self._t1 if x in self._t1.sizes else self._t2

    def _adapted(self, p: float, x: Hashable, b1: int, b2: int) -> float:
        """p after a miss on x; b1 and b2 are |B1| and |B2| as the miss found them, x in them."""
        if x in self._b1.sizes:  # Case II: p = min(p + δ1, c), δ1 = max(1, |B2| / |B1|)
            nbytes = self._b1.sizes[x]
            return min(p + nbytes * max(1.0, b2 / max(b1, nbytes)), self._c)
        if x in self._b2.sizes:  # Case III: p = max(p - δ2, 0), δ2 = max(1, |B1| / |B2|)
            nbytes = self._b2.sizes[x]
            return max(p - nbytes * max(1.0, b1 / max(b2, nbytes)), 0.0)
        return p

    def _trim(self) -> None:
        """Forgets ghosts, LRU first: case IV A keeps |L1| within c, case IV B |L1| + |L2| within 2c."""
        t1, b1, b2 = self._t1.nbytes, self._b1, self._b2
        while b1.sizes and t1 + b1.nbytes > self._c:
            b1.pop_lru()
        while b2.sizes and self.nbytes + b1.nbytes + b2.nbytes > 2 * self._c:
            b2.pop_lru()


class _Replace:
    """The paper's REPLACE, again and again, on lists that it leaves as they are."""

    def __init__(self, t1: _List[int], t2: _List[int], held: Held) -> None:
        self.chosen: list[int] = []
        self.t1_nbytes = t1.nbytes
        self._nbytes = 0
        self._sizes1, self._sizes2 = t1.sizes, t2.sizes
        self._free1, self._free2 = _free(t1, held), _free(t2, held)

    def until(self, nbytes: int, p: float, x_in_b2: bool) -> tuple[int, int]:
        """Chooses until all that was chosen adds up to `nbytes`; gives the bytes this took from T1 and T2."""
        gone_t1 = gone_t2 = 0
        while self._nbytes < nbytes:
            from_t1 = self.t1_nbytes > p or (x_in_b2 and self.t1_nbytes == p)
            lru = next(self._free1 if from_t1 else self._free2, None)
            if lru is None:
                from_t1 = not from_t1
                lru = next(self._free1 if from_t1 else self._free2, None)
            if lru is None:
                break
            self.chosen.append(lru)
            if from_t1:
                size = self._sizes1[lru]
                self.t1_nbytes -= size
                gone_t1 += size
            else:
                size = self._sizes2[lru]
                gone_t2 += size
            self._nbytes += size
        return gone_t1, gone_t2


def _free(residents: _List[int], held: Held) -> Iterator[int]:
    """Those that are not held, LRU end first, asked about a few at a time, then more."""
    numbers, num = iter(residents.sizes), _FIRST_LOOK
    while few := list(islice(numbers, num)):
        num = min(2 * num, _MOST_LOOK)
        those = np.array(few, np.int32)
        yield from those[~held(those)].tolist()
