"""What a live transformers model is: the identity of its KV, and how its blocks are laid out.

Layer kinds come from the stock cache that `generate` would build for the model's config; tensor names, shapes
and dtypes from a forward of a few tokens, so that what a release really caches counts and not what its
config suggests (MLA caches a latent in one release and expanded heads in another).
"""

from __future__ import annotations

import inspect
import json
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from ..block.identity import Identity, encode
from ..block.layout import DTYPES, TOKENS, BlockLayout, LayerGroup, TensorSpec
from ..errors import Unsupported
from .weights import Weights, version_of

_IGNORED_CONFIG = frozenset(
    [
        "_name_or_path",
        "name_or_path",
        "transformers_version",
        "architectures",
        "use_cache",
        "dtype",
        "torch_dtype",
        "id2label",
        "label2id",
        "problem_type",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "tokenizer_class",
        "task_specific_params",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "sep_token_id",
        "decoder_start_token_id",
        "initializer_range",
        "initializer_factor",
    ]
)
"""Config fields that cannot change KV bytes. Every other field, known or not, is part of the identity."""

_REFUSED = {
    "DynamicIndexedLayer": "its indexer keys have no place in a block yet",
    "DynamicSlidingWindowLayer": "it is subclassed in a way that is not known here",
    "LinearAttentionLayer": "a recurrent state cannot be cut at a block boundary",
    "LinearAttentionAndFullAttentionLayer": "its recurrent state cannot be cut at a block boundary",
    "LinearAttentionAndSlidingWindowAttentionLayer": "its recurrent state cannot be cut at a block boundary",
}
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
_NUM_PROBE_TOKENS = 4
_STATE_NAMES = ("keys", "values")

_weights: weakref.WeakKeyDictionary[torch.nn.Module, Weights] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class LayerFacts:
    """A layer that holds KV: `kind` is full or window, `shapes` are `(H, TOKENS, D)` by tensor name."""

    index: int
    kind: str
    window: int
    class_name: str
    device: torch.device
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]

    def specs(self) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(self.index, n, self.shapes[n], self.dtypes[n]) for n in _STATE_NAMES)


@dataclass(frozen=True)
class ModelFacts:
    """What capture and restore need to know of a model.

    `position_limit` is the first position at which keys begin to depend on the length of the whole prompt
    (dynamic and long rope); None where they never do.
    """

    identity: Identity
    layout: BlockLayout
    layers: tuple[LayerFacts, ...]
    position_limit: int | None


def describe_model(
    model: torch.nn.Module, block_size: int = 32, salt: str = ""
) -> tuple[Identity, BlockLayout]:
    """The identity and block layout of a live causal language model.

    Raises:
        Unsupported: a model whose KV cannot be cut into blocks, naming the layer class and why.
    """
    facts = read_model(model, block_size, salt)
    return facts.identity, facts.layout


def layout_of(model: torch.nn.Module, block_size: int = 32) -> BlockLayout:
    """The block layout alone: quick, since no weight is hashed.

    Raises:
        Unsupported: as `describe_model`.
    """
    inner = inner_model(model)
    _refuse_by_kind(inner)
    return _layout(_probe(inner), block_size)


def rehash(model: torch.nn.Module) -> None:
    """Forget what was hashed of `model`: needed after writing a parameter through `.data`."""
    _weights.pop(inner_model(model), None)


def inner_model(model: torch.nn.Module) -> torch.nn.Module:
    """The transformers model whose forward runs: what an adapter wrapper wraps, else `model` itself."""
    unwrap = getattr(model, "get_base_model", None)
    inner: torch.nn.Module = unwrap() if callable(unwrap) else model
    return inner


def cache_argument(model: torch.nn.Module) -> str:
    """What `forward` calls its cache in this release: `cache`, or `past_key_values` before 5.24.

    Raises:
        Unsupported: the forward takes neither.
    """
    names = inspect.signature(type(inner_model(model)).forward).parameters
    for name in ("cache", "past_key_values"):
        if name in names:
            return name
    raise Unsupported(f"{type(model).__name__} takes no KV cache in its forward")


def read_model(model: torch.nn.Module, block_size: int = 32, salt: str = "") -> ModelFacts:
    """As `describe_model`, with the facts about each layer."""
    inner = inner_model(model)
    _refuse_by_kind(inner)
    layers = _probe(inner)
    hashes = _weights.setdefault(inner, Weights())
    tensors = _named_tensors(inner)
    tuned = _adapter_tensors(inner)
    base = {n: t for n, t in tensors.items() if not any(n.startswith(p) for p in _adapter_prefixes(inner))}
    identity = Identity(
        weights=hashes.digest(base),
        dtypes=_dtypes(tensors, layers),
        config=_plain_config(inner),
        adapters={name: Weights().digest(parts) for name, parts in tuned.items()},
        framework=_framework(inner, layers),
        tp=_tensor_parallel(inner),
        salt=salt,
    )
    return ModelFacts(identity, _layout(layers, block_size), layers, _position_limit(inner.config))


