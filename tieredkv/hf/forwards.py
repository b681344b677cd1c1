"""How long the forwards of one cache took, by the clock of the device that ran them. Nothing is waited for."""

from __future__ import annotations

import time
from typing import Any

import torch

from ..speeds import Sample

_MAX_KEPT = 256
"""Forwards remembered until they are asked for; of later ones nothing is learned."""


class Forwards:
    """Times every forward over several tokens. A model on several devices, or of an unknown kind, is not timed.

    Args:
        devices: those that the model's layers are on.
    """

    def __init__(self, devices: set[torch.device]) -> None:
        only = next(iter(devices)) if len(devices) == 1 else None
        self._device = only if only is not None and only.type in ("cpu", "cuda") else None
        self._running: tuple[int, int, Any] | None = None
        self._ended: list[tuple[int, int, Any, Any]] = []

    def begins(self, start: int, num_tokens: int) -> None:
        """A forward of `num_tokens` behind `start` others is about to run; one that broke off is forgotten."""
        self._running = None
        if self._device is not None and num_tokens > 1 and len(self._ended) < _MAX_KEPT:
            self._running = start, num_tokens, self._now()

    def ends(self) -> None:
        if self._running is not None:
            self._ended.append((*self._running, self._now()))
        self._running = None

    def take(self) -> list[Sample]:
        """`(tokens before, tokens, seconds)` of those that have ended since this was last asked."""
        ended, self._ended = self._ended, []
        if self._device is not None and self._device.type == "cuda":
            done = [forward for forward in ended if forward[3].query()]
            return [Sample(start, n, began.elapsed_time(end) / 1e3) for start, n, began, end in done]
        return [Sample(start, n, end - began) for start, n, began, end in ended]

    def _now(self) -> Any:
        if self._device is None or self._device.type == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event
