"""The table as figures, and for a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from bench.figures import Figure, none_of, shown
from rich.console import Console
from rich.table import Table

from .families import FAMILIES
from .family import ATTENTION
from .section import MARKS
from .verdict import ABSENT, CHECKPOINT, EXACT, REFUSED, WRONG, Cell

_LEAST_OF_RECURRENT = ("resume", "fork", "rollback", "edited message")
_STYLES = {EXACT: "green", CHECKPOINT: "cyan", REFUSED: "yellow", WRONG: "bold red", ABSENT: "dim"}


def figures(cells: Sequence[Cell]) -> list[Figure]:
    """What the table must reach, and how many cells there are of each verdict."""
    kinds = {family.name: family.kind for family in FAMILIES}
    wrong = [cell for cell in cells if cell.verdict == WRONG]
    refused = [
        cell for cell in cells
        if cell.verdict == REFUSED and kinds[cell.family] == ATTENTION and not cell.by_transformers
    ]  # fmt: skip
    below = [
        cell for cell in cells
        if kinds[cell.family] != ATTENTION and cell.operation.startswith(_LEAST_OF_RECURRENT)
        and cell.verdict in (REFUSED, WRONG)
    ]  # fmt: skip
    theirs = [cell for cell in below if cell.by_transformers]
    ours = [cell for cell in below if not cell.by_transformers]
    counts = Counter(cell.verdict for cell in cells)
    return [
        none_of("cells_that_are_wrong_num", len(wrong), _named(wrong)),
        none_of("refused_attention_cells_num", len(refused), _named(refused)),
        none_of("recurrent_cells_below_checkpoint_num", len(ours), _named(ours)),
        shown("recurrent_cells_that_transformers_refuses_num", len(theirs), _named(theirs)),
        *(shown(f"{verdict}_cells_num", counts[verdict]) for verdict in MARKS if verdict != WRONG),
    ]


def _named(cells: Sequence[Cell]) -> str:
    names = [f"{cell.family}: {cell.operation}" for cell in cells]
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def line(cell: Cell) -> str:
    reason = f": {cell.reason}" if cell.reason and cell.verdict != EXACT else ""
    return f"{cell.transformers} {cell.family}, {cell.operation}: {cell.verdict}{reason}"


def show(console: Console, cells: Sequence[Cell], found: Sequence[Figure], seconds: float) -> None:
    """A row for each family, a column for each operation; then every reason, then the figures."""
    operations = list(dict.fromkeys(cell.operation for cell in cells))
    table = Table(title=f"{len(cells)} cells in {seconds:.0f} s", show_lines=False)
    for column in ("family", *(str(number) for number, _ in enumerate(operations, 1))):
        table.add_column(column)
    for family in dict.fromkeys(cell.family for cell in cells):
        marks = {
            c.operation: f"[{_STYLES[c.verdict]}]{MARKS[c.verdict]}[/]" for c in cells if c.family == family
        }
        table.add_row(family, *(marks.get(name, "") for name in operations))
    console.print(table)
    for number, name in enumerate(operations, 1):
        console.print(f"{number:3} {name}", highlight=False)
    for cell in cells:
        if cell.reason and cell.verdict in (WRONG, REFUSED):
            console.print(line(cell), style=_STYLES[cell.verdict], markup=False, highlight=False)
    marks = {True: "met", False: "not met", None: ""}
    for figure in found:
        value = f"{figure.name} {figure.value:g} (must be {figure.must}) {marks[figure.met]} {figure.detail}"
        console.print(value, markup=False, highlight=False)
