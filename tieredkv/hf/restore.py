"""Fills a fresh cache with a stored prefix.

States go into the layers by their attributes, never through `update`: a window layer would count only the
tokens it was given. The cache that is filled is always a new one, so a restore that fails leaves nothing
wrong behind; it is a miss.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..namespace import Namespace
from ..prefix import Prefix
from .capture import CapturingCache, Tokens
from .layers import GrowingMixin, WindowLayer, spacious
from .states import put

_GROWING = ("keys", "values")


@dataclass(frozen=True)
class Restored:
    """What a restore gave: tokens by the tier they were read from, why not more, and how long it took."""

    num_tokens: int
    by_tier: Mapping[str, int]
    reason: str
    detail: str
    seconds: float


def restore(
    space: Namespace, cache: CapturingCache, tokens: Tokens, num_new: int = 0, at_most: int | None = None
) -> Restored:
    """Fill the empty `cache` with the longest restorable prefix of `tokens`, at least one token short of it.

    Args:
        num_new: tokens that will follow `tokens`, if that is known: full layers get room for all of them, so
            that no forward copies what is restored.
        at_most: restore no more tokens than these.
    """
    assert cache.num_tokens == 0, f"a restore goes into an empty cache, this one holds {cache.num_tokens}"
    began = time.perf_counter()
    with space.load(tokens if at_most is None else tokens[: at_most + 1]) as prefix:
        num_tokens = prefix.num_tokens
        assert num_tokens < len(tokens), (
            f"a prefix of {num_tokens} leaves nothing to compute of {len(tokens)}"
        )
        if num_tokens:
            _fill(cache, prefix, len(tokens) + num_new if num_new else spacious(len(tokens)))
            cache.restored(tokens[:num_tokens])
    seconds = time.perf_counter() - began
    return Restored(num_tokens, dict(prefix.by_tier), str(prefix.reason), prefix.detail, seconds)


def _fill(cache: CapturingCache, prefix: Prefix, capacity: int) -> None:
    """All tensors of all layers in one pass over the parts, each straight to its place."""
    outs: dict[tuple[int, str], torch.Tensor] = {}
    held: dict[int, dict[str, torch.Tensor]] = {}
    for facts in cache.facts.layers:
        layer = cache.layers[facts.index]
        for state in facts.states:
            spec = state.spec(facts.index)
            shape = prefix.shape_of(facts.index, state.name)
            like = torch.empty(
                [0 if n < 0 else n for n in spec.shape], dtype=spec.torch_dtype, device=facts.device
            ).unsqueeze(state.held.batch_axis)
            if isinstance(layer, GrowingMixin) and state.name in _GROWING:
                length = shape[1]
                room = spacious(length) if isinstance(layer, WindowLayer) else capacity
                tensor = layer.reserve(state.name, like, room)[:, :, :length]
            else:
                tensor = like.new_empty(shape).unsqueeze(state.held.batch_axis)
            held.setdefault(facts.index, {})[state.name] = tensor
            outs[facts.index, state.name] = tensor.select(state.held.batch_axis, 0)
    prefix.gather_into(outs)
    for index, tensors in held.items():
        put(cache.layers[index], tensors, prefix.num_tokens)
    for window_layer in cache.window_layers():
        window_layer.restored(prefix.num_tokens)
