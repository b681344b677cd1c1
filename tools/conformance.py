"""Every family of transformers, every operation of a chat: exact, exact from a checkpoint, refused, or wrong.

python tools/conformance.py                                    the whole table for the installed transformers
python tools/conformance.py --family llama --operation fork    names by their beginnings
python tools/conformance.py --json                             the last line is one JSON object
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Annotated

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # flex attention as it is written: compiling takes minutes

import typer
from conforming import cells, report
from conforming.family import Family
from conforming.operations import Operation
from conforming.verdict import Cell
from rich.console import Console


def main(
    family: Annotated[list[str] | None, typer.Option(help="Only families whose names begin so.")] = None,
    operation: Annotated[list[str] | None, typer.Option(help="Only operations that begin so.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object as the last line.")] = False,
) -> None:
    """Run the table, print it, and say for each figure whether it reaches what it must."""
    cells.quiet()
    try:
        families, operations = cells.chosen(family or (), operation or ())
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    began = time.perf_counter()
    console = Console(stderr=as_json, width=None if sys.stdout.isatty() else 140)
    found = run(console, families, operations)
    figures = report.figures(found)
    report.show(console, found, figures, time.perf_counter() - began)
    if as_json:
        shown = {"cells": [c.as_json() for c in found], "figures": [f.as_json() for f in figures]}
        typer.echo(json.dumps(shown))
    if any(figure.met is False for figure in figures):
        raise typer.Exit(1)


def run(console: Console, families: list[Family], operations: list[Operation]) -> list[Cell]:
    found: list[Cell] = []
    with console.status("") as status:
        for row in families:
            for cell in cells.cells_of(row, operations):
                found.append(cell)
                status.update(f"{cell.family}: {cell.operation}")
    return found


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()
