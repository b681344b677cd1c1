"""A file system door that counts what a store does to its files."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

from tieredkv.system import File, OsFs


class CountingFs(OsFs):
    """Bytes written and syncs, by the folder that a file lies in: `wal`, `slabs`, or the store itself."""

    def __init__(self) -> None:
        self.written, self.syncs = Counter[str](), Counter[str]()
        self._lock = threading.Lock()

    def open_file(self, path: str, **options: Any) -> Any:
        return _CountedFile(super().open_file(path, **options), PurePath(path).parent.name, self)

    def count(self, folder: str, nbytes: int = 0, syncs: int = 0) -> None:
        with self._lock:
            self.written[folder] += nbytes
            self.syncs[folder] += syncs


class _CountedFile:
    def __init__(self, file: File, folder: str, fs: CountingFs) -> None:
        self._file, self._folder, self._fs = file, folder, fs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def pwritev(self, buffers: Sequence[Any], offset: int) -> None:
        self._file.pwritev(buffers, offset)
        self._fs.count(self._folder, nbytes=sum(memoryview(b).nbytes for b in buffers))

    def datasync(self) -> None:
        self._file.datasync()
        self._fs.count(self._folder, syncs=1)
