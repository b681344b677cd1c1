"""What a move between two tiers takes: percentiles by direction, copies beside memcpy, bytes written, break-even."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

import torch

from tieredkv.units import KiB, MiB, format_nbytes

from . import child, moves
from .figures import Figure, at_least, at_most, shown, unmeasured
from .percentile import COLUMNS, percentiles_ms
from .plan import Plan
from .scratch import tidied, try_job
from .sheet import Sheet
from .transfer import BLOCK_SIZE, Size

MIN_COPY = 0.90
MAX_WRITTEN_RATIO = 1.03
_PART_NBYTES = 2 * MiB
_LENGTHS = (32, 128, 512, 2048, 8192)
_MODEL_PARAMETERS = 100e6
"""Weights that a token of Gemma 3 270M passes through, embeddings left out."""


def measure(plan: Plan) -> Iterator[Figure | Sheet]:
    """Percentiles first, then memory, amplification and break-even."""
    yield geometry()
    yield from latencies(plan)
    yield from memory(plan)
    yield from amplification(plan)
    yield from break_even(plan)
    yield from cuda()


def geometry() -> Sheet:
    rows = [
        (format_nbytes(nbytes), BLOCK_SIZE, nbytes // BLOCK_SIZE, format_nbytes(2048 * nbytes // BLOCK_SIZE))
        for nbytes in (8 * MiB, 2 * MiB, 512 * KiB, 64 * KiB)
    ]
    return Sheet(
        "What is stored",
        "A block is 32 tokens. Parts of 8 MiB are those of a model of about 70 billion parameters in half"
        " precision, 2 MiB of one of 8 billion, 64 KiB of one of less than a billion.",
        ("a block's part", "tokens", "bytes a token", "a prompt of 2,048 tokens"), tuple(rows),
    )  # fmt: skip


def latencies(plan: Plan) -> Iterator[Sheet]:
    """One block at a time, and a prompt of 2,048 tokens at a time; with `quick` only blocks."""
    rows: list[tuple[str | float | None, ...]] = []
    repeats = {1: 50} if plan.quick else {1: 200, 64: 30}
    for num_parts, count in repeats.items():
        what = "a block" if num_parts == 1 else f"a prompt of {num_parts * BLOCK_SIZE:,} tokens"
        size = Size(_PART_NBYTES, num_parts)
        for disk_io, which in (("direct", "cold"), ("buffered", "warm")):
            plan.progress.say(f"spill and restore of {what}, {which}")
            with tidied(plan.root / "moves") as path:
                found = child.run(
                    moves.spill_and_restore, path=path, repeats=count, disk_io=disk_io, **vars(size)
                )
            if disk_io == "direct":
                rows.append((f"{what}: device to disk, synced", *_row(found["spill_s"], size)))
            rows.append((f"{what}: disk to device, {which}", *_row(found["restore_s"], size)))
    yield Sheet(
        "How long one move takes",
        "2 MiB parts, through the public API, one at a time: nothing overlaps but what a single call overlaps"
        " itself. Cold is O_DIRECT, which leaves nothing in the page cache; warm was written through it.",
        ("ms", *COLUMNS, "GB/s"), tuple(rows), draw="bars", log=True,
    )  # fmt: skip


def _row(seconds: Sequence[float], size: Size) -> tuple[float, ...]:
    return (*percentiles_ms(seconds), size.nbytes / median(seconds) / 1e9)


def memory(plan: Plan) -> Iterator[Figure | Sheet]:
    size = Size(_PART_NBYTES, 64)
    plan.progress.say("copies between host and device tier")
    with tidied(plan.root / "moves") as path:
        found = try_job(moves.memory, path=path, rounds=2 * plan.rounds, **vars(size))
    yield _copy("host_to_device", found, "up", size.nbytes, "one copy")
    yield _copy(
        "device_to_host", found, "down", 2 * size.nbytes, "a prompt in, an older one down: two copies"
    )
    if isinstance(found, dict):
        yield Sheet(
            "Between device and host memory",
            f"A prompt of {size.num_tokens:,} tokens in parts of 2 MiB; the device tier here is the CPU's memory."
            " A hit on the device moves nothing.",
            ("ms", *COLUMNS),
            tuple((name, *percentiles_ms(found[key])) for name, key in (
                ("host to device", "up_s"), ("one memcpy", "copy_up_s"),
                ("store into a full device, one prompt down", "down_s"), ("two memcpy", "copy_down_s"),
                ("load what is on the device", "hit_s"),
            )),
        )  # fmt: skip


def _copy(name: str, found: Mapping[str, Any] | str, way: str, nbytes: int, what: str) -> Figure:
    if isinstance(found, str):
        return unmeasured(f"{name}_over_memcpy_ratio", f">= {MIN_COPY:g}", found)
    ours, copy = found[f"{way}_s"], found[f"copy_{way}_s"]
    ratios = [theirs / mine for mine, theirs in zip(ours, copy, strict=True)]
    spread = median(max(a, b) / min(a, b) - 1 for a, b in pairwise(copy))
    return at_least(
        f"{name}_over_memcpy_ratio", median(ratios), MIN_COPY, spread,
        f"{what}; {nbytes / median(ours) / 1e9:.2f} GB/s, one thread's memcpy {nbytes / median(copy) / 1e9:.2f};"
        f" memcpy against memcpy {spread:.0%}",
        ratios=[round(r, 3) for r in ratios],
    )  # fmt: skip


def amplification(plan: Plan) -> Iterator[Figure]:
    size = Size(_PART_NBYTES, 64)
    name = "written_per_payload_whole_life_2mib_ratio"
    with tidied(plan.root / "life") as path:
        found = try_job(moves.life, path=path, num_chains=4, **vars(size))
    if isinstance(found, str):
        yield unmeasured(name, f"<= {MAX_WRITTEN_RATIO:g}", found)
        return
    blocks = found["num_blocks"]
    yield at_most(
        name, found["written_nbytes"] / found["payload_nbytes"], MAX_WRITTEN_RATIO,
        f"from opening to closing, headers, log and checkpoints: {found['written_nbytes']:,} bytes for"
        f" {found['payload_nbytes']:,}",
    )  # fmt: skip
    yield shown("log_a_block_nbytes", found["log_nbytes"] / blocks, f"{blocks} blocks, one flush each 64")
    yield shown("syncs_a_block_num", found["num_syncs"] / blocks, f"{found['num_syncs']} for {blocks} blocks")


# ---- load or recompute ---------------------------------------------------------------------------


def break_even(plan: Plan) -> Iterator[Figure | Sheet]:
    """From which prompt length on a restore from disk is faster than computing the prompt again."""
    speed, how = prefill_speed(plan)
    part_nbytes = 512 * KiB
    plan.progress.say("restoring prompts of several lengths")
    with tidied(plan.root / "moves") as path:
        found = try_job(
            moves.prompt_lengths, path=path, lengths=list(_LENGTHS), repeats=2 if plan.quick else 5,
            part_nbytes=part_nbytes,
        )  # fmt: skip
    if isinstance(found, str):
        yield unmeasured("break_even_prompt_tokens", "-", found)
        return
    rows = [(length, found[str(length)] * 1e3, length / speed * 1e3) for length in _LENGTHS]
    better = [length for length, restored, computed in rows if restored < computed]
    if better:
        yield shown("break_even_prompt_tokens", better[0], f"of {_LENGTHS} tried; {how}")
    else:
        yield unmeasured("break_even_prompt_tokens", "-", f"recomputing was faster at every length; {how}")
    yield Sheet(
        "Load or recompute?",
        f"Cold from disk, parts of 512 KiB ({part_nbytes // BLOCK_SIZE // KiB} KiB a token), against {how}."
        " Where the lines cross, a prompt is worth its place on disk.",
        ("prompt, tokens", "restore, ms", "prefill, ms"), tuple(rows), draw="lines", log=True,
    )  # fmt: skip


def prefill_speed(plan: Plan) -> tuple[float, str]:
    """Tokens a second as given, or those of products as large as a small model's on this machine."""
    if plan.prefill_tokens_s is not None:
        return plan.prefill_tokens_s, f"a prefill of {plan.prefill_tokens_s:g} tokens a second, as given"
    tokens, width = 512, 2048
    a, b = torch.ones(tokens, width), torch.ones(width, width)
    times = []
    for _ in range(12):
        began = time.perf_counter()
        torch.mm(a, b)
        times.append(time.perf_counter() - began)
    speed = (2 * tokens * width * width / median(times[2:])) / (2 * _MODEL_PARAMETERS)
    how = (
        f"a prefill of {speed:.0f} tokens a second, which products of 100 million weights a token reach here"
    )
    return speed, f"{how} (--prefill says your model's)"


def cuda() -> Iterator[Figure]:
    """Rows for a machine with a GPU."""
    why = "no CUDA device here" if not torch.cuda.is_available() else "measured by tests marked gpu"
    for name in ("device_to_host", "host_to_device"):
        yield unmeasured(f"cuda_{name}_2mib_over_pinned_copy_ratio", f">= {MIN_COPY:g}", why)
