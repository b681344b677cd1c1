"""The one door to durable files, so that tests can crash, tear, delay and replay.

`Fs` knows files and no format. Paths are plain strings. Failures are `OSError`, as the system said them.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import stat
import sys
from collections.abc import Sequence
from typing import Protocol, TypeAlias

from ..errors import PathUnusable
from ..units import PAGE_NBYTES, MiB
from .descriptor import Descriptor
from .lock import take

Buffer: TypeAlias = "bytes | bytearray | memoryview | mmap.mmap"

_IOV_MAX = os.sysconf("SC_IOV_MAX") if "SC_IOV_MAX" in os.sysconf_names else 1024
_NOWAIT: int = getattr(os, "RWF_NOWAIT", 0)
_O_DIRECT: int = getattr(os, "O_DIRECT", 0)
_PUNCH_HOLE_KEEP_SIZE = 0x03
NO_FILE = (errno.EINVAL, errno.EISDIR, errno.ELOOP, errno.ENXIO)
"""What opening a name says when something else than a file lies there."""

NOT_NOW = (errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""What opening a file says when it may be as good as ever, and the next try or another user gets it."""


def path_of(given: str | bytes | os.PathLike[str]) -> str:
    """The path as text, `~` expanded.

    Raises:
        PathUnusable: there is a null byte in it.
    """
    path = os.fsdecode(given)
    if "\0" in path:
        raise PathUnusable(f"{path!r} holds a null byte, and no path does")
    return os.path.expanduser(path)


_REFUSED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


class Lock(Protocol):
    """A held directory lock."""

    def close(self) -> None: ...


class File(Protocol):
    """One open regular file. Calls at disjoint offsets may run at the same time; `close` alone."""

    @property
    def direct(self) -> bool:
        """Whether transfers bypass the page cache: offsets, lengths and memory in whole pages then."""
        ...

    def pwritev(self, buffers: Sequence[Buffer], offset: int) -> None:
        """Write all of `buffers`, one after the other, from byte `offset` on.

        Raises:
            OSError: some of it may have been written.
        """
        ...

    def preadv(self, buffers: Sequence[Buffer], offset: int, *, nowait: bool = False) -> int:
        """Fill `buffers` from byte `offset` on; returns the bytes read, fewer only at the end of the file.

        `nowait` takes what the page cache has without waiting for the disk, perhaps nothing.
        """
        ...

    def datasync(self) -> None:
        """Make contents and length survive power loss. A failure is final: every later call fails too,
        for the system may have marked the lost pages clean. A file that has no name any more fails."""
        ...

    def allocate(self, offset: int, nbytes: int) -> None:
        """Reserve real space for the range; the file grows to hold it, reading zeros where it is new."""
        ...

    def punch(self, offset: int, nbytes: int) -> None:
        """Make the range read zeros, giving its space back where the file system can."""
        ...

    def drop_cached(self, offset: int, nbytes: int) -> None:
        """Hint that the cached pages of the range will not be needed."""
        ...

    def nbytes(self) -> int: ...

    def map_read(self) -> mmap.mmap:
        """The whole file mapped for reading. Nobody may shorten the file while the map lives."""
        ...

    def close(self) -> None: ...


class Fs(Protocol):
    """What a store does to its directory. Nothing here follows a link in the last part of a path, except
    `list_names` and `sync_dir` of a directory."""

    def make_dir(self, path: str) -> None:
        """Make the directory, private, and those above it; durable on return. Exists already: no effect."""
        ...

    def list_names(self, path: str) -> list[str]: ...

    def exists(self, path: str) -> bool: ...

    def is_dir(self, path: str) -> bool:
        """A directory itself, not a link to one."""
        ...

    def sync_dir(self, path: str) -> None:
        """Make creations, renames and unlinks in the directory survive power loss."""
        ...

    def unlink(self, path: str) -> None: ...

    def rename(self, old: str, new: str) -> None:
        """Atomic; replaces `new`."""
        ...

    def file_nbytes(self, path: str) -> int: ...

    def free_nbytes(self, path: str) -> int:
        """Bytes that this user may still write on the file system of `path`."""
        ...

    def open_file(
        self, path: str, *, create: bool = False, writable: bool = False, direct: bool = False
    ) -> File:
        """Open a regular file; `create` makes it, private, and fails where the name is taken.

        `direct` asks to bypass the page cache; `File.direct` tells whether the file system agreed.
        """
        ...

    def as_real_file(self, path: str) -> contextlib.AbstractContextManager[str]:
        """A path where a library that does its own I/O finds the file; what it wrote there is in the file
        when the scope ends."""
        ...

    def lock(self, path: str) -> Lock:
        """Hold the lock file `path` until `close` or the end of the process.

        Raises:
            errors.StoreHeld: a living process holds it; names its pid.
        """
        ...


