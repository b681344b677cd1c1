"""Which tensors a cache layer of transformers holds, how they lie, and how they are read and put back.

A state is named by its attribute, and by the key behind a dot where the attribute is a dict of tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import (
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

KNOWN_LAYERS = (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    DynamicIndexedLayer,
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)
"""The stock classes whose tensors `states_of` tells in full."""


@dataclass(frozen=True)
class State:
    """One tensor of a layer: which axis counts tokens (None for a recurrent state) and which counts rows."""

    name: str
    token_axis: int | None
    batch_axis: int = 0


_KEYS_VALUES = (State("keys", 2), State("values", 2))
_INDEXER = (State("indexer_keys", 1), State("indexer_position_ids", 2, batch_axis=1))
_RECURRENT = ("conv_states", "recurrent_states")


def states_of(layer: Any) -> tuple[State, ...]:
    """The tensors that a layer of a known class holds now."""
    states: list[State] = []
    if isinstance(layer, DynamicLayer):
        states += _KEYS_VALUES
    if isinstance(layer, DynamicIndexedLayer):
        states += _INDEXER
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        states += [State(f"{name}.{i}", None) for name in _RECURRENT for i in getattr(layer, name)]
    return tuple(state for state in states if (held := read(layer, state.name)) is not None and held.numel())


def read(layer: Any, name: str) -> torch.Tensor | None:
    """The tensor of that name as the layer holds it, or None."""
    attribute, _, key = name.partition(".")
    value: Any = getattr(layer, attribute, None)
    tensor: torch.Tensor | None = value.get(int(key)) if key and value is not None else value
    if (
        isinstance(layer, LinearAttentionCacheLayerMixin)
        and attribute == "conv_states"
        and tensor is not None
    ):
        width = layer.conv_kernel_size[int(key)]
        return tensor[..., -width:] if width else tensor  # longer while the past is recorded
    return tensor


def put(layer: Any, states: Mapping[str, torch.Tensor]) -> None:
    """Fill a fresh layer with the states it shall hold, as the forwards that made them would have left it."""
    for name, state in states.items():
        attribute, _, key = name.partition(".")
        if not key:
            if attribute == "keys":
                layer.lazy_initialization(state.narrow(2, 0, 0), state.narrow(2, 0, 0))
            elif attribute == "indexer_keys":
                layer.lazy_initialization_indexer(state)
            setattr(layer, attribute, state)
            continue
        layer.lazy_initialization(**{attribute: state, "state_idx": int(key)})
        getattr(layer, attribute)[int(key)].copy_(state)
        if attribute == "conv_states":
            layer.has_previous_state[int(key)] = True
