"""Real processes for tests: forked, watched, killed."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import NoReturn

import torch


def outcome_of(act: Callable[[], object], timeout_s: float = 30.0) -> int:
    """Run `act` in a forked child: 0 when it returned, 1 when it raised, minus the signal that ended it.

    Raises:
        AssertionError: it was not over in time.
    """
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            torch.set_num_threads(1)  # the parent's pool of threads is not here, and torch would wait for it
            act()
            status = 0
        except BaseException as failure:
            sys.__stderr__.write(f"child: {failure!r}\n")
        finally:
            sys.__stderr__.flush()
            os._exit(status)
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError(f"the child was not over after {timeout_s} s")


def die() -> NoReturn:
    """The end of this process by SIGKILL, here and now."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("a process survived SIGKILL")
