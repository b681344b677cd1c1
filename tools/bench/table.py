"""What the block table takes: lookups beside vLLM's, ten times more blocks, a million, recovery by size."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

from . import big_store, child, scale
from .figures import Figure, at_least, at_most, unmeasured
from .plan import Plan
from .rivals import vllm_pool
from .rivals.environment import CannotInstall
from .rivals.ranking import VLLM
from .scratch import tidied, try_job
from .sheet import Sheet

MAX_LOOKUP_MS = 0.8
MIN_OVER_VLLM = 2.0
MAX_GROWTH = 1.3
MAX_OPEN_S, MAX_BLOCK_NBYTES, MAX_STALL_MS = 1.5, 300.0, 20.0
MILLION = 1_000_000
_LOOKUP_TOKENS = scale.CHAIN * scale.BLOCK_SIZE


def measure(plan: Plan) -> Iterator[Figure | Sheet]:
    yield from lookups(plan)
    yield from growth(plan)
    yield from recovery(plan)
    yield from million(plan)


def lookups(plan: Plan) -> Iterator[Figure]:
    name = f"lookup_{_LOOKUP_TOKENS}_tokens_ms"
    plan.progress.say(f"lookups of {_LOOKUP_TOKENS:,} tokens")
    with tidied(plan.root / "lookup") as path:
        found = try_job(scale.look_up, path=path, rounds=50 * plan.rounds)
    ratio = f"lookup_{_LOOKUP_TOKENS}_tokens_over_vllm_pool_ratio"
    if isinstance(found, str):
        yield unmeasured(name, f"< {MAX_LOOKUP_MS:g}", found)
        yield unmeasured(ratio, f">= {MIN_OVER_VLLM:g}", found)
        return
    ms = found["seconds"] * 1e3
    how = (
        f"{found['num_tokens']:,} tokens found on the device, hashing included, median of {50 * plan.rounds}"
    )
    yield at_most(name, ms, MAX_LOOKUP_MS, how)
    yield _over_vllm(plan, ratio, ms)


def _over_vllm(plan: Plan, name: str, ms: float) -> Figure:
    must = f">= {MIN_OVER_VLLM:g}"
    if plan.rivals_home is None:
        return unmeasured(name, must, "--rivals all builds an environment for vLLM")
    try:
        python = str(VLLM.python(plan.rivals_home, plan.progress.say))
    except CannotInstall as error:
        return unmeasured(name, must, str(error))
    sizes = {"num_tokens": _LOOKUP_TOKENS, "block_size": scale.BLOCK_SIZE}
    found = try_job(vllm_pool.look_up, python=python, rounds=10 * plan.rounds, **sizes)
    if isinstance(found, str) or found["num_found"] != found["num_blocks"]:
        return unmeasured(name, must, found if isinstance(found, str) else f"it found {found}")
    theirs = found["seconds"] * 1e3
    return at_least(name, theirs / ms, MIN_OVER_VLLM, 0.0, f"{theirs:.2f} ms there with its default hash")


def growth(plan: Plan) -> Iterator[Figure]:
    num_blocks = 2_000 if plan.quick else 20_000
    plan.progress.say(f"lookup and store with {num_blocks:,} and {10 * num_blocks:,} blocks")
    with tidied(plan.root / "growth") as path:
        found = try_job(scale.ten_times, path=path, num_blocks=num_blocks, rounds=4 * plan.rounds)
    for what in ("lookup", "store"):
        name = f"{what}_with_10_times_more_blocks_ratio"
        if isinstance(found, str):
            yield unmeasured(name, f"<= {MAX_GROWTH:g}", found)
            continue
        few, many = found[f"{what}_few"], found[f"{what}_many"]
        ratios = [b / a for a, b in zip(few, many, strict=True)]
        yield at_most(
            name, median(ratios), MAX_GROWTH,
            f"chains of {scale.CHAIN} blocks: {median(few) * 1e3:.2f} ms with {num_blocks:,} blocks in the table,"
            f" {median(many) * 1e3:.2f} ms with {10 * num_blocks:,}",
        )  # fmt: skip


# ---- opening -------------------------------------------------------------------------------------


def recovery(plan: Plan) -> Iterator[Sheet]:
    """Opening after SIGKILL, and after a clean close, against the number of blocks."""
    sizes = (1_000, 10_000) if plan.quick else (1_000, 10_000, 50_000, 200_000)
    rows = []
    for num_blocks in sizes:
        plan.progress.say(f"recovering {num_blocks:,} blocks")
        with tidied(plan.root / "recovered") as path:
            child.run(big_store.build, path=path, num_blocks=num_blocks)
            log = [_open_s(path, num_blocks) for _ in range(plan.runs - 1)]
            log.append(_open_s(path, num_blocks, close=True))  # the last one leaves a checkpoint
            checkpoint = [_open_s(path, num_blocks) for _ in range(plan.runs)]
            rows.append((num_blocks, median(log) * 1e3, median(checkpoint) * 1e3))
    yield Sheet(
        "How long a restart takes",
        f"Opening a store after SIGKILL, from its log, and after a clean close, from its checkpoint; two parts a"
        f" block, medians of {plan.runs} fresh processes, files in the page cache.",
        ("blocks", "from the log, ms", "from a checkpoint, ms"), tuple(rows), draw="lines", log=True,
    )  # fmt: skip


def _open_s(path: str, num_blocks: int, close: bool = False) -> float:
    opened = child.run(big_store.open_once, path=path, num_blocks=num_blocks, close=close)
    if opened["num_blocks"] != num_blocks:
        raise child.ChildFailed(f"recovery found {opened['num_blocks']} of {num_blocks} blocks")
    return float(opened["seconds"])


def million(plan: Plan) -> Iterator[Figure]:
    names = ("open_1000000_blocks_s", "table_and_lru_a_block_nbytes", "caller_stall_in_checkpoint_ms")
    musts = (f"< {MAX_OPEN_S:g}", f"< {MAX_BLOCK_NBYTES:g}", f"< {MAX_STALL_MS:g}")
    found = _million(plan)
    if isinstance(found, str):
        yield from (unmeasured(name, must, found) for name, must in zip(names, musts, strict=True))
        return
    opened, stalled = found
    seconds = median(one["seconds"] for one in opened)
    nbytes = median(one["anonymous_nbytes"] for one in opened) / MILLION
    stall = median(one["longest_s"] for one in stalled) * 1e3
    idle = median(one["idle_s"] for one in stalled) * 1e3
    yield at_most(names[0], seconds, MAX_OPEN_S, f"median of {plan.runs} fresh processes, from a checkpoint")
    yield at_most(
        names[1], nbytes, MAX_BLOCK_NBYTES, "anonymous memory above the bare import, after opening: all of it"
    )
    yield at_most(
        names[2], stall, MAX_STALL_MS,
        f"the longest of {stalled[0]['num_calls']} lookups and stores while a checkpoint of"
        f" {stalled[0]['checkpoint_s']:.1f} s was written, median of {plan.runs}; {idle:.1f} ms without one",
    )  # fmt: skip


def _million(plan: Plan) -> tuple[list[dict[str, Any]], list[dict[str, Any]]] | str:
    if plan.quick:
        return "--quick leaves it out: it takes 9 GB of disk and minutes"
    of = {"num_blocks": MILLION, "window": 0}
    with tidied(plan.root / "million") as path:
        try:
            with plan.progress.bar("building a store of a million blocks", MILLION) as advance:
                child.run(big_store.build, lambda done: advance(done), path=path, **of)
            child.run(big_store.open_once, path=path, close=True, **of)
            runs = range(plan.runs)
            opened = [child.run(big_store.open_once, path=path, close=False, **of) for _ in runs]
            stalled = [child.run(scale.checkpoint_stall, path=path, **of) for _ in runs]
        except child.ChildFailed as error:
            return str(error).strip().splitlines()[-1]
    short = [one["num_blocks"] for one in opened if one["num_blocks"] != MILLION]
    return f"only {short[0]} of {MILLION} blocks were found" if short else (opened, stalled)
