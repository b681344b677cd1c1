"""Puts back what slot headers prove, where the log or the checkpoints cannot say it any more.

A header that verifies says which block's part its slot holds. Of headers for the same part the highest
put_seq is right. Sessions and pins are nowhere but in the log: they are not salvaged. Namespaces come back
by digest; their layout is learned when somebody asks for that namespace again.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..block.layout import BlockLayout
from ..outcomes import Tier
from ..tier.base import PartStore
from ..wal.records import NAMESPACE, PUT, PUT_DTYPE, Run
from .catalog import NamespaceRow
from .state import State


def salvage(store: PartStore, state: State) -> int:
    """Add to `state`, which has not settled yet, every part that only its slot header knows.

    Returns:
        How many parts were added.
    """
    state.catch_up()
    batches = [(b.part_nbytes, b.slots[b.sound], b.headers[b.sound]) for b in store.iter_headers()]
    headers = [h for _, _, h in batches]
    if not headers or not sum(map(len, headers)):
        return 0
    found = np.concatenate(headers)
    slots = np.concatenate([slots for _, slots, _ in batches])
    sizes = np.concatenate([np.full(len(slots), nbytes) for nbytes, slots, _ in batches])
    keep = _newest(found)
    found, slots, sizes = found[keep], slots[keep], sizes[keep]
    numbers = _namespace_numbers(state, found, sizes)
    records = np.zeros(len(found), dtype=PUT_DTYPE)
    for name in ("digest", "parent", "depth", "group", "flags", "num_tokens", "put_seq", "checksum"):
        records[name] = found[name]
    records["namespace"], records["slot"] = numbers, slots
    records = records[_unknown(state, records)]
    state.apply(0, Run(PUT, records))
    state.catch_up()
    return len(records)


def _newest(headers: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Indices of the header with the highest put_seq for each digest and group."""
    digests = np.ascontiguousarray(headers["digest"]).view("V32").ravel()
    _, same = np.unique(digests, return_inverse=True)
    order = np.lexsort((headers["put_seq"], headers["group"], same))
    last = np.append(
        (same[order][1:] != same[order][:-1]) | (headers["group"][order][1:] != headers["group"][order][:-1]),
        True,
    )
    newest: npt.NDArray[np.int64] = order[last]
    return newest


def _unknown(state: State, records: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Which of `records` say more than the table has."""
    table = state.table
    rows = table.find(np.ascontiguousarray(records["digest"]))
    groups = records["group"].astype(np.int64)
    inside = groups < table.num_groups
    groups = np.where(inside, groups, 0)
    known = (rows >= 0) & (table.slot[Tier.DISK, groups, rows] >= 0)
    known &= table.put_seq[groups, rows] >= records["put_seq"]
    fresh: npt.NDArray[np.bool_] = inside & ~known
    return fresh


def _namespace_numbers(
    state: State, headers: npt.NDArray[Any], sizes: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """The number of each header's namespace; those not in the catalog are entered with a stand-in layout."""
    numbers = np.zeros(len(headers), dtype=np.int64)
    digests = np.ascontiguousarray(headers["namespace"]).view("V32").ravel()
    for digest in np.unique(digests):
        mine = digests == digest
        row = state.catalog.by_digest(digest.tobytes())
        if row is None:
            groups = int(headers["group"][mine].max()) + 1
            nbytes = [int(sizes[mine & (headers["group"] == g)].max(initial=4096)) for g in range(groups)]
            number = 1 + max(state.catalog.namespaces, default=0)
            row = NamespaceRow(number, digest.tobytes(), {}, BlockLayout.stand_in(nbytes))
            state.apply(0, Run(NAMESPACE, (row.encode(),)))
        numbers[mine] = row.number
    return numbers
