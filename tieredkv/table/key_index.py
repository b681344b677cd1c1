"""Open-addressing hash index from a digest's key to its row, in one int32 array, batched with numpy."""

from __future__ import annotations

from itertools import count

import numpy as np
import numpy.typing as npt

from ..block.hashing import KEY_NBYTES, Digests

Rows = npt.NDArray[np.int32]
"""int32 `[n]`; -1 where there is no row."""

_Words = npt.NDArray[np.uint64]

Columns = npt.NDArray[np.uint64]
"""The digests of a table's rows as little-endian words, `[n, 4]`; the first two are the key."""

_FREE = -1
_GONE = -2
_MIN_SLOTS = 1024

KEY_MASKS = (np.uint64(2**64 - 1), np.uint64(2**64 - 1))
"""Bits of each half of a key that count. Tests cut them to prove that a short key gives no wrong hit."""


def as_slice(rows: Rows) -> Rows | slice:
    """The same rows as an index: a slice where they follow one another, as most new ones do. numpy copies then."""
    if not len(rows):
        return rows
    first, last = int(rows[0]), int(rows[-1])
    follow = last - first + 1 == len(rows) and bool((rows[1:] > rows[:-1]).all())
    return slice(first, last + 1) if follow else rows


def key_words(digests: Digests) -> tuple[_Words, _Words]:
    """The two little-endian 64-bit halves of each digest's key."""
    words = np.ascontiguousarray(digests[:, :KEY_NBYTES]).view("<u8")
    return words[:, 0] & KEY_MASKS[0], words[:, 1] & KEY_MASKS[1]


def is_first(keys: tuple[_Words, _Words]) -> npt.NDArray[np.bool_]:
    """Where each distinct key stands for the first time: bool `[n]`."""
    alike = np.sort(keys[0])
    if not (alike[1:] == alike[:-1]).any():
        return np.ones(len(alike), dtype=np.bool_)
    order = np.lexsort(keys)
    ordered = keys[0][order], keys[1][order]
    again = (ordered[0][1:] == ordered[0][:-1]) & (ordered[1][1:] == ordered[1][:-1])
    first = np.ones(len(order), dtype=np.bool_)
    first[order[1:][again]] = False
    return first


class KeyIndex:
    """Rows by key; quadratic probing (Hopgood and Davenport, The Computer Journal 15(4), 1972), at most half full.

    Each collision steps one further than the one before, which comes to every slot, and keys that crowd together part
    soon. The keys themselves stay in the table's columns.
    """

    def __init__(self) -> None:
        self._slots = np.full(_MIN_SLOTS, _FREE, dtype=np.int32)
        self._num_used = 0
        self._num_live = 0

    def __len__(self) -> int:
        return self._num_live

    @property
    def nbytes(self) -> int:
        return self._slots.nbytes

    def find(self, keys: tuple[_Words, _Words], columns: Columns) -> Rows:
        """The row of each key, -1 where there is none."""
        found = np.full(len(keys[0]), -1, dtype=np.int32)
        todo = np.arange(len(found))
        first, second = keys
        mask = len(self._slots) - 1
        at = (first & np.uint64(mask)).astype(np.intp)
        for step in count(1):
            rows = self._slots.take(at)
            used = np.flatnonzero(rows != _FREE)
            if len(used) < len(rows):
                todo, first, second, at, rows = todo[used], first[used], second[used], at[used], rows[used]
            if not todo.size:
                break
            held = columns.take(rows, axis=0)  # a row that is gone takes some other's, and does not count
            match = (held[:, 0] & KEY_MASKS[0] == first) & (held[:, 1] & KEY_MASKS[1] == second) & (rows >= 0)
            found[todo[match]] = rows[match]
            more = np.flatnonzero(~match)
            todo, first, second, at = todo[more], first[more], second[more], (at[more] + step) & mask
        return found

    def insert(self, rows: Rows, columns: Columns) -> None:
        """Add `rows`, whose keys are distinct and not yet in the index."""
        if 2 * (self._num_used + len(rows)) > len(self._slots):
            self._rebuild(len(rows), columns)
        mask = len(self._slots) - 1
        todo = rows
        at = (columns[as_slice(rows), 0] & KEY_MASKS[0] & np.uint64(mask)).astype(np.intp)
        for step in count(1):
            if not todo.size:
                break
            here = self._slots.take(at)
            self._slots[at] = np.where(here < 0, todo, here)  # of several that want one place, one stays
            lost = self._slots.take(at) != todo
            self._num_used += int(np.count_nonzero(~lost & (here == _FREE)))
            more = np.flatnonzero(lost)
            todo, at = todo[more], (at[more] + step) & mask
        self._num_live += len(rows)

    def remove(self, rows: Rows, columns: Columns) -> None:
        """Take out `rows`, all of which are in the index."""
        mask = len(self._slots) - 1
        todo = rows
        at = (columns[rows, 0] & KEY_MASKS[0] & np.uint64(mask)).astype(np.int64)
        for step in count(1):
            if not todo.size:
                break
            mine = self._slots[at] == todo
            self._slots[at[mine]] = _GONE
            todo, at = todo[~mine], (at[~mine] + step) & mask
        self._num_live -= len(rows)

    def _rebuild(self, num_more: int, columns: Columns) -> None:
        live = self._slots[self._slots >= 0]
        size = _MIN_SLOTS
        while size < 4 * (len(live) + num_more):
            size *= 2
        self._slots = np.full(size, _FREE, dtype=np.int32)
        self._num_used = self._num_live = 0
        self.insert(live, columns)
