"""Is what comes back what was stored? Every tensor of every layer, by the tier that it was read from."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch

import tieredkv
from tieredkv import TOKENS, BlockLayout, Config, LayerGroup, TensorSpec
from tieredkv.units import KiB, MiB

from . import workload
from .child import Say

BLOCK_SIZE = 32
NUM_BLOCKS = 24
NUM_CHAINS = 12
_WAIT_S = 30.0
_CONFIG = Config(
    device_nbytes=4 * MiB, host_nbytes=6 * MiB, disk_nbytes=128 * MiB, block_size=BLOCK_SIZE, deadline_s=_WAIT_S
)  # fmt: skip


def layout() -> BlockLayout:
    """Two full and three window layers; K and V differ in width, and one layer in dtype."""
    full = tuple(
        TensorSpec(layer, name, (2, TOKENS, width), "float32")
        for layer in (0, 1)
        for name, width in (("k", 64), ("v", 48))
    )
    window = tuple(
        TensorSpec(layer, name, (2, TOKENS, 32), "bfloat16" if layer == 4 else "float32")
        for layer in (2, 3, 4)
        for name in ("k", "v")
    )
    return BlockLayout(BLOCK_SIZE, (LayerGroup("full", full), LayerGroup("window", window, window=130)))


def store_and_compare(say: Say, path: str) -> dict[str, Any]:
    """Fill a store until device and host overflow, then load every chain and compare it."""
    of = layout()
    with tieredkv.open(path, _CONFIG) as cache:
        space = cache.namespace(workload.IDENTITY, of)
        for seed in range(NUM_CHAINS):
            num_tokens = NUM_BLOCKS * BLOCK_SIZE
            stored = space.store(
                workload.tokens(seed, num_tokens), workload.kv(seed, num_tokens, of), anchors=[num_tokens]
            )
            if stored.num_new != NUM_BLOCKS or not stored.wait(_WAIT_S):
                raise RuntimeError(f"chain {seed} was not taken: {stored}")
        compared = compare_all(space)
        cache.check()
    return compared


def compare_restarted(say: Say, path: str) -> dict[str, Any]:
    """In a new process: everything is on disk alone."""
    with tieredkv.open(path, _CONFIG) as cache:
        return compare_all(cache.namespace(workload.IDENTITY, layout()))


def compare_all(space: tieredkv.Namespace) -> dict[str, Any]:
    """Compare every chain, the last stored first, since loading it evicts nothing of the others."""
    differing, tensors, num_tokens = 0, 0, Counter[str]()
    for seed in reversed(range(NUM_CHAINS)):
        stored = workload.kv(seed, NUM_BLOCKS * BLOCK_SIZE, space.layout)
        # one token more, for one token of a prompt is always left to compute
        with space.load([*workload.tokens(seed, NUM_BLOCKS * BLOCK_SIZE).tolist(), 0]) as prefix:
            num_tokens.update(prefix.by_tier)
            if not prefix.num_tokens:
                continue
            wrong, compared = compare(prefix, stored)
            differing, tensors = differing + wrong, tensors + compared
    return {
        "differing": differing, "tensors": tensors, "tokens_by_tier": dict(num_tokens),
        "wanted_tokens": NUM_CHAINS * NUM_BLOCKS * BLOCK_SIZE,
    }  # fmt: skip


def compare(prefix: tieredkv.Prefix, stored: dict[int, tuple[torch.Tensor, ...]]) -> tuple[int, int]:
    """How many of a prefix's tensors differ in any bit from what was stored, and how many there are."""
    differing = compared = 0
    for group in prefix.layout.groups:
        seen = Counter[int]()
        for spec in group.tensors:
            whole = stored[spec.layer][seen[spec.layer]]
            seen[spec.layer] += 1
            assert spec.token_axis is not None, "these layers all have tokens"
            first = prefix.first_token(spec.layer, spec.name)
            wanted = whole.narrow(spec.token_axis, first, prefix.num_tokens - first).contiguous()
            got = prefix.gather(spec.layer, spec.name)
            same = got.shape == wanted.shape and torch.equal(got.view(torch.uint8), wanted.view(torch.uint8))
            differing, compared = differing + (not same), compared + 1
    return differing, compared


def part_sizes() -> str:
    return ", ".join(f"{nbytes // KiB} KiB" for nbytes in layout().part_nbytes)


def directory(root: Path) -> Path:
    return root / "equality"
