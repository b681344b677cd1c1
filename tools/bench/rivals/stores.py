"""Rivals that are a store of values: LMDB and diskcache."""

from __future__ import annotations

from collections.abc import Sequence

import lmdb
import numpy as np
import torch

from .contestant import BlockStore, Load


class LmdbValues(BlockStore):
    """A value a block, a synced write transaction a prompt."""

    def __init__(self, path: str, load: Load) -> None:
        self._env = lmdb.open(path, map_size=4 * load.nbytes, subdir=True)
        super().__init__(path, load)

    def holds(self, key: str) -> bool:
        with self._env.begin() as txn:
            return txn.get(key.encode()) is not None

    def put(self, keys: Sequence[str], blocks: torch.Tensor) -> None:
        with self._env.begin(write=True) as txn:
            for key, block in zip(keys, blocks, strict=True):
                txn.put(key.encode(), memoryview(block.numpy()))

    def get(self, keys: Sequence[str], out: torch.Tensor) -> None:
        with self._env.begin(buffers=True) as txn:
            for key, block in zip(keys, out, strict=True):
                np.copyto(block.numpy(), np.frombuffer(txn.get(key.encode()), np.uint8))

    def delete(self, keys: Sequence[str]) -> None:
        with self._env.begin(write=True) as txn:
            for key in keys:
                txn.delete(key.encode())

    def close(self) -> None:
        self._env.close()
        super().close()


class DiskCache(BlockStore):
    """diskcache as it comes, with room for everything."""

    def __init__(self, path: str, load: Load) -> None:
        from diskcache import Cache

        self._cache = Cache(path, size_limit=4 * load.nbytes)
        super().__init__(path, load)

    def holds(self, key: str) -> bool:
        return key in self._cache

    def put(self, keys: Sequence[str], blocks: torch.Tensor) -> None:
        for key, block in zip(keys, blocks, strict=True):
            self._cache.set(key, block.numpy().tobytes())

    def get(self, keys: Sequence[str], out: torch.Tensor) -> None:
        for key, block in zip(keys, out, strict=True):
            np.copyto(block.numpy(), np.frombuffer(self._cache[key], np.uint8))

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            del self._cache[key]

    def close(self) -> None:
        self._cache.close()
        super().close()
