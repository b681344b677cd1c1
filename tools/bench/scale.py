"""Jobs over tables of many blocks: lookups and stores against their number, and a caller beside a checkpoint."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

import tieredkv
from tieredkv import Config
from tieredkv.units import KiB, MiB

from . import big_store, workload
from .child import Say

BLOCK_SIZE = 32
PART_NBYTES = 4 * KiB
CHAIN = 1024
_WAIT_S = 120.0


def look_up(say: Say, path: str, rounds: int) -> dict[str, Any]:
    """Seconds to look up one chain, all of it in the device tier."""
    with tieredkv.open(path, _in_memory(2 * CHAIN)) as cache:
        space, ids = _filled(cache, CHAIN), workload.tokens(0, CHAIN * BLOCK_SIZE + 1)
        found = space.lookup(ids)
        seconds = [_timed(lambda: space.lookup(ids)) for _ in range(rounds)]
    return {"seconds": median(seconds), "num_tokens": found.num_tokens}


def ten_times(say: Say, path: str, num_blocks: int, rounds: int) -> dict[str, Any]:
    """Lookups and stores of a chain with `num_blocks` and with ten times as many in the table, in turn."""
    found: dict[str, list[float]] = {
        f"{what}_{size}": [] for what in ("lookup", "store") for size in ("few", "many")
    }
    sizes = {"few": num_blocks, "many": 10 * num_blocks}
    caches = {
        size: tieredkv.open(f"{path}/{size}", _in_memory(n + (rounds + 1) * CHAIN))
        for size, n in sizes.items()
    }
    spaces = {size: _filled(cache, sizes[size]) for size, cache in caches.items()}
    kv = workload.kv(0, CHAIN * BLOCK_SIZE, workload.layout(PART_NBYTES, BLOCK_SIZE))
    for number in range(rounds):
        ids = workload.tokens(1_000_000 + number, CHAIN * BLOCK_SIZE)
        for size, space in spaces.items():
            found[f"store_{size}"].append(_timed(lambda s=space, i=ids: s.store(i, kv)))  # type: ignore[misc]
            found[f"lookup_{size}"].append(
                median(_timed(lambda s=space, i=ids: s.lookup(i)) for _ in range(5))
            )  # type: ignore[misc]
    for cache in caches.values():
        cache.close()
    return found


def checkpoint_stall(say: Say, path: str, num_blocks: int, window: int) -> dict[str, Any]:
    """The longest lookup, and the longest store of one block, while a checkpoint of a large table is written."""
    config = replace(big_store.config(num_blocks, window), device_nbytes=64 * MiB)
    cache = tieredkv.open(path, config)
    space = cache.namespace(workload.IDENTITY, big_store.layout(window))
    kv = workload.kv(0, BLOCK_SIZE, space.layout)
    known = workload.tokens(0, 32 * BLOCK_SIZE)
    call = _Calls(space, kv, known)
    call.during(lambda: time.sleep(1.0))
    idle_s = call.longest_s
    seconds = _timed(lambda: call.during(lambda: _checkpoint(cache)))
    say(result={
        "idle_s": idle_s, "longest_s": call.longest_s, "num_calls": call.count, "checkpoint_s": seconds,
        "num_blocks": cache.stats().num_blocks,
    })  # fmt: skip
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def _checkpoint(cache: tieredkv.TieredCache) -> None:
    if not cache.checkpoint(_WAIT_S):
        raise RuntimeError("no checkpoint was written")


class _Calls:
    """A caller that looks up and stores, one after the other, for as long as something else lasts."""

    def __init__(self, space: tieredkv.Namespace, kv: Any, known: workload.Tokens) -> None:
        self._space, self._kv, self._known = space, kv, known
        self._seed = 2_000_000
        self.longest_s, self.count = 0.0, 0

    def during(self, what: Callable[[], None]) -> None:
        self.longest_s, self.count, failures = 0.0, 0, list[BaseException]()

        def run() -> None:
            try:
                what()
            except RuntimeError as error:
                failures.append(error)

        other = threading.Thread(target=run)
        other.start()
        while other.is_alive():
            self._seed += 1
            ids = workload.tokens(self._seed, BLOCK_SIZE)
            for call in (
                lambda: self._space.lookup(self._known),
                lambda i=ids: self._space.store(i, self._kv),
            ):  # type: ignore[misc]
                self.longest_s = max(self.longest_s, _timed(call))
                self.count += 1
        other.join()
        if failures:
            raise failures[0]


def _in_memory(num_blocks: int) -> Config:
    return Config(
        device_nbytes=max(64 * MiB, num_blocks * PART_NBYTES * 9 // 8), host_nbytes=0, disk_nbytes=0,
        block_size=BLOCK_SIZE,
    )  # fmt: skip


def _filled(cache: tieredkv.TieredCache, num_blocks: int) -> tieredkv.Namespace:
    space = cache.namespace(workload.IDENTITY, workload.layout(PART_NBYTES, BLOCK_SIZE))
    kv = workload.kv(0, CHAIN * BLOCK_SIZE, space.layout)
    for seed, count in workload.chains(num_blocks, CHAIN):
        part = {layer: tuple(t[:, : count * BLOCK_SIZE] for t in tensors) for layer, tensors in kv.items()}
        stored = space.store(workload.tokens(seed, count * BLOCK_SIZE), part)
        if stored.num_new != count:
            raise RuntimeError(f"chain {seed} was not taken: {stored}")
    return space


def _timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
