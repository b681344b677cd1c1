"""This package as a contestant: parts that lie in the device tier are spilled, and loaded back verified."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import torch

import tieredkv
from tieredkv.units import MiB

from .. import workload
from ..transfer import Size, load_s
from .contestant import Load

_WAIT_S = 120.0
_NUM_CHAINS = 3
_OTHER_CHAIN = 1000
_MAX_CHAINS = 8


class Durable:
    """Directly to disk, checksummed, logged and synced at the end (`flush`)."""

    survives, durability, disk_io = True, "flush", "direct"

    def __init__(self, path: str, load: Load) -> None:
        self._path, self._size = path, Size(load.part_nbytes, load.num_blocks)
        self._layout = self._size.layout()
        self._kv = workload.kv(0, self._size.num_tokens, self._layout)
        found = Path(path, "roomy").exists()
        self._cache = self._open("roomy", self._config())
        self._space = self._cache.namespace(workload.IDENTITY, self._layout)
        self._chain = -1
        if found:
            self.read()  # touches the device memory
        else:
            self._touch()

    def fresh(self) -> float:
        """The first chain, timed; and two more, so that a chain to be loaded has left the device tier."""
        seconds = self._spill(self._cache, 0)
        for chain in range(1, _NUM_CHAINS):
            self._spill(self._cache, chain)
        return seconds

    def over(self) -> float:
        """A chain for which an earlier one leaves the disk, in a store with room for little more than one."""
        nbytes = self._size.nbytes
        log_nbytes = min(64 * MiB, nbytes // 2 + 8 * MiB)
        config = replace(self._config(), disk_nbytes=nbytes * 3 // 2 + log_nbytes)
        with self._open("full", config) as cache:
            for chain in range(_MAX_CHAINS):
                before = _num_evicted(cache)
                seconds = self._spill(cache, chain)
                if _num_evicted(cache) - before >= self._size.num_parts * 9 // 10:
                    return seconds
        raise RuntimeError(f"{_MAX_CHAINS} chains and the disk is not full: every one was a fresh write")

    def read(self) -> float:
        self._chain = (self._chain + 1) % _NUM_CHAINS
        return load_s(self._space, self._size, self._chain)

    def num_wrong(self) -> int:
        """Parts of the chain loaded last that differ from what was stored."""
        ids = self._size.prompt(self._chain)
        wrong = torch.zeros(self._size.num_parts, dtype=torch.bool)
        with self._space.load(ids) as prefix:
            for name, stored in zip(("k", "v"), self._kv[0], strict=True):
                got = prefix.gather(0, name).view(torch.uint8).view(self._size.num_parts, -1)
                wrong |= (got != stored.view(torch.uint8).view(self._size.num_parts, -1)).any(dim=1)
        return int(wrong.sum())

    def close(self) -> None:
        self._cache.close()

    def _config(self) -> tieredkv.Config:
        return replace(self._size.config(_NUM_CHAINS, self.disk_io), durability=self.durability)

    def _open(self, name: str, config: tieredkv.Config) -> tieredkv.TieredCache:
        return tieredkv.open(Path(self._path, name), config)

    def _spill(self, cache: tieredkv.TieredCache, chain: int) -> float:
        space = cache.namespace(workload.IDENTITY, self._layout)
        stored = space.store(self._size.prompt(chain), self._kv)
        if stored.num_new != self._size.num_parts:
            raise RuntimeError(f"chain {chain} was not taken: {stored}")
        began = time.perf_counter()
        if not self._settle(cache, stored):
            raise RuntimeError(f"chain {chain} did not reach the disk: {cache.stats().counters}")
        return time.perf_counter() - began

    def _touch(self) -> None:
        """A chain that nobody asks for: memory is touched, as everybody's is, and the first call is made."""
        if not self._space.store(self._size.prompt(_OTHER_CHAIN), self._kv).wait(_WAIT_S):
            raise RuntimeError(f"the disk takes nothing: {self._cache.stats().counters}")

    def _settle(self, cache: tieredkv.TieredCache, stored: tieredkv.Stored) -> bool:
        return cache.flush(_WAIT_S).ok


class Unsynced(Durable):
    """Through the page cache, without a sync: committed, as the unsynced rivals are (`Stored.wait`)."""

    durability, disk_io = "none", "buffered"

    def _settle(self, cache: tieredkv.TieredCache, stored: tieredkv.Stored) -> bool:
        return stored.wait(_WAIT_S)


def _num_evicted(cache: tieredkv.TieredCache) -> int:
    return next(tier.num_evictions for tier in cache.stats().tiers if tier.name == "disk")
