"""Several rows in one `generate` call: prompts of different length, beams, sequences of one prompt.

Each prompt is restored and computed alone up to its last token, so its blocks are stored as ever, and exactly
what one row would have computed. Then the rows' caches are copied into one, padded on the left, and `generate`
goes on from there. What it generates stays outside the sessions' caches: the next prompt computes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache, DynamicCache

from ..errors import BadInput
from .arguments import chosen, is_assisted, num_sequences, prompt_readers
from .capture import CapturingCache, Tokens
from .live_model import LiveModel
from .probe import forward_arguments, inner_model
from .row_ends import record_ends, row_enders, stop_ids
from .states import State, is_pooling, put, read, states_of

_COUNTING = frozenset(["max_length", "min_length", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"])
"""Arguments that count a prompt's ids, or runs of them, and so what pads it too."""


@dataclass(frozen=True)
class Generated:
    """What `generate` gave for one prompt.

    Attributes:
        ids: int32 `[n]`: the prompt and the answer that was committed.
        text: that answer.
        sequences: int64 `[rows, m]`: every sequence that was returned, prompt included, ends padded.
    """

    ids: Tokens = field(repr=False)
    text: str = field(repr=False)
    sequences: torch.Tensor = field(repr=False)


@dataclass(frozen=True)
class Asked:
    """A session's prompt, computed up to its last token.

    Attributes:
        keep: commits the prompt with its answer; returns the answer's text.
    """

    tokens: Tokens = field(repr=False)
    cache: CapturingCache
    keep: Callable[[Tokens], str]


def compute_rest(live: LiveModel, cache: CapturingCache, tokens: Tokens) -> None:
    """Forward what `cache` does not hold of `tokens`."""
    start, inner = cache.num_tokens, inner_model(live.model)
    if start < len(tokens):
        ids = torch.tensor(tokens[start:], dtype=torch.long, device=live.device)[None]
        with torch.no_grad():
            inner(**forward_arguments(inner, cache, ids, start))


def check_rows(live: LiveModel, given: Mapping[str, Any], num_rows: int) -> None:
    """That so many rows can go through one call with these arguments, each with the answer it would get alone.

    Raises:
        BadInput: naming the argument, and the way out.
    """
    model = live.model
    if (chosen("num_beams", given, model) or 1) > 1:
        if enders := row_enders(given, model):
            raise BadInput(
                f"{', '.join(enders)}: which beam ended where cannot be told, so neither what the answer is;"
                " leave it out, or num_beams"
            )
    elif is_assisted(given, model):
        raise BadInput(
            "assistant_model, prompt_lookup_num_tokens: drafts go with one sequence of one session; use its"
            " generate(), without num_return_sequences"
        )
    readers = prompt_readers(given, model, 0) if num_rows > 1 else []
    if readers and not live.new_cache().counts_tokens:
        raise BadInput(
            f"{', '.join(readers)}: needs the whole prompt, and of several rows this model is given the last ids"
            " alone; leave it out, or generate one row at a time"
        )