class OsFile(Descriptor):
    """A `File` of the operating system."""

    __slots__ = ("_sync_failed", "direct")

    def __init__(self, fd: int, direct: bool) -> None:
        super().__init__(fd)
        self.direct = direct
        self._sync_failed = False

    def pwritev(self, buffers: Sequence[Buffer], offset: int) -> None:
        views = _views(buffers)
        while views:
            done = os.pwritev(self._fd, views[:_IOV_MAX], offset)
            if done == 0:
                raise OSError(errno.EIO, "the system wrote nothing")
            offset += done
            views = _after(views, done)

    def preadv(self, buffers: Sequence[Buffer], offset: int, *, nowait: bool = False) -> int:
        if nowait and not _NOWAIT:
            return 0
        views, total = _views(buffers), 0
        while views:
            done = self._read_some(views[:_IOV_MAX], offset + total, _NOWAIT if nowait else 0)
            total += done
            if done == 0 or (self.direct and total % PAGE_NBYTES):  # a part page is the end of the file
                break
            views = _after(views, done)
        return total

    def _read_some(self, views: list[memoryview], offset: int, flags: int) -> int:
        try:
            return os.preadv(self._fd, views, offset, flags) if flags else os.preadv(self._fd, views, offset)
        except OSError as error:
            if flags and error.errno in (errno.EAGAIN, *_REFUSED):
                return 0
            raise

    def datasync(self) -> None:
        if self._sync_failed:
            raise OSError(errno.EIO, "an earlier sync of this file failed, which is final")
        try:
            _datasync(self._fd)
            if os.fstat(self._fd).st_nlink == 0:
                raise OSError(errno.ENOENT, "somebody removed this file while it was open")
        except OSError:
            self._sync_failed = True
            raise

    def allocate(self, offset: int, nbytes: int) -> None:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self._fd, offset, nbytes)
        else:
            start = max(offset, self.nbytes())
            self._write_zeros(start, offset + nbytes - start)

    def punch(self, offset: int, nbytes: int) -> None:
        failure = _fallocate(self._fd, _PUNCH_HOLE_KEEP_SIZE, offset, nbytes)
        if failure in _REFUSED:
            self._write_zeros(offset, min(nbytes, self.nbytes() - offset))
        elif failure:
            raise OSError(failure, os.strerror(failure))

    def _write_zeros(self, offset: int, nbytes: int) -> None:
        for start in range(offset, offset + nbytes, len(_ZEROS)):
            self.pwritev([memoryview(_ZEROS)[: offset + nbytes - start]], start)

    def drop_cached(self, offset: int, nbytes: int) -> None:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fd, offset, nbytes, os.POSIX_FADV_DONTNEED)

    def nbytes(self) -> int:
        return os.fstat(self._fd).st_size

    def map_read(self) -> mmap.mmap:
        return mmap.mmap(self._fd, 0, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED)


