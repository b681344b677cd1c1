"""Makes a clean store of all that can be proved of another: every part whose slot verifies, every session that
the log or a checkpoint still holds. The other store is only read.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import BadInput
from ..outcomes import Counters, Tier
from ..system import Fs, OsFs, path_of
from ..table.journal import Journal
from ..table.key_index import Rows
from ..table.recovery import SLABS, WAL, claim
from ..table.state import State
from ..tier.base import PartStore, Verdict
from ..tier.lmdb_store import LmdbStore
from ..tier.slab import SlabStore
from ..tier.slab_format import SLOT_HEADER_NBYTES, new_headers
from ..units import MiB
from ..wal.records import NAMESPACE, PUT, PUT_DTYPE, SESSION, Run
from ..wal.writer import LogWriter
from .report import Reading, batches_of, check_parts, payloads_of, read

_TIMEOUT_S = 60.0
_SEGMENT_NBYTES = MiB

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Rescued:
    """What went into the new store, and what did not, by verdict."""

    path: str
    out: str
    num_parts: int
    nbytes: int
    num_blocks: int
    num_namespaces: int
    num_sessions: int
    not_rescued: dict[str, int]
    damage: tuple[str, ...]
    exit_code: int


def rescue(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    progress: Progress = lambda _done, _total: None,
    fs: Fs | None = None,
) -> Rescued:
    """Write the store `out`, a new directory, from what can be proved of the store at `path`.

    Args:
        progress: told how many parts of how many are done.

    Raises:
        BadInput: `out` is there and not empty, or lies in the store at `path`.
        NotAStore, NewerFormat, PathUnusable: as `audit.read`, and for `out` as `open`.
        OSError: `out` could not be written; what is there of it is no clean store and may be removed.
    """
    fs = fs or OsFs()
    out = path_of(out)
    if fs.exists(out) and (not fs.is_dir(out) or fs.list_names(out)):
        raise BadInput(f"{out} is there already: name a new directory")
    reading = read(path, fs)
    store, new = os.path.realpath(reading.path), os.path.realpath(out)
    if os.path.commonpath([store, new]) == store:
        raise BadInput(f"{out} lies in {reading.path}, which is only read: name a directory outside it")
    lock_file = claim(fs, out)
    try:
        return _Rescue(reading, out).run(progress)
    finally:
        lock_file.close()


class _Rescue:
    """One rescue: copies parts, and builds the new store's state by the records that it would have logged."""

    def __init__(self, reading: Reading, out: str) -> None:
        self._reading = reading
        self._out = out
        self._fs = reading.fs
        self._state = State()
        self._state.clear()
        self._next_slot: dict[int, int] = {}
        self._open_number = 1 + max((h.open_number for h in reading.found.headers), default=0)
        self._lsn = 0
        self._nbytes = 0
        self._refused: dict[str, int] = {}

    def run(self, progress: Progress) -> Rescued:
        reading, catalog = self._reading, self._reading.state.catalog
        self._apply(NAMESPACE, tuple(row.encode() for row in catalog.namespaces.values()))
        self._copy_all(progress)
        self._apply(SESSION, tuple(row.encode() for row in catalog.sessions.values()))
        self._state.catalog.clock_s, self._state.catalog.wall_s = catalog.clock_s, catalog.wall_s
        self._state.settle()
        self._write_table()
        refused = sum(self._refused.values())
        return Rescued(
            path=reading.path, out=self._out, num_parts=sum(self._next_slot.values()), nbytes=self._nbytes,
            num_blocks=len(self._state.table), num_namespaces=len(catalog.namespaces),
            num_sessions=len(self._state.catalog.sessions), not_rescued=self._refused,
            damage=tuple(reading.damage), exit_code=2 if reading.damage or refused else 0,
        )  # fmt: skip

    def _apply(self, kind: int, records: Any) -> None:
        if len(records):
            self._state.apply(self._lsn + 1, Run(kind, records))
            self._lsn += len(records)

    # ---- parts ---------------------------------------------------------------------------------

    def _copy_all(self, progress: Progress) -> None:
        source = payloads_of(self._fs, self._reading.path)
        batches = list(batches_of(self._reading.state))
        total, done = sum(len(rows) for _, _, rows in batches), 0
        target = self._target(source)
        try:
            for part_nbytes, group, rows in batches:
                self._copy(source, target, part_nbytes, group, rows)
                done += len(rows)
                progress(done, total)
            target.sync()
        finally:
            target.close()
            source.close()

    def _target(self, source: PartStore) -> PartStore:
        """A store of the same kind: the reopened one is opened with the same options."""
        slabs = f"{self._out}/{SLABS}"
        if isinstance(source, LmdbStore):
            return LmdbStore(self._fs, slabs, map_nbytes=2 * source.allocated_nbytes + 64 * MiB)
        return SlabStore(self._fs, slabs)

    def _copy(self, source: PartStore, target: PartStore, part_nbytes: int, group: int, rows: Rows) -> None:
        """Read, check and write one batch; parts that fail their check stay behind, counted."""
        state = self._reading.state
        verdicts, memory = check_parts(state, source, part_nbytes, group, rows)
        good = [at for at, verdict in enumerate(verdicts) if verdict is Verdict.OK]
        for verdict in verdicts:
            if verdict is not Verdict.OK:
                self._refused[str(verdict.value)] = self._refused.get(str(verdict.value), 0) + 1
        if not good:
            return
        slots = state.table.slot[Tier.DISK, group, rows[good]].astype(np.int64)
        headers = new_headers(len(good))
        headers[:] = source.read_headers(part_nbytes, slots).headers
        first = self._next_slot.get(part_nbytes, 0)
        new = np.arange(first, first + len(good), dtype=np.int64)
        target.write(part_nbytes, new, headers, [memory[at] for at in good])
        self._next_slot[part_nbytes] = first + len(good)
        self._nbytes += len(good) * (part_nbytes + SLOT_HEADER_NBYTES)
        self._put(rows[good], group, new, headers)

    def _put(self, rows: Rows, group: int, slots: npt.NDArray[np.int64], headers: npt.NDArray[Any]) -> None:
        table = self._reading.state.table
        records = np.zeros(len(rows), dtype=PUT_DTYPE)
        for name in ("digest", "parent", "depth", "flags", "num_tokens", "put_seq"):
            records[name] = headers[name]
        records["namespace"], records["slot"], records["group"] = table.namespace[rows], slots, group
        records["checksum"] = table.checksum[group, rows]
        self._open_number = max(self._open_number, 1 + (int(records["put_seq"].max()) >> 32))
        self._apply(PUT, records)

    # ---- the table -----------------------------------------------------------------------------

    def _write_table(self) -> None:
        """A checkpoint of everything, and a first segment that names it: with that, `out` is a store."""
        wal_dir = f"{self._out}/{WAL}"
        self._fs.make_dir(wal_dir)
        self._fs.make_dir(f"{self._out}/{SLABS}")
        writer = LogWriter(self._fs, wal_dir, segment_nbytes=_SEGMENT_NBYTES)
        journal = Journal(
            fs=self._fs, store_dir=self._out, wal_dir=wal_dir, writer=writer, state=self._state,
            lock=threading.Condition(threading.RLock()), sync_parts=lambda: True, interval_s=None,
            open_number=self._open_number, next_lsn=self._lsn + 1, durable_lsn=0, segments=(), checkpoints=(),
            log_keep_nbytes=1 << 62, log_max_nbytes=1 << 62, counters=Counters(),
        )  # fmt: skip
        journal.start(must_checkpoint=True)
        if not journal.close(time.monotonic() + _TIMEOUT_S):
            raise OSError(f"the new store's log could not be closed: {journal.trouble}")