def generate_rows(live: LiveModel, rows: Sequence[Asked], given: Mapping[str, Any]) -> list[Generated]:
    """One `generate` call over all rows; the first sequence of each is committed.

    Raises:
        BadInput: an argument that would read what pads shorter rows; nothing was generated.
    """
    readers = sorted(_COUNTING & {*prompt_readers(given, live.model, 0)})
    if readers and len({len(row.tokens) for row in rows}) > 1:
        raise BadInput(
            f"{', '.join(readers)}: the rows are of different length, and what pads the shorter ones would be read as"
            " their prompt; leave it out, or generate rows of one length together"
        )
    num_returned = int(chosen("num_return_sequences", given, live.model) or 1)
    longest = max(len(row.tokens) for row in rows)
    pads = [longest - len(row.tokens) for row in rows]
    ids, mask = (np.zeros((len(rows), longest), dtype=np.int64) for _ in range(2))
    for number, row in enumerate(rows):
        ids[number] = row.tokens[
            0
        ]  # releases before 5.24 take a pad for a part of the prompt: one that is there
        ids[number, pads[number] :], mask[number, pads[number] :] = row.tokens, 1
    cache = _together(live, [row.cache for row in rows], num_sequences(given, live.model))
    # Where no layer counts tokens generate cannot tell what the cache holds: it is given the last ids alone.
    tells = rows[0].cache.counts_tokens or not any(row.cache.num_tokens for row in rows)
    skipped = 0 if tells else longest - 1
    inputs = {
        "input_ids": torch.from_numpy(ids[:, skipped:]).to(live.device),
        "attention_mask": torch.from_numpy(mask[:, skipped:]).to(live.device),
        live.cache_name: cache,
        "use_cache": True,
    }
    recorded, ends = record_ends(given, live.model)
    out = live.model.generate(**{**recorded, **inputs})
    new = getattr(out, "sequences", out).cpu()[:, longest - skipped :]
    stops = stop_ids(given, live.model)
    results = []
    for number, (row, answers) in enumerate(zip(rows, new.split(num_returned), strict=True)):
        answer = answers[0].numpy()[: ends.of(number * num_returned, longest - skipped)]
        found = np.flatnonzero(np.isin(answer, stops))
        answer = answer[: int(found[0]) + 1] if found.size else answer
        tokens = np.concatenate([row.tokens, answer.astype(np.int32)])
        prompt = torch.from_numpy(row.tokens.astype(np.int64)).expand(num_returned, -1)
        results.append(Generated(tokens, row.keep(tokens), torch.cat([prompt, answers], dim=1)))
    return results


def _together(live: LiveModel, caches: Sequence[CapturingCache], num_each: int) -> Cache:
    """A cache of all rows, each `num_each` times: shorter rows are padded on the left, as their ids are."""
    together = DynamicCache(config=inner_model(live.model).config)
    longest = max(cache.num_tokens for cache in caches)
    fullest = next(cache for cache in caches if cache.num_tokens == longest)
    for index, layer in enumerate(together.layers if longest else ()):
        if is_pooling(layer) and any(cache.num_tokens != longest for cache in caches):
            raise BadInput("rows of different length cannot go together: this model pools tokens by position")
        window = getattr(layer, "sliding_window", None)
        length = longest if window is None else min(longest, window - 1)
        stacked: dict[str, torch.Tensor] = {}
        for state in states_of(fullest.layers[index]):
            tensors = [read(cache.layers[index], state) if cache.num_tokens else None for cache in caches]
            whole = [tensor for tensor in tensors if tensor is not None]
            rows = whole if is_pooling(layer) else _rows(tensors, state, length)
            stacked[state.name] = torch.cat(rows, state.batch_axis).repeat_interleave(
                num_each, state.batch_axis
            )
        put(layer, stacked, longest)
        if stacked and window is not None:
            layer.cumulative_length = longest
    return together


def _rows(tensors: Sequence[torch.Tensor | None], state: State, length: int) -> list[torch.Tensor]:
    """One state of every row, equally long: the last `length` tokens, zeros before those of shorter rows.

    Nothing is held of a row that is one token long: that is a state of zeros.
    """
    like = next(tensor for tensor in tensors if tensor is not None)
    axis = state.token_axis
    if axis is None:
        return [torch.zeros_like(like) if tensor is None else tensor for tensor in tensors]
    rows = []
    for tensor in tensors:
        held = like.narrow(axis, 0, 0) if tensor is None else tensor
        held = held.narrow(axis, max(0, held.shape[axis] - length), min(length, held.shape[axis]))
        shape = [length - held.shape[axis] if a == axis else n for a, n in enumerate(held.shape)]
        rows.append(torch.cat([held.new_zeros(shape), held], axis))
    return rows
