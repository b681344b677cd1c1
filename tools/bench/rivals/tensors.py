"""A rival of one safetensors file a block."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from .files import Files


class Safetensors(Files):
    """One safetensors file a block; loading maps it, so the copy is what reads it."""

    def put(self, keys: Sequence[str], blocks: torch.Tensor) -> None:
        for key, block in zip(keys, blocks, strict=True):
            save_file({"kv": block}, self.file(key))

    def get(self, keys: Sequence[str], out: torch.Tensor) -> None:
        for key, block in zip(keys, out, strict=True):
            np.copyto(block.numpy(), load_file(self.file(key))["kv"].numpy())
