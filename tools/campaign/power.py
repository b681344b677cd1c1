"""True power cuts of an ext4 file system on a loop device: they also reach LMDB, and the kernel's own order.

Two ways that know nothing of each other: the file system is shut down in mid-flight by an ioctl, without
flushing its journal; or its backing file is copied while the victim is stopped, and the copy is mounted.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .kills import STEPS, lane
from .processes import Say

_EXT4_IOC_SHUTDOWN = 0x8004587D
_NO_LOG_FLUSH = 2
_DISK_NBYTES = 48 << 20


class LoopDisk:
    """An ext4 file system in a file, mounted until `remove`. Needs root.

    Raises:
        OSError, subprocess.CalledProcessError: loop mounts do not work here.
    """

    power = True

    def __init__(self, *, by_copy: bool, options: Sequence[str] = ()) -> None:
        self._by_copy = by_copy
        self._options = options
        self._folder = tempfile.mkdtemp(
            prefix="power-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None
        )
        self._image = f"{self._folder}/image"
        self.home = f"{self._folder}/mnt"
        os.mkdir(self.home)
        self._is_mounted = False
        self.renew()

    def strike(self) -> None:
        if self._by_copy:
            script = (
                f"kill -STOP {os.getpid()}; cp --sparse=always {self._image} {self._image}.copy;"
                f" kill -KILL {os.getpid()}"
            )
            subprocess.Popen(["sh", "-c", script])
        else:
            fd = os.open(self.home, os.O_RDONLY)
            fcntl.ioctl(fd, _EXT4_IOC_SHUTDOWN, struct.pack("I", _NO_LOG_FLUSH))
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    def recover(self) -> None:
        self._unmount()
        if os.path.exists(f"{self._image}.copy"):
            os.replace(f"{self._image}.copy", self._image)
        self._mount()

    def renew(self) -> None:
        self._unmount()
        with open(self._image, "wb") as file:
            file.truncate(_DISK_NBYTES)
        _do("mkfs.ext4", "-q", "-F", *self._options, self._image)
        self._mount()

    def remove(self) -> None:
        self._unmount()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _mount(self) -> None:
        _do("mount", "-o", "loop,commit=300", self._image, self.home)
        self._is_mounted = True

    def _unmount(self) -> None:
        """The last of a killed process may still be inside for a moment."""
        for _ in range(100 if self._is_mounted else 0):
            if subprocess.run(["umount", self.home], capture_output=True).returncode == 0:
                break
            time.sleep(0.05)
        self._is_mounted = False


def _do(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def unavailable() -> str:
    """Why there can be no power cuts here; empty if there can."""
    if os.geteuid() != 0:
        return "loop mounts need root"
    try:
        disk = LoopDisk(by_copy=False)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"loop mounts do not work here: {error}"
    try:
        fd = os.open(disk.home, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, _EXT4_IOC_SHUTDOWN, struct.pack("I", _NO_LOG_FLUSH))
        finally:
            os.close(fd)
    except OSError as error:
        return f"ext4 cannot be shut down here: {error}"
    finally:
        disk.remove()
    return ""


def jobs(seed: int, num_cuts: int, lanes: int) -> Iterator[tuple[str, Callable[[Say], Any]]]:
    """Lanes over both ways and all payload stores."""
    kinds: tuple[dict[str, Any], ...] = (
        {"durability": "group"}, {"durability": "flush"}, {"disk": "lmdb"}, {"disk_io": "mmap", "durability": "none"},
    )  # fmt: skip
    for number in range(lanes):

        def job(say: Say, number: int = number) -> dict[str, Any]:
            steps = STEPS[3 * number % len(STEPS) :] + STEPS[: 3 * number % len(STEPS)]
            weapon = LoopDisk(by_copy=(number + number // len(kinds)) % 2 == 1)
            fixed = kinds[number % len(kinds)]
            return lane(say, seed * 104_729 + number, -(-num_cuts // lanes), steps, weapon, **fixed)

        yield f"power cuts, lane {number}", job
