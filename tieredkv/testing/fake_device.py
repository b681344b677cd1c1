"""A device whose work and copies complete late, on the CPU, so that a missing wait shows as wrong bytes.

`LateStream` stands where a `CudaStream` would. A copy reads its source when it completes, not when it is
queued; queued kernels (`compute`) are late too, and copies overtake them unless `after_current` forbids it.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable

import torch

from ..tier.stream import Ticket

POISON = 0xA5


def poison(tensor: torch.Tensor) -> None:
    """Fill the bytes of a contiguous tensor with 0xA5, which no test stores on purpose."""
    tensor.view(torch.uint8).fill_(POISON)


def is_poisoned(tensor: torch.Tensor) -> bool:
    """Whether a whole 64-byte line of a contiguous tensor is poison (all of it, if it is shorter)."""
    flat = tensor.view(torch.uint8).reshape(-1) == POISON
    if flat.numel() < 64:
        return bool(flat.all())
    return bool(flat[: flat.numel() // 64 * 64].view(-1, 64).all(dim=1).any())


def _move(dst: torch.Tensor, src: torch.Tensor) -> None:
    dst.copy_(src)


class LateTicket:
    """A point among the copies of a `LateStream`."""

    def __init__(self) -> None:
        self._landed = threading.Event()

    def done(self) -> bool:
        return self._landed.is_set()

    def wait(self, timeout_s: float) -> bool:
        return self._landed.wait(timeout_s)

    def land(self) -> None:
        self._landed.set()


class LateStream:
    """Copies that complete when `release` lets them, or by a thread after random delays.

    Args:
        delay_s: the longest delay of one copy; a thread then completes copies. None: only `release` does.
        seed: of the delays.
    """

    def __init__(self, *, delay_s: float | None = None, seed: int = 0) -> None:
        self._lock = threading.RLock()
        self._kernels: deque[Callable[[], None]] = deque()
        self._num_kernels_queued = 0
        self._num_kernels_run = 0
        self._num_kernels_needed = 0
        self._copies: deque[tuple[int, Callable[[], None]]] = deque()
        self._wake = threading.Event()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        if delay_s is not None:
            self._thread = threading.Thread(
                target=self._run, args=(delay_s, random.Random(seed)), name="late-stream", daemon=True
            )
            self._thread.start()

    def compute(self, kernel: Callable[[], None]) -> None:
        """Queue work on the caller's fake stream; it runs as late as the waits allow."""
        with self._lock:
            self._kernels.append(kernel)
            self._num_kernels_queued += 1
        self._wake.set()

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        assert dst.shape == src.shape, f"copy of {tuple(src.shape)} to {tuple(dst.shape)}"
        self._queue(lambda: _move(dst, src))

    def after_current(self) -> None:
        with self._lock:
            self._num_kernels_needed = self._num_kernels_queued

    def ticket(self) -> Ticket:
        ticket = LateTicket()
        self._queue(ticket.land)
        return ticket

    def before_current(self, ticket: Ticket) -> None:
        """The caller's next work is a call on the CPU, so its stream waits here: until the ticket is done."""
        while not ticket.done():
            assert self.release(1) or ticket.done(), "the ticket is of another stream"

    def release(self, count: int | None = None) -> int:
        """Complete up to `count` queued copies, all by default, with what they wait for; returns how many."""
        num_done = 0
        while count is None or num_done < count:
            with self._lock:
                if not self._copies:
                    break
                needed, act = self._copies.popleft()
                while self._num_kernels_run < needed:
                    self._run_kernel()
                act()
            num_done += 1
        return num_done

    def release_compute(self) -> None:
        """Run every queued kernel."""
        with self._lock:
            while self._kernels:
                self._run_kernel()

    @property
    def num_pending(self) -> int:
        """Copies and tickets not yet done."""
        with self._lock:
            return len(self._copies)

    def close(self) -> None:
        """Stop the thread, then complete everything."""
        self._closed.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
        self.release()
        self.release_compute()

    def _queue(self, act: Callable[[], None]) -> None:
        with self._lock:
            self._copies.append((self._num_kernels_needed, act))
        self._wake.set()

    def _run_kernel(self) -> None:
        self._kernels.popleft()()
        self._num_kernels_run += 1

    def _run(self, delay_s: float, chance: random.Random) -> None:
        while not self._closed.is_set():
            self._wake.wait()
            self._wake.clear()
            while not self._closed.wait(chance.uniform(0, delay_s)) and self.release(1):
                pass
            if not self.num_pending:
                self.release_compute()
