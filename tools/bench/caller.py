"""What spilling costs whoever calls: time in `store` beyond its one copy, and a decode loop beside it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from statistics import median
from typing import Any

import torch

import tieredkv
from tieredkv.units import MiB, format_nbytes

from . import workload
from .child import Say
from .figures import Figure, at_least, at_most, shown, unmeasured
from .plan import Plan
from .scratch import tidied, try_job
from .transfer import Size, copy_in_s

MAX_STALL_PERCENT = 3.0
MIN_DECODE = 0.9
_PROMPT = Size(2 * MiB, 64)
_SPILLED, _QUICK_SPILLED = Size(2 * MiB, 256), Size(2 * MiB, 96)
_NUM_HELD = 4
"""Prompts that the device tier holds while stores are timed: `store` takes a quarter of the tier at a time."""

_WAIT_S = 120.0


def measure(plan: Plan) -> Iterator[Figure]:
    plan.progress.say("time in store")
    with tidied(plan.root / "stall") as path:
        found = try_job(stall, path=path, rounds=plan.rounds, **vars(_PROMPT))
    yield stall_figure(found)
    plan.progress.say("decoding while blocks spill")
    with tidied(plan.root / "decode") as path:
        size = _QUICK_SPILLED if plan.quick else _SPILLED
        found = try_job(decode, path=path, rounds=plan.rounds, **vars(size))
    yield from decode_figures(found)


# ---- time in store -------------------------------------------------------------------------------


def stall(say: Say, path: str, rounds: int, **size: int) -> dict[str, Any]:
    """Seconds in `store` of a new prompt, of its one copy alone before and after, and until all of it is on disk.

    Memory for some prompts, so that each store takes slots that were used before and whose blocks are on disk
    already.
    """
    of = Size(**size)
    kv = workload.kv(0, of.num_tokens, of.layout())
    pool = torch.ones(of.num_parts, of.part_nbytes, dtype=torch.uint8)
    num_chains = rounds + _NUM_HELD + 2
    config = replace(
        of.config(num_chains, "direct"), spill="eager", device_nbytes=(2 * _NUM_HELD + 1) * of.nbytes // 2
    )
    store_s, before_s, after_s, disk_s = [], [], [], []
    with tieredkv.open(path, config) as cache:
        space = cache.namespace(workload.IDENTITY, of.layout())
        for chain in range(num_chains):
            ids = of.prompt(chain)
            before_s.append(copy_in_s(of, pool, kv))
            began = time.perf_counter()
            stored = space.store(ids, kv)
            returned = time.perf_counter()
            if stored.num_new != of.num_parts or not stored.wait(_WAIT_S):
                raise RuntimeError(f"chain {chain} was not taken: {stored}")
            whole = time.perf_counter() - began
            if not cache.flush(_WAIT_S).ok:
                raise RuntimeError(f"chain {chain} was not spilled")
            store_s.append(returned - began)
            after_s.append(copy_in_s(of, pool, kv))
            disk_s.append(whole - (before_s[-1] + after_s[-1]) / 2)  # it begins while `store` still copies
    found = {"store_s": store_s, "before_s": before_s, "after_s": after_s, "disk_s": disk_s}
    return {key: seconds[-rounds:] for key, seconds in found.items()}


def stall_figure(found: dict[str, Any] | str) -> Figure:
    name = "store_beyond_copy_over_disk_transfer_percent"
    if isinstance(found, str):
        return unmeasured(name, f"<= {MAX_STALL_PERCENT:g}", found)
    rounds = list(zip(found["store_s"], found["before_s"], found["after_s"], found["disk_s"], strict=True))
    percent = [100 * (store - (before + after) / 2) / disk for store, before, after, disk in rounds]
    spread = median(100 * abs(before - after) / disk for _, before, after, disk in rounds)
    store, copy, disk = (median(found[key]) * 1e3 for key in ("store_s", "before_s", "disk_s"))
    return at_most(
        name, median(percent), MAX_STALL_PERCENT,
        f"a prompt of {_PROMPT.num_tokens:,} tokens, {format_nbytes(_PROMPT.nbytes)}: {store:.1f} ms in store, of it"
        f" {copy:.1f} ms the copy; the way to disk took {disk:.0f} ms beside and after it; copy against copy"
        f" {spread:.1f} %",
        spread=spread, runs=[round(p, 2) for p in percent],
    )  # fmt: skip


# ---- decode --------------------------------------------------------------------------------------


def decode(say: Say, path: str, rounds: int, **size: int) -> dict[str, Any]:
    """Tokens a second of a stand-in for decoding, alone and while the prompt that was just stored goes to disk.

    As in a session: blocks spill in the background, and each forward is announced before it begins.
    """
    of = Size(**size)
    kv = workload.kv(0, of.num_tokens, of.layout())
    idle, busy, moved_s = [], [], []
    with tieredkv.open(path, replace(of.config(rounds + 1, "direct"), spill="eager")) as cache:
        space = cache.namespace(workload.IDENTITY, of.layout())
        step = Decoder(space)
        for chain in range(rounds + 1):
            before = step.rate(seconds=0.5)
            spilled = _Spilling(space.store(of.prompt(chain), kv))
            during = step.rate(until=spilled.done)
            seconds = spilled.join()
            after = step.rate(seconds=0.5)
            if chain:
                idle.append((before + after) / 2)
                busy.append(during)
                moved_s.append(seconds)
    return {"idle": idle, "busy": busy, "moved_s": moved_s, "nbytes": of.nbytes}


class Decoder:
    """One token at a time through as many weights as a small model has, in products of a matrix and a vector."""

    def __init__(self, space: tieredkv.Namespace) -> None:
        self._space = space
        self._layers = [torch.ones(2048, 1024) for _ in range(24)]
        self._token = torch.ones(1024)

    def rate(self, seconds: float = float("inf"), until: threading.Event | None = None) -> float:
        """Tokens a second for `seconds`, or until an event."""
        began, count = time.perf_counter(), 0
        while (taken := time.perf_counter() - began) < seconds and not (until and until.is_set() and count):
            self._space.pace.forward_begins()
            for layer in self._layers:
                torch.mv(layer, self._token)
            self._space.pace.forward_ends()
            count += 1
        return count / taken


class _Spilling:
    """Waits in a thread of its own until a stored prompt is on disk."""

    def __init__(self, stored: tieredkv.Stored) -> None:
        self.done = threading.Event()
        self._stored, self._seconds, self._ok = stored, 0.0, False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        began = time.perf_counter()
        try:
            self._ok = self._stored.wait(_WAIT_S)
        finally:
            self._seconds = time.perf_counter() - began
            self.done.set()

    def join(self) -> float:
        self._thread.join()
        if not self._ok:
            raise RuntimeError("not everything was spilled while decoding")
        return self._seconds


def decode_figures(found: dict[str, Any] | str) -> Iterator[Figure]:
    name = "decode_while_spilling_over_idle_ratio"
    if isinstance(found, str):
        yield unmeasured(name, f">= {MIN_DECODE:g}", found)
        return
    ratios = [busy / idle for idle, busy in zip(found["idle"], found["busy"], strict=True)]
    idle = found["idle"]
    spread = max(idle) / min(idle) - 1
    rate = found["nbytes"] / median(found["moved_s"]) / 1e9
    yield at_least(
        name, median(ratios), MIN_DECODE, spread,
        f"matrix products of 50 million weights a token: {median(idle):.0f} tokens a second idle,"
        f" {median(found['busy']):.0f} while {format_nbytes(found['nbytes'])} go to disk at {rate:.2f} GB/s;"
        f" idle against idle {spread:.0%}",
        ratios=[round(r, 3) for r in ratios],
    )  # fmt: skip
    yield shown("spill_while_decoding_gb_s", rate, "the rate beside that decode loop")
