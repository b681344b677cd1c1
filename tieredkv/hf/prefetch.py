"""A session's KV on its way into its own memory, while the user types."""

from __future__ import annotations

import logging
import threading
import time

import numpy as np

from ..errors import TieredKVError
from .capture import CapturingCache, Tokens
from .exit import end_at_exit
from .restore import Restored, restore

log = logging.getLogger("tieredkv.hf")


class Prefetch:
    """Fills `cache` with the longest stored prefix of `tokens`, in a thread of its own.

    It holds what it reads pinned until it is done, cancelled or not; that takes at most the deadline of the
    cache. What it fills is counted with the session's working buffer.

    Args:
        own: what the session has in memory already: with as many tokens nothing is read.
    """

    def __init__(self, cache: CapturingCache, tokens: Tokens, own: CapturingCache | None) -> None:
        self._cache = cache
        self._tokens = np.append(tokens, np.int32(0))  # whatever follows: the last whole block counts too
        self._num_held = own.num_tokens if own is not None else 0
        self._cancelled = threading.Event()
        self.restored: Restored | None = None
        self._began = time.perf_counter()
        self._thread = threading.Thread(target=self._run, name="tieredkv-prefetch", daemon=True)
        self._thread.start()
        end_at_exit(self)

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    @property
    def cancelled(self) -> bool:
        return self._cancelled.is_set()

    @property
    def seconds(self) -> float:
        """How long ago it began."""
        return time.perf_counter() - self._began

    @property
    def num_tokens(self) -> int:
        """Tokens brought; 0 before it is done, and where the session's memory reaches as far."""
        return self.restored.num_tokens if self.restored is not None and not self.cancelled else 0

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is done; False if it was not, within `timeout_s`."""
        self._thread.join(timeout_s)
        return self.done

    def cancel(self, wait: bool = False) -> None:
        """Let go of what it brings, as soon as it is there; with `wait`, before this returns."""
        self._cancelled.set()
        if wait:
            self._thread.join()

    def stop(self) -> None:
        """As `cancel`."""
        self.cancel()

    def close(self) -> None:
        """As `cancel`, waiting."""
        self.cancel(wait=True)

    def take(self, own: CapturingCache | None) -> CapturingCache | None:
        """Whichever cache reaches further, waiting for this one."""
        self._thread.join()
        return self._cache if self.num_tokens > (own.num_tokens if own is not None else 0) else own

    def _run(self) -> None:
        space = self._cache.space
        if space is None or self.cancelled:
            return
        try:
            if space.lookup(self._tokens).num_tokens > self._num_held:
                self.restored = restore(space, self._cache, self._tokens)
        except TieredKVError as error:  # a miss: the next prompt looks for itself
            log.warning("nothing was prefetched: %s", error)
        if self.cancelled:
            self._cache.reset()
