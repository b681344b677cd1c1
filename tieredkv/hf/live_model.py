"""A live model bound to an open cache: its facts and namespace as long as it stays what it was."""

from __future__ import annotations

import threading
from typing import Any

from ..cache import TieredCache
from ..namespace import Namespace
from .capture import CapturingCache
from .gate import Gate
from .identity import ModelFacts, fingerprint, read_model, rehash
from .probe import cache_argument, inner_model


class LiveModel:
    """Notices when the model is no longer the one that was described: other weights, config, dtype, adapter.

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
        self._facts: ModelFacts
        self._space: Namespace
        self._gate: Gate
        self.refresh()

    @property
    def facts(self) -> ModelFacts:
        return self._facts

    @property
    def space(self) -> Namespace:
        return self._space

    @property
    def gate(self) -> Gate:
        """Chooses between loading and computing for this namespace."""
        return self._gate

    @property
    def block_size(self) -> int:
        return self._facts.layout.block_size

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
            mark = fingerprint(self.model)
            if mark != self._mark:
                self._facts = read_model(self.model, self.kv.config.block_size, self._salt)
                self._space = self.kv.namespace(self._facts.identity, self._facts.layout)
                self._gate = Gate(self.kv, self._space, self.device)
                self._mark = mark

    def rehash(self) -> None:
        """Hash every weight again: needed after writing a parameter through `.data`."""
        rehash(self.model)
        self._mark = b""
        self.refresh()

    def new_cache(self) -> CapturingCache:
        """An empty cache whose blocks go to the present namespace."""
        cache = CapturingCache(self.model, self._facts, self._space)
        self.kv.count_working(cache)
        return cache