def fingerprint(model: torch.nn.Module) -> bytes:
    """A cheap mark that changes whenever `read_model` could give another identity; no byte is hashed."""
    inner = inner_model(model)
    tensors = [[n, t.data_ptr(), version_of(t), str(t.dtype)] for n, t in _named_tensors(inner).items()]
    tuned = [[name, sorted(parts)] for name, parts in _adapter_tensors(inner).items()]
    config = _plain_config(inner)
    return encode([tensors, tuned, json.dumps(config, sort_keys=True), _attention(inner), inner.training])


def _refuse_by_kind(model: Any) -> None:
    config = getattr(model, "config", None)
    name = type(model).__name__
    if config is None or not hasattr(config, "get_text_config"):
        raise Unsupported(f"{name} is not a transformers model: it has no config")
    if getattr(config, "is_encoder_decoder", False):
        raise Unsupported(f"{name} is an encoder-decoder: its cross-attention KV is not cut into blocks")
    if any(hasattr(module, "rope_deltas") for module in model.modules()):
        raise Unsupported(
            f"{name} keeps rope_deltas on the model, outside any cache: positions would be wrong"
        )
    if model.training:
        raise Unsupported(f"{name} is in training mode, where KV is random: call model.eval() first")


def _probe(model: Any) -> tuple[LayerFacts, ...]:
    """The layers that hold KV, from two forwards of a few tokens."""
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    ids = torch.arange(2 * _NUM_PROBE_TOKENS, device=model.device)[None] % vocabulary
    short, long = (_forward(model, ids[:, :n]) for n in (_NUM_PROBE_TOKENS, 2 * _NUM_PROBE_TOKENS))
    layers = [_layer_facts(i, layer) for i, layer in enumerate(short.layers) if layer.keys is not None]
    holding = tuple(layer for layer in layers if layer is not None)
    if not holding:
        raise Unsupported(f"{type(model).__name__} left nothing in the KV cache that it was given")
    for layer in holding:
        _refuse_unless_causal(layer, short.layers[layer.index], long.layers[layer.index])
    return holding


