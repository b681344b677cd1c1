"""What a model really leaves in a cache: told by forwards of a few tokens, not by its config or its name.

A token's KV must not depend on what comes after it, and a sequence must go on from its cache alone, whatever
another sequence did to the model in between; a model that fails is refused with the reason.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from ..block.layout import DTYPES, TOKENS, TensorSpec
from ..errors import Unsupported
from .states import State, is_known, is_pooling, read, selects, states_of

_NUM_TOKENS = 4
_ROUNDING = 1e-3
"""What single precision never reaches in so few tokens, and a forgotten state always does."""
_FAILURES = (
    AttributeError,
    IndexError,
    KeyError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True)
class StateFacts:
    """One tensor of a layer: `kind` is full, window or recurrent, `shape` is that of a `TensorSpec`, without rows.

    `held` tells how the layer has it.
    """

    name: str
    kind: str
    window: int
    shape: tuple[int, ...]
    dtype: str
    held: State = field(repr=False)

    def spec(self, layer: int) -> TensorSpec:
        return TensorSpec(layer, self.name, self.shape, self.dtype)


@dataclass(frozen=True)
class LayerFacts:
    """A layer that holds states; `window` is W where its attention slides, else 0."""

    index: int
    class_name: str
    window: int
    device: torch.device
    states: tuple[StateFacts, ...]

    def of_kind(self, kind: str) -> tuple[StateFacts, ...]:
        return tuple(state for state in self.states if state.kind == kind)


@dataclass(frozen=True)
class Probe:
    """The layers that hold states, and whether several tokens at once go on from recurrent ones."""

    layers: tuple[LayerFacts, ...]
    continues: bool


def inner_model(model: torch.nn.Module) -> torch.nn.Module:
    """The transformers model whose forward runs: what an adapter wrapper wraps, else `model` itself."""
    unwrap = getattr(model, "get_base_model", None)
    inner: torch.nn.Module = unwrap() if callable(unwrap) else model
    return inner


def forward_parameters(model: torch.nn.Module) -> Mapping[str, Any]:
    """What the model's `forward` takes, by name."""
    return inspect.signature(type(model).forward).parameters


def cache_argument(model: Any) -> str:
    """What a model's `forward` calls its cache: `cache`; before 5.24 `past_key_values`, or `cache_params`.

    Raises:
        Unsupported: the forward takes none of them.
    """
    names = forward_parameters(inner_model(model))
    for name in ("cache", "past_key_values", "cache_params"):
        if name in names:
            return name
    raise Unsupported(f"{type(model).__name__} takes no KV cache in its forward")


def forward_arguments(model: Any, cache: Any, ids: torch.Tensor, first_position: int) -> dict[str, Any]:
    """Arguments for a forward of `ids` `[1, n]` behind what `cache` holds, without logits that nobody reads."""
    names = forward_parameters(model)
    arguments = {"input_ids": ids, "use_cache": True, cache_argument(model): cache}
    if "position_ids" in names:  # some models number them from 0 where they are missing
        end = first_position + ids.shape[1]
        arguments["position_ids"] = torch.arange(first_position, end, device=ids.device)[None]
    if "logits_to_keep" in names:
        arguments["logits_to_keep"] = 1
    return arguments


def probe(model: Any) -> Probe:
    """Run the model over a few ids.

    Raises:
        Unsupported: its states cannot be cut at block boundaries, naming the layer and why.
    """
    name = type(model).__name__
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    ids = torch.arange(3 * _NUM_TOKENS, device=model.device)[None] % vocabulary
    run = _Runs(model, ids)
    short, long = run(_NUM_TOKENS), run(2 * _NUM_TOKENS)
    layers = tuple(
        facts for i, layer in enumerate(short.layers) if (facts := _layer_facts(i, layer)) is not None
    )
    if not layers:
        raise Unsupported(f"{name} left nothing in the KV cache that it was given")
    for facts in layers:
        _refuse_unless_causal(facts, short.layers[facts.index], long.layers[facts.index])
    if any(selects(layer) for layer in short.layers):
        _refuse_unless_selection_continues(model, layers)
    recurs = any(facts.of_kind("recurrent") for facts in layers)
    if not recurs and all(type(x).__name__ == "DummyLayer" or states_of(x) for x in short.layers):
        return Probe(layers, continues=True)
    singly = [_NUM_TOKENS, *[1] * _NUM_TOKENS]
    alone, single = run(*singly), run(*singly, mixed=True)
    limit = max(1e-2, _tolerance(model.dtype))
    if any(_distance(facts, single, alone) > limit for facts in layers):
        raise Unsupported(f"{name} keeps a state outside any cache, where two conversations would mix")
    chunk, continues = run(_NUM_TOKENS, _NUM_TOKENS), True
    for facts in _one_of_each(layers):
        stepping = _distance(facts, single, long)
        if not stepping <= limit:
            raise Unsupported(f"{name} does not go on from its recurrent states as if it had never stopped")
        continues &= _distance(facts, chunk, long) <= max(_ROUNDING, 3 * stepping)
    return Probe(layers, continues)


def _one_of_each(layers: tuple[LayerFacts, ...]) -> list[LayerFacts]:
    """The first layer of each sort of recurrent states: rounding grows with depth, with experts by leaps."""
    found: dict[Any, LayerFacts] = {}
    for facts in layers:
        if facts.of_kind("recurrent"):
            found.setdefault(facts.states, facts)
    return list(found.values())


