"""A live model bound to an open cache: its facts and namespace as long as it stays what it was."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from ..cache import TieredCache
from ..namespace import Namespace
from .capture import CapturingCache
from .gate import Gate
from .identity import ModelFacts, fingerprint, read_model, rehash
from .probe import cache_argument, inner_model


@dataclass(frozen=True)
class _Known:
    """What belongs together: a thread that looks while another describes the model anew finds all old or all new."""

    facts: ModelFacts
    space: Namespace
    gate: Gate


class LiveModel:
    """Notices when the model is no longer the one that was described: other weights, config, dtype, adapter.

    Any thread may call.

    Attributes:
        cache_name: what the model's forward calls its cache.
    """

    def __init__(self, kv: TieredCache, model: Any, salt: str = "") -> None:
        self.kv = kv
        self.model = model
        self.cache_name = cache_argument(model)
        self._salt = salt
        self._mark = b""
        self._lock = threading.Lock()
        self._known: _Known
        self.refresh()

    @property
    def facts(self) -> ModelFacts:
        return self._known.facts

    @property
    def space(self) -> Namespace:
        return self._known.space

    @property
    def gate(self) -> Gate:
        """Chooses between loading and computing for this namespace."""
        return self._known.gate

    @property
    def block_size(self) -> int:
        return self._known.facts.layout.block_size

    @property
    def device(self) -> Any:
        inner: Any = inner_model(self.model)
        return inner.device

    def refresh(self) -> None:
        """Describe the model again if it changed; its namespace may be another one then.

        Raises:
            Unsupported: it became a model whose KV cannot be kept.
        """
        with self._lock:
            self._describe()

    def rehash(self) -> None:
        """Hash every weight again: needed after writing a parameter through `.data`."""
        with self._lock:  # else who describes it just now would take the old hashes for the new
            rehash(self.model)
            self._mark = b""
            self._describe()

    def new_cache(self) -> CapturingCache:
        """An empty cache whose blocks go to the present namespace."""
        known = self._known
        cache = CapturingCache(self.model, known.facts, known.space)
        self.kv.count_working(cache)
        return cache

    def _describe(self) -> None:
        """Read the model if it is not the one that is known (lock held)."""
        mark = fingerprint(self.model)
        if mark != self._mark:
            facts = read_model(self.model, self.kv.config.block_size, self._salt)
            space = self.kv.namespace(facts.identity, facts.layout)
            self._known = _Known(facts, space, Gate(self.kv, space, self.device))
            self._mark = mark
