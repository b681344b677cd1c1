"""Commits a second of writers that each wait for durability, beside as many that each sync for themselves."""

from __future__ import annotations

import contextlib
import gc
import itertools
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
from tieredkv.wal import CheckpointRef, LogWriter, Run
from tieredkv.wal.format import BEFORE_THE_LOG, SegmentHeader, decode_header, encode_frame, encode_header
from tieredkv.wal.records import PUT, PUT_DTYPE

NUM_WRITERS = 64
_SEGMENT_NBYTES = 16 * MiB
_NUM_PREPARED = 1024
"""Records that each writer has ready, one after the other and then again: making them is no cost of a commit."""


class Disk(OsFs):
    """A file system whose every sync lasts `sync_s`, one after the other, as on one disk; 0: no sync at all."""

    def __init__(self, sync_s: float) -> None:
        self.sync_s = sync_s
        self.turn = threading.Lock()

    def open_file(self, path: str, **options: Any) -> Any:
        return _DiskFile(super().open_file(path, **options), self)


class _DiskFile:
    def __init__(self, file: File, disk: Disk) -> None:
        self._file, self._disk = file, disk

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def datasync(self) -> None:
        if not self._disk.sync_s:
            return
        with self._disk.turn:
            until = time.perf_counter() + self._disk.sync_s
            self._file.datasync()
            time.sleep(max(0.0, until - time.perf_counter()))


def sync_ms(path: Path, num_syncs: int = 100) -> float:
    """Median time of one append with its `fdatasync`, nobody else syncing, over blank space as in our segments."""
    path.write_bytes(bytes(_SEGMENT_NBYTES))
    seconds = []
    with contextlib.closing(OsFs().open_file(str(path), writable=True)) as file:
        file.datasync()
        for number in range(num_syncs):
            began = time.perf_counter()
            file.pwritev([b"x" * 160], number * 160)
            file.datasync()
            seconds.append(time.perf_counter() - began)
    return sorted(seconds)[num_syncs // 2] * 1e3


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

    records = [_records(writer) for writer in range(NUM_WRITERS)]

    def commit(writer: int, number: int) -> None:
        at = number % _NUM_PREPARED
        ticket = journal.submit(PUT, records[writer][at : at + 1])
        if not (journal.flush(time.monotonic() + 60.0) and ticket.wait(0.0)):
            raise OSError(f"a commit did not become durable: {journal.trouble}")
        if journal.durable_lsn < ticket.lsn:
            raise OSError(f"flush returned at LSN {journal.durable_lsn}, before LSN {ticket.lsn} was durable")

    try:
        return _a_second(commit, seconds)
    finally:
        journal.close(time.monotonic() + 60.0)


def each_for_itself(fs: OsFs, path: Path, seconds: float, *, shared: bool) -> float:
    """The same records appended by each writer, as the same bytes, with a `fdatasync` of its own: to one log for all,
    or to a log for each. A log is a file as our segments are, reserved and synced before."""
    fs.make_dir(str(path))
    names = ["all"] * NUM_WRITERS if shared else [f"{number}" for number in range(NUM_WRITERS)]
    files = {name: fs.open_file(f"{path}/{name}", create=True) for name in set(names)}
    for file in files.values():
        file.allocate(0, _SEGMENT_NBYTES)
        file.datasync()
    header = decode_header(
        encode_header(SegmentHeader(1, 1, 0, 1, BEFORE_THE_LOG, CheckpointRef(), _SEGMENT_NBYTES))
    )
    frames = [
        [
            bytes(encode_frame(header, 0, 1, 0, [Run(PUT, record.reshape(1))])[0])
            for record in _records(writer)
        ]
        for writer in range(NUM_WRITERS)
    ]
    nbytes = len(frames[0][0])
    tails = {name: itertools.count() for name in files}

    def commit(writer: int, number: int) -> None:
        name = names[writer]
        files[name].pwritev(
            [frames[writer][number % _NUM_PREPARED]], next(tails[name]) * nbytes % _SEGMENT_NBYTES
        )
        files[name].datasync()

    try:
        return _a_second(commit, seconds)
    finally:
        for file in files.values():
            file.close()


def _records(writer: int) -> np.ndarray[Any, np.dtype[Any]]:
    """Puts of one writer's blocks, `[_NUM_PREPARED]`; the digests are spread as those of real chains are."""
    records, numbers = np.zeros(_NUM_PREPARED, PUT_DTYPE), np.arange(_NUM_PREPARED)
    records["digest"] = np.random.default_rng(writer).integers(0, 256, records["digest"].shape, np.uint8)
    records["slot"] = records["put_seq"] = writer * _NUM_PREPARED + numbers
    return records


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

    gc.collect()
    gc.freeze()  # what was imported and prepared is nothing to look through again and again
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
