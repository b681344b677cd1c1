"""Is what a restart gives back the same, bit for bit, as what was never evicted?

The yardstick is a stock `DynamicCache` driven by forward calls of the same lengths: the prompt in one call,
the answer token by token up to the restored boundary, then the rest in one call. Another cut of the same
tokens would round differently in the last bits, with any cache.
"""

from __future__ import annotations

from typing import Any

import torch

_NUM_PROMPT_TOKENS = 1536
"""Of the document: three windows of the demo's own model, and half the time of the whole."""

_NUM_ANSWER_TOKENS = 40
"""More than a block, so that a boundary falls into the answer, where calls are one token long."""

_NUM_TAIL_TOKENS = 8


def remember(session: Any, model: Any, document: list[int]) -> tuple[list[int], int]:
    """Generate after the head of `document`, keep it in `session`; returns all tokens, and how many it had."""
    prompt = document[:_NUM_PROMPT_TOKENS]
    attached = session.attach(torch.tensor([prompt]))
    limits = {"min_new_tokens": _NUM_ANSWER_TOKENS, "max_new_tokens": _NUM_ANSWER_TOKENS}
    with torch.inference_mode():
        out = model.generate(**attached, **limits, do_sample=False)
    session.commit(out)
    return out[0].tolist(), len(prompt)


def compare(session: Any, model: Any, tokens: list[int], num_prompt_tokens: int) -> tuple[int, int]:
    """How many elements of K and V, and how many of the logits after the tail, are not the same bits.

    `session` is what a restart found of the tokens of `remember`.
    """
    from transformers import DynamicCache

    ids = torch.tensor([tokens + tokens[:_NUM_TAIL_TOKENS]])
    attached = session.attach(ids)
    keyword, restored = next((k, v) for k, v in attached.items() if hasattr(v, "get_seq_length"))
    stock = DynamicCache(config=model.config)
    boundary = int(restored.get_seq_length())
    assert num_prompt_tokens <= boundary < len(tokens), f"{boundary} tokens restored of {len(tokens)}"
    steps = [num_prompt_tokens, *range(num_prompt_tokens + 1, boundary + 1)]
    with torch.inference_mode():
        for start, end in zip([0, *steps], steps, strict=False):
            model(ids[:, start:end], **{keyword: stock}, logits_to_keep=1)
        kv_differences = sum(
            _differences(ours.keys, theirs.keys) + _differences(ours.values, theirs.values)
            for ours, theirs in zip(restored.layers, stock.layers, strict=True)
        )
        ours, theirs = (model(ids[:, boundary:], **{keyword: cache}).logits for cache in (restored, stock))
    return kv_differences, _differences(ours, theirs)


def top_two_gap(model: Any, tokens: list[int]) -> float:
    """By how much the most likely next token leads the second, in logits, without any cache of ours."""
    with torch.inference_mode():
        logits = model(torch.tensor([tokens]), logits_to_keep=1).logits[0, -1]
    first, second = logits.topk(2).values.tolist()
    return float(first - second)


def _differences(ours: torch.Tensor, theirs: torch.Tensor) -> int:
    """Elements that differ; of the longer one the last positions count, since a window keeps no more."""
    length = min(ours.shape[-2], theirs.shape[-2])
    return int((ours[..., -length:, :] != theirs[..., -length:, :]).sum())
