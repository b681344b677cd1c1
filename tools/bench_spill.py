"""How fast blocks spill and come back, beside what the hardware can do.

python tools/bench_spill.py --basics          the first figures, in under two minutes
python tools/bench_spill.py --basics --json   the last line is one JSON object
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer
from bench import basics, speed
from bench.child import ChildFailed
from bench.figures import Figure
from bench.machine import describe
from bench.progress import Progress
from rich.console import Console
from rich.table import Table

_NUM_BLOCKS = 100_000
_RUNS = 5


def main(
    basics_only: Annotated[bool, typer.Option("--basics", help="The first figures alone.")] = False,
    speed_only: Annotated[bool, typer.Option("--speed", help="Spill and restore against raw.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object as the last line.")] = False,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Where to write, on the disk to be measured.")
    ] = None,
    num_blocks: Annotated[int, typer.Option("--blocks", help="Blocks of the large store.")] = _NUM_BLOCKS,
    runs: Annotated[int, typer.Option(help="Repeats of each measurement; figures are medians.")] = _RUNS,
) -> None:
    """Measure, print a table, and say for each figure whether it reaches what it must."""
    if not (basics_only or speed_only):
        raise typer.BadParameter("say what to measure: --basics, --speed or both")
    root = Path(tempfile.mkdtemp(prefix="tieredkv-bench-", dir=directory))
    machine = describe(root)
    progress = Progress(Console(stderr=True))
    began = time.perf_counter()
    try:
        figures = list(basics.measure(root, progress, num_blocks, runs)) if basics_only else []
        figures += speed.measure(root, progress, runs) if speed_only else ()
    except ChildFailed as error:
        progress.console.print(f"a measurement failed: {error}", style="red", markup=False)
        raise typer.Exit(2) from error
    finally:
        shutil.rmtree(root, ignore_errors=True)
    console = Console(stderr=as_json, width=None if sys.stdout.isatty() else 140)
    show(console, machine, figures, time.perf_counter() - began)
    if as_json:
        typer.echo(json.dumps({"machine": machine, "figures": [f.as_json() for f in figures]}))
    if any(figure.met is False for figure in figures):
        raise typer.Exit(1)


def show(
    console: Console, machine: dict[str, str | int | float], figures: list[Figure], seconds: float
) -> None:
    console.print(
        ", ".join(f"{name} {value}" for name, value in machine.items()), style="dim", highlight=False
    )
    if float(machine["load"]) > float(machine["num_cores"]):
        console.print("other programs kept the processors busy: times are too long", style="yellow")
    table = Table(title=f"measured in {seconds:.0f} s")
    for column in ("figure", "value", "must be", "", "how"):
        table.add_column(column, overflow="fold", justify="right" if column == "value" else "left")
    marks = {True: "[green]met[/]", False: "[red]not met[/]", None: ""}
    for figure in figures:
        value = "not measured" if figure.value is None else f"{figure.value:g}"
        table.add_row(figure.name, value, figure.must, marks[figure.met], figure.detail)
    console.print(table)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()
