"""Models that also see or hear: the position offsets that they keep on themselves, and the ids that stand for media.

A Qwen-VL keeps `rope_deltas`, how far its positions are off after images, on the model: the next conversation would
be numbered by the last one's. Here every cache has its own, put back before it is used.
"""

from __future__ import annotations

import re
import weakref
from typing import Any

import torch

_MEDIA_FIELD = re.compile(r"(image|video|vision|audio|speech|media)\w*_token_(id|index)$")

_owner: weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[RopeDeltas]] = weakref.WeakKeyDictionary()


def media_ids(config: Any) -> frozenset[int]:
    """Ids whose KV depends on pixels or sounds, and not on the ids before them alone."""
    fields = config.to_dict()
    return frozenset(v for name, v in fields.items() if _MEDIA_FIELD.search(name) and isinstance(v, int))


class RopeDeltas:
    """One cache's position offsets: None at first, as on a model that has seen nothing; text leaves them zero."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._modules = [weakref.ref(m) for m in model.modules() if hasattr(m, "rope_deltas")]
        self._model = weakref.ref(model)
        self._kept: list[Any] = [None] * len(self._modules)

    def install(self) -> None:
        """Put them on the model, which is about to go on from this cache."""
        model = self._model()
        if model is None or not self._modules:
            return
        for module, kept in zip(self._living(), self._kept, strict=True):
            module.rope_deltas = kept
        _owner[model] = weakref.ref(self)

    def ensure(self) -> None:
        """Put them on the model unless they are there: `generate` may have set new ones since."""
        model = self._model()
        owner = _owner.get(model) if model is not None else None
        if owner is None or owner() is not self:
            self.install()

    def keep(self) -> None:
        """Take note of what a forward left."""
        self._kept = [module.rope_deltas for module in self._living()]

    def _living(self) -> list[Any]:
        found = [module() for module in self._modules]
        assert None not in found, "a model lost a module during a forward"
        return found


def disown(model: torch.nn.Module) -> None:
    """A forward with somebody else's cache is about to run: whatever is on the model then is not ours."""
    _owner.pop(model, None)
