"""Which tensors a cache layer of transformers holds, how they lie, and how they are read and put back.

A state is named by its attribute, and by the key behind a dot where the attribute is a dict of tensors.

DeepSeek-V4 keeps, beside its window, a row for every so many tokens and what is on its way into the next row.
Those layers cannot be cut anywhere, so their windows and leftovers are states too, padded to the most they can be.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers.cache_utils import (
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from ..errors import Unsupported

KNOWN_LAYERS = (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    DynamicIndexedLayer,
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)
"""The stock classes whose tensors `states_of` tells in full."""
_POOLING_LAYERS = ("DeepseekV4HCACache", "DeepseekV4CSACache")
"""Defined beside their model: known by name, so that no model is imported for them."""


@dataclass(frozen=True)
class State:
    """One tensor of a layer: which axis counts tokens (None for a recurrent state) and which counts rows.

    Attributes:
        stride: tokens for each place on the token axis.
        padded: axis 1 (2 for keys) of a recurrent state that grows has this many places here, the last ones zero.
    """

    name: str
    token_axis: int | None
    batch_axis: int = 0
    stride: int = 1
    padded: int = 0


_KEYS_VALUES = (State("keys", 2), State("values", 2))
_INDEXER = (State("indexer_keys", 1), State("indexer_position_ids", 2, batch_axis=1))
_RECURRENT = ("conv_states", "recurrent_states")


def is_known(layer: Any) -> bool:
    """Whether `states_of` tells all that the layer holds."""
    return type(layer) in KNOWN_LAYERS or is_pooling(layer) or type(layer).__name__ == "DummyLayer"


def selects(layer: Any) -> bool:
    """Whether an index beside the layer chooses the keys that a token attends to."""
    return any(state in _INDEXER for state in states_of(layer))


def is_pooling(layer: Any) -> bool:
    """Whether it is a layer that pools tokens into rows."""
    return any(kind.__name__ in _POOLING_LAYERS for kind in type(layer).__mro__)


def states_of(layer: Any) -> tuple[State, ...]:
    """The tensors that a layer of a known class holds now.

    Raises:
        Unsupported: it pools tokens and has not gone so far that all its tensors could be told.
    """
    if is_pooling(layer):
        return _pooling_states(layer)
    states: list[State] = []
    if isinstance(layer, DynamicLayer):
        states += _KEYS_VALUES
    if isinstance(layer, DynamicIndexedLayer):
        states += _INDEXER
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        states += [State(f"{name}.{i}", None) for name in _RECURRENT for i in getattr(layer, name)]
    return tuple(state for state in states if (held := read(layer, state)) is not None and held.numel())


def _pooling_states(layer: Any) -> tuple[State, ...]:
    rate = int(layer.compress_rate)
    states = [State("keys", None, padded=layer.sliding_window - 1)]
    for name in layer.compressed_kv:
        states.append(State(f"compressed_kv.{name}", 1, stride=rate))
        states += [State(f"{buffer}.{name}", None, padded=rate) for buffer in ("buffer_kv", "buffer_gate")]
    for name in getattr(layer, "overlap_kv", ()):
        states += [State(f"{overlap}.{name}", None) for overlap in ("overlap_kv", "overlap_gate")]
    missing = [state.name for state in states if read(layer, state) is None]
    if missing:
        raise Unsupported(f"a {type(layer).__name__} that pools {rate} tokens: {missing[0]} is not there yet")
    return tuple(states)


def read(layer: Any, state: State) -> torch.Tensor | None:
    """The tensor as the layer holds it, padded if it is to be, or None."""
    attribute, _, key = state.name.partition(".")
    value: Any = getattr(layer, attribute, None)
    tensor: torch.Tensor | None = value.get(_key(key)) if key and value is not None else value
    if tensor is None:
        return None
    if attribute == "conv_states":
        width = layer.conv_kernel_size[int(key)]
        return tensor[..., -width:] if width else tensor  # longer while the past is recorded
    if state.padded:
        return F.pad(tensor, (0, 0, 0, state.padded - tensor.shape[-2]))
    return tensor


def _key(key: str) -> int | str:
    return int(key) if key.isdigit() else key


def put(layer: Any, states: Mapping[str, torch.Tensor], num_tokens: int) -> None:
    """Fill a fresh layer with the states it shall hold, as forwards over `num_tokens` tokens would have left it."""
    if is_pooling(layer):
        _put_pooling(layer, states, num_tokens)
        return
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


def _put_pooling(layer: Any, states: Mapping[str, torch.Tensor], num_tokens: int) -> None:
    keys = states["keys"][:, :, : min(num_tokens, layer.sliding_window - 1)]
    layer.lazy_initialization(keys[:, :, :0], keys[:, :, :0])
    layer.keys = layer.values = keys
    layer.cumulative_length = num_tokens
    whole, rest = divmod(num_tokens, int(layer.compress_rate))
    for name, state in states.items():
        attribute, _, key = name.partition(".")
        if attribute.startswith("buffer"):
            getattr(layer, attribute)[key] = state[:, :rest]
        elif attribute == "compressed_kv" or (attribute.startswith("overlap") and whole):
            getattr(layer, attribute)[key] = state
    for name in layer.entry_count:
        layer.entry_count[name] = whole
