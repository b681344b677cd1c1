"""What a model was really asked to compute: every forward, with where it began and what it gave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

CACHE_NAMES = ("cache", "past_key_values", "cache_params")
"""What forwards call their cache, in one release or another."""


@dataclass(frozen=True)
class Forward:
    """One forward over `ids` `[rows, q]` behind a cache of `start` tokens.

    Attributes:
        logits: `[rows, n, vocabulary]` of its last n tokens.
        num_asked: `logits_to_keep` as it was given: 0 is all.
    """

    start: int
    ids: torch.Tensor
    logits: torch.Tensor
    num_asked: int

    @property
    def end(self) -> int:
        return self.start + self.ids.shape[1]


class Recorder:
    """Keeps every forward of `model` until it is closed; use it with `with`."""

    def __init__(self, model: Any) -> None:
        self._forwards: list[Forward] = []
        self._start = 0
        self._hooks = (
            # before any other hook: the cache is to be asked how long it is before it is told of this forward
            model.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True),
            model.register_forward_hook(self._after, with_kwargs=True),
        )

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()

    def take(self) -> list[Forward]:
        """The forwards since this was last asked."""
        taken, self._forwards = self._forwards, []
        return taken

    def _before(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._start = num_held(cache_of(kwargs))

    def _after(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        asked = kwargs.get("logits_to_keep", 0)
        forward = Forward(self._start, ids.clone(), output.logits.detach().clone(), int(asked or 0))
        self._forwards.append(forward)


def cache_of(arguments: dict[str, Any]) -> Any:
    """The cache among a forward's arguments, by any of its names."""
    found = (arguments.get(name) for name in CACHE_NAMES)
    return next((cache for cache in found if cache is not None), None)


def num_held(cache: Any) -> int:
    """Tokens in a cache; 0 for one of recurrent layers alone, which does not know."""
    known = getattr(cache, "num_tokens", None)
    if known is not None:
        return int(known)
    layers = getattr(cache, "layers", ())
    lengths = [int(layer.get_seq_length()) for layer in layers if hasattr(layer, "get_seq_length")]
    return max(lengths, default=0)


def by_position(forwards: Sequence[Forward]) -> dict[int, torch.Tensor]:
    """The logits `[rows, vocabulary]` behind each token; of a token forwarded twice, the last."""
    found: dict[int, torch.Tensor] = {}
    for forward in forwards:
        first = forward.end - forward.logits.shape[1]
        found |= {first + i: forward.logits[:, i] for i in range(forward.logits.shape[1])}
    return found
