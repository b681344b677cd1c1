"""The first figures: lookup, opening, import, and whether what comes back is what was stored."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from tieredkv.units import MiB, format_nbytes

from . import big_store, child, equality
from .figures import Figure, at_most, none_of, unmeasured
from .progress import Progress

MAX_LOOKUP_RATIO = 2.0
MAX_OPEN_S = 1.0
MAX_OPEN_MIB = 40.0
MAX_IMPORT_S = 0.2
_LOOKUP = f"lookup_{big_store.BLOCKS_A_CHAIN * big_store.BLOCK_SIZE}_tokens_over_sha256_ratio"


def measure(root: Path, progress: Progress, num_blocks: int, runs: int) -> Iterator[Figure]:
    """Each figure as it is known. `root` is an empty directory with room for a store of `num_blocks`."""
    yield from import_figures(progress, runs)
    yield from equality_figures(root, progress)
    yield from big_store_figures(root, progress, num_blocks, runs)


def import_figures(progress: Progress, runs: int) -> Iterator[Figure]:
    times = []
    # the first run may compile bytecode, and is not counted
    for _ in progress.each("import in a fresh process", range(runs + 1)):
        out = subprocess.run(
            big_store.IMPORT_COMMAND, capture_output=True, text=True, check=True, env=child.environment()
        )
        times.append(json.loads(out.stdout))
    counted = times[1:]
    seconds = [t["tieredkv_s"] for t in counted]
    yield at_most(
        "import_beyond_torch_s", median(seconds), MAX_IMPORT_S,
        f"median of {runs}; import torch alone {median(t['torch_s'] for t in counted):.2f} s",
        runs=seconds,
    )  # fmt: skip
    yield none_of("import_of_transformers_num", sum(t["transformers"] for t in counted))


def equality_figures(root: Path, progress: Progress) -> Iterator[Figure]:
    name, path = "restored_kv_differing_tensors_num", str(equality.directory(root))
    progress.say("K and V that come back, compared bit for bit")
    filled = child.run(equality.store_and_compare, path=path)
    restarted = child.run(equality.compare_restarted, path=path)
    tiers = {**filled["tokens_by_tier"], "after_restart": sum(restarted["tokens_by_tier"].values())}
    missing = [tier for tier in ("device", "host", "disk", "after_restart") if not tiers.get(tier)]
    short = restarted["wanted_tokens"] - tiers["after_restart"]
    if missing or short:
        why = f"nothing came from {', '.join(missing)}" if missing else f"{short} tokens were not restored"
        yield unmeasured(name, "0", f"{why}; tokens by tier {tiers}")
        return
    yield none_of(
        name, filled["differing"] + restarted["differing"],
        f"of {filled['tensors'] + restarted['tensors']}; full and window layers, parts of"
        f" {equality.part_sizes()}; tokens by tier {tiers}",
        tokens_by_tier=tiers,
    )  # fmt: skip


def big_store_figures(root: Path, progress: Progress, num_blocks: int, runs: int) -> Iterator[Figure]:
    path = root / "big"
    with progress.bar(f"building a store of {num_blocks:,} blocks", num_blocks) as advance:
        built = child.run(big_store.build, lambda done: advance(done), path=str(path), num_blocks=num_blocks)
    disk = format_nbytes(big_store.store_nbytes(path))
    progress.say(f"built in {built['seconds']:.1f} s, {disk} on disk, and killed")
    ways = {}
    ways["log"] = _open_runs(progress, "opening from the log after SIGKILL", path, num_blocks, runs)
    child.run(big_store.open_once, path=str(path), num_blocks=num_blocks, close=True)
    ways["checkpoint"] = _open_runs(progress, "opening from a checkpoint", path, num_blocks, runs)
    yield from _opening(ways, num_blocks, runs)
    progress.say(f"looking up {big_store.BLOCKS_A_CHAIN * big_store.BLOCK_SIZE:,} tokens")
    yield _lookup(
        child.run(big_store.look_up, path=str(path), num_blocks=num_blocks, rounds=50 * runs), num_blocks
    )


def _open_runs(progress: Progress, what: str, path: Path, num_blocks: int, runs: int) -> list[dict[str, Any]]:
    return [
        child.run(big_store.open_once, path=str(path), num_blocks=num_blocks, close=False)
        for _ in progress.each(what, range(runs))
    ]


def _opening(ways: Mapping[str, list[dict[str, Any]]], num_blocks: int, runs: int) -> Iterator[Figure]:
    """The worse of both ways, and only if every part was there at every opening."""
    seconds_name, memory_name = f"open_{num_blocks}_blocks_s", f"open_{num_blocks}_blocks_anonymous_mib"
    for way, opened in ways.items():
        for once in opened:
            whole = (once["num_blocks"], once["num_parts"]) == (num_blocks, 2 * num_blocks)
            if not whole or (once["num_replayed"] > 0) != (way == "log"):
                why = f"found {once}, not {num_blocks} blocks in {2 * num_blocks} parts from the {way}"
                yield unmeasured(seconds_name, f"<= {MAX_OPEN_S:g}", why)
                yield unmeasured(memory_name, f"<= {MAX_OPEN_MIB:g}", why)
                return
    seconds = {way: round(median(o["seconds"] for o in opened), 4) for way, opened in ways.items()}
    mib = {way: round(median(o["anonymous_nbytes"] for o in opened) / MiB, 2) for way, opened in ways.items()}
    cpu_s = {way: round(median(o["cpu_s"] for o in opened), 4) for way, opened in ways.items()}
    how = (
        f"the worse of {_each(seconds)} (processor time {_each(cpu_s)});"
        f" medians of {runs} fresh processes, files in the page cache"
    )
    yield at_most(
        seconds_name, max(seconds.values()), MAX_OPEN_S, how,
        runs={way: [round(o["seconds"], 4) for o in opened] for way, opened in ways.items()},
    )  # fmt: skip
    yield at_most(
        memory_name, max(mib.values()), MAX_OPEN_MIB,
        f"the worse of {_each(mib)}; RssAnon above the bare import, in the same process", **mib,
    )  # fmt: skip


def _each(values: Mapping[str, float]) -> str:
    return ", ".join(f"{value:g} from the {way}" for way, value in values.items())


def _lookup(found: dict[str, Any], num_blocks: int) -> Figure:
    whole = (big_store.BLOCKS_A_CHAIN - 1) * big_store.BLOCK_SIZE
    if found["num_tokens"] != whole or found["num_blocks"] != num_blocks:
        why = f"the lookup found {found['num_tokens']} of {whole} tokens in {found['num_blocks']} blocks"
        return unmeasured(_LOOKUP, f"<= {MAX_LOOKUP_RATIO:g}", why)
    return at_most(
        _LOOKUP, found["lookup_s"] / found["sha256_s"], MAX_LOOKUP_RATIO,
        f"lookup {found['lookup_s'] * 1e3:.3f} ms, of it hashing {found['chain_s'] * 1e3:.3f} ms;"
        f" plain chained sha256 {found['sha256_s'] * 1e3:.3f} ms; {num_blocks:,} blocks, full and window parts",
        lookup_ms=round(found["lookup_s"] * 1e3, 4), sha256_ms=round(found["sha256_s"] * 1e3, 4),
    )  # fmt: skip
