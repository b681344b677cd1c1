"""What is raced: whoever can put the blocks of a prompt on disk and bring them back.

Every contestant gets the same blocks in touched memory and brings them back into touched memory. It is made
anew in each process; what it finds in its directory is what an earlier one left there.
"""

from __future__ import annotations

import mmap
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

import numpy as np
import torch

_FIRST, _SECOND = "first", "second"


@dataclass(frozen=True)
class Load:
    """How many blocks of how many bytes."""

    num_blocks: int
    part_nbytes: int

    @property
    def nbytes(self) -> int:
        return self.num_blocks * self.part_nbytes

    def blocks(self) -> torch.Tensor:
        """uint8 `[num_blocks, part_nbytes]` of random bytes, the same in every process."""
        words = np.random.default_rng(0).integers(0, 1 << 63, self.nbytes // 8)
        blocks = self.memory()
        blocks.view(-1).copy_(torch.from_numpy(words.view(np.uint8)))
        return blocks

    def memory(self) -> torch.Tensor:
        """As much touched memory, aligned for direct I/O."""
        mapped = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            mapped.madvise(mmap.MADV_HUGEPAGE)
        memory = torch.from_numpy(np.frombuffer(mapped, np.uint8)).view(self.num_blocks, self.part_nbytes)
        return memory.fill_(1)


class Contestant(Protocol):
    """One way to keep blocks on disk. Each call returns the seconds that it took."""

    survives: bool
    """Whether another process finds the blocks again."""

    def fresh(self) -> float:
        """Put all blocks into an empty store."""
        ...

    def over(self) -> float:
        """Put as many blocks again where older ones leave for them."""
        ...

    def read(self) -> float:
        """Bring all blocks back."""
        ...

    def num_wrong(self) -> int:
        """Blocks of the last `read` that are not as they were put."""
        ...

    def close(self) -> None: ...


class BlockStore(ABC):
    """A rival that keeps one value a block: its subclass puts, gets and deletes."""

    survives: ClassVar[bool] = True

    def __init__(self, path: str, load: Load) -> None:
        self.path, self.load = path, load
        os.makedirs(path, exist_ok=True)
        self._blocks = load.blocks()
        self._out = load.memory()
        self.put(["one"], self._blocks[:1])  # whatever is imported or made at the first call is there now
        self.get(["one"], self._out[:1])
        self.delete(["one"])
        self._held = _SECOND if self.holds(self._keys(_SECOND)[0]) else _FIRST

    def fresh(self) -> float:
        return _timed(lambda: self.put(self._keys(_FIRST), self._blocks))

    def over(self) -> float:
        self.put(["one"], self._blocks[:1])  # whatever is imported or made at the first call is there now
        self.get(["one"], self._out[:1])
        self.delete(["one"])
        self._held = _SECOND
        return _timed(lambda: self.replace(self._keys(_FIRST), self._keys(_SECOND), self._blocks))

    def read(self) -> float:
        return _timed(lambda: self.get(self._keys(self._held), self._out))

    def num_wrong(self) -> int:
        same = (self._out == self._blocks).all(dim=1)
        self._out.zero_()
        return int((~same).sum())

    def close(self) -> None:
        """Give back what is open, memory included."""
        del self._blocks, self._out

    def replace(self, old: Sequence[str], new: Sequence[str], blocks: torch.Tensor) -> None:
        """Put `blocks` under `new` keys where the `old` ones leave."""
        self.delete(old)
        self.put(new, blocks)

    @abstractmethod
    def holds(self, key: str) -> bool: ...

    @abstractmethod
    def put(self, keys: Sequence[str], blocks: torch.Tensor) -> None:
        """Keep `blocks`, uint8 `[num_blocks, part_nbytes]`."""

    @abstractmethod
    def get(self, keys: Sequence[str], out: torch.Tensor) -> None:
        """Fill `out`, shaped as for `put`; OSError or KeyError for what is not there."""

    @abstractmethod
    def delete(self, keys: Sequence[str]) -> None: ...

    def _keys(self, which: str) -> list[str]:
        return [f"{which}-{number:05d}" for number in range(self.load.num_blocks)]


def drop_cached_pages(directory: Path) -> None:
    """Ask the kernel to forget what it caches of our own files; they are synced first, and none is mapped."""
    for path in directory.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def _timed(call: Callable[[], None]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