class _Runs:
    """Forwards of the same ids, cut as asked, on a new cache; `mixed` with another sequence's in between."""

    def __init__(self, model: Any, ids: torch.Tensor) -> None:
        self._model = model
        self._ids = ids

    def __call__(self, *lengths: int, mixed: bool = False) -> Any:
        cache, start = self._cache(), 0
        for length in lengths:
            self._forward(cache, self._ids[:, start : start + length], start)
            start += length
            if mixed:
                self._forward(self._cache(), self._ids[:, -length:], 0)
        return cache

    def _cache(self) -> Any:
        name = type(self._model).__name__
        try:
            cache = DynamicCache(config=self._model.config)
        except _FAILURES as e:
            raise Unsupported(f"{name} does not run with a KV cache built for its config: {e}") from e
        for index, layer in enumerate(cache.layers):
            if not is_known(layer):
                raise Unsupported(
                    f"{name}: layer {index} is a {type(layer).__name__}, whose states are not known to be cut at a"
                    " block boundary"
                )
        return cache

    def _forward(self, cache: Any, ids: torch.Tensor, first_position: int) -> None:
        try:
            with torch.no_grad():
                self._model(**forward_arguments(self._model, cache, ids, first_position))
        except _FAILURES as e:
            name = type(self._model).__name__
            raise Unsupported(f"{name} does not run with a KV cache built for its config: {e}") from e


def _layer_facts(index: int, layer: Any) -> LayerFacts | None:
    states = states_of(layer)
    if not states:
        return None
    window = 0 if is_pooling(layer) else int(getattr(layer, "sliding_window", None) or 0)
    tensors = {state.name: _held(layer, state) for state in states}
    return LayerFacts(
        index=index,
        class_name=type(layer).__name__,
        window=window,
        device=next(iter(tensors.values())).device,
        states=tuple(_state_facts(index, state, tensors[state.name], window) for state in states),
    )


def _state_facts(index: int, state: State, tensor: torch.Tensor, window: int) -> StateFacts:
    dtype = str(tensor.dtype).removeprefix("torch.")
    axis, shape = state.token_axis, list(tensor.shape)
    length = min(_NUM_TOKENS, window - 1) if window else _NUM_TOKENS // state.stride
    if shape[state.batch_axis] != 1 or (axis is not None and shape[axis] != length) or dtype not in DTYPES:
        raise Unsupported(
            f"layer {index} caches {state.name} as {shape} {dtype}, not as one row with {length} on axis {axis}"
        )
    kind = "recurrent" if axis is None else "window" if window else "full"
    if axis is not None:
        shape[axis] = TOKENS * state.stride
    del shape[state.batch_axis]
    return StateFacts(state.name, kind, window if kind == "window" else 0, tuple(shape), dtype, state)


def _held(layer: Any, state: State) -> torch.Tensor:
    tensor = read(layer, state)
    assert tensor is not None, f"a {type(layer).__name__} lost its {state.name}"
    return tensor


def _refuse_unless_causal(facts: LayerFacts, short: Any, long: Any) -> None:
    """A token's KV must not depend on later tokens, or a shared prefix would be wrong for its next user."""
    for state in states_of(short):
        axis = state.token_axis
        if axis is None:
            continue
        one, other = _held(short, state), _held(long, state)
        if other.shape[axis] != 2 * _NUM_TOKENS // state.stride or not one.numel():
            continue
        error = (one - other.narrow(axis, 0, one.shape[axis])).abs().max().item()
        if not error <= _tolerance(one.dtype) * max(1.0, one.abs().max().item()):
            raise Unsupported(
                f"layer {facts.index}: the {state.name} of a token depend on the tokens after it"
            )


def _refuse_unless_selection_continues(model: Any, layers: tuple[LayerFacts, ...]) -> None:
    """Sparse attention behind a prefix of more tokens than it selects; some releases select other ones there."""
    config = model.config.get_text_config(decoder=True)
    num_held = config.index_topk
    ids = torch.arange(num_held + _NUM_TOKENS, device=model.device)[None] % config.vocab_size
    run = _Runs(model, ids)
    whole, behind = run(num_held + _NUM_TOKENS), run(num_held, _NUM_TOKENS)
    for facts in layers:
        for state in states_of(whole.layers[facts.index]):
            one, other = (_held(cache.layers[facts.index], state) for cache in (whole, behind))
            if state.token_axis is None or not one.is_floating_point() or not one.numel():
                continue
            one, other = (x.narrow(state.token_axis, num_held, _NUM_TOKENS).double() for x in (one, other))
            if not (one - other).norm() <= max(1e-2, _tolerance(model.dtype)) * one.norm():
                raise Unsupported(
                    f"{type(model).__name__} selects other tokens behind a prefix than in one call, with attention"
                    f" {model.config._attn_implementation!r} in this release of transformers: load it with"
                    " attn_implementation='eager', or take a newer release"
                )


def _distance(facts: LayerFacts, one: Any, other: Any) -> float:
    """How far two caches of the same ids are apart in what a layer holds, relative to its size."""
    apart: list[float] = []
    for state in states_of(one.layers[facts.index]):
        mine, theirs = (_held(cache.layers[facts.index], state).double() for cache in (one, other))
        apart.append(float((mine - theirs).norm() / theirs.norm().clamp(min=1e-30)))
    return max(apart)


def _tolerance(dtype: torch.dtype) -> float:
    return _ROUNDING if dtype in (torch.float32, torch.float64) else 0.1