class OsFs:
    """The operating system's own files. Every descriptor is closed in a forked child."""

    def make_dir(self, path: str) -> None:
        path = os.path.abspath(path)
        if os.path.isdir(path):
            return
        parent = os.path.dirname(path)
        self.make_dir(parent)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
            os.chmod(path, 0o700)  # whatever the umask took away
        if not os.path.isdir(path):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        self.sync_dir(parent)

    def list_names(self, path: str) -> list[str]:
        return sorted(os.listdir(path))

    def exists(self, path: str) -> bool:
        return os.path.lexists(path)

    def is_dir(self, path: str) -> bool:
        return os.path.isdir(path) and not os.path.islink(path)

    def sync_dir(self, path: str) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def rename(self, old: str, new: str) -> None:
        os.replace(old, new)

    def file_nbytes(self, path: str) -> int:
        return os.lstat(path).st_size

    def free_nbytes(self, path: str) -> int:
        space = os.statvfs(path)
        return space.f_bavail * space.f_frsize

    def open_file(
        self, path: str, *, create: bool = False, writable: bool = False, direct: bool = False
    ) -> OsFile:
        writable = writable or create
        if direct and _O_DIRECT:
            fd = self._try_direct(path, create, writable)
            if fd is not None:
                return OsFile(fd, direct=True)
            create = create and not self.exists(path)
        return OsFile(_open_regular(path, create, writable, 0), direct=False)

    def _try_direct(self, path: str, create: bool, writable: bool) -> int | None:
        """A direct descriptor that has moved a page, or None where the file system will not."""
        try:
            fd = _open_regular(path, create, writable, _O_DIRECT)
        except OSError as error:
            if error.errno not in _REFUSED:
                raise
            return None
        try:
            _probe_direct(fd, writable)
        except OSError as error:
            if error.errno in _REFUSED:
                os.close(fd)
                return None  # anything else is no refusal: the first real call will say it
        return fd

    def as_real_file(self, path: str) -> contextlib.AbstractContextManager[str]:
        return contextlib.nullcontext(path)

    def lock(self, path: str) -> Lock:
        return take(path)


def _open_regular(path: str, create: bool, writable: bool, extra: int) -> int:
    # O_NONBLOCK: opening a fifo must not wait for its other end; regular files ignore it
    flags = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | extra
    flags |= os.O_RDWR if writable else os.O_RDONLY
    fd = os.open(path, flags | (os.O_CREAT | os.O_EXCL if create else 0), 0o600)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        if create:
            os.fchmod(fd, 0o600)  # whatever the umask took away
    except BaseException:
        os.close(fd)
        raise
    return fd


def _probe_direct(fd: int, writable: bool) -> None:
    """Move one page for real: some file systems accept O_DIRECT at open and refuse it later.

    The first page is written back as it was read, so it cannot matter; a shorter file ends as it began.
    """
    nbytes = os.fstat(fd).st_size
    with mmap.mmap(-1, PAGE_NBYTES) as page:
        os.preadv(fd, [page], 0)
        if writable and nbytes in range(1, PAGE_NBYTES):
            return
        if writable:
            os.pwritev(fd, [page], 0)
        if writable and nbytes == 0:
            os.ftruncate(fd, 0)


def _views(buffers: Sequence[Buffer]) -> list[memoryview]:
    views = [memoryview(buffer).cast("B") for buffer in buffers]
    return [view for view in views if view.nbytes]


def _after(views: list[memoryview], done: int) -> list[memoryview]:
    """What is left of `views` when their first `done` bytes are through."""
    for index, view in enumerate(views):
        if done < view.nbytes:
            return [view[done:], *views[index + 1 :]]
        done -= view.nbytes
    return []


def _datasync(fd: int) -> None:
    if sys.platform == "darwin":
        fcntl.fcntl(fd, fcntl.F_FULLFSYNC)  # its fsync leaves the data in the drive's cache
    else:
        os.fdatasync(fd)


def _fallocate(fd: int, mode: int, offset: int, nbytes: int) -> int:
    """Linux `fallocate`, which Python lacks; returns the errno, 0 when done."""
    if _LIBC_FALLOCATE is None:
        return errno.ENOSYS
    if _LIBC_FALLOCATE(fd, mode, offset, nbytes) == 0:
        return 0
    return ctypes.get_errno()


_LIBC_FALLOCATE = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
if _LIBC_FALLOCATE is not None:
    _LIBC_FALLOCATE.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)

_ZEROS = mmap.mmap(-1, MiB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
