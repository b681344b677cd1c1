"""A long prompt after a restart: its first token, cold and restored, beside a saved `DynamicCache` and llama.cpp.

Every round is a new process that first takes the prompt up from disk, then loads the same cache from a
safetensors file whose pages were dropped, and at last computes the whole prompt: both ratios are of one round.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from bench import child
from bench.child import Say
from bench.figures import Figure, at_least, shown, unmeasured
from transformers import DynamicCache

from . import llama
from .ratios import paired, ratio_at_most
from .setting import K, Setting, ask, cache_name, generate_s, loaded, opened, prompt, reused

NUM_TOKENS = 8 * K
LLAMA_TOKENS = 2 * K
MAX_OVER_COLD = 0.01
_EDITION, _SESSION = "restart", "before"


def figures(setting: Setting) -> Iterator[Figure]:
    """After a restart against cold prefill, against safetensors, and the speed-up against llama.cpp's."""
    long = _rounds(setting, NUM_TOKENS)
    size = f"{NUM_TOKENS // K}k"
    cold_ms, ours_ms, saved_ms = (
        median(r[key] for r in long) * 1e3 for key in ("cold_s", "ours_s", "saved_s")
    )
    over_cold = paired([r["ours_s"] for r in long], [r["cold_s"] for r in long])
    if any(r["by_tier"] != {"disk": r["boundary"]} for r in long):
        why = f"reused {[r['by_tier'] for r in long]}, not all of the prompt from disk"
        yield unmeasured(f"restart_ttft_{size}_over_cold_ratio", f"<= {MAX_OVER_COLD:g}", why)
        return
    yield ratio_at_most(
        f"restart_ttft_{size}_over_cold_ratio", over_cold, MAX_OVER_COLD,
        f"{ours_ms:.0f} ms, of it the restore {median(r['restore_s'] for r in long) * 1e3:.0f} ms; cold prefill by"
        f" stock transformers {cold_ms:.0f} ms; a new process each round, {long[0]['boundary']} tokens from disk",
    )  # fmt: skip
    yield ratio_at_most(
        f"restart_ttft_{size}_over_safetensors_ratio",
        paired([r["ours_s"] for r in long], [r["saved_s"] for r in long]), 1.0,
        f"a DynamicCache of the same tokens, saved with safetensors and loaded cold: {saved_ms:.0f} ms",
    )  # fmt: skip
    yield shown(f"cold_ttft_{size}_ms", cold_ms, "stock transformers")
    yield shown(f"cold_prefill_{size}_tokens_s", NUM_TOKENS / cold_ms * 1e3, "stock transformers")
    yield shown(f"restart_ttft_{size}_ms", ours_ms, "from disk, first use in a new process")
    yield from _beside_llama(setting, 1 / median(over_cold))


def _beside_llama(setting: Setting, speedup: float) -> Iterator[Figure]:
    """Our speed-up at 8k tokens over llama.cpp's at 2k, as the figure is named; both at 2k and 8k are shown."""
    name = f"restart_speedup_{NUM_TOKENS // K}k_over_llama_cpp_{LLAMA_TOKENS // K}k_ratio"
    short = _rounds(setting, LLAMA_TOKENS)
    ours = 1 / median(paired([r["ours_s"] for r in short], [r["cold_s"] for r in short]))
    yield shown(f"restart_speedup_{LLAMA_TOKENS // K}k_ratio", ours, "cold over restarted, ours")
    theirs: dict[int, float] = {}
    for num_tokens in (LLAMA_TOKENS, NUM_TOKENS):
        found = llama.rounds(setting, num_tokens)
        if isinstance(found, str):
            yield unmeasured(name, ">= 1", found)
            return
        theirs[num_tokens] = median(found["cold_s"]) / median(found["restored_s"])
        cold_ms, restored_ms, slot_ms = (
            median(found[key]) * 1e3 for key in ("cold_s", "restored_s", "slot_s")
        )
        yield shown(
            f"llama_cpp_restart_speedup_{num_tokens // K}k_ratio", theirs[num_tokens],
            f"4-bit: cold {cold_ms:.0f} ms, restored {restored_ms:.0f} ms, of it slot restore {slot_ms:.0f} ms",
        )  # fmt: skip
    yield at_least(
        name, speedup / theirs[LLAMA_TOKENS], 1.0, 0.0,
        f"ours {speedup:.0f} times at {NUM_TOKENS // K}k and {ours:.0f} at {LLAMA_TOKENS // K}k, llama.cpp's"
        f" {theirs[LLAMA_TOKENS]:.0f} at {LLAMA_TOKENS // K}k and {theirs[NUM_TOKENS]:.0f} at {NUM_TOKENS // K}k",
    )  # fmt: skip


