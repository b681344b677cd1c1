"""A file system whose calls can be counted, made to fail and made to hang."""

from __future__ import annotations

import errno
import mmap
import threading
from collections import Counter
from collections.abc import Callable, Sequence

from tieredkv.system.fs import Buffer, File, Lock, OsFs


class FaultyFs(OsFs):
    """`fail(call, code, when)` makes `call` raise `OSError(code)` where `when(name, offset)` holds."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.faults: dict[str, tuple[int, Callable[[str, int], bool]]] = {}
        self.gates: dict[str, threading.Event] = {}
        self.no_direct = False

    def fail(self, call: str, code: int, when: Callable[[str, int], bool] = lambda _name, _at: True) -> None:
        self.faults[call] = (code, when)

    def heal(self) -> None:
        self.faults.clear()

    def note(self, call: str, path: str, offset: int = 0) -> None:
        self.calls[call] += 1
        if call in self.gates:
            self.gates[call].wait(20.0)
        if call in self.faults and self.faults[call][1](path.rsplit("/", 1)[-1], offset):
            raise OSError(self.faults[call][0], f"{call} made to fail", path)

    def sync_dir(self, path: str) -> None:
        self.note("sync_dir", path)
        super().sync_dir(path)

    def open_file(  # type: ignore[override]
        self, path: str, *, create: bool = False, writable: bool = False, direct: bool = False
    ) -> File:
        self.note("create" if create else "open_writable" if writable else "open", path)
        file = super().open_file(path, create=create, writable=writable, direct=direct and not self.no_direct)
        return _FaultyFile(self, path, file)

    def lock(self, path: str) -> Lock:
        raise OSError(errno.ENOSYS, "no locks here")


class _FaultyFile:
    def __init__(self, fs: FaultyFs, path: str, file: File) -> None:
        self._fs, self._path, self._file = fs, path, file

    @property
    def direct(self) -> bool:
        return self._file.direct

    def pwritev(self, buffers: Sequence[Buffer], offset: int) -> None:
        self._fs.note("pwritev", self._path, offset)
        self._file.pwritev(buffers, offset)

    def preadv(self, buffers: Sequence[Buffer], offset: int, *, nowait: bool = False) -> int:
        self._fs.note("preadv", self._path, offset)
        return self._file.preadv(buffers, offset, nowait=nowait)

    def datasync(self) -> None:
        self._fs.note("datasync", self._path)
        self._file.datasync()

    def allocate(self, offset: int, nbytes: int) -> None:
        self._fs.note("allocate", self._path, offset)
        self._file.allocate(offset, nbytes)

    def punch(self, offset: int, nbytes: int) -> None:
        self._fs.note("punch", self._path, offset)
        self._file.punch(offset, nbytes)

    def drop_cached(self, offset: int, nbytes: int) -> None:
        self._file.drop_cached(offset, nbytes)

    def nbytes(self) -> int:
        return self._file.nbytes()

    def map_read(self) -> mmap.mmap:
        return self._file.map_read()

    def close(self) -> None:
        self._file.close()
