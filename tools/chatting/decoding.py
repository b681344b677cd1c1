"""Decode speed with our cache layers against a stock `DynamicCache`, both in one `generate`, turn by turn."""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import torch
from bench import child
from bench.child import Say
from bench.figures import Figure, shown
from transformers import DynamicCache
from transformers.generation.streamers import BaseStreamer

from .ratios import paired, ratio_at_least
from .setting import K, Setting, cache_name, loaded, opened, prompt

NUM_TOKENS = 4 * K
_NUM_NEW = 48


def figures(setting: Setting) -> Iterator[Figure]:
    setting.progress.say(f"decoding {_NUM_NEW} tokens behind {NUM_TOKENS}, with our layers and stock ones")
    found = child.run(
        decode, model=str(setting.model), store=str(setting.root / "decode"), num_tokens=NUM_TOKENS,
        rounds=setting.runs + 2,
    )  # fmt: skip
    size = f"{NUM_TOKENS // K}k"
    yield ratio_at_least(
        f"decode_{size}_over_stock_ratio", paired(found["ours"], found["stock"]), 1.0,
        f"{median(found['ours']):.2f} tokens/s, stock {median(found['stock']):.2f}; {_NUM_NEW} tokens each, blocks"
        " stored and spilled meanwhile",
    )  # fmt: skip
    yield shown(f"decode_{size}_tokens_s", median(found["ours"]))
    yield shown(f"decode_{size}_stock_tokens_s", median(found["stock"]), "stock transformers, DynamicCache")


class Times(BaseStreamer):  # type: ignore[misc]
    """When each token came; the first `put` is the prompt's."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.at.append(time.perf_counter())

    def end(self) -> None:
        pass

    @property
    def tokens_s(self) -> float:
        """Tokens a second from the first generated one on."""
        first, last = self.at[1], self.at[-1]
        return (len(self.at) - 2) / (last - first)


def decode(say: Say, model: str, store: str, num_tokens: int, rounds: int) -> dict[str, list[float]]:
    """Tokens a second of both, in turns that change who goes first."""
    live, tokenizer = loaded(model)
    ids = torch.tensor([prompt(tokenizer, num_tokens, "decode")])
    found: dict[str, list[float]] = {"ours": [], "stock": []}
    kept = _prefilled(live, ids)
    with opened(store, live, tokenizer) as chats:
        for number in range(rounds + 1):
            ways = ["ours", "stock"] if number % 2 else ["stock", "ours"]
            for way in ways:
                if way == "stock":
                    given = _given(live, ids, _copied(live, kept, num_tokens - 1))
                    speed = _speed(live, given)[0]
                else:
                    with chats.session(f"round {number}") as session:
                        speed, out = _speed(live, session.attach(ids))
                        session.commit(out)
                if number:  # the first round stores the prompt
                    found[way].append(speed)
    return found


def _speed(model: Any, given: dict[str, Any]) -> tuple[float, Any]:
    times = Times()
    with torch.inference_mode():
        out = model.generate(**given, max_new_tokens=_NUM_NEW, do_sample=False, streamer=times)
    return times.tokens_s, out


def _prefilled(model: Any, ids: torch.Tensor) -> DynamicCache:
    stock = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(ids[:, :-1], **{cache_name(model): stock}, logits_to_keep=1)
    return stock


def _copied(model: Any, kept: DynamicCache, num_tokens: int) -> DynamicCache:
    """A stock cache of the same states, for one more `generate`."""
    stock = DynamicCache(config=model.config)
    for layer, source in zip(stock.layers, kept.layers, strict=True):
        layer.lazy_initialization(source.keys[:, :, :0], source.values[:, :, :0])
        layer.keys, layer.values = source.keys.clone(), source.values.clone()
        if hasattr(layer, "cumulative_length"):
            layer.cumulative_length = num_tokens
    return stock


def _given(model: Any, ids: torch.Tensor, stock: DynamicCache) -> dict[str, Any]:
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), cache_name(model): stock}
