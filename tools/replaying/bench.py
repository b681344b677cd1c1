"""The figures of the replay tool: how fast a log is replayed, and how fast commits become durable."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from bench import child
from bench.figures import Figure, at_most, none_of
from bench.machine import describe
from bench.progress import Progress
from rich.console import Console
from rich.table import Table

from tieredkv.system import OsFs

from . import big_log, commits, traced

_NUM_RECORDS = 1_000_000
_RUNS = 5
_SYNC_S = 0.004
_SECONDS = 2.0
_COMMIT_RUNS = 3


def run_bench(as_json: bool, directory: Path | None = None, num_records: int = _NUM_RECORDS) -> int:
    """Measure everything here and show it; returns 0 if every figure is met, 1 if one is not."""
    root = Path(tempfile.mkdtemp(prefix="tieredkv-replay-", dir=directory))
    machine, progress = describe(root), Progress(Console(stderr=True))
    try:
        figures = [
            *replay_figures(root, progress, num_records),
            *commit_figures(root, progress),
            *trace_figures(root, progress),
        ]
    finally:
        shutil.rmtree(root, ignore_errors=True)
    show(Console(stderr=as_json, width=None if sys.stdout.isatty() else 140), machine, figures)
    if as_json:
        print(json.dumps({"machine": machine, "figures": [figure.as_json() for figure in figures]}))
    return 1 if any(figure.met is False for figure in figures) else 0


# ---- replay --------------------------------------------------------------------------------------


def replay_figures(root: Path, progress: Progress, num_records: int) -> Iterator[Figure]:
    whole, half = root / "whole", root / "half"
    progress.say(f"writing a log of {num_records:,} records, and one of half as many")
    big_log.write_log(whole, num_records)
    big_log.write_log(half, num_records // 2)
    runs = [
        child.run(big_log.replay_once, path=str(whole))
        for _ in progress.each("replaying the log", range(_RUNS))
    ]
    best = min(runs, key=lambda run: run["seconds"])
    wrong = sum(run["num_records"] != num_records or run["end"] != "clean" for run in runs)
    yield none_of("replays_not_whole_num", wrong, f"{best['num_blocks']:,} blocks are left at the end")
    how = f"of {_RUNS} fresh processes, files in the page cache"
    yield at_most(f"replay_{num_records}_records_s", best["seconds"], 5.0, f"best {how}")
    ratios = [run["seconds"] / run["read_s"] for run in runs]
    reads = ", ".join(f"{run['read_s'] * 1e3:.1f}" for run in runs)
    yield at_most(
        "replay_over_read_with_xxh3_ratio", median(ratios), 40.0,
        f"median {how}; each beside the best of five reads in its process: {reads} ms; best {min(ratios):.1f}"
    )  # fmt: skip
    seconds: dict[Path, list[float]] = {half: [], whole: []}
    for _ in progress.each("recovering from both", range(_RUNS)):
        for path, took in seconds.items():
            took.append(child.run(big_log.recover_once, path=str(path))["seconds"])
    ratio = min(seconds[whole]) / min(seconds[half])
    yield at_most(
        "recovery_when_the_log_doubles_ratio", ratio, 2.3, f"{min(seconds[half]):.3f} s for the half"
    )
    yield from memory_figures(root, progress, num_records)


def memory_figures(root: Path, progress: Progress, num_records: int) -> Iterator[Figure]:
    """The same blocks put again and again: the table stays, the log grows."""
    progress.say("replaying two logs over the same blocks")
    peaks = {}
    for count in (num_records // 2, num_records):
        path = root / f"same-{count}"
        big_log.write_log(path, count, num_blocks=num_records // 10)
        peaks[count] = min(child.run(big_log.replay_once, path=str(path))["peak_nbytes"] for _ in range(3))
    half, whole = peaks.values()
    more = (whole - half) / (1 << 20)
    how = (
        f"the log doubles over the same {num_records // 10:,} blocks; {half / (1 << 20):.0f} MiB for the half"
    )
    yield at_most("replay_memory_when_the_log_doubles_mib", max(0.0, more), 16.0, how)


# ---- commits -------------------------------------------------------------------------------------


def commit_figures(root: Path, progress: Progress) -> Iterator[Figure]:
    for name, must, fs in (("as_it_is", 2.0, OsFs()), ("sync_4_ms", 20.0, commits.Disk(_SYNC_S))):
        ours, theirs = list[float](), list[float]()
        for number in progress.each(f"{commits.NUM_WRITERS} writers waiting, {name}", range(_COMMIT_RUNS)):
            place = root / f"commits-{name}-{number}"
            theirs += [
                commits.each_for_itself(fs, place / kind, _SECONDS, shared=kind == "shared")
                for kind in ("shared", "own")
            ]
            ours.append(commits.through_the_log(fs, place / "ours", _SECONDS))
        ratio = median(ours) / max(theirs)
        how = f"{median(ours):,.0f} a second; each for itself at best {max(theirs):,.0f}"
        if name == "as_it_is":
            how += _what_limits(root, max(theirs))
        yield Figure(f"commits_{name}_ratio", round(ratio, 2), f">= {must:g}", ratio >= must, how)


def _what_limits(root: Path, theirs: float) -> str:
    """Where the disk runs many syncs at once as fast as one, what is left is what it takes to wake a thread."""
    alone_ms, together_ms = commits.sync_ms(root / "sync"), commits.NUM_WRITERS / theirs * 1e3
    unsynced = commits.through_the_log(commits.Disk(0.0), root / "unsynced", _SECONDS)
    round_ms = commits.NUM_WRITERS / unsynced * 1e3
    return (
        f"; a sync alone takes {alone_ms:.2f} ms, each of {commits.NUM_WRITERS} at once {together_ms:.2f} ms;"
        f" our round of {commits.NUM_WRITERS} without any sync {round_ms:.2f} ms, interpreter and thread switches;"
        f" so no log with one sync at a time gets above {together_ms / alone_ms:.2f} here"
    )


# ---- the trace -----------------------------------------------------------------------------------


def trace_figures(root: Path, progress: Progress) -> Iterator[Figure]:
    progress.say("storing and loading, with the trace and without")
    found = child.run(traced.compare, path=str(root / "traced"))
    how = f"{found['without_s']:.3f} s without, {found['num_events']:,} events; median of {found['num_pairs']} pairs"
    yield at_most("trace_cost_percent", found["percent"], 3.0, how)


def show(console: Console, machine: dict[str, Any], figures: list[Figure]) -> None:
    facts = ", ".join(f"{name} {value}" for name, value in machine.items())
    console.print(facts, style="dim", highlight=False)
    table = Table("figure", "value", "must be", "", "how")
    marks = {True: "[green]met[/]", False: "[red]not met[/]", None: ""}
    for figure in figures:
        value = "not measured" if figure.value is None else f"{figure.value:g}"
        table.add_row(figure.name, value, figure.must, marks[figure.met], figure.detail)
    console.print(table)
