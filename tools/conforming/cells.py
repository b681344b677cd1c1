"""Runs cells. What fails is asked of transformers too: an operation that its own cache refuses is its refusal."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tieredkv.errors import TieredKVError

from .compare import most_error
from .environments import installed
from .fake_devices import FakeDevices
from .families import FAMILIES
from .family import RECURRENT, Family
from .operations import OPERATIONS, Operation
from .scene import GREEDY, Scene, quiet
from .stock import Stock, cache_name
from .verdict import ABSENT, CELL, READY, REFUSED, WRONG, Cell, DidNotHappen

_NUM_HELD, _NUM_ASKED = 40, 60
_SILENT = "behind a prefix in its own cache the same call gives other logits"
_WITH_LOGITS: Mapping[str, Any] = {"return_dict_in_generate": True, "output_logits": True}


def chosen(families: Sequence[str], operations: Sequence[str]) -> tuple[list[Family], list[Operation]]:
    """Those of these names, or whose names begin so; all where nothing is asked for. Case does not matter.

    Raises:
        ValueError: nothing begins so.
    """
    return _named(FAMILIES, families), _named(OPERATIONS, operations)


def in_order(found: Sequence[Cell]) -> list[Cell]:
    """In the order of the table, one release after the other."""
    names = [family.name for family in FAMILIES]
    releases = list(dict.fromkeys(cell.transformers for cell in found))
    return sorted(found, key=lambda cell: (releases.index(cell.transformers), names.index(cell.family)))


def cells_of(family: Family, operations: Sequence[Operation]) -> Iterator[Cell]:
    """One row of the table; each cell in a folder and with a model of its own."""
    torch.set_num_threads(1)  # models this small only wait for one another's threads
    for operation in operations:
        with tempfile.TemporaryDirectory(prefix="tieredkv-conformance-") as folder:
            yield replace(cell(family, operation, Path(folder)), transformers=installed())


def main() -> None:
    """A process that reads names of families, does their rows, and prints each cell as it comes."""
    quiet()
    _, operations = chosen((), json.loads(sys.argv[1]))
    print(READY, flush=True)
    for line in sys.stdin:
        families, _ = chosen([line.strip()], ())
        for family in families:
            for found in cells_of(family, operations):
                print(CELL + json.dumps(found.as_json()), flush=True)
        print(READY, flush=True)


def cell(family: Family, operation: Operation, folder: Path) -> Cell:
    if missing := family.missing():
        return Cell(family.name, operation.name, ABSENT, None, missing)
    try:
        num_more = family.num_more if operation.past_window else 0
        with Scene(family, folder, family.build(), num_more) as scene:
            found = operation.run(scene)
    except Exception as error:  # whatever goes wrong is what this cell is there to say
        return _failed(family, operation, error)
    return Cell(family.name, operation.name, **vars(found))


def _failed(family: Family, operation: Operation, error: Exception) -> Cell:
    said, ours = first_line(error), isinstance(error, TieredKVError)
    theirs = "" if isinstance(error, (DidNotHappen, AssertionError)) else failure_of_stock(family, operation)
    same = _words(theirs) in _words(said)
    if theirs and (ours or same):
        reason = f"transformers: {theirs}" if same else f"{said}; transformers: {theirs}"
        return Cell(family.name, operation.name, REFUSED, None, reason, by_transformers=True)
    reason = said if ours or isinstance(error, DidNotHappen) else f"{type(error).__name__}: {error}"
    return Cell(family.name, operation.name, REFUSED if ours else WRONG, None, reason)


def failure_of_stock(family: Family, operation: Operation) -> str:
    """What transformers says of the same with a cache of its own, or how it goes wrong silently; or nothing."""
    try:
        with FakeDevices():
            model = family.build()
            operation.prepare(model)
            whole, behind = _done_with_stock(model, family, operation)
    except Exception as error:  # its own words are the reason
        return first_line(error)
    apart = (whole.double() - behind.double()).abs().max().item()
    return "" if apart <= most_error(model, [whole]) else _SILENT


def _done_with_stock(model: Any, family: Family, operation: Operation) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the first token after the same prompt: with nothing cached, and behind a prefix in a stock cache."""
    options = {**GREEDY, **operation.options(model, family), **_WITH_LOGITS}
    ids = family.random_ids(_NUM_ASKED, seed=3).to(model.device)
    whole = model.generate(ids, **options)
    stock = Stock(model, family)
    stock.forward(ids[:, :_NUM_HELD])
    if options.get("num_beams", 1) > 1:
        stock.cache.batch_repeat_interleave(options["num_beams"])
    given = {"input_ids": ids[:, _NUM_HELD:], "attention_mask": torch.ones_like(ids)}
    if family.kind == RECURRENT:  # such a cache knows no length, so neither does a mask
        del given["attention_mask"]
    behind = model.generate(**given, **options, **{cache_name(model): stock.cache})
    return whole.logits[0], behind.logits[0]


def _words(text: str) -> str:
    """Without its numbers: they are of the lengths that a prompt happens to have."""
    return re.sub(r"\d+", "", text)


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _named(rows: Sequence[Any], wanted: Sequence[str]) -> list[Any]:
    """The rows of these names; for a name that no row has, those that begin so."""
    if not wanted:
        return list(rows)
    found: list[Any] = []
    for name in map(str.lower, wanted):
        same = [row for row in rows if row.name.lower() == name]
        same = same or [row for row in rows if row.name.lower().startswith(name)]
        if not same:
            raise ValueError(f"nothing is called {name!r}: choose of {', '.join(row.name for row in rows)}")
        found += [row for row in same if row not in found]
    return found
