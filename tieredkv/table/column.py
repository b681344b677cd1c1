"""A column of the block table: an array that grows by rows and is seldom copied.

Memory is set aside for several times the rows in use. That costs address space alone: a page becomes real memory
when it is first written.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

_AHEAD = 4
_LARGE = 1 << 14
_LARGE_AHEAD = 1 << 21
"""Of a table that is no small one any more, so many rows are set aside at once: its columns are copied just once."""


class Column:
    """`values` is the array, with its rows along `axis`; every new element is `empty`.

    It is no contiguous array, where `axis` is not the first: index it, for `take` would copy all of it first.
    """

    def __init__(self, shape: tuple[int, ...], axis: int, dtype: npt.DTypeLike, empty: int) -> None:
        self.values: npt.NDArray[Any] = np.full(shape, empty, dtype=dtype)
        self._axis = axis
        self._empty = empty
        self._set_aside = self.values

    def grow(self, num_rows: int) -> None:
        """Have `num_rows` rows, no fewer than before. What was taken from `values` may show a copy from now on."""
        had = self.values.shape[self._axis]
        if num_rows > self._set_aside.shape[self._axis]:
            ahead = max(_AHEAD * num_rows, _LARGE_AHEAD if num_rows > _LARGE else 0)
            self._set_aside = np.zeros(self._shape(self._axis, ahead), dtype=self.values.dtype)
            self._rows(0, had)[...] = self.values
        if self._empty:  # else it reads zeros already, and the pages of what nobody writes stay away
            self._rows(had, num_rows)[...] = self._empty
        self.values = self._rows(0, num_rows)

    def widen(self, num_groups: int) -> None:
        """Have `num_groups` layer groups, which lie along the axis before the rows."""
        groups = self._axis - 1
        had = self.values.shape[groups]
        wider = np.full(self._shape(groups, num_groups), self._empty, dtype=self.values.dtype)
        wider[(slice(None),) * groups + (slice(had),)] = self.values
        self.values = self._set_aside = wider

    def _shape(self, axis: int, length: int) -> tuple[int, ...]:
        shape = self.values.shape
        return (*shape[:axis], length, *shape[axis + 1 :])

    def _rows(self, start: int, end: int) -> npt.NDArray[Any]:
        return self._set_aside[(slice(None),) * self._axis + (slice(start, end),)]
