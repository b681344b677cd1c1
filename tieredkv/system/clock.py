"""The one door to time. No order and no correctness depends on what it says."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds, by two hands: one for waits and durations, one for expiry across restarts."""

    def monotonic(self) -> float:
        """Seconds since some fixed moment of this boot; never goes back."""
        ...

    def wall(self) -> float:
        """Seconds since 1970 as the machine believes; may jump either way."""
        ...


class SystemClock:
    """The machine's own clocks."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()
