"""Commits a second of writers that each wait for durability, beside as many that each sync for themselves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tieredkv.outcomes import Counters
from tieredkv.system import File, OsFs
from tieredkv.table.journal import Journal
from tieredkv.table.state import State
from tieredkv.units import MiB
from tieredkv.wal import CheckpointRef, LogWriter
from tieredkv.wal.records import PUT, PUT_DTYPE

NUM_WRITERS = 64
_SEGMENT_NBYTES = 16 * MiB
_RECORD_NBYTES = 160
"""A frame of one put: what a writer that syncs for itself would write."""


class SlowDisk(OsFs):
    """A file system whose every sync lasts `sync_s`, one after the other, as on one disk."""

    def __init__(self, sync_s: float) -> None:
        self.sync_s = sync_s
        self.turn = threading.Lock()
        self.num_syncs = 0

    def open_file(self, path: str, **options: Any) -> Any:
        return _SlowFile(super().open_file(path, **options), self)


class _SlowFile:
    def __init__(self, file: File, disk: SlowDisk) -> None:
        self._file, self._disk = file, disk

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def datasync(self) -> None:
        with self._disk.turn:
            until = time.perf_counter() + self._disk.sync_s
            self._file.datasync()
            self._disk.num_syncs += 1
            time.sleep(max(0.0, until - time.perf_counter()))


def through_the_log(fs: OsFs, path: Path, seconds: float) -> float:
    """Commits a second, each durable before its writer goes on, through one journal."""
    wal_dir = f"{path}/wal"
    fs.make_dir(wal_dir)
    journal = Journal(
        fs=fs, store_dir=str(path), wal_dir=wal_dir, writer=LogWriter(fs, wal_dir, segment_nbytes=_SEGMENT_NBYTES),
        state=State(), lock=threading.Condition(threading.RLock()), sync_parts=lambda: True, interval_s=None,
        open_number=1, next_lsn=1, durable_lsn=0, segments=(), checkpoints=[CheckpointRef()],
        log_keep_nbytes=1 << 40, log_max_nbytes=1 << 40, counters=Counters(),
    )  # fmt: skip
    journal.start(must_checkpoint=False)

    def commit(writer: int, number: int) -> None:
        record = np.zeros(1, PUT_DTYPE)
        record["digest"] = np.frombuffer(f"{writer:8d} {number:23d}".encode(), np.uint8)
        record["slot"] = record["put_seq"] = writer << 16 | number & 0xFFFF
        ticket = journal.submit(PUT, record)
        if not (ticket.wait(60.0) and journal.flush(time.monotonic() + 60.0)):
            raise OSError(f"a commit did not become durable: {journal.trouble}")
        if journal.durable_lsn < ticket.lsn:
            raise OSError(f"flush returned at LSN {journal.durable_lsn}, before LSN {ticket.lsn} was durable")

    try:
        return _a_second(commit, seconds)
    finally:
        journal.close(time.monotonic() + 60.0)


def each_for_itself(fs: OsFs, path: Path, seconds: float, *, shared: bool) -> float:
    """The same with a `fdatasync` of each writer's own, in one file for all or in a file for each."""
    fs.make_dir(str(path))
    names = ["all"] * NUM_WRITERS if shared else [f"{number}" for number in range(NUM_WRITERS)]
    files = {name: fs.open_file(f"{path}/{name}", create=True) for name in set(names)}
    for file in files.values():
        file.allocate(0, _SEGMENT_NBYTES if shared else MiB)
        file.datasync()
    record, most = bytes(range(_RECORD_NBYTES)), MiB // NUM_WRITERS // _RECORD_NBYTES

    def commit(writer: int, number: int) -> None:
        slot = (writer * most if shared else 0) + number % most
        file = files[names[writer]]
        file.pwritev([record], slot * _RECORD_NBYTES)
        file.datasync()

    try:
        return _a_second(commit, seconds)
    finally:
        for file in files.values():
            file.close()


def _a_second(commit: Callable[[int, int], None], seconds: float) -> float:
    """How often a second the writers got through `commit`, all at once."""
    counts, failures = [0] * NUM_WRITERS, list[BaseException]()
    ready, stop = threading.Barrier(NUM_WRITERS + 1), threading.Event()

    def work(writer: int) -> None:
        ready.wait()
        try:
            while not stop.is_set():
                commit(writer, counts[writer])
                counts[writer] += 1
        except OSError as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(writer,)) for writer in range(NUM_WRITERS)]
    for thread in threads:
        thread.start()
    ready.wait()
    began = time.perf_counter()
    time.sleep(seconds)
    done, took = sum(counts), time.perf_counter() - began
    stop.set()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return done / took