def _rounds(setting: Setting, num_tokens: int) -> list[dict[str, Any]]:
    store, saved = setting.root / f"restart-{num_tokens}", setting.root / f"saved-{num_tokens}.safetensors"
    common = {"model": str(setting.model), "store": str(store), "saved": str(saved), "num_tokens": num_tokens}
    setting.progress.say(f"a prompt of {num_tokens} tokens, kept and saved")
    child.run(remember, **common)
    rounds = setting.progress.each(f"{num_tokens} tokens after a restart, and cold", range(setting.runs))
    return [child.run(resume, **common) for _ in rounds]


def remember(say: Say, model: str, store: str, saved: str, num_tokens: int) -> None:
    """Keep a prompt in a store, and as much of it as a store gives back in a stock cache, with safetensors."""
    live, tokenizer = loaded(model)
    ids = prompt(tokenizer, num_tokens, _EDITION)
    with opened(store, live, tokenizer) as chats, chats.session(_SESSION) as session:
        session.commit(ask(live, session, ids)[1])
        boundary = chats.boundary(num_tokens)
    stock = DynamicCache(config=live.config)
    with torch.inference_mode():
        live(torch.tensor([ids[:boundary]]), **{cache_name(live): stock}, logits_to_keep=1)
    save_cache(stock, saved)


def resume(say: Say, model: str, store: str, saved: str, num_tokens: int) -> dict[str, Any]:
    """The first token of that prompt in this new process: restored, from the saved file, and cold."""
    live, tokenizer = loaded(model)
    ids = prompt(tokenizer, num_tokens, _EDITION)
    with opened(store, live, tokenizer) as chats, chats.session("after") as session:
        ours_s, _ = ask(live, session, ids)
        by_tier, explain = reused(session), session.last_explain
        boundary = chats.boundary(num_tokens)
    drop_pages(saved)
    began = time.perf_counter()
    stock = load_cache(live, saved, boundary)
    given = {
        "input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, num_tokens, dtype=torch.long),
        cache_name(live): stock,
    }  # fmt: skip
    generate_s(live, ids, given)
    saved_s = time.perf_counter() - began
    return {
        "ours_s": ours_s, "saved_s": saved_s, "cold_s": generate_s(live, ids, {}), "by_tier": by_tier,
        "boundary": boundary, "restore_s": explain.restore_s if explain else 0.0,
    }  # fmt: skip


# A DynamicCache in a file


def save_cache(stock: DynamicCache, path: str) -> None:
    """Write it with safetensors, synced, and drop its pages."""
    from safetensors.torch import save_file

    layers = enumerate(stock.layers)
    tensors = {f"{i}.{n}": getattr(x, n).contiguous() for i, x in layers for n in ("keys", "values")}
    save_file(tensors, path)
    drop_pages(path)


def load_cache(model: Any, path: str, num_tokens: int) -> DynamicCache:
    """A stock cache of `num_tokens` from `save_cache`'s file, every page of it read."""
    from safetensors.torch import load_file

    tensors, stock = load_file(path), DynamicCache(config=model.config)
    for index, layer in enumerate(stock.layers):
        keys, values = tensors[f"{index}.keys"], tensors[f"{index}.values"]
        layer.lazy_initialization(keys[:, :, :0], values[:, :, :0])
        layer.keys, layer.values = keys, values
        if hasattr(layer, "cumulative_length"):
            layer.cumulative_length = num_tokens
    for tensor in tensors.values():
        tensor.view(-1)[::K].sum()  # the file is mapped: one number of each page brings it in
    return stock


def drop_pages(path: str) -> None:
    """Sync a file and take it out of the page cache; nothing may have it mapped."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
    assert Path(path).stat().st_size, f"{path} is empty"
