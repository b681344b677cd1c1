"""How fast blocks spill and come back, beside what the hardware and other ways can do.

python tools/bench_spill.py --quick --report out.html   a first look, in under two minutes
python tools/bench_spill.py --json                      everything; the last line is one JSON object
python tools/bench_spill.py --only rivals --rivals all  one part, with the rivals that need environments
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer
from bench.child import ChildFailed
from bench.figures import Figure, unmeasured
from bench.machine import describe
from bench.plan import Plan
from bench.progress import Progress
from bench.rivals.environment import default_home
from bench.sections import QUICK_NUM_BLOCKS, QUICK_RUNS, SECTIONS
from bench.sheet import Sheet
from bench.show import show
from rich.console import Console

_RUNS, _NUM_BLOCKS = 5, 100_000


def main(
    basics: Annotated[bool, typer.Option("--basics", help="As --only basics: the first figures.")] = False,
    speed: Annotated[bool, typer.Option("--speed", help="As --only speed: spill, restore, raw.")] = False,
    only: Annotated[
        list[str], typer.Option(help=f"Parts to measure: {', '.join(SECTIONS)}. All if none is named.")
    ] = [],  # noqa: B006 (typer wants a list, and nothing changes it)
    quick: Annotated[bool, typer.Option("--quick", help="Smaller and fewer: under two minutes.")] = False,
    rivals: Annotated[
        str, typer.Option(help='"light", or "all": also vLLM, LMCache, SGLang, in environments built once.')
    ] = "light",
    rivals_dir: Annotated[
        Path, typer.Option(help="Where those environments are kept: 6 GB.")
    ] = default_home(),  # noqa: B008 (a path, made once)
    trace: Annotated[
        Path | None, typer.Option(help="Real workloads: a folder or a file; TIEREDKV_DATA if not given.")
    ] = None,
    prefill: Annotated[
        float | None, typer.Option(help="Prefill speed of your model, tokens a second.", min=1)
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Write one page with plots here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object as the last line.")] = False,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Where to write, on the disk to be measured.")
    ] = None,
    num_blocks: Annotated[int | None, typer.Option("--blocks", help="Blocks of the large store.")] = None,
    runs: Annotated[int | None, typer.Option(help="Repeats; figures are medians.", min=1)] = None,
) -> None:
    """Measure, print a table, and say for each figure whether it reaches what it must."""
    names = [name for name, asked in (("basics", basics), ("speed", speed)) if asked] + only
    if unknown := sorted(set(names) - set(SECTIONS)):
        raise typer.BadParameter(f"--only {unknown[0]}: choose from {', '.join(SECTIONS)}")
    if rivals not in ("light", "all"):
        raise typer.BadParameter(f'--rivals {rivals}: choose "light" or "all"')
    if report is not None and importlib.util.find_spec("matplotlib") is None:
        raise typer.BadParameter('--report draws with matplotlib: pip install ".[bench]"')
    given = trace or (Path(found) if (found := os.environ.get("TIEREDKV_DATA")) else None)
    root = Path(tempfile.mkdtemp(prefix="tieredkv-bench-", dir=directory))
    plan = Plan(
        root, Progress(Console(stderr=True)), runs or (QUICK_RUNS if quick else _RUNS), quick,
        num_blocks or (QUICK_NUM_BLOCKS if quick else _NUM_BLOCKS),
        rivals_dir if rivals == "all" else None, given, prefill,
    )  # fmt: skip
    measure(plan, [name for name in SECTIONS if name in names or not names], as_json, report)


def measure(plan: Plan, names: list[str], as_json: bool, report: Path | None) -> None:
    """Run these parts, and show what they found in every way asked for."""
    machine, began = describe(plan.root), time.perf_counter()
    plan.progress.say(f"measuring {', '.join(names)}; {plan.runs} runs of each")
    found: list[Figure | Sheet] = []
    failed = False
    try:
        for name in names:
            try:
                found.extend(SECTIONS[name](plan))
            except ChildFailed as error:
                failed = True
                plan.progress.console.print(f"{name} failed: {error}", style="red", markup=False)
                found.append(unmeasured(f"rest_of_{name}_num", "-", str(error).strip().splitlines()[-1]))
    finally:
        shutil.rmtree(plan.root, ignore_errors=True)
    figures = [one for one in found if isinstance(one, Figure)]
    sheets = [one for one in found if isinstance(one, Sheet)]
    console = Console(stderr=as_json, width=None if sys.stdout.isatty() else 140)
    show(console, machine, figures, time.perf_counter() - began, sheets)
    result = {
        "machine": machine, "command": sys.argv[1:], "figures": [f.as_json() for f in figures],
        "sheets": [s.as_json() for s in sheets],
    }  # fmt: skip
    if report is not None:
        from bench.report import write  # draws with matplotlib, which nothing else needs

        write(report, result)
        console.print(f"report: {report}", highlight=False)
    if as_json:
        typer.echo(json.dumps(result))
    if failed or any(figure.met is False for figure in figures):
        raise typer.Exit(2 if failed else 1)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()
