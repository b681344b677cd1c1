"""What a live transformers model is: the identity of its KV, and how its blocks are laid out.

Layer kinds come from the stock cache that `generate` would build for the model's config; tensor names, shapes
and dtypes from a forward of a few tokens, so that what a release really caches counts and not what its
config suggests (MLA caches a latent in one release and expanded heads in another).
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..block.identity import Identity, encode
from ..block.layout import BlockLayout, LayerGroup, TensorSpec
from ..errors import Unsupported
from .probe import LayerFacts, inner_model, probe
from .probe import cache_argument as cache_argument
from .vision import media_ids
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

_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
_LEAST_INTERVAL = 1024
"""Tokens between the states that are kept within a long prompt: fewer would cost more than they save."""

_SCALING = ".scaling"
_weights: weakref.WeakKeyDictionary[torch.nn.Module, Weights] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class ModelFacts:
    """What capture and restore need to know of a model.

    Attributes:
        position_limit: the first position at which keys begin to depend on the length of the whole prompt
            (dynamic and long rope); None where they never do.
        continues: whether a forward of several tokens goes on from a recurrent state; some models ignore the
            state then, and are driven one token at a time.
        interval: tokens between the states that are kept within a long sequence; 0 without recurrent layers.
        media_ids: ids that stand for images, videos or sounds.
    """

    identity: Identity
    layout: BlockLayout
    layers: tuple[LayerFacts, ...]
    position_limit: int | None
    continues: bool = True
    interval: int = 0
    media_ids: frozenset[int] = frozenset()


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
    return _layout(probe(inner).layers, block_size)


def rehash(model: torch.nn.Module) -> None:
    """Forget what was hashed of `model`: needed after writing a parameter through `.data`."""
    _weights.pop(inner_model(model), None)


def read_model(model: torch.nn.Module, block_size: int = 32, salt: str = "") -> ModelFacts:
    """As `describe_model`, with the facts about each layer."""
    _refuse_prompts(model)
    inner = inner_model(model)
    _refuse_by_kind(inner)
    found = probe(inner)
    layers = found.layers
    hashes = _weights.setdefault(inner, Weights())
    hashes.expect(encode(_merged(inner)))
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
    layout = _layout(layers, block_size)
    limit = _position_limit(inner.config)
    media = media_ids(inner.config)
    return ModelFacts(identity, layout, layers, limit, found.continues, _interval(layout), media)


def fingerprint(model: torch.nn.Module) -> bytes:
    """A cheap mark that changes whenever `read_model` could give another identity; no byte is hashed."""
    inner = inner_model(model)
    tensors = [[n, t.data_ptr(), version_of(t), str(t.dtype)] for n, t in _named_tensors(inner).items()]
    tuned = [
        [name, sorted(parts), [float(t) for n, t in sorted(parts.items()) if n.endswith(_SCALING)]]
        for name, parts in _adapter_tensors(inner).items()
    ]
    config = _plain_config(inner)
    return encode(
        [
            tensors,
            tuned,
            _merged(inner),
            json.dumps(config, sort_keys=True),
            _attention(inner),
            inner.training,
        ]
    )


def _refuse_prompts(model: Any) -> None:
    """What a wrapper puts before every prompt is nothing that the model inside could tell."""
    for name, config in dict(getattr(model, "peft_config", None) or {}).items():
        if getattr(config, "is_prompt_learning", False):
            raise Unsupported(
                f"adapter {name!r} is a learned prompt ({type(config).__name__}): its tokens have no ids,"
                " and blocks are found by ids"
            )


def _refuse_by_kind(model: Any) -> None:
    config = getattr(model, "config", None)
    name = type(model).__name__
    if config is None or not hasattr(config, "get_text_config"):
        raise Unsupported(f"{name} is not a transformers model: it has no config")
    if getattr(config, "is_encoder_decoder", False):
        raise Unsupported(f"{name} is an encoder-decoder: its cross-attention KV is not cut into blocks")
    if model.training:
        raise Unsupported(f"{name} is in training mode, where KV is random: call model.eval() first")


def _layout(layers: tuple[LayerFacts, ...], block_size: int) -> BlockLayout:
    """One group for all full tensors, one for each window length, one for all recurrent states."""
    kinds: dict[tuple[str, int], list[TensorSpec]] = {}
    for layer in layers:
        for state in layer.states:
            kinds.setdefault((state.kind, state.window), []).append(state.spec(layer.index))
    order = sorted(kinds, key=lambda kind: (("full", "window", "recurrent").index(kind[0]), kind[1]))
    return BlockLayout(block_size, tuple(LayerGroup(k, tuple(kinds[k, w]), w) for k, w in order))


def _interval(layout: BlockLayout) -> int:
    """As often as the states cost no more than the attention's KV does, and never closer than a chunk of prefill."""
    nbytes = dict(zip((group.kind for group in layout.groups), layout.part_nbytes, strict=True))
    if "recurrent" not in nbytes:
        return 0
    num_blocks = -(-nbytes["recurrent"] // nbytes["full"]) if "full" in nbytes else 1
    return layout.block_size * max(num_blocks, _LEAST_INTERVAL // layout.block_size)


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
    states = sorted({state.dtype for layer in layers for state in layer.states})
    return {"weights": ",".join(weights), "kv": ",".join(states)}


def _framework(model: Any, layers: tuple[LayerFacts, ...]) -> dict[str, Any]:
    rows = [[x.index, x.class_name, x.window, [list(s.shape) for s in x.states]] for x in layers]
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


def _merged(model: torch.nn.Module) -> list[list[Any]]:
    """Which adapters are in the base weights, by layer."""
    return [
        [n, [str(a) for a in getattr(m, "merged_adapters", ())]]
        for n, m in _adapter_layers(model)
        if m.merged
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
                parts[f"{name}{_SCALING}"] = torch.tensor(float(scaling[adapter]))
    return {adapter: parts for adapter, parts in sorted(adapters.items()) if parts}


def _tensors_of(prefix: str, container: Any, adapter: str) -> dict[str, torch.Tensor]:
    if adapter not in container:
        return {}
    held = container[adapter]
    if isinstance(held, torch.Tensor):
        return {prefix: held}
    return {f"{prefix}.{name}": tensor for name, tensor in held.named_parameters()}
