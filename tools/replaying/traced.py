"""What the advisory trace costs: one loop of stores and loads, with it and without, in turns."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from bench.child import Say

import tieredkv
from tieredkv import Config, Identity
from tieredkv.block.layout import TOKENS, BlockLayout, LayerGroup, TensorSpec
from tieredkv.table.trace import read_trace

_BLOCK_SIZE = 32
_NUM_PROMPTS, _NUM_TOKENS = 24, 32 * 32 + 1
_NUM_LAYERS = 4
_PAIRS = 45


def compare(say: Say, path: str) -> dict[str, Any]:
    """Median over pairs of what the loop takes with the trace, above what it takes without, in percent."""
    torch.set_num_threads(1)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    with _cache(f"{path}/without", False) as without, _cache(f"{path}/with", True) as traced:
        gc.collect()
        gc.freeze()  # a full collection falls into one loop or another, and costs more than the trace
        for number in range(_PAIRS + 1):
            order = (False, True) if number % 2 else (True, False)
            for trace in order:
                took = _loop(traced if trace else without, number)
                if number:  # the first warms up
                    seconds[trace].append(took)
    ratios = [on / off for on, off in zip(seconds[True], seconds[False], strict=True)]
    return {
        "percent": max(0.0, (median(ratios) - 1) * 100), "without_s": median(seconds[False]), "num_pairs": _PAIRS,
        "num_events": sum(len(records) for records in read_trace(f"{path}/with")),
    }  # fmt: skip


def _layout() -> BlockLayout:
    specs = [
        TensorSpec(n, name, (2, TOKENS, 64), "bfloat16") for n in range(_NUM_LAYERS) for name in ("k", "v")
    ]
    return BlockLayout(_BLOCK_SIZE, (LayerGroup("full", tuple(specs)),))


def _cache(path: str, trace: bool) -> tieredkv.TieredCache:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    config = Config(
        device_nbytes="32MiB", host_nbytes="32MiB", disk_nbytes="1GiB", block_size=_BLOCK_SIZE, trace=trace
    )
    return tieredkv.open(path, config)


def _loop(cache: tieredkv.TieredCache, number: int) -> float:
    """Store new prompts and load each twice; the tiers above hold about half of them. Processor time of the process
    and all its threads: waiting for a busy machine is no cost of ours."""
    space = cache.namespace(Identity(weights="ab" * 32), _layout())
    rng = np.random.default_rng(number)
    prompts = [rng.integers(0, 50_000, _NUM_TOKENS) for _ in range(_NUM_PROMPTS)]
    tensor = torch.ones(2, _NUM_TOKENS, 64, dtype=torch.bfloat16)
    kv = dict.fromkeys(range(_NUM_LAYERS), (tensor, tensor))
    began = time.process_time()
    for prompt in prompts:
        space.store(prompt, kv).wait(10.0)
    for prompt in prompts * 2:
        with space.load(prompt) as prefix:
            assert prefix.num_tokens == _NUM_TOKENS // _BLOCK_SIZE * _BLOCK_SIZE, (
                f"{prefix.num_tokens} tokens came back"
            )
    return time.process_time() - began
