"""How much whoever copies to disk in the background rests while a model computes."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

_REST = 9.0
"""Rest for each second of work: two cores that decode are then left nine tenths of what they have."""

_MAX_REST_S = 0.25
_MAX_FORWARD_S = 5.0
"""A forward that failed never says that it ended."""


class Pace:
    """Told when a forward begins and ends; `rest` then slows its callers, unless somebody waits for them."""

    def __init__(self) -> None:
        self._forward_until = 0.0  # monotonic; 0 while none runs
        self._num_hurried = 0
        self._changed = threading.Condition()

    def forward_begins(self) -> None:
        self._forward_until = time.monotonic() + _MAX_FORWARD_S

    def forward_ends(self) -> None:
        self._forward_until = 0.0
        with self._changed:
            self._changed.notify_all()

    @contextlib.contextmanager
    def hurry(self) -> Iterator[None]:
        """Nobody rests within this scope: its caller waits for what they do."""
        with self._changed:
            self._num_hurried += 1
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._num_hurried -= 1

    def rest(self, worked_s: float) -> None:
        """After `worked_s` seconds of work: rest in proportion while a forward runs and nobody waits."""
        with self._changed:
            self._changed.wait_for(self._is_free, min(_REST * worked_s, _MAX_REST_S))

    def _is_free(self) -> bool:
        return self._num_hurried > 0 or time.monotonic() >= self._forward_until
