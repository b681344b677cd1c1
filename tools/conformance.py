"""Every family of transformers, every operation of a chat: exact, exact from a checkpoint, refused, or wrong.

python tools/conformance.py                                    the whole table for the installed transformers
python tools/conformance.py --family llama --operation fork    names, or their beginnings
python tools/conformance.py --transformers 5.15 --transformers 5.20 --transformers 5.24 --markdown
                                                               three releases, into the README
python tools/conformance.py --json                             the last line is one JSON object
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # flex attention as it is written: compiling takes minutes

import typer
from conforming import cells, environments, report, section
from conforming.scene import quiet
from conforming.verdict import Cell
from rich.console import Console

_README = Path(__file__).parents[1] / "README.md"
_SHORT = ("Llama", "Mistral, sliding", "Bamba")


def main(
    family: Annotated[list[str] | None, typer.Option(help="Only families of this name.")] = None,
    operation: Annotated[list[str] | None, typer.Option(help="Only operations of this name.")] = None,
    release: Annotated[
        list[str] | None,
        typer.Option("--transformers", help="A minor release, as 5.20; several are one table."),
    ] = None,
    environment_dir: Annotated[
        Path | None, typer.Option("--environments", help="Where other releases are installed, and kept.")
    ] = None,
    jobs: Annotated[int, typer.Option(help="Processes at once; 0 runs all in this one.")] = 2,
    short: Annotated[bool, typer.Option("--short", help=f"Only {', '.join(_SHORT)}.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Write the README's section.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object as the last line.")] = False,
) -> None:
    """Run the table, print it, and say for each figure whether it reaches what it must."""
    quiet()
    try:
        families, operations = cells.chosen(family or (_SHORT if short else ()), operation or ())
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    began = time.perf_counter()
    console = Console(stderr=as_json, width=None if sys.stdout.isatty() else 140)
    found: list[Cell] = []
    with console.status("") as status, _kept(environment_dir) as folder:
        for minor in release or [environments.installed()]:
            status.update(f"transformers {minor}")
            try:
                packages = environments.environment(minor, folder)
                longest_first = sorted(families, key=lambda family: family.weights is None)
                names = [family.name for family in longest_first]
                for cell in _cells(packages, names, [o.name for o in operations], jobs):
                    found = cells.in_order([*found, cell])
                    console.print(report.line(cell), style="dim", markup=False, highlight=False)
                    if markdown:  # what is done outlives a run that is cut off
                        section.write_section(_README, section.section(found))
            except environments.ChildFailed as error:
                console.print(f"a run failed: {error}", style="red", markup=False)
                raise typer.Exit(2) from error
    figures = report.figures(found)
    report.show(console, found, figures, time.perf_counter() - began)
    if as_json:
        shown = {"cells": [c.as_json() for c in found], "figures": [f.as_json() for f in figures]}
        typer.echo(json.dumps(shown))
    if any(figure.met is False for figure in figures):
        raise typer.Exit(1)


def _cells(
    packages: Path | None, families: Sequence[str], operations: Sequence[str], jobs: int
) -> Iterator[Cell]:
    """All cells of one release, as they come."""
    if jobs:
        yield from environments.run_all(packages, families, operations, jobs)
        return
    rows, columns = cells.chosen(families, operations)
    for row in rows:
        yield from cells.cells_of(row, columns)


@contextmanager
def _kept(folder: Path | None) -> Iterator[Path]:
    """Where environments lie: the folder given, or one that goes at the end."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="tieredkv-environments-") as passing:
        yield Path(passing)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()
