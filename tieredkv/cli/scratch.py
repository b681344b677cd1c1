"""A folder for as long as the command runs, on the disk of the user's cache folder.

The system's temporary folder is often memory. A command that was killed leaves its folder behind; the next one
removes it, told by the lock that a living owner holds on it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import PathUnusable

_PREFIX = "demo-"


@contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """A fresh folder in `parent`, removed at the end.

    Raises:
        PathUnusable: it cannot be made.
    """
    try:
        parent.mkdir(parents=True, exist_ok=True)
        _remove_left_behind(parent)
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        lock = _lock(folder)
    except OSError as error:
        raise PathUnusable(f"{parent}: {error.strerror}") from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _remove_left_behind(parent: Path) -> None:
    for folder in parent.glob(_PREFIX + "*"):
        lock = _lock(folder)
        if lock is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _lock(folder: Path) -> int | None:
    """A descriptor that holds the folder's lock, or None while another process does."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor
