"""Runs a model over the part of a prompt whose boundaries are to be kept, before `generate` takes the rest.

A forward over many tokens leaves only its last recurrent state, so a prompt is cut where a state is wanted.
"""

from __future__ import annotations

from typing import Any

import torch

from .capture import CapturingCache, Tokens
from .probe import forward_arguments, inner_model

_MOST_STEPS = 256
"""Tokens that a model which does not continue by several at once is driven over one by one for an early anchor."""


def prefill(model: Any, cache: CapturingCache, tokens: Tokens) -> None:
    """Forward `tokens` behind what `cache` holds, as far as a later prompt may start from; one is always left.

    Nothing is done for a model without recurrent layers. One that cannot go on from a state by several tokens at
    once is driven so far that `generate` has a single token to compute.
    """
    facts, last = cache.facts, len(tokens) - 1
    if not facts.interval:
        return
    begun, size = cache.num_tokens, facts.layout.block_size
    every = range((begun // facts.interval + 1) * facts.interval, last + 1, facts.interval)
    stops = [b for b in cache.wanted if begun < b <= last]
    if facts.continues:
        cache.want(every)
        stops = sorted({*stops, *every})
    else:
        stops = _single_steps(stops, begun, last, size)
    inner: Any = inner_model(model)
    ids = torch.tensor(tokens, dtype=torch.long, device=inner.device)[None]
    with torch.no_grad():
        for stop in stops:
            start = cache.num_tokens
            inner(**forward_arguments(inner, cache, ids[:, start:stop], start))


def _single_steps(stops: list[int], begun: int, last: int, block_size: int) -> list[int]:
    """A first forward from nothing as far as the earliest stop that is near enough, then token by token."""
    if begun:
        return list(range(begun + 1, last + 1))
    near = [stop for stop in stops if last - stop <= _MOST_STEPS]
    first = near[0] if near else max(last // block_size * block_size, 1)
    return list(range(min(first, last), last + 1)) if last else []
