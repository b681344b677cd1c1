"""Everything durable in one object: what a log record changes and a checkpoint holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ..wal.records import FIRST_BLOB_KIND, NAMESPACE, Run
from .block_table import BlockTable
from .catalog import Catalog
from .key_index import Rows

_NO_ROWS: Rows = np.zeros(0, dtype=np.int32)


class State:
    """The block table and the catalog, changed together by the same `apply`, live and in replay."""

    def __init__(self) -> None:
        self.table = BlockTable()
        self.catalog = Catalog()

    def clear(self) -> None:
        self.table.clear()
        self.table.replaying = True
        self.catalog.clear()

    def apply(self, first_lsn: int, run: Run) -> Rows:
        """Apply one run of records; returns the rows that block records named."""
        if run.kind < FIRST_BLOB_KIND:
            return self.table.apply(first_lsn, run)
        self.catalog.apply(run)
        if run.kind == NAMESPACE:
            self.table.ensure_groups(max(len(n.layout.groups) for n in self.catalog.namespaces.values()))
        return _NO_ROWS

    def snapshot(self) -> dict[str, npt.NDArray[Any] | bytes]:
        """What a checkpoint holds, by name."""
        return {**self.table.snapshot(), **self.catalog.snapshot()}

    def restore(self, arrays: Mapping[str, Any]) -> None:
        """Take over a checkpoint's arrays; `settle` must follow, after any replay."""
        names = ("namespaces", "sessions", "catalog")
        self.catalog.restore({name: bytes(arrays[name]) for name in names})
        self.table.restore({k: v for k, v in arrays.items() if k not in names})

    def settle(self) -> None:
        """End recovery: link the chains."""
        self.table.settle()
