"""The table of public reports is whole, and every test that it names is there."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]
NUM_REPORTS = 72
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (Path(__file__).parent / "REPORTS.md").read_text(encoding="utf-8").splitlines()
    if re.match(r"\| \d+ \|", line)
]
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


@cache
def names_in(path: str) -> frozenset[str]:
    """Names that pytest collects from a file: functions, and methods of test classes."""
    tree = ast.parse((CHECKOUT / path).read_text(encoding="utf-8"))
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name.startswith("Test")]
    bodies = [tree.body, *(node.body for node in classes)]
    return frozenset(
        node.name
        for body in bodies
        for node in body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    )


def test_every_report_has_one_row() -> None:
    assert [int(row[0]) for row in ROWS] == list(range(1, NUM_REPORTS + 1))
    assert all(len(row) == 4 and all(row) for row in ROWS)
    assert all(re.search(r"#\d+", row[1]) for row in ROWS), "a report is named by project and number"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_what_stands_against_it_is_there(row: list[str]) -> None:
    named = TEST.findall(row[3])
    assert named, "no test is named"
    for path, name in named:
        assert Path(path).name.startswith("test_") and name in names_in(path), f"{path} has no {name}"
    sentence = TEST.sub("", row[3]).replace("<br>", "").strip()
    assert not sentence or re.search(r"`tieredkv/[\w/]+\.py`", sentence), (
        "a reason names the module that makes it true"
    )
    for module in re.findall(r"`(tieredkv/[\w/]+\.py)`", sentence):
        assert (CHECKOUT / module).exists(), module
