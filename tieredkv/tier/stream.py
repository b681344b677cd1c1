"""Copies between tiers, and the order they keep with the work that reads and writes the same memory.

A block may be copied away only after the kernels that produce it, and may be read only after the copy that
brings it; a slot may be used again only after the copy out of it. A stream gives four words for that:

    after_current()    copies queued from now on wait for all work the caller has queued so far
    copy(dst, src)     queue a copy; neither tensor may be written, nor dst read, before its ticket is done
    ticket()           done once every copy queued so far has landed
    before_current(t)  work that the caller queues from now on waits for t

Each may be called from any thread. On the CPU all of this holds at once and costs nothing.
"""

from __future__ import annotations

import time
from typing import Protocol

import torch

from .copier import Copier


class Ticket(Protocol):
    """A point in a stream of copies."""

    def done(self) -> bool:
        """Whether every copy before this point has landed. Never blocks."""
        ...

    def wait(self, timeout_s: float) -> bool:
        """Block the calling thread until `done()`, at most `timeout_s`; returns `done()`."""
        ...


class CopyStream(Protocol):
    """An ordered queue of copies beside the caller's own work."""

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Queue `dst.copy_(src)` of equal shapes and dtypes."""
        ...

    def after_current(self) -> None:
        """Copies queued from now on wait for the work that the calling thread's stream already has."""
        ...

    def ticket(self) -> Ticket:
        """A ticket for every copy queued so far."""
        ...

    def before_current(self, ticket: Ticket) -> None:
        """Work queued from now on by the calling thread's stream waits for `ticket`."""
        ...


class _Done:
    def done(self) -> bool:
        return True

    def wait(self, timeout_s: float) -> bool:
        return True


class HostStream:
    """Copies in host memory: done when `copy` returns."""

    _ticket = _Done()

    def __init__(self, copier: Copier) -> None:
        self._copier = copier

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        self._copier.copy([(dst, src)])

    def after_current(self) -> None:
        """Nothing to do: work on the CPU is done when it returns."""

    def ticket(self) -> Ticket:
        return self._ticket

    def before_current(self, ticket: Ticket) -> None:
        """Nothing to do: so are copies."""


class CudaStream:
    """A CUDA stream of its own; copies from and to pinned memory do not hold up the host."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            dst.copy_(src, non_blocking=True)
        for tensor in (dst, src):
            if tensor.is_cuda:  # its memory must not be handed out again before this copy has run
                tensor.record_stream(self._stream)

    def after_current(self) -> None:
        self._stream.wait_event(torch.cuda.current_stream(self._device).record_event())

    def ticket(self) -> Ticket:
        return _CudaTicket(self._stream.record_event())

    def before_current(self, ticket: Ticket) -> None:
        assert isinstance(ticket, _CudaTicket), f"a ticket of {type(ticket).__name__} is of another stream"
        torch.cuda.current_stream(self._device).wait_event(ticket.event)


class _CudaTicket:
    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def done(self) -> bool:
        return bool(self.event.query())

    def wait(self, timeout_s: float) -> bool:
        """CUDA has no wait with a bound, so this asks again, ever less often, up to each millisecond."""
        deadline, pause_s = time.monotonic() + timeout_s, 20e-6
        while not self.done():
            if time.monotonic() >= deadline:
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 1e-3)
        return True


def stream_for(device: torch.device, copier: Copier) -> CopyStream:
    """The stream that serves copies to and from `device`."""
    return CudaStream(device) if device.type == "cuda" else HostStream(copier)
