"""Hit rates by tier of named workloads, through the real cache with small parts, and again after a restart."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

import tieredkv
from tieredkv import Config
from tieredkv.policy.registry import POLICIES
from tieredkv.tier.arena import DISK_CHUNK_NBYTES
from tieredkv.tier.slab_format import SLOT_HEADER_NBYTES
from tieredkv.units import KiB, MiB, align_up

from . import traces, workload
from .child import Say
from .figures import Figure, at_least, unmeasured
from .plan import Plan
from .scratch import tidied, try_job
from .sheet import Sheet

BLOCK_SIZE = 32
PART_NBYTES = 4 * KiB
NUM_ASKED = 100
"""Requests that are looked up before a kill and after it."""

MIN_RESTARTED = 0.99
_LEAST_BLOCKS = 48
_WAIT_S = 60.0


def measure(plan: Plan) -> Iterator[Figure | Sheet]:
    try:
        workloads = traces.all_workloads(plan.trace, plan.quick)
    except FileNotFoundError as error:
        yield unmeasured("warm_restart_hits_over_before_ratio", f">= {MIN_RESTARTED:g}", str(error))
        return
    sources = "; ".join(f"{one.name}, {_percents(one)}: {one.source}" for one in workloads)
    rows: list[tuple[str | float | None, ...]] = []
    restarted: list[tuple[str, float, float]] = []
    for one in workloads:
        for policy in ("lru",) if plan.quick else POLICIES:
            plan.progress.say(f"{one.name}, {policy}")
            found = _run(plan, one, policy)
            if isinstance(found, str):
                yield unmeasured(f"hits_{policy}_ratio", "-", f"{one.name}: {found}")
                continue
            total = found["num_tokens"]
            shares = [found["by_tier"].get(tier, 0) / total for tier in traces.TIERS]
            rows.append((f"{one.name}, {policy}", *shares, sum(shares), one.ideal()))
            restarted.append((one.name, found["before"], found["after"]))
    yield Sheet(
        "Who finds what: hits by tier",
        "Share of prompt tokens found on each tier, of all asked for; the last column is what a cache without"
        " bounds would find. Device, host and disk hold these shares of a workload's distinct blocks, 48 blocks at"
        f" least, the disk in whole chunks of 4 MiB: {sources}.",
        ("share of tokens", "device", "host", "disk", "together", "unbounded"), tuple(rows), draw="stacked",
    )  # fmt: skip
    yield from restart_figure(restarted)


def _percents(one: traces.Workload) -> str:
    return "/".join(f"{share:.0%}" for share in one.shares)


def _run(plan: Plan, one: traces.Workload, policy: str) -> dict[str, Any] | str:
    with tidied(plan.root / "hits") as path, tidied(plan.root / "requests.json") as requests:
        Path(requests).write_text(json.dumps(asdict(one)), encoding="utf-8")
        common = {"path": path, "requests": requests, "policy": policy}
        found = try_job(drive, **common)
        again = try_job(ask_again, **common) if isinstance(found, dict) else found
    return again if isinstance(again, str) or isinstance(found, str) else {**found, **again}


def restart_figure(restarted: list[tuple[str, float, float]]) -> Iterator[Figure]:
    name = "warm_restart_hits_over_before_ratio"
    counted = [(what, before, after) for what, before, after in restarted if before]
    if not counted:
        yield unmeasured(name, f">= {MIN_RESTARTED:g}", "nothing was found before the restart either")
        return
    what, before, after = min(counted, key=lambda row: row[2] / row[1])
    yield at_least(
        name, after / before, MIN_RESTARTED, 0.0,
        f"of {NUM_ASKED} prompts, {before:.1%} of what is on disk found before SIGKILL, {after:.1%} after it;"
        f" the worst of {len(counted)} runs ({what})",
    )  # fmt: skip


# ---- jobs ----------------------------------------------------------------------------------------


def drive(say: Say, path: str, requests: str, policy: str) -> dict[str, Any]:
    """Ask for every prompt and store what it lacks; then die without closing."""
    asked, config = _read(requests, policy)
    cache = tieredkv.open(path, config)
    space = cache.namespace(workload.IDENTITY, workload.layout(PART_NBYTES, BLOCK_SIZE))
    longest = max(map(len, asked)) * BLOCK_SIZE
    kv = workload.kv(0, longest, space.layout)
    by_tier, num_tokens = Counter[str](), 0
    for request in asked:
        ids = tokens(request)
        with space.load(np.append(ids, 0)) as prefix:
            by_tier.update(prefix.by_tier)
            num_tokens += len(ids)
        space.store(ids, {layer: tuple(t[:, : len(ids)] for t in both) for layer, both in kv.items()})
    if not cache.flush(_WAIT_S).ok:
        raise RuntimeError(f"not everything was flushed: {cache.health()}")
    before = on_disk(cache, space, asked)
    say(result={"by_tier": dict(by_tier), "num_tokens": num_tokens, "before": before})
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def ask_again(say: Say, path: str, requests: str, policy: str) -> dict[str, Any]:
    """What a new process finds of the last prompts."""
    asked, config = _read(requests, policy)
    with tieredkv.open(path, config) as cache:
        space = cache.namespace(workload.IDENTITY, workload.layout(PART_NBYTES, BLOCK_SIZE))
        return {"after": on_disk(cache, space, asked)}


def on_disk(cache: tieredkv.TieredCache, space: tieredkv.Namespace, asked: list[list[int]]) -> float:
    """Share of the last prompts' tokens that is found: after a flush, all of it is on disk too."""
    last = [tokens(request) for request in asked[-NUM_ASKED:]]
    found = sum(space.lookup(np.append(ids, 0)).num_tokens for ids in last)
    return found / sum(map(len, last))


def tokens(request: list[int]) -> workload.Tokens:
    """The tokens of a prompt: each block's number, over and over."""
    return np.repeat(np.asarray(request, dtype=np.int32), BLOCK_SIZE)


def _read(requests: str, policy: str) -> tuple[list[list[int]], Config]:
    """The prompts of a workload, and a cache whose tiers have their shares of it."""
    one = json.loads(Path(requests).read_text(encoding="utf-8"))
    asked: list[list[int]] = one["requests"]
    distinct = len({block for request in asked for block in request})
    device, host, disk = (max(_LEAST_BLOCKS, int(share * distinct)) for share in one["shares"])
    chunks_nbytes = align_up(disk * (PART_NBYTES + SLOT_HEADER_NBYTES), DISK_CHUNK_NBYTES)
    return asked, Config(
        device_nbytes=device * PART_NBYTES, host_nbytes=host * PART_NBYTES, policy=policy, block_size=BLOCK_SIZE,
        disk_nbytes=max(8 * MiB, chunks_nbytes * 4 // 3), deadline_s=_WAIT_S,
    )  # fmt: skip
