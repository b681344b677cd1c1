"""What still computes in a thread of its own when the process ends is stopped and waited for, then kept.

A daemon thread that is in a call of torch when the interpreter goes down takes the process down (SIGABRT), and what
an answer said until then would be lost. Whoever reads the answer has ended, or never comes to its end.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from typing import Protocol

from ..cache import before_closing_at_exit

log = logging.getLogger("tieredkv.hf")

_WAIT_SHARE = 0.75
"""Of the time that is left so much is for what computes to end; the rest is for keeping it and for the caches."""


class Work(Protocol):
    """Something that computes in a thread of its own."""

    def stop(self) -> None:
        """Ask it to end soon; returns at once."""

    def wait(self, timeout_s: float) -> bool:
        """Wait until it has ended; False if it has not, within `timeout_s`."""

    def close(self) -> None:
        """Keep what it did; asked only once it has ended."""


class _Exit:
    """All work of this process; a forked child has none of its parent's."""

    def __init__(self) -> None:
        self.has_begun = False
        self._lock = threading.Lock()
        self._works: weakref.WeakSet[Work] = weakref.WeakSet()

    def note(self, work: Work) -> None:
        with self._lock:
            self._works.add(work)

    def end_all(self, until: float) -> None:
        self.has_begun = True
        with self._lock:
            works = list(self._works)
        for work in works:
            work.stop()
        now = time.monotonic()
        wait_until = now + _WAIT_SHARE * max(0.0, until - now)
        ended = [work for work in works if work.wait(max(0.0, wait_until - time.monotonic()))]
        for work in ended:
            if time.monotonic() >= until:
                break
            try:
                work.close()
            except Exception as error:  # the others are kept all the same
                log.warning("what was computed last is not kept: %s", error)


_exit = _Exit()


def end_at_exit(work: Work) -> None:
    """Have `work` stopped, waited for and closed when the process ends, if it still lives."""
    _exit.note(work)


def has_exit_begun() -> bool:
    """Whether nothing may be waited for without a bound any more: threads do not outlive the interpreter."""
    return _exit.has_begun


def _forget_all() -> None:
    global _exit
    _exit = _Exit()


os.register_at_fork(after_in_child=_forget_all)
before_closing_at_exit(lambda until: _exit.end_all(until))
