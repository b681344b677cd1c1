"""The durable rows of a table as they were at one moment, copied in slices while the table goes on changing.

A row that is about to change is copied before: so the whole is exactly what it was when the snapshot was begun,
and nobody waits for more than one slice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from .key_index import Rows

Columns: TypeAlias = Mapping[str, npt.NDArray[Any]]

_SLICE_ROWS = 1 << 13


class TableSnapshot:
    """One copy under way. Everything but `arrays` is called with the metadata lock held.

    Args:
        rows: what to copy, ascending.
        num_rows: above all rows of the table.
        columns: the table's columns as they are now, rows first; `parent` among them.
    """

    def __init__(self, rows: Rows, num_rows: int, columns: Callable[[], Columns]) -> None:
        self._rows = rows
        self._num_rows = num_rows
        self._columns = columns
        self._is_copied = np.zeros(len(rows), dtype=np.bool_)
        self._next = 0
        self._packed = {name: _empty_like(column, len(rows)) for name, column in columns().items()}

    @property
    def is_whole(self) -> bool:
        return self._next >= len(self._rows)

    def copy_next(self) -> None:
        """Copy the next slice of rows."""
        until = min(len(self._rows), self._next + _SLICE_ROWS)
        self._copy(self._next + np.flatnonzero(~self._is_copied[self._next : until]))
        self._next = until

    def before_change(self, rows: Rows) -> None:
        """Copy those of `rows` that are not copied yet."""
        if self.is_whole:
            return
        at = np.minimum(np.searchsorted(self._rows, rows), len(self._rows) - 1)
        self._copy(at[(self._rows[at] == rows) & ~self._is_copied[at]])

    def _copy(self, at: npt.NDArray[np.int64]) -> None:
        rows = self._rows[at]
        for name, column in self._columns().items():
            packed = self._packed[name]
            packed[at] = column[rows] if column.ndim == 1 else column[rows, : packed.shape[1]]
        self._is_copied[at] = True

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """What was copied, by name; a `parent` is the place of its row among these, -1 if it is not here."""
        assert self.is_whole, f"{self._next} of {len(self._rows)} rows are copied"
        packed = {name: column if name == "digest" else column.T for name, column in self._packed.items()}
        place = np.full(self._num_rows + 1, -1, dtype=np.int32)
        slices = [slice(at, at + _SLICE_ROWS) for at in range(0, len(self._rows), _SLICE_ROWS)]
        for part in slices:
            rows = self._rows[part]
            place[rows] = np.arange(part.start, part.start + len(rows), dtype=np.int32)
        for part in slices:
            packed["parent"][part] = place[packed["parent"][part]]
        return packed


def _empty_like(column: npt.NDArray[Any], num_rows: int) -> npt.NDArray[Any]:
    """Laid out in memory as the column is: part columns group by group."""
    order: Any = "F" if column.strides[0] < column.strides[-1] else "C"
    return np.empty((num_rows, *column.shape[1:]), column.dtype, order)
