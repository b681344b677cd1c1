"""Mends a store that nobody has open: what recovery mends, and parts that failed their check are dropped."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence

import numpy as np

from ..outcomes import Counters
from ..system import Fs, OsFs
from ..tier.base import PartStore
from ..wal.records import DROP, DROP_DTYPE
from ..wal.writer import LogWriter
from .audit import BadPart, payloads_of
from .journal import Journal
from .recovery import WAL, claim, recover
from .salvage import salvage
from .state import State

_TIMEOUT_S = 60.0
_CAUSE_DAMAGED = 3


def repair(path: str | os.PathLike[str], bad: Sequence[BadPart], fs: Fs | None = None) -> None:
    """Recover the store at `path` and log that the parts in `bad` are gone; ends with a checkpoint.

    Raises:
        StoreUnusable: somebody has it open, or it cannot be written.
        OSError: the log or the checkpoint could not be written; what was there is as it was.
    """
    fs, path = fs or OsFs(), os.path.expanduser(os.fspath(path))
    lock_file = claim(fs, path)
    try:
        state = State()
        store = payloads_of(fs, path)
        try:
            _mend(fs, path, state, store, bad)
        finally:
            store.close()
    finally:
        lock_file.close()


def _mend(fs: Fs, path: str, state: State, store: PartStore, bad: Sequence[BadPart]) -> None:
    recovered = recover(fs, path, state, salvage=lambda: salvage(store, state))
    state.settle()
    segment_nbytes = max((s.header.segment_nbytes for s in recovered.segments if s.header), default=1 << 20)
    writer = LogWriter(
        fs, f"{path}/{WAL}", segment_nbytes=segment_nbytes, next_number=recovered.next_segment,
        position=recovered.position,
    )  # fmt: skip
    journal = Journal(
        fs=fs, store_dir=path, wal_dir=f"{path}/{WAL}", writer=writer, state=state,
        lock=threading.Condition(threading.RLock()), sync_parts=lambda: True, interval_s=None,
        open_number=recovered.open_number, next_lsn=recovered.next_lsn, durable_lsn=recovered.durable_lsn,
        segments=recovered.segments, checkpoints=[recovered.checkpoint], log_keep_nbytes=1 << 62,
        log_max_nbytes=1 << 62, counters=Counters(),
    )  # fmt: skip
    until = time.monotonic() + _TIMEOUT_S
    journal.start(must_checkpoint=recovered.must_checkpoint)
    try:
        _drop(journal, state, bad)
        if not journal.checkpoint(until):
            raise OSError(f"no checkpoint could be written: {journal.trouble}")
    finally:
        journal.close(until)


def _drop(journal: Journal, state: State, bad: Sequence[BadPart]) -> None:
    digests = np.frombuffer(b"".join(bytes.fromhex(part.digest) for part in bad), dtype=np.uint8).reshape(
        -1, 32
    )
    rows = state.table.find(digests)
    groups = np.array([part.group for part in bad], dtype=np.int64)
    known = rows >= 0
    records = np.zeros(int(known.sum()), dtype=DROP_DTYPE)
    records["digest"] = digests[known]
    records["group"], records["cause"] = groups[known], _CAUSE_DAMAGED
    records["put_seq"] = state.table.put_seq[groups[known], rows[known]]
    records["slot"] = [part.slot for part, here in zip(bad, known.tolist(), strict=True) if here]
    if len(records) and not journal.submit(DROP, records).wait(_TIMEOUT_S):
        raise OSError(f"the drops could not be logged: {journal.trouble}")
