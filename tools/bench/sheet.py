"""What is shown beside the figures: a titled table of numbers, and how to draw it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

Cell = str | float | int | None


@dataclass(frozen=True)
class Sheet:
    """Rows of numbers under a title, with a sentence on how they came about and how to read them.

    The first column names the row; `columns[0]` is the unit of the others. `draw` says what the report makes
    of it beside the table: `"bars"` a group of bars a row, `"stacked"` one bar a row out of its first three
    numbers, `"lines"` a line a column over the first column, which then holds numbers, `""` nothing.
    """

    title: str
    how: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    draw: str = ""
    log: bool = False

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def from_json(found: Mapping[str, Any]) -> Sheet:
    return Sheet(**{**found, "columns": tuple(found["columns"]), "rows": tuple(map(tuple, found["rows"]))})
