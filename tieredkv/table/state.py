"""Everything durable in one object: what a log record changes and a checkpoint holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ..wal.reader import Lsns
from ..wal.records import DROP, FIRST_BLOB_KIND, NAMESPACE, PUT, Run, merge_runs
from .block_table import BlockTable
from .catalog import Catalog
from .key_index import Rows
from .snapshot import TableSnapshot

_NO_ROWS: Rows = np.zeros(0, dtype=np.int32)


_MAX_LATE_RECORDS = 1 << 15


class State:
    """The block table and the catalog, changed together by the same `apply`, live and in replay.

    In a replay, block records are gathered and applied many at once, puts before drops: a drop names the put
    that it ends, so it finds what it would have found in LSN order. `catch_up` before the table is looked at.
    """

    def __init__(self) -> None:
        self.table = BlockTable()
        self.catalog = Catalog()
        self._late: dict[int, list[tuple[Lsns, Run]]] = {PUT: [], DROP: []}
        self._num_late = 0

    def clear(self) -> None:
        self._forget_late()
        self.table.clear()
        self.table.replaying = True
        self.catalog.clear()

    def apply(self, lsns: int | Lsns, run: Run) -> Rows:
        """Apply one run of records; returns the rows that block records named, in a replay none.

        Args:
            lsns: each record's LSN, or the first's if they follow one another.
        """
        if run.kind < FIRST_BLOB_KIND:
            return self._apply_late(lsns, run) if self.table.replaying else self.table.apply(lsns, run)
        self.catalog.apply(run)
        if run.kind == NAMESPACE:
            self.catch_up()
            self.table.ensure_groups(max(len(n.layout.groups) for n in self.catalog.namespaces.values()))
        return _NO_ROWS

    def _apply_late(self, lsns: int | Lsns, run: Run) -> Rows:
        each = np.arange(lsns, lsns + len(run)) if isinstance(lsns, int) else lsns
        self._late[run.kind].append((each, run))
        self._num_late += len(run)
        if self._num_late >= _MAX_LATE_RECORDS:
            self.catch_up()
        return _NO_ROWS

    def catch_up(self) -> None:
        """Apply what a replay has gathered."""
        for late in self._late.values():
            if late:
                lsns = late[0][0] if len(late) == 1 else np.concatenate([each for each, _ in late])
                self.table.apply(lsns, merge_runs([run for _, run in late]))
        self._forget_late()

    def _forget_late(self) -> None:
        self._late = {PUT: [], DROP: []}
        self._num_late = 0

    def begin_snapshot(self) -> tuple[TableSnapshot, dict[str, bytes]]:
        """What a checkpoint holds as of now: the table, to be copied in slices, and the catalog.

        Both with the metadata lock held; then `table.end_snapshot`.
        """
        self.catch_up()
        return self.table.begin_snapshot(), self.catalog.snapshot()

    def snapshot(self) -> dict[str, npt.NDArray[Any] | bytes]:
        """What a checkpoint holds, by name, at once."""
        self.catch_up()
        return {**self.table.snapshot(), **self.catalog.snapshot()}

    def restore(self, arrays: Mapping[str, Any]) -> None:
        """Take over a checkpoint's arrays; `settle` must follow, after any replay."""
        self._forget_late()
        names = ("namespaces", "sessions", "catalog")
        self.catalog.restore({name: bytes(arrays[name]) for name in names})
        self.table.restore({k: v for k, v in arrays.items() if k not in names})

    def settle(self) -> None:
        """End recovery: link the chains."""
        self.catch_up()
        self.table.settle()
