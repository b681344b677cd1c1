"""Rivals that keep one file a block: by hand, and with `torch.save`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from .contestant import BlockStore


class Files(BlockStore):
    def holds(self, key: str) -> bool:
        return self.file(key).exists()

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.file(key).unlink()

    def file(self, key: str) -> Path:
        return Path(self.path, key)


class PlainFile(Files):
    """`write` into a temporary name, then `rename`; old files are overwritten in place before."""

    sync = False

    def put(self, keys: Sequence[str], blocks: torch.Tensor) -> None:
        for key, block in zip(keys, blocks, strict=True):
            self._write(f"{self.file(key)}.new", key, block)

    def replace(self, old: Sequence[str], new: Sequence[str], blocks: torch.Tensor) -> None:
        for gone, key, block in zip(old, new, blocks, strict=True):
            self._write(str(self.file(gone)), key, block)

    def _write(self, at: str, key: str, block: torch.Tensor) -> None:
        fd = os.open(at, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            done = os.write(fd, memoryview(block.numpy()))
            if done != len(block):
                raise OSError(f"{at}: {done} of {len(block)} bytes written")
            if self.sync:
                os.fdatasync(fd)
        finally:
            os.close(fd)
        os.rename(at, self.file(key))

    def get(self, keys: Sequence[str], out: torch.Tensor) -> None:
        for key, block in zip(keys, out, strict=True):
            with open(self.file(key), "rb", buffering=0) as file:
                done = file.readinto(memoryview(block.numpy()))
            if done != len(block):
                raise OSError(f"{self.file(key)}: {done} of {len(block)} bytes read")


class SyncedFile(PlainFile):
    """The same, and `fdatasync` before the rename."""

    sync = True


class TorchSave(Files):
    """`torch.save` of a tensor, `torch.load` with `weights_only`."""

    def put(self, keys: Sequence[str], blocks: torch.Tensor) -> None:
        for key, block in zip(keys, blocks, strict=True):
            own = torch.from_numpy(block.numpy().copy())  # of a view it would save the whole storage
            torch.save(own, self.file(key))

    def get(self, keys: Sequence[str], out: torch.Tensor) -> None:
        for key, block in zip(keys, out, strict=True):
            np.copyto(block.numpy(), torch.load(self.file(key), weights_only=True).numpy())
