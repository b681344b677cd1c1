"""LMCache's local disk backend with O_DIRECT and chunks of at most 32 MiB, never synced.

Its index lives in memory alone, so no other process finds its files: it is read cold by the process that
wrote, which O_DIRECT makes fair. Its staging memory is where blocks come from and where they arrive.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from typing import Any, ClassVar

import torch

from tieredkv.units import GiB, MiB

from .contestant import Load

_MAX_CHUNK_NBYTES = 32 * MiB
_WAIT_S = 120.0


class LmcacheDisk:
    survives: ClassVar[bool] = False

    def __init__(self, path: str, load: Load) -> None:
        os.environ["LMCACHE_TRACK_USAGE"] = "false"
        os.makedirs(path, exist_ok=True)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        per_chunk = _blocks_a_chunk(load)
        self._chunks = load.blocks().view(-1, per_chunk * load.part_nbytes)
        self._cpu, self._disk = _backends(path, 3 * load.nbytes, self._loop)
        self._sources = [self._staged(chunk) for chunk in self._chunks]
        self._read: list[Any] = []
        self._which = 0

    def fresh(self) -> float:
        return self._put()

    def over(self) -> float:
        began = time.perf_counter()
        for key in self._keys():
            self._disk.remove(key)
        took = time.perf_counter() - began
        self._which += 1
        return took + self._put()

    def read(self) -> float:
        for chunk in self._read:
            chunk.ref_count_down()
        began = time.perf_counter()
        self._read = self._disk.batched_get_blocking(self._keys())
        took = time.perf_counter() - began
        if any(chunk is None for chunk in self._read):
            raise OSError("a chunk is not there")
        return took

    def num_wrong(self) -> int:
        pairs = zip(self._read, self._chunks, strict=True)
        return sum(not torch.equal(_bytes(got), chunk) for got, chunk in pairs)

    def close(self) -> None:
        self._disk.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _put(self) -> float:
        done = threading.Semaphore(0)
        keys = self._keys()
        began = time.perf_counter()
        self._disk.batched_submit_put_task(
            keys, self._sources, on_complete_callback=lambda _key: done.release()
        )
        for key in keys:
            if not done.acquire(timeout=_WAIT_S):
                raise OSError(f"{key} was not written within {_WAIT_S:g} s")
        return time.perf_counter() - began

    def _keys(self) -> list[Any]:
        from lmcache.utils import CacheEngineKey

        first = self._which << 20
        return [CacheEngineKey("bench", 1, 0, first + n, torch.bfloat16) for n in range(len(self._chunks))]

    def _staged(self, chunk: torch.Tensor) -> Any:
        from lmcache.v1.memory_management import MemoryFormat

        shape = torch.Size((2, 1, 256, len(chunk) // (2 * 256 * 2)))
        staged = self._cpu.allocate(shape, torch.bfloat16, MemoryFormat.KV_2LTD)
        _bytes(staged).copy_(chunk)
        return staged


def _backends(path: str, nbytes: int, loop: asyncio.AbstractEventLoop) -> tuple[Any, Any]:
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.memory_allocators.mixed_memory_allocator import MixedMemoryAllocator
    from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
    from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend

    config = LMCacheEngineConfig.from_defaults(
        local_cpu=False,
        local_disk=path,
        max_local_disk_size=4 * nbytes / GiB,
        extra_config={"use_odirect": True},
    )
    memory = MixedMemoryAllocator(nbytes, align_bytes=4096)
    memory.buffer.fill_(1)  # touched, as everybody's memory is
    cpu = LocalCPUBackend(config, memory_allocator=memory, dst_device="cpu")
    return cpu, LocalDiskBackend(config, loop, cpu, dst_device="cpu")


def _bytes(staged: Any) -> torch.Tensor:
    whole: torch.Tensor = staged.tensor
    return whole.view(torch.uint8).view(-1)


def _blocks_a_chunk(load: Load) -> int:
    """The most blocks that go into a chunk and divide them all."""
    most = max(1, _MAX_CHUNK_NBYTES // load.part_nbytes)
    return max(n for n in range(1, min(most, load.num_blocks) + 1) if load.num_blocks % n == 0)
