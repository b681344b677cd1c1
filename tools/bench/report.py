"""One page about a run: what was measured on what, every figure, every picture with its numbers below it."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any

from . import plots, sheet
from .show import text

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; }
table { border-collapse: collapse; margin: .8rem 0; font-size: .85rem; }
td, th { padding: .2rem .7rem; border-bottom: 1px solid #ddd; text-align: right; vertical-align: top; }
td:first-child, th:first-child, td.how { text-align: left; }
.met { color: #2a7f3f; } .missed { color: #b3261e; } .how, .dim { color: #666; }
pre { background: #f5f5f5; padding: .6rem; overflow-x: auto; } svg { max-width: 100%; height: auto; }
"""
_VERDICTS = {True: '<span class="met">met</span>', False: '<span class="missed">not met</span>', None: ""}


def write(path: Path, result: Mapping[str, Any]) -> None:
    """Write the page of a run's result, as `--json` prints it, to `path`; nothing in it refers to another file."""
    path.write_text(page(result), encoding="utf-8")


def page(result: Mapping[str, Any]) -> str:
    sheets = [sheet.from_json(one) for one in result["sheets"]]
    body = "".join((
        _head(result), _figures(result["figures"]), *(_sheet(one) for one in sheets), _unmeasured(result["figures"]),
    ))  # fmt: skip
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>tieredkv: spill and restore</title>'
        f"<style>{_STYLE}</style></head><body>{body}</body></html>\n"
    )


def _head(result: Mapping[str, Any]) -> str:
    judged = [one["met"] for one in result["figures"] if one["met"] is not None]
    command = f"python tools/bench_spill.py {shlex.join(result['command'])}"
    machine = result["machine"]
    busy = ""
    if float(machine["load"]) > float(machine["num_cores"]):
        busy = (
            '<p class="missed">Other programs kept the processors busy when this run began: times are too long,'
            " and only ratios within the run mean anything.</p>"
        )
    return (
        "<h1>Spill and restore</h1>"
        "<p>How fast the KV of a chat goes to disk and comes back, beside what the hardware can do and beside what"
        f" one would use instead. {sum(judged)} of {len(judged)} figures reach what they must.</p>{busy}"
        f"<p>To measure again:</p><pre>{escape(command)}</pre>"
        + _table(("machine", ""), [(name.replace("_", " "), text(value)) for name, value in machine.items()])
    )


def _figures(figures: Iterable[Mapping[str, Any]]) -> str:
    rows = [
        f"<tr><td>{escape(one['name'])}</td><td>{one['value']:g}</td><td>{escape(one['must'])}</td>"
        f'<td>{_VERDICTS[one["met"]]}</td><td class="how">{escape(one["detail"])}</td></tr>'
        for one in figures
        if one["value"] is not None
    ]
    return (
        "<h2>The figures</h2><p>A ratio is met at its target less what raw transfers of the same run differed from"
        " each other; where that was too much, it is not judged.</p>"
        f"<table><tr><th>figure</th><th>value</th><th>must be</th><th></th><th>how</th></tr>{''.join(rows)}</table>"
    )


def _unmeasured(figures: Iterable[Mapping[str, Any]]) -> str:
    rows = [(one["name"], one["must"], one["detail"]) for one in figures if one["value"] is None]
    return f"<h2>Not measured</h2>{_table(('figure', 'must be', 'why'), rows)}" if rows else ""


def _sheet(one: sheet.Sheet) -> str:
    numbers = _table(one.columns, [tuple(map(text, row)) for row in one.rows])
    return f"<h2>{escape(one.title)}</h2><p>{escape(one.how)}</p>{plots.svg(one)}{numbers}"


def _table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"
