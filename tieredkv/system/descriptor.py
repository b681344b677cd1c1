"""An open file descriptor that a forked child does not keep.

A child of `fork` shares the parent's open files: its `flock` would outlive the parent, and a stray write
would land in the parent's store. So every descriptor of the store is closed in the child, there and then.
"""

from __future__ import annotations

import os
import weakref


class Descriptor:
    """Owns one descriptor until `close`; afterwards, and in a forked child, every use of it is EBADF."""

    __slots__ = ("__weakref__", "_fd")

    def __init__(self, fd: int) -> None:
        self._fd = fd
        _OPEN.add(self)

    def close(self) -> None:
        """Give the descriptor back; twice is harmless. No other thread may be inside a call on it."""
        fd, self._fd = self._fd, -1
        _OPEN.discard(self)
        if fd >= 0:
            os.close(fd)


_OPEN: weakref.WeakSet[Descriptor] = weakref.WeakSet()


def _close_all_in_child() -> None:
    for descriptor in list(_OPEN):
        descriptor.close()


os.register_at_fork(after_in_child=_close_all_in_child)
