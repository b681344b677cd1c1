"""Mends a store that nobody has open: what recovery mends, parts that failed their check, a torn end of the log."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import BadInput
from ..outcomes import Counters
from ..system import Fs, OsFs, path_of
from ..table.journal import Journal
from ..table.recovery import BROKEN, WAL, claim, free_name, recover
from ..table.salvage import salvage
from ..table.state import State
from ..tier.base import PartStore
from ..units import MiB
from ..wal.format import segment_name
from ..wal.reader import End, LogEnd
from ..wal.records import DROP, DROP_DTYPE
from ..wal.writer import LogWriter
from .report import BadPart, payloads_of, read

_TIMEOUT_S = 60.0
_CAUSE_DAMAGED = 3


def repair(path: str | os.PathLike[str], bad: Sequence[BadPart], fs: Fs | None = None) -> None:
    """Recover the store at `path` and log that the parts in `bad` are gone; ends with a checkpoint.

    Raises:
        StoreUnusable: somebody has it open, or it cannot be written.
        OSError: the log or the checkpoint could not be written; what was there is as it was.
    """
    fs, path = fs or OsFs(), path_of(path)
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
    open_number = max(recovered.open_number, (state.table.last_put_seq() >> 32) + 1)
    segment_nbytes = max((s.header.segment_nbytes for s in recovered.segments if s.header), default=1 << 20)
    writer = LogWriter(
        fs, f"{path}/{WAL}", segment_nbytes=segment_nbytes, next_number=recovered.next_segment,
        position=recovered.position,
    )  # fmt: skip
    journal = Journal(
        fs=fs, store_dir=path, wal_dir=f"{path}/{WAL}", writer=writer, state=state,
        lock=threading.Condition(threading.RLock()), sync_parts=lambda: True, interval_s=None,
        open_number=open_number, next_lsn=recovered.next_lsn,
        durable_lsn=recovered.durable_lsn,
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


@dataclass(frozen=True)
class Truncated:
    """What `truncate` cut off: nothing (`cut_nbytes` 0), or a segment's bytes from `offset` on."""

    path: str
    log_end: str
    segment: int = 0
    offset: int = 0
    cut_nbytes: int = 0
    kept_copy: str = ""
    exit_code: int = 0


def truncate(path: str | os.PathLike[str], fs: Fs | None = None) -> Truncated:
    """Cut a torn end off the log of the store at `path`; the segment as it was is kept beside it as `.broken`.

    A clean log is left as it is. So is a corrupt one: what lies behind its end was synced once, and `salvage`
    or an opening get more out of it.

    Raises:
        StoreHeld: somebody has it open; nothing was changed.
        BadInput: the log is corrupt, not torn; nothing was changed.
        NotAStore, NewerFormat, PathUnusable: as `audit.read`.
        OSError: the copy could not be made, and nothing was cut; or the cut could not be synced.
    """
    fs = fs or OsFs()
    reading = read(path, fs)
    lock_file = claim(fs, reading.path)
    try:
        end = read(path, fs).log.end
        if end.end is End.CLEAN:
            return Truncated(reading.path, str(end))
        if end.end is End.CORRUPT:
            raise BadInput(f"the log is {end}, not torn: salvage it instead")
        return _cut(fs, reading.path, end)
    finally:
        lock_file.close()


def _cut(fs: Fs, path: str, end: LogEnd) -> Truncated:
    wal_dir = f"{path}/{WAL}"
    name = segment_name(end.number)
    broken = free_name(fs, f"{wal_dir}/{name}{BROKEN}")
    if end.offset == 0:  # a segment whose header was never completed: nothing of it counts
        fs.rename(f"{wal_dir}/{name}", broken)
    else:
        _copy(fs, f"{wal_dir}/{name}", broken)
        fs.sync_dir(wal_dir)
        with contextlib.closing(fs.open_file(f"{wal_dir}/{name}", writable=True)) as file:
            nbytes = end.offset + end.nbytes
            file.allocate(0, nbytes)
            file.punch(end.offset, end.nbytes)
            file.datasync()
    fs.sync_dir(wal_dir)
    return Truncated(path, str(end), end.number, end.offset, end.nbytes, broken, exit_code=1)


def _copy(fs: Fs, path: str, new: str) -> None:
    with (
        contextlib.closing(fs.open_file(path)) as source,
        contextlib.closing(fs.open_file(new, create=True)) as target,
    ):
        buffer = memoryview(bytearray(MiB))
        at = 0
        while done := source.preadv([buffer], at):
            target.pwritev([buffer[:done]], at)
            at += done
        target.datasync()


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
