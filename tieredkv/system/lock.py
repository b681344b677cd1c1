"""One writer per directory: `flock` on a file that names its owner.

`flock` ends with the last descriptor of the open file, and a child forked behind Python's back keeps one.
So a held lock is believed only while its recorded owner lives. Of a dead owner the file is replaced by a
fresh, locked one, which the child does not hold. Every taking of the lock happens under a `flock` of the
directory, held for that moment alone, so two takers cannot both replace it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from ..errors import StoreHeld
from .descriptor import Descriptor

_MAX_NBYTES = 4096
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


@dataclass(frozen=True)
class Owner:
    """A process as it can be recognised later: pids are reused, so its start time and boot count too.

    `namespace` is its pid namespace: a pid of another container says nothing here.
    """

    pid: int
    start: str
    boot: str
    namespace: str

    @staticmethod
    def current() -> Owner:
        pid = os.getpid()
        return Owner(pid, _start_time(pid), _boot_id(), _namespace())

    @staticmethod
    def parse(raw: bytes) -> Owner | None:
        """The owner a lock file names, or None if it names none."""
        try:
            fields = json.loads(raw)
            return Owner(
                int(fields["pid"]), str(fields["start"]), str(fields["boot"]), str(fields["namespace"])
            )
        except (ValueError, KeyError, TypeError):
            return None

    def is_dead(self) -> bool:
        """True only where that is certain: same boot, same pid namespace, and no such process any more."""
        if not self.start or self.boot != _boot_id() or self.namespace != _namespace():
            return False
        return _start_time(self.pid) != self.start

    def encode(self) -> bytes:
        return json.dumps(asdict(self), sort_keys=True).encode() + b"\n"


class DirLock(Descriptor):
    """The held lock file; `close` gives the lock back."""

    __slots__ = ()


def take(path: str) -> DirLock:
    """Lock the file `path`, made if absent, and write this process into it.

    Raises:
        StoreHeld: a living process has it (also this one), or is taking it at this moment.
        OSError: the file cannot be made, or is not a plain file.
    """
    with _taking_turns(path):
        fd = _open_plain(path, _FLAGS)
        try:
            if not _try_flock(fd):
                fd = _replace(fd, path)
            os.ftruncate(fd, 0)
            os.pwrite(fd, Owner.current().encode(), 0)
        except BaseException:
            os.close(fd)
            raise
        return DirLock(fd)


def _replace(fd: int, path: str) -> int:
    """Another open file holds the lock: refuse if its owner may live, else put a fresh locked file there."""
    owner = Owner.parse(os.pread(fd, _MAX_NBYTES, 0))
    if owner is None or not owner.is_dead():
        raise _held(path, owner)
    fresh_path = f"{path}.tmp"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(fresh_path)
    fresh = _open_plain(fresh_path, _FLAGS | os.O_EXCL)
    try:
        fcntl.flock(fresh, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.replace(fresh_path, path)
    except BaseException:
        os.close(fresh)
        raise
    os.close(fd)
    return fresh


@contextlib.contextmanager
def _taking_turns(path: str) -> Iterator[None]:
    turn = Descriptor(os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    try:
        if not _try_flock(turn._fd):
            raise _held(path, None)
        yield
    finally:
        turn.close()


def _held(path: str, owner: Owner | None) -> StoreHeld:
    who = (
        "another process, which is opening it or did not leave its name"
        if owner is None
        else f"process {owner.pid}"
    )
    return StoreHeld(f"{os.path.dirname(path)} is held by {who}; close it there, or open another directory")


def _open_plain(path: str, flags: int) -> int:
    fd = os.open(path, flags, 0o600)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        if status.st_size == 0:  # new: private, whatever the umask took away
            os.fchmod(fd, 0o600)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _try_flock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise
        return False
    return True


def _start_time(pid: int) -> str:
    """Clock ticks from boot to the start of process `pid`; empty when there is none, or it is a zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()  # the name before it may hold anything
    except OSError:
        return ""
    return "" if fields[0] in (b"Z", b"X") else fields[19].decode()


def _boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            return file.read().decode().strip()
    except OSError:
        return ""


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
