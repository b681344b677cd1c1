"""The restore alone: from ids in hand to a cache that is ready for the forward, beside a raw read of its bytes.

K and V are random, in the shape of the model. Each round opens the store anew, so that all comes from disk, into
memory that was used before, as the raw read's was: what else would be measured is how fast pages are cleared.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from bench import child, raw, workload
from bench.child import Say
from bench.figures import Figure, shown
from transformers import DynamicCache

from tieredkv import Namespace
from tieredkv.block.anchors import needed_parts
from tieredkv.block.layout import BlockLayout
from tieredkv.hf.identity import layout_of
from tieredkv.hf.live_model import LiveModel
from tieredkv.hf.restore import restore
from tieredkv.units import MiB, format_nbytes

from .ratios import paired, ratio_at_most
from .restart import drop_pages, load_cache, save_cache
from .setting import Chats, K, Setting, keep_memory, load, opened

NUM_TOKENS = 8 * K
MAX_OVER_RAW = 2.0

KV = dict[int, tuple[torch.Tensor, ...]]


def figures(setting: Setting) -> Iterator[Figure]:
    setting.progress.say(f"restoring {NUM_TOKENS} tokens, beside a raw read and a safetensors file")
    found = child.run(
        restores, model=str(setting.model), path=str(setting.root / "restoring"), num_tokens=NUM_TOKENS,
        rounds=setting.runs,
    )  # fmt: skip
    size, ours = f"{NUM_TOKENS // K}k", found["ours_s"]
    raw_s = [(one + other) / 2 for one, other in zip(found["before_s"], found["after_s"], strict=True)]
    ours_ms, raw_ms, saved_ms = (median(x) * 1e3 for x in (ours, raw_s, found["saved_s"]))
    raw_spread = median(abs(a / b - 1) for a, b in zip(found["before_s"], found["after_s"], strict=True))
    yield ratio_at_most(
        f"restore_{size}_over_raw_read_ratio", paired(ours, raw_s), MAX_OVER_RAW,
        f"{ours_ms:.1f} ms, raw O_DIRECT read of {format_nbytes(found['nbytes'])} at depth {found['depth']}"
        f" {raw_ms:.1f} ms, raw against raw {raw_spread:.0%}",
    )  # fmt: skip
    yield ratio_at_most(
        f"restore_{size}_over_safetensors_ratio", paired(ours, found["saved_s"]), 1.0,
        f"a DynamicCache of the same bytes, saved with safetensors, pages dropped: {saved_ms:.1f} ms",
    )  # fmt: skip
    yield shown(f"restore_{size}_first_ms", found["first_s"] * 1e3, "into memory that was never touched")


def restores(say: Say, model: str, path: str, num_tokens: int, rounds: int) -> dict[str, Any]:
    """Seconds of restores, of raw reads just before and after, and of loads of saved caches."""
    live, tokenizer = load(Path(model))
    keep_memory()
    layout = layout_of(live)
    nbytes = needed_nbytes(layout, num_tokens)
    kv, ids = workload.kv(0, num_tokens, layout), workload.tokens(0, num_tokens)
    with opened(path, live, tokenizer) as chats:
        _store(chats, ids, kv)
    with opened(path, live, tokenizer) as chats:
        found: dict[str, Any] = {"nbytes": nbytes, "first_s": _restore_s(chats, ids)}
    saved = [f"{path}-{number}.safetensors" for number in range(rounds)]
    for file in saved:
        save_cache(stock_cache(live, layout, kv, num_tokens - 1), file)
    disk = raw.RawFile(f"{path}.raw", -(-nbytes // MiB) * MiB, MiB, 2 * rounds + len(raw.DEPTHS))
    for region in range(2 * rounds + len(raw.DEPTHS)):
        disk.write(region, 2)
    found["depth"] = disk.best_read_depth(2 * rounds)
    for number in range(rounds):
        with opened(path, live, tokenizer, spill="evict") as chats:
            _touch(chats, ids, kv)
            seconds = {
                "before_s": disk.read(2 * number, found["depth"]),
                "ours_s": _restore_s(chats, ids),
                "after_s": disk.read(2 * number + 1, found["depth"]),
                "saved_s": _load_saved_s(live, saved[number], num_tokens - 1),
            }
        for key, value in seconds.items():
            found.setdefault(key, []).append(value)
    disk.close()
    return found


def _store(chats: Chats, ids: Any, kv: KV, salt: str = "") -> Namespace:
    space = LiveModel(chats.kv, chats.live.model, salt).space
    stored = space.store(ids, kv, anchors=[chats.boundary(len(ids))])
    if stored.num_refused:
        raise RuntimeError(f"{len(ids)} tokens were not kept: {stored}")
    return space


def _touch(chats: Chats, ids: Any, kv: KV) -> None:
    """Use as much of the device tier and of working memory as will be used, and let it go."""
    passing = _store(chats, ids, kv, salt="passing")
    restore(passing, chats.live.new_cache(), ids)
    gc.collect()  # a cache lies in circles of references
    chats.kv.purge(passing)


def _restore_s(chats: Chats, ids: Any) -> float:
    cache = chats.live.new_cache()
    began = time.perf_counter()
    got = restore(chats.space, cache, ids)
    seconds = time.perf_counter() - began
    if got.by_tier != {"disk": chats.boundary(len(ids))}:
        raise RuntimeError(f"restored {got}, not {chats.boundary(len(ids))} tokens from disk")
    return seconds


def _load_saved_s(model: Any, path: str, num_tokens: int) -> float:
    drop_pages(path)
    began = time.perf_counter()
    load_cache(model, path, num_tokens)
    return time.perf_counter() - began


def stock_cache(model: Any, layout: BlockLayout, kv: KV, num_tokens: int) -> DynamicCache:
    """A stock cache that holds the first `num_tokens` of `kv`, of window layers the last of them."""
    stock = DynamicCache(config=model.config)
    for group in layout.groups:
        first = max(0, num_tokens - (group.window - 1)) if group.window else 0
        for layer in {spec.layer for spec in group.tensors}:
            states = [tensor[None, :, first:num_tokens] for tensor in kv[layer]]
            stock.layers[layer].keys, stock.layers[layer].values = states
    return stock


def needed_nbytes(layout: BlockLayout, num_tokens: int) -> int:
    """Bytes of all parts that a restore of a prompt of `num_tokens` reads."""
    needed = needed_parts(layout, (num_tokens - 1) // layout.block_size)
    return sum((end - first) * layout.part_nbytes[group] for group, first, end in needed)
