"""Jobs that move parts between memory and disk through the public API, raw transfers in between."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

import tieredkv
from tieredkv import Config
from tieredkv.tier.copier import Copier, Pair, copy_alone
from tieredkv.units import GiB, KiB, MiB

from . import workload
from .child import Say
from .machine import written_nbytes
from .raw import DEPTHS, RawFile, memcpy_s

BLOCK_SIZE = 32
_WAIT_S = 120.0


@dataclass(frozen=True)
class Size:
    """A part size, and how many parts a chain has."""

    part_nbytes: int
    num_parts: int

    @property
    def nbytes(self) -> int:
        return self.part_nbytes * self.num_parts

    @property
    def num_tokens(self) -> int:
        return self.num_parts * BLOCK_SIZE

    def config(self, num_chains: int, disk_io: str) -> Config:
        """Device memory for one chain and a little, so that each chain takes the slots of the one before."""
        chunk = max(self.part_nbytes, min(64 * MiB, self.nbytes // 16))
        return Config(
            device_nbytes=self.nbytes + 2 * chunk, host_nbytes=0, block_size=BLOCK_SIZE, deadline_s=_WAIT_S,
            disk_nbytes=GiB + (self.nbytes + self.num_parts * 4 * KiB) * num_chains * 5 // 4, spill="evict",
            durability="flush", disk_io=disk_io,
        )  # fmt: skip

    def layout(self) -> tieredkv.BlockLayout:
        return workload.layout(self.part_nbytes, BLOCK_SIZE)

    def prompt(self, chain: int) -> workload.Tokens:
        """A chain's tokens and one more, which is left to compute."""
        return workload.tokens(chain, self.num_tokens + 1)


def spill(say: Say, path: str, raw_path: str, rounds: int, disk_io: str, **size: int) -> dict[str, Any]:
    """Spill a chain a round by `flush`, and write as many bytes raw before and after; round 0 is not counted."""
    of = Size(**size)
    raw = RawFile(raw_path, of.nbytes, of.part_nbytes, 2 * rounds + len(DEPTHS))
    depth = raw.best_write_depth(2 * rounds)
    ours_s, before_s, after_s, written = [], [], [], []
    kv = workload.kv(0, of.num_tokens, of.layout())
    with tieredkv.open(path, of.config(rounds + 1, disk_io)) as cache:
        space = cache.namespace(workload.IDENTITY, of.layout())
        for chain in range(rounds + 1):
            stored = space.store(of.prompt(chain), kv)
            if stored.num_new != of.num_parts:
                raise RuntimeError(f"chain {chain} was not taken: {stored}")
            if chain:
                before_s.append(raw.write(2 * chain - 2, depth))
            at, began = written_nbytes(), time.perf_counter()
            flushed = cache.flush(_WAIT_S)
            seconds = time.perf_counter() - began
            if not flushed.ok or flushed.num_spilled != of.num_parts:
                raise RuntimeError(f"not every part was spilled: {flushed}")
            if chain:
                written.append(written_nbytes() - at)
                ours_s.append(seconds)
                after_s.append(raw.write(2 * chain - 1, depth))
        counters = dict(cache.stats().counters)
    raw.close()
    return {
        "ours_s": ours_s, "before_s": before_s, "after_s": after_s, "depth": depth, "counters": counters,
        "written_ratio": median(written) / of.nbytes,
    }  # fmt: skip


def restore(say: Say, path: str, raw_path: str, rounds: int, disk_io: str, **size: int) -> dict[str, Any]:
    """Load a chain a round into memory that an earlier chain has touched; round 0 touches it."""
    of = Size(**size)
    raw = RawFile(raw_path, of.nbytes, of.part_nbytes, 2 * rounds + len(DEPTHS))
    depth = raw.best_read_depth(2 * rounds)
    ours_s, before_s, after_s = [], [], []
    with tieredkv.open(path, of.config(rounds + 1, disk_io)) as cache:
        space = cache.namespace(workload.IDENTITY, of.layout())
        for chain in range(rounds + 1):
            if chain:
                before_s.append(raw.read(2 * chain - 2, depth))
            seconds = load_s(space, of, chain)
            ours_s.append(seconds)
            if chain:
                after_s.append(raw.read(2 * chain - 1, depth))
    raw.close()
    return {
        "first_touch_s": ours_s[0], "ours_s": ours_s[1:], "before_s": before_s, "after_s": after_s,
        "depth": depth,
    }  # fmt: skip


