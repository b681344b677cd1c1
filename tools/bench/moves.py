"""Jobs that time single moves between tiers: blocks one at a time, prompts, and copies in memory."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

import tieredkv

from . import workload
from .child import Say
from .counting import CountingFs
from .raw import memcpy_s
from .transfer import BLOCK_SIZE, Size, copy_in_s, load_s

_WAIT_S = 120.0


def spill_and_restore(say: Say, path: str, repeats: int, disk_io: str, **size: int) -> dict[str, Any]:
    """Seconds of each spill (store done, until `flush` returns) and of each restore from disk.

    Device memory holds one prompt and a little; prompts take turns until each of them has been restored, the
    first ones only to touch the memory.
    """
    of = Size(**size)
    spill_s, restore_s = [], []
    kv = workload.kv(0, of.num_tokens, of.layout())
    with tieredkv.open(path, of.config(repeats + 2, disk_io)) as cache:
        space = cache.namespace(workload.IDENTITY, of.layout())
        for chain in range(repeats + 2):
            if space.store(of.prompt(chain), kv).num_new != of.num_parts:
                raise RuntimeError(f"chain {chain} was not taken")
            began = time.perf_counter()
            flushed = cache.flush(_WAIT_S)
            spill_s.append(time.perf_counter() - began)
            if not flushed.ok:
                raise RuntimeError(f"chain {chain}: {flushed.failures}")
        for chain in range(repeats):
            restore_s.append(load_s(space, of, chain))
    return {"spill_s": spill_s[2:], "restore_s": restore_s[1:]}


def memory(say: Say, path: str, rounds: int, **size: int) -> dict[str, Any]:
    """Copies between device and host tier, without a disk, each beside copies by one thread.

    The device holds four prompts and a little, the host eight. A store into a full device tier is two copies:
    the prompt comes in, an older one goes down to the host.
    """
    of, on_device, on_host = Size(**size), 4, 8
    config = replace(
        of.config(1, "direct"), device_nbytes=(2 * on_device + 1) * of.nbytes // 2,
        host_nbytes=(2 * on_host + 1) * of.nbytes // 2, disk_nbytes=0, spill="eager",
    )  # fmt: skip
    kv = workload.kv(0, of.num_tokens, of.layout())
    pool = torch.ones(of.num_parts, of.part_nbytes, dtype=torch.uint8)
    found: dict[str, list[float]] = {
        "down_s": [],
        "copy_down_s": [],
        "up_s": [],
        "copy_up_s": [],
        "hit_s": [],
    }
    with tieredkv.open(path, config) as cache:
        space = cache.namespace(workload.IDENTITY, of.layout())
        last = on_device + on_host + 1 + rounds
        for chain in range(last):  # until every slot of both tiers was used once
            before = copy_in_s(of, pool, kv) + min(memcpy_s(of.nbytes, 2))
            seconds = _store_s(space, of, chain, kv)
            if chain >= last - rounds:
                found["down_s"].append(seconds)
                after = copy_in_s(of, pool, kv) + min(memcpy_s(of.nbytes, 2))
                found["copy_down_s"].append((before + after) / 2)
        for number in range(-on_host, rounds):  # round and round: until each is in the host, and then timed
            chain = last - on_host + 1 + number % (on_host - 1)
            before = min(memcpy_s(of.nbytes, 2))
            seconds = _up_s(space, of, chain)
            if number >= 0:
                found["up_s"].append(seconds)
                found["copy_up_s"].append((before + min(memcpy_s(of.nbytes, 2))) / 2)
                began = time.perf_counter()
                space.load(of.prompt(chain)).close()
                found["hit_s"].append(time.perf_counter() - began)
    return found


def _store_s(space: tieredkv.Namespace, of: Size, chain: int, kv: Any) -> float:
    ids = of.prompt(chain)
    began = time.perf_counter()
    stored = space.store(ids, kv)
    seconds = time.perf_counter() - began
    if stored.num_new != of.num_parts:
        raise RuntimeError(f"chain {chain} was not taken: {stored}")
    return seconds


def _up_s(space: tieredkv.Namespace, of: Size, chain: int) -> float:
    ids = of.prompt(chain)
    began = time.perf_counter()
    prefix = space.load(ids)
    seconds = time.perf_counter() - began
    with prefix:
        if prefix.num_tokens != of.num_tokens:
            raise RuntimeError(f"chain {chain}: {dict(prefix.by_tier)}, not {of.num_tokens} tokens")
    return seconds


def life(say: Say, path: str, num_chains: int, **size: int) -> dict[str, Any]:
    """Everything a store writes from opening to closing, checkpoints included, by folder; and its syncs."""
    of, fs = Size(**size), CountingFs()
    kv = workload.kv(0, of.num_tokens, of.layout())
    with tieredkv.open(path, of.config(num_chains, "direct"), fs=fs) as cache:
        space = cache.namespace(workload.IDENTITY, of.layout())
        for chain in range(num_chains):
            _store_s(space, of, chain, kv)
            if not cache.flush(_WAIT_S).ok:
                raise RuntimeError(f"chain {chain} was not spilled")
        cache.checkpoint(_WAIT_S)
        log_nbytes = fs.written["wal"]
    checkpoints = sum(file.stat().st_size for file in Path(path).glob("table-*"))
    return {
        "payload_nbytes": num_chains * of.nbytes, "num_blocks": num_chains * of.num_parts, "log_nbytes": log_nbytes,
        "written_nbytes": sum(fs.written.values()) + checkpoints, "num_syncs": sum(fs.syncs.values()),
    }  # fmt: skip


def prompt_lengths(say: Say, path: str, lengths: list[int], repeats: int, part_nbytes: int) -> dict[str, Any]:
    """Seconds to restore prompts of several lengths, in tokens, cold from disk; the median of each.

    Two more prompts of the greatest length, stored last, fill the device tier.
    """
    longest = Size(part_nbytes, max(lengths) // BLOCK_SIZE)
    found: dict[str, list[float]] = {}
    config = longest.config(len(lengths) * repeats + 2, "direct")
    with tieredkv.open(path, config) as cache:
        space = cache.namespace(workload.IDENTITY, longest.layout())
        sizes = [Size(part_nbytes, length // BLOCK_SIZE) for length in lengths for _ in range(repeats)]
        for chain, of in enumerate([*sizes, longest, longest]):
            kv = workload.kv(0, of.num_tokens, of.layout())
            if space.store(of.prompt(chain), kv).num_new != of.num_parts or not cache.flush(_WAIT_S).ok:
                raise RuntimeError(f"chain {chain} was not spilled")
        for chain, of in enumerate(sizes):
            found.setdefault(str(of.num_tokens), []).append(load_s(space, of, chain))
    return {length: median(seconds) for length, seconds in found.items()}
