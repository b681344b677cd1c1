"""vLLM's `fs` tier: its own batch calls, one a prompt as its manager makes them, with O_DIRECT, never synced."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from .files import Files


class VllmFs(Files):
    def put(self, keys: Sequence[str], blocks: torch.Tensor) -> None:
        from vllm.v1.kv_offload.tiering.fs.io import batch_store_block

        size = blocks.shape[1]
        batch_store_block(self._paths(keys), memoryview(blocks.numpy()), self._offsets(blocks), size)

    def get(self, keys: Sequence[str], out: torch.Tensor) -> None:
        from vllm.v1.kv_offload.tiering.fs.io import batch_load_block

        batch_load_block(self._paths(keys), memoryview(out.numpy()), self._offsets(out), out.shape[1])

    def _paths(self, keys: Sequence[str]) -> list[str]:
        return [str(Path(self.path, key)) for key in keys]

    def _offsets(self, blocks: torch.Tensor) -> list[int]:
        return [number * blocks.shape[1] for number in range(len(blocks))]
