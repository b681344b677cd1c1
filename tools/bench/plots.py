"""Sheets as pictures: SVG text that a page can hold. The only module that needs matplotlib."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .sheet import Sheet

COLOURS = ("#2a6f97", "#e07a5f", "#81b29a", "#f2cc8f", "#6d597a", "#8d99ae")
_STYLE = {
    "font.size": 9, "svg.fonttype": "none", "font.family": "sans-serif", "axes.spines.top": False,
    "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.3, "axes.axisbelow": True,
}  # fmt: skip


_METADATA = re.compile("<metadata>.*?</metadata>", re.DOTALL)


def svg(sheet: Sheet) -> str:
    """The sheet as one `<svg>` element, or nothing where it is not to be drawn."""
    draw = DRAWN.get(sheet.draw)
    if draw is None or not sheet.rows:
        return ""
    with matplotlib.rc_context(_STYLE):
        height = 2.6 if sheet.draw == "lines" else 0.9 + 0.16 * len(sheet.rows) * _bars_a_row(sheet)
        figure = Figure(figsize=(8.0, max(2.2, height)))
        draw(figure.subplots(), sheet)
        out = io.StringIO()
        figure.savefig(out, format="svg", bbox_inches="tight", metadata={"Date": None})
    text = out.getvalue()
    return _METADATA.sub("", text[text.index("<svg") :])


def _bars(axes: Axes, sheet: Sheet) -> None:
    """A group of bars a row, the first row on top; a column that is not in the first one's unit is left out."""
    columns = _bar_columns(sheet)
    width = 0.8 / len(columns)
    for number, at in enumerate(columns):
        places = [row + width * (number - (len(columns) - 1) / 2) for row in range(len(sheet.rows))]
        values = [_number(row[at]) for row in sheet.rows]
        bars = axes.barh(places, values, width, label=sheet.columns[at], color=COLOURS[number % len(COLOURS)])
        axes.bar_label(bars, [f"{v:.3g}" if v else "" for v in values], padding=2, fontsize=7)
    _rows_as_labels(axes, sheet)


def _stacked(axes: Axes, sheet: Sheet) -> None:
    """One bar a row, its first three numbers end to end, and a mark at the last number."""
    left = [0.0] * len(sheet.rows)
    for at in (1, 2, 3):
        values = [_number(row[at]) for row in sheet.rows]
        axes.barh(range(len(sheet.rows)), values, 0.7, left, label=sheet.columns[at], color=COLOURS[at - 1])
        left = [a + b for a, b in zip(left, values, strict=True)]
    ideal = [_number(row[-1]) for row in sheet.rows]
    axes.plot(ideal, range(len(sheet.rows)), "k|", markersize=12, label=sheet.columns[-1])
    axes.set_xlim(0, 1)
    _rows_as_labels(axes, sheet)


def _lines(axes: Axes, sheet: Sheet) -> None:
    places = [_number(row[0]) for row in sheet.rows]
    for at in range(1, len(sheet.columns)):
        values = [_number(row[at]) for row in sheet.rows]
        axes.plot(places, values, "o-", label=sheet.columns[at], color=COLOURS[at - 1])
    if sheet.log:
        axes.set_xscale("log")
        axes.set_yscale("log")
    axes.set_xlabel(sheet.columns[0])
    axes.legend(frameon=False)


def _rows_as_labels(axes: Axes, sheet: Sheet) -> None:
    axes.set_yticks(range(len(sheet.rows)), [str(row[0]) for row in sheet.rows])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(sheet.columns[0])
    if sheet.log:
        axes.set_xscale("log")
    axes.legend(
        frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.12 - 0.5 / len(sheet.rows)), ncols=4
    )


def _bar_columns(sheet: Sheet) -> list[int]:
    return [at for at in range(1, len(sheet.columns)) if sheet.columns[at] != "GB/s"]


def _bars_a_row(sheet: Sheet) -> int:
    return len(_bar_columns(sheet)) if sheet.draw == "bars" else 2


def _number(cell: Any) -> float:
    return float(cell) if cell is not None else 0.0


DRAWN: Mapping[str, Callable[[Axes, Sheet], None]] = {"bars": _bars, "stacked": _stacked, "lines": _lines}
