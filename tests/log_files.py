"""Small logs for tests: written by the real writer, damaged by hand, read back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tieredkv.system import File, Fs, OsFs
from tieredkv.wal import CheckpointRef, LogWriter, Run
from tieredkv.wal import records as r
from tieredkv.wal.reader import LogRead, read_log

SEGMENT_NBYTES = 16384
NOTHING = CheckpointRef()


def puts(first: int, count: int) -> Run:
    """`count` puts whose every byte follows from their LSN."""
    rows = np.zeros(count, r.PUT_DTYPE)
    lsns = np.arange(first, first + count)
    rows["digest"] = (lsns[:, None] * 7 + np.arange(32)) % 251
    rows["put_seq"] = lsns
    rows["slot"] = lsns * 3
    return Run(r.PUT, rows)


def session(lsn: int, nbytes: int = 11) -> Run:
    return Run(r.SESSION, (lsn.to_bytes(8, "little") + b"s" * nbytes,))


def flat(runs: Sequence[tuple[int, Run]]) -> list[tuple[int, int, bytes]]:
    """Every record as (LSN, kind, bytes)."""
    out = []
    for first, run in runs:
        for offset, record in enumerate(run.records):
            out.append(
                (first + offset, run.kind, bytes(record) if isinstance(record, bytes) else record.tobytes())
            )
    return out


@dataclass
class Log:
    """A log under construction, and what was put into it."""

    fs: Fs
    wal_dir: str
    writer: LogWriter
    written: list[tuple[int, int, bytes]]
    next_lsn: int = 1
    durable_lsn: int = 0

    @staticmethod
    def begin(root: Path, fs: Fs | None = None, segment_nbytes: int = SEGMENT_NBYTES) -> Log:
        fs = fs or OsFs()
        wal_dir = str(root / "wal")
        fs.make_dir(wal_dir)
        log = Log(fs, wal_dir, LogWriter(fs, wal_dir, segment_nbytes=segment_nbytes), [])
        log.start()
        return log

    def start(self, checkpoint: CheckpointRef = NOTHING, open_number: int = 1) -> None:
        self.writer.start(
            self.next_lsn, open_number=open_number, checkpoint=checkpoint, durable_lsn=self.durable_lsn
        )

    def append(self, *runs: Run) -> None:
        self.writer.append(runs, self.next_lsn, self.durable_lsn)
        for run in runs:
            self.written += flat([(self.next_lsn, run)])
            self.next_lsn += len(run)
        self.writer.check()

    def put(self, count: int = 1) -> None:
        self.append(puts(self.next_lsn, count))

    def sync(self) -> None:
        self.durable_lsn = self.writer.sync()
        self.writer.check()

    def rotate(self, checkpoint: CheckpointRef = NOTHING) -> None:
        self.sync()
        self.writer.rotate(open_number=1, checkpoint=checkpoint, durable_lsn=self.durable_lsn)
        self.writer.check()

    def path(self, number: int) -> Path:
        return Path(self.wal_dir, f"{number:010d}.wal")

    def read(self, after_lsn: int = 0) -> tuple[list[tuple[int, int, bytes]], LogRead]:
        log = read_log(self.fs, self.wal_dir, after_lsn)
        return flat(list(log.runs())), log


def rewrite(path: Path, raw: bytes) -> None:
    """Give the file these bytes in place: emptying it first makes some file systems write it out on close."""
    with open(path, "r+b") as file:
        file.write(raw)
        file.truncate()


class FailingFile:
    """A file whose next operations of a kind fail; everything else goes through."""

    def __init__(self, file: File, fs: FailingFs) -> None:
        self._file, self._fs = file, fs
        self._sync_failed = False

    def pwritev(self, buffers, offset):  # type: ignore[no-untyped-def]
        if self._fs.fails("write"):
            whole = b"".join(buffers)
            self._file.pwritev([whole[: len(whole) // 2]], offset)
            raise OSError(5, "injected write failure")
        self._file.pwritev(buffers, offset)

    def datasync(self) -> None:
        if self._sync_failed or self._fs.fails("sync"):
            self._sync_failed = True
            raise OSError(5, "injected sync failure")
        self._file.datasync()

    def allocate(self, offset: int, nbytes: int) -> None:
        if self._fs.fails("allocate"):
            raise OSError(28, "injected full disk")
        self._file.allocate(offset, nbytes)

    def preadv(self, buffers, offset, *, nowait=False):  # type: ignore[no-untyped-def]
        if any(
            offset < at + size and at < offset + sum(map(len, buffers)) for at, size in self._fs.unreadable
        ):
            raise OSError(5, "injected read failure")
        return self._file.preadv(buffers, offset, nowait=nowait)

    def __getattr__(self, name: str):  # type: ignore[no-untyped-def]
        return getattr(self._file, name)


class FailingFs(OsFs):
    """An `OsFs` that fails on request: `fail("sync", 1)` lets one sync through and fails the next."""

    def __init__(self) -> None:
        self.countdown: dict[str, int] = {}
        self.unreadable: list[tuple[int, int]] = []
        self.calls: list[str] = []

    def fail(self, operation: str, after: int = 0) -> None:
        self.countdown[operation] = after

    def fails(self, operation: str) -> bool:
        self.calls.append(operation)
        left = self.countdown.get(operation)
        if left is None:
            return False
        self.countdown[operation] = left - 1
        if left == 0:
            del self.countdown[operation]
        return left == 0

    def open_file(self, path, **options):  # type: ignore[no-untyped-def, override]
        return FailingFile(super().open_file(path, **options), self)

    def sync_dir(self, path: str) -> None:
        if self.fails("sync_dir"):
            raise OSError(5, "injected directory sync failure")
        super().sync_dir(path)
