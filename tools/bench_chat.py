"""How soon a chat answers, and how fast: cold, from every tier, after a restart, and beside what else there is.

python tools/bench_chat.py                 every row; about twenty minutes on two cores
python tools/bench_chat.py --quick         some rows, in under two minutes
python tools/bench_chat.py --only restart  one group of rows
python tools/bench_chat.py --json          the last line is one JSON object
"""

from __future__ import annotations

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
from bench.machine import describe
from bench.progress import Progress
from bench.show import show, text_of
from chatting import rows
from chatting.setting import Setting, model_folder
from rich.console import Console

_RUNS, _QUICK_RUNS = 5, 3
_DATA = os.environ.get("TIEREDKV_DATA")


def main(
    only: Annotated[str | None, typer.Option(help=f"One of {', '.join(rows.ALL)}.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help=f"{', '.join(rows.QUICK)}, few runs.")] = False,
    short: Annotated[
        bool, typer.Option("--short", help="Three conversations, shown without a target.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object as the last line.")] = False,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Where to write, on the disk to be measured.")
    ] = None,
    model: Annotated[Path | None, typer.Option(help="A folder of another transformers model.")] = None,
    data: Annotated[Path | None, typer.Option(help="The folder of real conversations.")] = None,
    runs: Annotated[int, typer.Option(help="Repeats of each measurement; figures are medians.")] = _RUNS,
) -> None:
    """Measure, print a table, and say for each figure whether it reaches what it must."""
    if only is not None and only not in rows.ALL:
        raise typer.BadParameter(f"--only {only}: one of {', '.join(rows.ALL)}")
    names = [only] if only else list(rows.QUICK if quick else rows.ALL)
    progress = Progress(Console(stderr=True))
    progress.say(f"measuring {', '.join(names)}")
    root = Path(tempfile.mkdtemp(prefix="tieredkv-bench-", dir=directory))
    machine, began, figures = describe(root), time.perf_counter(), []
    setting = Setting(
        root=root, model=model or model_folder(progress), progress=progress,
        runs=min(runs, _QUICK_RUNS) if quick else runs,
        data=data or (Path(_DATA) if _DATA else None), num_conversations=3 if short else rows.NUM_CONVERSATIONS,
    )  # fmt: skip
    try:
        for name in names:
            for figure in rows.measure(name, setting):
                progress.say(f"{figure.name}: {text_of(figure)}")
                figures.append(figure)
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


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()
