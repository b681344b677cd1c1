"""The door to files, opened on a `SimDisk`: every call can fail, be late, lie, or be the last before a crash.

Covered by it: everything a store writes itself. Not covered: LMDB's own calls. A checkpoint is written by LMDB
into a real temporary file, whose bytes then enter the simulated disk as one write that nothing has synced yet;
so a checkpoint's loss and tearing are simulated, a tear inside LMDB's own work on it is not. Maps
(`disk_io="mmap"`) and the LMDB payload store need real files too.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from ..errors import StoreHeld
from ..system.fs import Buffer
from .sim_disk import PAGE_NBYTES, SECTOR_NBYTES, Directory, Image, Inode, SimDisk

_GiB = 1 << 30

CHANGES = ("create", "pwritev", "allocate", "punch", "datasync", "sync_dir", "rename", "unlink", "make_dir")
"""Calls that change the disk or make a change durable; a crash can come before each."""


@dataclass
class Fault:
    """What goes wrong at some calls.

    Args:
        call: a name of a `File` or `Fs` method ("create" is `open_file` that creates), "" for any.
        nth: at which matching call, from 1; with `again`, at every one from there on.
        path: a piece of the path that must be in it.
        effect: "fail" (with `error`), "short" (some of a write arrives, then `error`), "delay" (by `delay_s`),
            "keep" and "revert" (a sync fails; the cache then shows the new bytes, or the old),
            "lie" (a sync says it is done), "misdirect" (a write lands elsewhere in its file).
    """

    call: str = ""
    nth: int = 1
    path: str = ""
    effect: str = "fail"
    error: int = errno.EIO
    delay_s: float = 0.0
    again: bool = False
    num_met: int = 0
    num_fired: int = 0

    def fires(self, call: str, path: str) -> bool:
        if (self.call and call != self.call) or self.path not in path:
            return False
        self.num_met += 1
        hit = self.num_met >= self.nth if self.again else self.num_met == self.nth
        self.num_fired += hit
        return hit


@dataclass(frozen=True)
class Op:
    """A call about to happen: its number from 0 among `CHANGES`, name and path."""

    number: int
    call: str
    path: str


@dataclass
class _Held:
    fs: SimFs
    path: str

    def close(self) -> None:
        self.fs.held.discard(self.path)


@dataclass
class SimFs:
    """An `Fs` in memory.

    Args:
        image: what the disk holds at first.
        seed: of misdirected and short writes.
        capacity_nbytes: of the file system; beyond it writes and reservations are ENOSPC.
        direct: whether it has direct transfers; then they must be aligned.
        before_op: called before each change, with the disk locked; crash images are frozen here.

    Attributes:
        struck_at, struck_path: the operation at which a fault struck last, and on what.
    """

    image: Image | None = None
    seed: int = 0
    capacity_nbytes: int = _GiB
    direct: bool = True
    before_op: Callable[[Op], None] = lambda _op: None
    faults: list[Fault] = field(default_factory=list)
    held: set[str] = field(default_factory=set)
    num_ops: int = 0
    num_open: int = 0
    off: bool = False
    struck_at: int = -1
    struck_path: str = ""

    def __post_init__(self) -> None:
        self.disk = SimDisk(self.image)
        self.mutex = threading.RLock()
        self.counts: Counter[str] = Counter()
        self._rng = random.Random(self.seed)

    def power_off(self) -> None:
        """From now on every call fails with EIO: the machine of this file system is gone."""
        self.off = True

    # ---- every call ----------------------------------------------------------------------------

    def begin(self, call: str, path: str) -> Fault | None:
        """Count a call and let its fault strike (disk locked); returns a fault that the call itself plays."""
        if self.off:
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        self.counts[call] += 1
        if call in CHANGES:
            self.before_op(Op(self.num_ops, call, path))
            self.num_ops += 1
        for fault in self.faults:
            if fault.effect != "delay" and fault.fires(call, path):
                self.struck_at, self.struck_path = self.num_ops, path
                if fault.effect == "fail":
                    raise OSError(fault.error, os.strerror(fault.error), path)
                return fault
        return None

    @contextlib.contextmanager
    def call(self, name: str, path: str) -> Iterator[Fault | None]:
        """A call with the disk locked; a delay is waited for before, with it free."""
        late = [f for f in self.faults if f.effect == "delay" and f.fires(name, path)]
        for fault in late:
            _wait(self, fault.delay_s)
        with self.mutex:
            yield self.begin(name, path)

    def room_for(self, inode: Inode, offset: int, end: int, path: str) -> None:
        more = inode.num_new_pages(offset, end) * PAGE_NBYTES
        if more and self.disk.used_nbytes + more > self.capacity_nbytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    # ---- directories ---------------------------------------------------------------------------

    def make_dir(self, path: str) -> None:
        path = os.path.abspath(path)
        if path in self.disk.dirs:
            return
        self.make_dir(os.path.dirname(path))
        with self.call("make_dir", path):
            self.disk.dirs.setdefault(path, Directory())

    def list_names(self, path: str) -> list[str]:
        with self.call("list_names", path):
            here = self.disk.dirs.get(path)
            if here is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            below = {p[len(path.rstrip("/")) + 1 :] for p in self.disk.dirs if p.startswith(f"{path}/")}
            return sorted(set(here.seen) | {name for name in below if "/" not in name})

    def exists(self, path: str) -> bool:
        with self.mutex:
            return path in self.disk.dirs or self._find(path) is not None

    def is_dir(self, path: str) -> bool:
        with self.mutex:
            return path in self.disk.dirs

    def sync_dir(self, path: str) -> None:
        with self.call("sync_dir", path) as fault:
            if fault is None or fault.effect != "lie":
                self.disk.dirs[path].sync()

    def unlink(self, path: str) -> None:
        with self.call("unlink", path):
            self._number(path)
            parent, name = _split(path)
            self.disk.dirs[parent].change((name, -1))

    def rename(self, old: str, new: str) -> None:
        with self.call("rename", old):
            number = self._number(old)
            (parent, name), (other, new_name) = _split(old), _split(new)
            assert parent == other, f"{old} and {new} lie in two directories"
            self.disk.dirs[parent].change((name, -1), (new_name, number))

    def file_nbytes(self, path: str) -> int:
        with self.mutex:
            return 0 if path in self.disk.dirs else len(self.disk.inodes[self._number(path)].data)

    def free_nbytes(self, path: str) -> int:
        with self.mutex:
            return max(0, self.capacity_nbytes - self.disk.used_nbytes)

    # ---- files ---------------------------------------------------------------------------------

    def open_file(
        self, path: str, *, create: bool = False, writable: bool = False, direct: bool = False
    ) -> SimFile:
        with self.call("create" if create else "open_file", path):
            if path in self.disk.dirs:
                raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), path)
            number = self._find(path)
            if create and number is not None:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
            if create:
                parent, name = _split(path)
                if parent not in self.disk.dirs:
                    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
                number = self.disk.create(parent, name)
            if number is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            return SimFile(self, self.disk.inodes[number], path, direct and self.direct)

    @contextlib.contextmanager
    def as_real_file(self, path: str) -> Iterator[str]:
        with self.mutex:
            before = bytes(self.disk.inodes[self._number(path)].data)
        with tempfile.TemporaryDirectory(dir=_SCRATCH) as folder:
            real = f"{folder}/{os.path.basename(path)}"
            with open(real, "wb") as file:
                file.write(before)
            try:
                yield real
            finally:
                with open(real, "rb") as file:
                    after = file.read()
                if after != before:
                    self._take_back(path, after)

    def _take_back(self, path: str, content: bytes) -> None:
        with self.call("pwritev", path) as fault:
            inode = self.disk.inodes[self._number(path)]
            self.write(inode, 0, content, path, fault)

    def lock(self, path: str) -> _Held:
        with self.mutex:
            if path in self.held:
                raise StoreHeld(f"{path} is held by process {os.getpid()}")
            self.held.add(path)
            return _Held(self, path)

    def _find(self, path: str) -> int | None:
        parent, name = _split(path)
        directory = self.disk.dirs.get(parent)
        return directory.seen.get(name) if directory else None

    def _number(self, path: str) -> int:
        number = self._find(path)
        if number is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return number

    def write(self, inode: Inode, offset: int, data: bytes, path: str, fault: Fault | None) -> None:
        """What a call of `pwritev` does, and what `fault` makes of it (disk locked)."""
        self.room_for(inode, offset, offset + len(data), path)
        if fault is not None and fault.effect == "short":
            inode.write(offset, data[: self.some(len(data))])
            raise OSError(fault.error, os.strerror(fault.error), path)
        if fault is not None and fault.effect == "misdirect":
            offset = self.elsewhere(offset, len(data), len(inode.data))
        inode.write(offset, data)

    def elsewhere(self, offset: int, nbytes: int, size: int) -> int:
        """Where a misdirected write lands: another page of the file."""
        pages = max(1, (size - nbytes) // PAGE_NBYTES)
        found = self._rng.randrange(pages) * PAGE_NBYTES
        return found if found != offset else max(0, offset - PAGE_NBYTES)

    def some(self, nbytes: int) -> int:
        """How much of a write arrives when it is cut: whole sectors."""
        return self._rng.randrange(max(1, nbytes // SECTOR_NBYTES)) * SECTOR_NBYTES


class SimFile:
    """A `File` of a `SimFs`."""

    def __init__(self, fs: SimFs, inode: Inode, path: str, direct: bool) -> None:
        self._fs = fs
        self._inode = inode
        self._path = path
        self._open = True
        self._sync_failed = False
        self.direct = direct
        fs.num_open += 1

    def pwritev(self, buffers: Sequence[Buffer], offset: int) -> None:
        data = b"".join(memoryview(buffer).cast("B") for buffer in buffers)
        self._check_aligned(buffers, offset)
        with self._call("pwritev") as fault:
            self._fs.write(self._inode, offset, data, self._path, fault)

    def preadv(self, buffers: Sequence[Buffer], offset: int, *, nowait: bool = False) -> int:
        self._check_aligned(buffers, offset)
        total = 0
        with self._call("preadv"):
            for buffer in buffers:
                view = memoryview(buffer).cast("B")
                piece = self._inode.data[offset + total : offset + total + view.nbytes]
                view[: len(piece)] = piece
                total += len(piece)
        return total

    def datasync(self) -> None:
        if self._sync_failed:
            raise OSError(errno.EIO, "an earlier sync of this file failed, which is final")
        try:
            with self._call("datasync") as fault:
                if fault is None or fault.effect not in ("keep", "revert", "lie"):
                    self._inode.sync()
                elif fault.effect != "lie":
                    self._inode.lose_pending(keep_in_cache=fault.effect == "keep")
                    raise OSError(errno.EIO, os.strerror(errno.EIO), self._path)
        except OSError:
            self._sync_failed = True
            raise

    def allocate(self, offset: int, nbytes: int) -> None:
        with self._call("allocate"):
            self._fs.room_for(self._inode, offset, offset + nbytes, self._path)
            self._inode.reserve(offset, offset + nbytes)

    def punch(self, offset: int, nbytes: int) -> None:
        with self._call("punch"):
            nbytes = min(nbytes, len(self._inode.data) - offset)
            if nbytes > 0:
                self._inode.punch(offset, nbytes)

    def drop_cached(self, offset: int, nbytes: int) -> None:
        """There is no second copy to drop."""

    def nbytes(self) -> int:
        return len(self._inode.data)

    def map_read(self) -> mmap.mmap:
        raise OSError(errno.ENODEV, "a simulated file cannot be mapped", self._path)

    def close(self) -> None:
        if self._open:
            self._open = False
            self._fs.num_open -= 1

    def _call(self, name: str) -> contextlib.AbstractContextManager[Fault | None]:
        if not self._open:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF), self._path)
        return self._fs.call(name, self._path)

    def _check_aligned(self, buffers: Sequence[Buffer], offset: int) -> None:
        if self.direct and any(n % PAGE_NBYTES for n in (offset, *(memoryview(b).nbytes for b in buffers))):
            raise OSError(errno.EINVAL, "a direct transfer that is not aligned", self._path)


_SCRATCH = "/dev/shm" if os.path.isdir("/dev/shm") else None


def _split(path: str) -> tuple[str, str]:
    parent, _, name = path.rpartition("/")
    return parent or "/", name


def _wait(fs: SimFs, delay_s: float) -> None:
    """Sleep, but no longer than the file system lives."""
    until = time.monotonic() + delay_s
    while time.monotonic() < until and not fs.off:
        time.sleep(min(0.02, delay_s))
