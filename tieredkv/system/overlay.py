"""A copy of a directory that costs nothing: reads come from the files there, changes stay in memory.

For looking at what a recovery would do without letting it. Nothing here is durable, so syncs do nothing.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from collections.abc import Iterator, Sequence

from .fs import Buffer, File, Fs, Lock


class OverlayFile:
    """A `File` in memory."""

    direct = False

    def __init__(self, data: bytearray) -> None:
        self._data = data

    def pwritev(self, buffers: Sequence[Buffer], offset: int) -> None:
        for buffer in buffers:
            raw = memoryview(buffer).cast("B")
            self._grow(offset)
            self._data[offset : offset + len(raw)] = raw
            offset += len(raw)

    def preadv(self, buffers: Sequence[Buffer], offset: int, *, nowait: bool = False) -> int:
        done = 0
        for buffer in buffers:
            view = memoryview(buffer).cast("B")
            piece = memoryview(self._data)[offset + done : offset + done + len(view)]
            view[: len(piece)] = piece
            done += len(piece)
            if len(piece) < len(view):
                break
        return done

    def datasync(self) -> None:
        pass

    def allocate(self, offset: int, nbytes: int) -> None:
        self._grow(offset + nbytes)

    def punch(self, offset: int, nbytes: int) -> None:
        end = min(offset + nbytes, len(self._data))
        if end > offset:
            self._data[offset:end] = bytes(end - offset)

    def drop_cached(self, offset: int, nbytes: int) -> None:
        pass

    def nbytes(self) -> int:
        return len(self._data)

    def map_read(self) -> mmap.mmap:
        raise OSError(errno.EOPNOTSUPP, "a file in memory is not mapped")

    def close(self) -> None:
        pass

    def _grow(self, nbytes: int) -> None:
        if nbytes > len(self._data):
            self._data.extend(bytes(nbytes - len(self._data)))


class _NoLock:
    def close(self) -> None:
        pass


class OverlayFs:
    """An `Fs` over `base`, which is only read.

    `files` holds what was changed, by path, None for what is gone; a caller may put files of its own there, or
    forget all changes. A file written in place is copied into memory whole.
    """

    def __init__(self, base: Fs) -> None:
        self.base = base
        self.files: dict[str, bytearray | None] = {}

    def make_dir(self, path: str) -> None:
        if not self.base.is_dir(path):
            raise OSError(errno.EROFS, "a copy in memory makes no directories", path)

    def list_names(self, path: str) -> list[str]:
        mine = {os.path.basename(p): data for p, data in self.files.items() if os.path.dirname(p) == path}
        there = [name for name in self.base.list_names(path) if name not in mine]
        return sorted(there + [name for name, data in mine.items() if data is not None])

    def exists(self, path: str) -> bool:
        return self.files[path] is not None if path in self.files else self.base.exists(path)

    def is_dir(self, path: str) -> bool:
        return path not in self.files and self.base.is_dir(path)

    def sync_dir(self, path: str) -> None:
        pass

    def unlink(self, path: str) -> None:
        if not self.exists(path):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        self.files[path] = None

    def rename(self, old: str, new: str) -> None:
        data = self._copied(old)
        self.unlink(old)
        self.files[new] = data

    def file_nbytes(self, path: str) -> int:
        data = self._data(path)
        return self.base.file_nbytes(path) if data is None else len(data)

    def free_nbytes(self, path: str) -> int:
        return self.base.free_nbytes(path)

    def open_file(
        self, path: str, *, create: bool = False, writable: bool = False, direct: bool = False
    ) -> File:
        if create:
            if self.exists(path):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
            self.files[path] = data = bytearray()
            return OverlayFile(data)
        known = self._copied(path) if writable else self._data(path)
        return self.base.open_file(path, direct=direct) if known is None else OverlayFile(known)

    @contextlib.contextmanager
    def as_real_file(self, path: str) -> Iterator[str]:
        if self._data(path) is not None:
            raise OSError(errno.EOPNOTSUPP, "a copy in memory has no real file", path)
        with self.base.as_real_file(path) as real:
            yield real

    def lock(self, path: str) -> Lock:
        return _NoLock()

    def _data(self, path: str) -> bytearray | None:
        """What was changed of a file that is there; None where it is as in the base."""
        if path in self.files and self.files[path] is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return self.files.get(path)

    def _copied(self, path: str) -> bytearray:
        data = self._data(path)
        if data is None:
            with contextlib.closing(self.base.open_file(path)) as file:
                data = bytearray(file.nbytes())
                file.preadv([data], 0)
            self.files[path] = data
        return data
