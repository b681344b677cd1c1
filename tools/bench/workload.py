"""Chains with K and V that anyone can make again from their seed, so that what comes back can be compared."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from tieredkv import TOKENS, BlockLayout, Identity, LayerGroup, TensorSpec

Tokens = npt.NDArray[np.int32]

IDENTITY, OTHER_IDENTITY = Identity(weights="bench"), Identity(weights="other")


def layout(part_nbytes: int, block_size: int = 32, window: int = 0) -> BlockLayout:
    """Parts of `part_nbytes`: one layer with a full group, and with `window` a second one with a window group."""
    width = part_nbytes // (2 * 2 * block_size)  # two tensors of two bytes a value
    assert width * 4 * block_size == part_nbytes, (
        f"{part_nbytes} bytes do not divide into {block_size} tokens"
    )
    groups = [LayerGroup("full", _layer(0, width))]
    if window:
        groups.append(LayerGroup("window", _layer(1, width), window=window))
    return BlockLayout(block_size, tuple(groups))


def _layer(number: int, width: int) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(number, name, (1, TOKENS, width), "bfloat16") for name in ("k", "v"))


def tokens(seed: int, num_tokens: int) -> Tokens:
    return np.random.default_rng(seed).integers(0, 1 << 17, num_tokens, dtype=np.int32)


def kv(seed: int, num_tokens: int, of: BlockLayout) -> dict[int, tuple[torch.Tensor, ...]]:
    """Random bytes for every tensor of every layer over `num_tokens`, by layer, in the layout's order."""
    generator = torch.Generator().manual_seed(seed)
    made: dict[int, tuple[torch.Tensor, ...]] = {}
    for group in of.groups:
        for spec in group.tensors:
            shape = [num_tokens if n == TOKENS else n for n in spec.shape]
            shape[-1] *= spec.torch_dtype.itemsize
            raw = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
            made[spec.layer] = (*made.get(spec.layer, ()), raw.view(spec.torch_dtype))
    return made


def every_anchor(of: BlockLayout, num_blocks: int) -> list[int]:
    """Boundaries, in tokens, that between them keep the window parts of every block."""
    step = max(1, *of.num_window_blocks)
    ends = [*range(step, num_blocks, step), num_blocks]
    return [end * of.block_size for end in ends]


def chains(num_blocks: int, blocks_a_chain: int) -> Iterator[tuple[int, int]]:
    """`(seed, number of blocks)` of chains that hold `num_blocks` together."""
    for seed, at in enumerate(range(0, num_blocks, blocks_a_chain)):
        yield seed, min(blocks_a_chain, num_blocks - at)
