"""Least recently used."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Generic

from .base import K


class LRU(Generic[K]):
    """The least recently used resident leaves first. See `Policy` for the contract of each verb."""

    def __init__(self, capacity_nbytes: int) -> None:
        self.capacity_nbytes = capacity_nbytes
        # Not a plain dict: its first key lies behind the holes of all those taken out before it.
        self._residents: OrderedDict[K, int] = OrderedDict()
        self._nbytes = 0

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def __contains__(self, key: object) -> bool:
        return key in self._residents

    def __len__(self) -> int:
        return len(self._residents)

    def touch(self, keys: Iterable[K]) -> None:
        deque(map(self._residents.move_to_end, keys), maxlen=0)

    reorder = touch

    def insert(self, key: K, nbytes: int) -> None:
        assert nbytes > 0 and key not in self._residents, (
            f"insert {key!r}, {nbytes} bytes, resident {key in self}"
        )
        self._residents[key] = nbytes
        self._nbytes += nbytes
        assert self._nbytes <= self.capacity_nbytes, f"{self._nbytes} bytes in {self.capacity_nbytes}"

    def resize(self, key: K, nbytes: int) -> None:
        assert nbytes > 0, f"{key!r} resized to {nbytes} bytes"
        self._nbytes += nbytes - self._residents[key]
        self._residents[key] = nbytes

    def victims(self, nbytes: int, pinned: Callable[[K], bool], incoming: Sequence[K] = ()) -> list[K]:
        chosen: list[K] = []
        for key, size in self._residents.items():
            if nbytes <= 0:
                break
            if not pinned(key):
                chosen.append(key)
                nbytes -= size
        return chosen

    def evict(self, key: K) -> None:
        self._nbytes -= self._residents.pop(key)

    def remove(self, key: K) -> None:
        self._nbytes -= self._residents.pop(key, 0)

    def check(self) -> None:
        total = sum(self._residents.values())
        assert self._nbytes == total, f"counted {self._nbytes} bytes, residents add up to {total}"
        assert all(size > 0 for size in self._residents.values()), "a resident without bytes"