def _forward(model: Any, ids: torch.Tensor) -> Any:
    name = type(model).__name__
    try:
        cache = DynamicCache(config=model.config)
        for index, layer in enumerate(cache.layers):
            _refuse_layer(name, index, layer)
        with torch.no_grad():
            model(input_ids=ids, use_cache=True, **{cache_argument(model): cache})
    except (
        AttributeError,
        IndexError,
        KeyError,
        NotImplementedError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as e:
        raise Unsupported(f"{name} does not run with a KV cache built for its config: {e}") from e
    return cache


def _refuse_layer(model_name: str, index: int, layer: Any) -> None:
    """Only the two stock classes are known to be cut at block boundaries, and layers that hold nothing."""
    kind = type(layer)
    if kind in (DynamicLayer, DynamicSlidingWindowLayer) or kind.__name__ == "DummyLayer":
        return
    why = _REFUSED.get(kind.__name__, "its state is not known to be cut at a block boundary")
    raise Unsupported(f"{model_name}: layer {index} is a {kind.__name__}: {why}")


def _layer_facts(index: int, layer: Any) -> LayerFacts | None:
    if not layer.is_initialized or layer.keys.numel() == 0:
        return None
    window = int(layer.sliding_window) if type(layer) is DynamicSlidingWindowLayer else 0
    states = {name: getattr(layer, name) for name in _STATE_NAMES}
    for name, state in states.items():
        length = min(_NUM_PROBE_TOKENS, window - 1) if window else _NUM_PROBE_TOKENS
        dtype = str(state.dtype).removeprefix("torch.")
        if state.ndim != 4 or state.shape[0] != 1 or state.shape[2] != length or dtype not in DTYPES:
            what = f"{list(state.shape)} {dtype}"
            raise Unsupported(f"layer {index} caches {name} as {what}, not as [batch, heads, tokens, width]")
    return LayerFacts(
        index=index,
        kind="window" if window else "full",
        window=window,
        class_name=type(layer).__name__,
        device=states["keys"].device,
        shapes={n: (s.shape[1], TOKENS, s.shape[3]) for n, s in states.items()},
        dtypes={n: str(s.dtype).removeprefix("torch.") for n, s in states.items()},
    )


def _refuse_unless_causal(layer: LayerFacts, short: Any, long: Any) -> None:
    """A token's KV must not depend on later tokens, or a shared prefix would be wrong for its next user."""
    for name in _STATE_NAMES:
        one, other = getattr(short, name), getattr(long, name)
        if other.shape[2] != 2 * _NUM_PROBE_TOKENS:
            continue
        error = (one - other[:, :, :_NUM_PROBE_TOKENS]).abs().max().item()
        tolerance = (1e-3 if one.dtype in (torch.float32, torch.float64) else 0.1) * max(
            1.0, one.abs().max().item()
        )
        if not error <= tolerance:
            raise Unsupported(f"layer {layer.index}: the {name} of a token depend on the tokens after it")


def _layout(layers: tuple[LayerFacts, ...], block_size: int) -> BlockLayout:
    """One group for all full layers, then one for each window length."""
    groups = []
    for window in sorted({layer.window for layer in layers}):
        specs = tuple(spec for layer in layers if layer.window == window for spec in layer.specs())
        groups.append(LayerGroup("window" if window else "full", specs, window))
    return BlockLayout(block_size, tuple(groups))


def _named_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name, less the rope tables that a forward rewrites from the config."""
    skipped = _length_dependent(getattr(model, "config", None))
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    return {n: t for n, t in tensors.items() if not (skipped and n.rsplit(".", 1)[-1].endswith("inv_freq"))}


def _plain_config(model: Any) -> dict[str, Any]:
    kept: dict[str, Any] = json.loads(json.dumps(_without_ignored(model.config.to_dict()), default=str))
    return kept


def _without_ignored(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _without_ignored(v) for k, v in value.items() if k not in _IGNORED_CONFIG}
    return [_without_ignored(v) for v in value] if isinstance(value, (list, tuple)) else value


def _dtypes(tensors: Mapping[str, torch.Tensor], layers: tuple[LayerFacts, ...]) -> dict[str, str]:
    weights = sorted({str(t.dtype).removeprefix("torch.") for t in tensors.values()})
    states = sorted({dtype for layer in layers for dtype in layer.dtypes.values()})
    return {"weights": ",".join(weights), "kv": ",".join(states)}


def _framework(model: Any, layers: tuple[LayerFacts, ...]) -> dict[str, Any]:
    rows = [[x.index, x.class_name, x.window, [list(x.shapes[n]) for n in _STATE_NAMES]] for x in layers]
    return {
        "name": "transformers",
        "model": type(model).__name__,
        "attention": _attention(model),
        "layers": rows,
    }


def _attention(model: Any) -> list[str]:
    """Which kernels run: they differ in the last bits of KV."""
    config = model.config.get_text_config(decoder=True)
    return [str(getattr(config, name, "")) for name in ("_attn_implementation", "_experts_implementation")]


def _tensor_parallel(model: Any) -> tuple[int, int]:
    size = int(getattr(model, "_tp_size", None) or 1)
    return (torch.distributed.get_rank() % size if size > 1 else 0, size)


def _rope_types(config: Any) -> list[tuple[str, Mapping[str, Any]]]:
    """Every rope type in a text config, with the parameters around it."""
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    found = []
    stack = [getattr(text, "rope_parameters", None), getattr(text, "rope_scaling", None)]
    while stack:
        value = stack.pop()
        if isinstance(value, Mapping):
            found += [(str(value["rope_type"]), value)] if "rope_type" in value else []
            stack += value.values()
    return found


def _length_dependent(config: Any) -> bool:
    return any(kind in _LENGTH_DEPENDENT_ROPE for kind, _ in _rope_types(config))


def _position_limit(config: Any) -> int | None:
    text = config.get_text_config(decoder=True)
    limits = [
        int(rope.get("original_max_position_embeddings") or text.max_position_embeddings)
        for kind, rope in _rope_types(config)
        if kind in _LENGTH_DEPENDENT_ROPE
    ]
    return min(limits, default=None)


def _adapter_layers(model: torch.nn.Module) -> list[tuple[str, Any]]:
    """Modules that carry adapters, told by the attributes that PEFT gives them."""
    return [
        (n, m) for n, m in model.named_modules() if hasattr(m, "adapter_layer_names") and hasattr(m, "merged")
    ]


def _adapter_prefixes(model: torch.nn.Module) -> tuple[str, ...]:
    return tuple(
        f"{name}.{attribute}."
        for name, module in _adapter_layers(model)
        for attribute in module.adapter_layer_names
    )


def _adapter_tensors(model: torch.nn.Module) -> dict[str, dict[str, torch.Tensor]]:
    """What each active adapter adds, by adapter and name; its scaling as a tensor of one number.

    A merged adapter is already in the base weights and adds nothing more.
    """
    adapters: dict[str, dict[str, torch.Tensor]] = {}
    for name, module in _adapter_layers(model):
        if module.merged or module.disable_adapters:
            continue
        for adapter in module.active_adapters:
            parts = adapters.setdefault(str(adapter), {})
            for attribute in module.adapter_layer_names:
                parts |= _tensors_of(f"{name}.{attribute}", getattr(module, attribute, {}), adapter)
            scaling = getattr(module, "scaling", {})
            if adapter in scaling:
                parts[f"{name}.scaling"] = torch.tensor(float(scaling[adapter]))
    return {adapter: parts for adapter, parts in sorted(adapters.items()) if parts}


def _tensors_of(prefix: str, container: Any, adapter: str) -> dict[str, torch.Tensor]:
    if adapter not in container:
        return {}
    held = container[adapter]
    if isinstance(held, torch.Tensor):
        return {prefix: held}
    return {f"{prefix}.{name}": tensor for name, tensor in held.named_parameters()}
