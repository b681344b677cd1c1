"""A store of many small blocks: how fast it opens, what memory it takes, how fast a lookup in it is."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import tieredkv
from tieredkv import Config
from tieredkv.units import GiB, KiB, MiB

from . import workload
from .child import Say
from .machine import anonymous_nbytes

PART_NBYTES = 4 * KiB
BLOCK_SIZE = 32
WINDOW = 513
BLOCKS_A_CHAIN = 1024
_WAIT_S = 60.0


def layout(window: int = WINDOW) -> tieredkv.BlockLayout:
    return workload.layout(PART_NBYTES, BLOCK_SIZE, window)


def config(num_blocks: int, window: int = WINDOW) -> Config:
    """Room for every block on disk, and for a few chains in memory."""
    slots_nbytes = num_blocks * (2 if window else 1) * (PART_NBYTES + 4 * KiB)
    return Config(
        device_nbytes=max(64 * MiB, min(GiB, 3 * num_blocks * PART_NBYTES)), host_nbytes=0,
        disk_nbytes=128 * MiB + slots_nbytes * 5 // 4, block_size=BLOCK_SIZE, deadline_s=_WAIT_S,
    )  # fmt: skip


def build(say: Say, path: str, num_blocks: int, window: int = WINDOW) -> dict[str, Any]:
    """Store `num_blocks` blocks through the public API, flush, and die by SIGKILL: the log holds them all.

    Or as much of them as fits between two checkpoints.
    """
    of, began = layout(window), time.perf_counter()
    cache = tieredkv.open(path, config(num_blocks, window))
    space = cache.namespace(workload.IDENTITY, of)
    done = 0
    for seed, count in workload.chains(num_blocks, BLOCKS_A_CHAIN):
        num_tokens = count * BLOCK_SIZE
        stored = space.store(
            workload.tokens(seed, num_tokens), workload.kv(seed, num_tokens, of),
            anchors=workload.every_anchor(of, count),
        )  # fmt: skip
        if stored.num_new != count or not stored.wait(_WAIT_S):
            raise RuntimeError(f"chain {seed} was not taken: {stored}")
        done += count
        say(done=done)
    flushed = cache.flush(_WAIT_S)
    if not flushed.ok:
        raise RuntimeError(f"not everything was flushed: {flushed.failures}")
    say(result={"seconds": time.perf_counter() - began, "log_nbytes": cache.stats().log_nbytes})
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def open_once(say: Say, path: str, num_blocks: int, close: bool, window: int = WINDOW) -> dict[str, Any]:
    """Open in this fresh process; at the end `close` writes what closing writes, else SIGKILL changes nothing."""
    before = anonymous_nbytes()
    began, cpu_began = time.perf_counter(), time.process_time()
    cache = tieredkv.open(path, config(num_blocks, window))
    seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
    report = cache.recovery
    say(
        result={
            "seconds": seconds,
            "cpu_s": cpu_s,
            "anonymous_nbytes": anonymous_nbytes() - before,
            "num_blocks": report.num_blocks,
            "num_parts": report.num_parts,
            "num_replayed": report.num_replayed,
            "log_end": report.log_end,
            "damage": list(report.damage),
        }
    )
    if close:
        cache.close()
        return {}
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def look_up(say: Say, path: str, num_blocks: int, rounds: int) -> dict[str, Any]:
    """Time lookups of one whole chain, each beside as many chained plain sha256 calls over the same bytes."""
    num_tokens = BLOCKS_A_CHAIN * BLOCK_SIZE
    cache = tieredkv.open(path, config(num_blocks))
    space = cache.namespace(workload.IDENTITY, layout())
    ids = workload.tokens(0, num_tokens)
    found = space.lookup(ids)
    lookup_s, sha_s, chain_s = [], [], []
    for _ in range(rounds):
        lookup_s.append(_timed(lambda: space.lookup(ids)))
        sha_s.append(_timed(lambda: _plain_chain(ids, space.digest)))
        chain_s.append(_timed(lambda: space.chain(ids)))
    held = cache.stats().num_blocks
    cache.close()
    return {
        "lookup_s": median(lookup_s), "sha256_s": median(sha_s), "chain_s": median(chain_s),
        "num_tokens": found.num_tokens, "num_blocks": held,
    }  # fmt: skip


def _plain_chain(ids: workload.Tokens, root: bytes) -> bytes:
    raw, sha256, parent = ids.tobytes(), hashlib.sha256, root
    step = BLOCK_SIZE * ids.itemsize
    for at in range(0, len(raw), step):
        parent = sha256(parent + raw[at : at + step]).digest()
    return parent


def _timed(call: Any) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def store_nbytes(path: Path) -> int:
    """Bytes that the store takes on disk."""
    return sum(f.stat().st_blocks * 512 for f in path.rglob("*") if f.is_file())


IMPORT_SCRIPT = """
import json, sys, time
began = time.perf_counter()
import torch
then = time.perf_counter()
import tieredkv
now = time.perf_counter()
print(json.dumps({"torch_s": then - began, "tieredkv_s": now - then, "transformers": "transformers" in sys.modules}))
"""
IMPORT_COMMAND = (sys.executable, "-c", IMPORT_SCRIPT)