def warm(say: Say, path: str, rounds: int, disk_io: str, **size: int) -> dict[str, Any]:
    """Store three chains through the page cache, then load them in turn, each beside a copy in memory.

    Three, since memory for one and a little may keep the head of the chain loaded last.
    """
    of = Size(**size)
    ours_s, before_s, after_s = [], [], []
    with tieredkv.open(path, of.config(3, disk_io)) as cache:
        space = cache.namespace(workload.IDENTITY, of.layout())
        kv = workload.kv(0, of.num_tokens, of.layout())
        for chain in range(3):
            space.store(of.prompt(chain), kv)
            if not cache.flush(_WAIT_S).ok:
                raise RuntimeError(f"chain {chain} was not spilled")
        for number in range(rounds + 3):
            seconds = load_s(space, of, number % 3)
            if number > 2:
                ours_s.append(seconds)
                _, before, after = memcpy_s(of.nbytes, 3)
                before_s.append(before)
                after_s.append(after)
    return {"ours_s": ours_s, "before_s": before_s, "after_s": after_s}


def bookkeeping(say: Say, path: str, rounds: int, num_blocks: int) -> dict[str, Any]:
    """Time of `store` a block, and of it the copy of the payload alone, with parts of one page.

    Both go into memory that was written before: chains of another model came and went.
    """
    of = Size(4 * KiB, num_blocks)
    kv = workload.kv(0, of.num_tokens, of.layout())
    pool = torch.zeros(num_blocks, of.part_nbytes, dtype=torch.uint8)
    store_s, copy_s, copier = [], [], Copier()
    config = Config(
        device_nbytes=(rounds + 3) * of.nbytes, host_nbytes=0, disk_nbytes=GiB, spill="evict",
        block_size=BLOCK_SIZE, durability="flush",
    )  # fmt: skip
    with tieredkv.open(path, config) as cache:
        passing = cache.namespace(workload.OTHER_IDENTITY, of.layout())
        for chain in range(rounds + 1):
            passing.store(of.prompt(chain), kv)
        cache.purge(passing)
        space = cache.namespace(workload.IDENTITY, of.layout())
        for chain in range(rounds + 1):
            ids = of.prompt(chain)
            began = time.perf_counter()
            stored = space.store(ids, kv)
            store_s.append(time.perf_counter() - began)
            if stored.num_new != num_blocks:
                raise RuntimeError(f"chain {chain} was not taken: {stored}")
            copy_s.append(copy_in_s(of, pool, kv, copier.copy))
    copier.close()
    return {"store_s": store_s[1:], "copy_s": copy_s[1:], "num_blocks": num_blocks}


def copy_in_s(
    of: Size, pool: torch.Tensor, kv: Any, copy: Callable[[Sequence[Pair]], None] = copy_alone
) -> float:
    """Seconds of the one copy that `store` makes of a prompt, into `pool` of parts; by one thread, unless said."""
    began = time.perf_counter()
    for target, tensor in zip(of.layout().views(pool, 0).values(), kv[0], strict=True):
        copy([(target, tensor.unflatten(1, (of.num_parts, BLOCK_SIZE)).movedim(1, 0))])
    return time.perf_counter() - began


def load_s(space: tieredkv.Namespace, of: Size, chain: int) -> float:
    """Seconds until a chain is in device memory, every part verified."""
    ids = of.prompt(chain)
    began = time.perf_counter()
    prefix = space.load(ids)
    seconds = time.perf_counter() - began
    with prefix:
        if prefix.num_tokens != of.num_tokens or prefix.by_tier != {"disk": of.num_tokens}:
            found = f"{prefix.num_tokens} tokens from {dict(prefix.by_tier)}, {prefix.reason}"
            raise RuntimeError(f"chain {chain}: {found}, not {of.num_tokens} from disk")
    return seconds
