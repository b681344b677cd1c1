"""What the terminal shows of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from .figures import Figure
from .sheet import Cell, Sheet

_MARKS = {True: "[green]met[/]", False: "[red]not met[/]", None: ""}


def show(
    console: Console,
    machine: Mapping[str, str | int | float],
    figures: Sequence[Figure],
    seconds: float,
    sheets: Sequence[Sheet] = (),
) -> None:
    """The machine, every sheet, then every figure beside what it must reach."""
    console.print(
        ", ".join(f"{name} {value}" for name, value in machine.items()), style="dim", highlight=False
    )
    if float(machine["load"]) > float(machine["num_cores"]):
        console.print("other programs kept the processors busy: times are too long", style="yellow")
    for sheet in sheets:
        _show_sheet(console, sheet)
    table = Table(title=f"measured in {seconds:.0f} s")
    for column in ("figure", "value", "must be", "", "how"):
        table.add_column(column, overflow="fold", justify="right" if column == "value" else "left")
    for figure in figures:
        table.add_row(figure.name, text_of(figure), figure.must, _MARKS[figure.met], figure.detail)
    console.print(table)


def text_of(figure: Figure) -> str:
    return "not measured" if figure.value is None else f"{figure.value:g}"


def text(cell: Cell) -> str:
    """A cell as people read it: four digits, no more."""
    if cell is None:
        return ""
    return f"{cell:.4g}" if isinstance(cell, float) else f"{cell:,}" if isinstance(cell, int) else cell


def _show_sheet(console: Console, sheet: Sheet) -> None:
    table = Table(title=sheet.title, caption=sheet.how, caption_justify="left")
    for number, column in enumerate(sheet.columns):
        table.add_column(column, justify="right" if number else "left")
    for row in sheet.rows:
        table.add_row(*map(text, row))
    console.print(table)
