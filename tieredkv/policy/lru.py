"""Least recently used."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .base import Held, Numbers, grown

_START = 1024
_FIRST_LOOK = 64


class LRU:
    """The least recently used resident leaves first. See `Policy` for the contract of each verb.

    One queue, old to new: a use writes the resident again at its end, and `_place` says where. What was
    written before stays and is dead, for `_place` no longer points at it; when the queue is full the living
    are moved together.
    """

    def __init__(self, capacity_nbytes: int) -> None:
        self.capacity_nbytes = capacity_nbytes
        self.nbytes = 0
        self._num_residents = 0
        self._queue = np.empty(_START, np.int32)
        self._first = self._end = 0  # nothing lives before or after these
        self._place = np.full(_START, -1, np.int32)
        self._nbytes_of = np.zeros(_START, np.int64)

    def __len__(self) -> int:
        return self._num_residents

    def holds(self, numbers: Numbers) -> npt.NDArray[np.bool_]:
        there: npt.NDArray[np.bool_] = self._place.take(numbers, mode="clip") >= 0
        there &= numbers < self._place.size
        return there

    def touch(self, numbers: Numbers) -> None:
        self._must_hold(numbers)
        self._append(numbers)

    reorder = touch

    def insert(self, numbers: Numbers, nbytes: npt.NDArray[np.int64]) -> None:
        if not len(numbers):
            return
        assert (nbytes > 0).all() and not self.holds(numbers).any(), f"insert {numbers}, {nbytes} bytes"
        size = int(numbers.max()) + 1
        self._place = grown(self._place, size, -1)
        self._nbytes_of = grown(self._nbytes_of, size, 0)
        self._append(numbers)
        self._nbytes_of[numbers] = nbytes
        self.nbytes += int(nbytes.sum())
        self._num_residents += len(numbers)
        assert self.nbytes <= self.capacity_nbytes, f"{self.nbytes} bytes in {self.capacity_nbytes}"

    def resize(self, numbers: Numbers, nbytes: npt.NDArray[np.int64]) -> None:
        self._must_hold(numbers)
        assert (nbytes > 0).all(), f"{numbers} resized to {nbytes} bytes"
        self.nbytes += int((nbytes - self._nbytes_of[numbers]).sum())
        self._nbytes_of[numbers] = nbytes

    def victims(self, nbytes: int, held: Held, incoming: Numbers) -> Numbers:
        chosen, at, step = [np.empty(0, np.int32)], self._first, _FIRST_LOOK
        while nbytes > 0 and at < self._end:
            alive = self._alive(at, min(at + step, self._end))
            if at == self._first and not len(alive):
                self._first = min(at + step, self._end)
            free = alive[~held(alive)]
            total = np.cumsum(self._nbytes_of[free])
            chosen.append(free[: int(np.searchsorted(total, nbytes)) + 1])
            nbytes -= int(total[-1]) if len(total) else 0
            at, step = at + step, 2 * step
        return np.concatenate(chosen)

    def evict(self, numbers: Numbers) -> None:
        self._must_hold(numbers)
        self._place[numbers] = -1
        self.nbytes -= int(self._nbytes_of[numbers].sum())
        self._num_residents -= len(numbers)

    remove = evict

    def check(self) -> None:
        alive = self._alive(self._first, self._end)
        assert len(alive) == self._num_residents == int((self._place >= 0).sum()), (
            f"{self._num_residents} residents counted, {len(alive)} in the queue"
        )
        total = int(self._nbytes_of[alive].sum())
        assert self.nbytes == total, f"counted {self.nbytes} bytes, residents add up to {total}"
        assert (self._nbytes_of[alive] > 0).all(), "a resident without bytes"

    def _alive(self, first: int, end: int) -> Numbers:
        """The residents of a stretch of the queue, in order."""
        written = self._queue[first:end]
        alive: Numbers = written[self._place[written] == np.arange(first, end)]
        return alive

    def _append(self, numbers: Numbers) -> None:
        if self._end + len(numbers) > self._queue.size:
            self._compact(len(numbers))
        end = self._end + len(numbers)
        self._queue[self._end : end] = numbers
        self._place[numbers] = np.arange(self._end, end)  # of one named twice, the last
        self._end = end

    def _compact(self, num_more: int) -> None:
        alive = self._alive(self._first, self._end)
        self._queue = np.empty(_START + len(alive) * 3 // 2 + num_more, np.int32)
        self._queue[: len(alive)] = alive
        self._place[alive] = np.arange(len(alive))
        self._first, self._end = 0, len(alive)

    def _must_hold(self, numbers: Numbers) -> None:
        there = self.holds(numbers)
        if not there.all():
            raise KeyError(int(numbers[~there][0]))
