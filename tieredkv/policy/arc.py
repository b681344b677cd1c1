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
- Pins. A pinned resident is passed over. Where a list has nothing left to give, the other one gives.
- Free room. REPLACE runs when the caller needs room, not when the lists are full, since blocks also leave by
  `remove` and by eviction ahead of need.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import filterfalse
from typing import Generic

from .base import K


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


class ARC(Generic[K]):
    """Recency and frequency share the tier, and p learns how. See `Policy` for the contract of each verb."""

    def __init__(self, capacity_nbytes: int) -> None:
        self._c = capacity_nbytes
        self._p = 0.0
        self._t1: _List[K] = _List()
        self._t2: _List[K] = _List()
        self._b1: _List[K] = _List()
        self._b2: _List[K] = _List()
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

    def __contains__(self, key: object) -> bool:
        return key in self._t1.sizes or key in self._t2.sizes

    def __len__(self) -> int:
        return len(self._t1.sizes) + len(self._t2.sizes)

    def touch(self, keys: Iterable[K]) -> None:
        # Case I: x in T1 ∪ T2. Move x to the MRU end of T2.
        t1, t2 = self._t1, self._t2
        for x in keys:
            if x in t1.sizes:
                t2.push(x, t1.pop(x))
            else:
                t2.sizes.move_to_end(x)

    def reorder(self, keys: Iterable[K]) -> None:
        for key in keys:
            self._home(key).sizes.move_to_end(key)

    def insert(self, key: K, nbytes: int) -> None:
        assert nbytes > 0 and key not in self, f"insert {key!r}, {nbytes} bytes, resident {key in self}"
        b1, b2 = self._b1, self._b2
        if key in b1.sizes or key in b2.sizes:
            # Cases II and III: x in B1 ∪ B2. Adapt p, then move x to the MRU end of T2.
            self._p = self._adapted(self._p, key, b1.nbytes - self._new_b1, b2.nbytes - self._new_b2)
            (b1 if key in b1.sizes else b2).pop(key)
            self._t2.push(key, nbytes)
        else:
            # Case IV: x is new. Move it to the MRU end of T1.
            self._t1.push(key, nbytes)
        self._new_b1 = self._new_b2 = 0
        self._trim()
        assert self.nbytes <= self._c, f"{self.nbytes} bytes in {self._c}"

    def resize(self, key: K, nbytes: int) -> None:
        assert nbytes > 0, f"{key!r} resized to {nbytes} bytes"
        home = self._home(key)
        home.nbytes += nbytes - home.sizes[key]
        home.sizes[key] = nbytes
        self._trim()

    def victims(self, nbytes: int, pinned: Callable[[K], bool], incoming: Sequence[K] = ()) -> list[K]:
        if nbytes <= 0:
            return []
        replace = _Replace(self._t1, self._t2, pinned)
        p, b1, b2 = self._p, self._b1.nbytes, self._b2.nbytes
        free = max(self._c - self.nbytes, 0)
        filled = 0
        for number, x in enumerate(incoming, start=1):
            share = (nbytes + free) * number // len(incoming) - filled
            filled += share
            p = self._adapted(p, x, b1, b2)
            gone_t1, gone_t2 = replace.until(filled - free, p, x in self._b2.sizes)
            b1 += gone_t1 - self._b1.sizes.get(x, 0)
            b2 += gone_t2 - self._b2.sizes.get(x, 0)
            if x not in self._b1.sizes and x not in self._b2.sizes:
                replace.t1_nbytes += share
        replace.until(nbytes, p, False)
        return replace.chosen

    def evict(self, key: K) -> None:
        if key in self._t1.sizes:
            nbytes = self._t1.pop(key)
            self._b1.push(key, nbytes)
            self._new_b1 += nbytes
        else:
            nbytes = self._t2.pop(key)
            self._b2.push(key, nbytes)
            self._new_b2 += nbytes
        self._trim()

    def remove(self, key: K) -> None:
        for keys in (self._t1, self._t2, self._b1, self._b2):
            if key in keys.sizes:
                keys.pop(key)

    def check(self) -> None:
        lists = {"T1": self._t1, "T2": self._t2, "B1": self._b1, "B2": self._b2}
        for name, keys in lists.items():
            keys.check(name)
        num_keys = sum(len(keys.sizes) for keys in lists.values())
        num_distinct = len(set().union(*(keys.sizes for keys in lists.values())))
        assert num_keys == num_distinct, f"{num_keys} places for {num_distinct} keys"
        l1, l2 = self._t1.nbytes + self._b1.nbytes, self._t2.nbytes + self._b2.nbytes
        assert l1 <= self._c or not self._b1.sizes, f"|L1| = {l1} > c = {self._c}, with ghosts in B1"
        assert l1 + l2 <= 2 * self._c or not self._b2.sizes, f"|L1| + |L2| = {l1 + l2} > 2c = {2 * self._c}"
        assert 0 <= self._p <= self._c, f"p = {self._p} with c = {self._c}"

    def _home(self, key: K) -> _List[K]:
        return self._t1 if key in self._t1.sizes else self._t2

    def _adapted(self, p: float, x: K, b1: int, b2: int) -> float:
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


class _Replace(Generic[K]):
    """The paper's REPLACE, again and again, on lists that it leaves as they are."""

    def __init__(self, t1: _List[K], t2: _List[K], pinned: Callable[[K], bool]) -> None:
        self.chosen: list[K] = []
        self.t1_nbytes = t1.nbytes
        self._nbytes = 0
        self._sizes1, self._sizes2 = t1.sizes, t2.sizes
        self._unpinned1: Iterator[K] = filterfalse(pinned, t1.sizes)
        self._unpinned2: Iterator[K] = filterfalse(pinned, t2.sizes)
        self._lru1 = next(self._unpinned1, None)
        self._lru2 = next(self._unpinned2, None)

    def until(self, nbytes: int, p: float, x_in_b2: bool) -> tuple[int, int]:
        """Chooses until all that was chosen adds up to `nbytes`; gives the bytes this took from T1 and T2."""
        gone_t1 = gone_t2 = 0
        while self._nbytes < nbytes:
            first = self.t1_nbytes > p or (x_in_b2 and self.t1_nbytes == p)
            if self._lru1 is not None and (first or self._lru2 is None):
                size = self._sizes1[self._lru1]
                self.chosen.append(self._lru1)
                self._lru1 = next(self._unpinned1, None)
                self.t1_nbytes -= size
                gone_t1 += size
            elif self._lru2 is not None:
                size = self._sizes2[self._lru2]
                self.chosen.append(self._lru2)
                self._lru2 = next(self._unpinned2, None)
                gone_t2 += size
            else:
                break
            self._nbytes += size
        return gone_t1, gone_t2
