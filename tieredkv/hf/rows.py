"""Several rows in one `generate` call: prompts of different length, beams, sequences of one prompt.

Each prompt is restored and computed alone up to its last token, so its blocks are stored as ever, and exactly
what one row would have computed. Then the rows' caches are copied into one, padded on the left, and `generate`
goes on from there. What it generates stays outside the sessions' caches: the next prompt computes it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers.cache_utils import Cache, DynamicCache

from ..errors import BadInput
from .arguments import num_sequences
from .capture import CapturingCache, Tokens
from .live_model import LiveModel
from .probe import inner_model


@dataclass(frozen=True)
class Generated:
    """What `generate` gave for one prompt.

    Attributes:
        ids: int32 `[n]`: the prompt and the answer that was committed.
        text: that answer.
        sequences: int64 `[rows, m]`: every sequence that was returned, prompt included, ends padded.
    """

    ids: Tokens
    text: str
    sequences: torch.Tensor


@dataclass(frozen=True)
class Asked:
    """A session's prompt, computed up to its last token.

    Attributes:
        keep: commits the prompt with its answer; returns the answer's text.
    """

    tokens: Tokens
    cache: CapturingCache
    keep: Callable[[Tokens], str]


def prefill(live: LiveModel, cache: CapturingCache, tokens: Tokens) -> None:
    """Forward what `cache` does not hold of `tokens`; logits are not wanted."""
    start, device, inner = cache.num_tokens, live.device, inner_model(live.model)
    if start >= len(tokens):
        return
    arguments: dict[str, Any] = {
        "input_ids": torch.tensor(tokens[start:], dtype=torch.long, device=device)[None],
        "attention_mask": torch.ones((1, len(tokens)), dtype=torch.long, device=device),
        "position_ids": torch.arange(start, len(tokens), device=device)[None],
        "logits_to_keep": 1,
    }
    known = inspect.signature(type(inner).forward).parameters
    arguments = {name: value for name, value in arguments.items() if name in known}
    with torch.no_grad():
        live.model(**arguments, **{live.cache_name: cache, "use_cache": True})


def generate_rows(live: LiveModel, rows: Sequence[Asked], given: Mapping[str, Any]) -> list[Generated]:
    """One `generate` call over all rows; the first sequence of each is committed."""
    model, num_each = live.model, num_sequences(given, live.model)
    num_returned = int(given.get("num_return_sequences") or 1)
    longest = max(len(row.tokens) for row in rows)
    ids = np.zeros((len(rows), longest), dtype=np.int64)
    mask = np.zeros((len(rows), longest), dtype=np.int64)
    for number, row in enumerate(rows):
        ids[number, longest - len(row.tokens) :] = row.tokens
        mask[number, longest - len(row.tokens) :] = 1
    cache = _together(inner_model(model), [row.cache for row in rows], num_each)
    out = model.generate(
        **{
            **given,
            "input_ids": torch.from_numpy(ids).to(live.device),
            "attention_mask": torch.from_numpy(mask).to(live.device),
            live.cache_name: cache,
        }
    )
    sequences = getattr(out, "sequences", out).cpu()
    ends = _ends(model, given)
    results = []
    for number, row in enumerate(rows):
        mine = sequences[number * num_returned : (number + 1) * num_returned, longest - len(row.tokens) :]
        answer = mine[0, len(row.tokens) :].numpy()
        found = np.flatnonzero(np.isin(answer, ends))
        answer = answer[: int(found[0]) + 1] if found.size else answer
        tokens = np.concatenate([row.tokens, answer.astype(np.int32)])
        results.append(Generated(tokens, row.keep(tokens), mine))
    return results


def _ends(model: Any, given: Mapping[str, Any]) -> list[int]:
    """The ids that end an answer; what follows them in a row is padding."""
    configs = (given.get("generation_config"), getattr(model, "generation_config", None))
    values = (given.get("eos_token_id"), *(getattr(config, "eos_token_id", None) for config in configs))
    value = next((value for value in values if value is not None), None)
    return [] if value is None else [value] if isinstance(value, int) else list(value)


def _together(model: Any, caches: Sequence[CapturingCache], num_each: int) -> Cache:
    """A cache of all rows, each `num_each` times: shorter rows are padded on the left, as their ids are."""
    together = DynamicCache(config=model.config)
    longest = max(cache.num_tokens for cache in caches)
    if longest == 0:
        return together
    if caches[0].recurrent_layers():
        raise BadInput(
            "several rows of a model with recurrent states are not put together yet: ask one by one"
        )
    empty = [number for number, cache in enumerate(caches) if not cache.num_tokens]
    if empty:
        raise BadInput(f"row {empty[0]} is one token long, which cannot be padded beside longer ones")
    for index, layer in enumerate(together.layers):
        parts = [cache.layers[index] for cache in caches]
        if getattr(parts[0], "keys", None) is None:
            continue
        window = getattr(layer, "sliding_window", None)
        length = longest if window is None else min(longest, window - 1)
        states = [
            _stacked([getattr(p, name) for p in parts], length, num_each) for name in ("keys", "values")
        ]
        layer.lazy_initialization(states[0][:, :, :0], states[1][:, :, :0])
        layer.keys, layer.values = states
        if window is not None:
            layer.cumulative_length = longest
    return together


def _stacked(states: Sequence[torch.Tensor], length: int, num_each: int) -> torch.Tensor:
    """The last `length` tokens of each `[1, H, n, D]` as rows of one tensor, zeros before those of shorter ones."""
    padded = [F.pad(s[:, :, -length:], (0, 0, max(0, length - s.shape[2]), 0)) for s in states]
    return torch.cat(padded).repeat_interleave(num_each, dim=0)
