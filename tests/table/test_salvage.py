"""Salvage: with the log and every checkpoint gone, every block whose slot verifies is back, purged ones are not."""

from __future__ import annotations

import dataclasses
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from core_helpers import IDENTITY, MIXED, load_checked, opened, prompt, store

from tieredkv.audit.report import fsck
from tieredkv.audit.rescue import rescue
from tieredkv.errors import BadInput

OTHER = dataclasses.replace(IDENTITY, weights="cd" * 32)


def test_everything_but_what_was_purged_comes_back(tmp_path: Path) -> None:
    path, out = tmp_path / "store", tmp_path / "out"
    with opened(path) as kv:
        space, other = kv.namespace(IDENTITY, MIXED), kv.namespace(OTHER, MIXED)
        for seed in range(6):
            assert store(space, prompt(seed)).wait(5)
            assert store(other, prompt(seed)).wait(5)
        kv.purge(other)
    num_parts = fsck(path).num_parts
    shutil.rmtree(path / "wal")
    for checkpoint in path.glob("table-*"):
        checkpoint.unlink()
    found = rescue(path, out)
    assert (found.num_parts, found.num_namespaces, found.exit_code) == (num_parts, 1, 2)
    assert fsck(out).exit_code == 0 and fsck(out).num_parts == num_parts
    with opened(out) as kv:
        space = kv.namespace(IDENTITY, MIXED)
        for seed in range(6):
            assert load_checked(space, prompt(seed))[0] == 320
        assert store(space, prompt(77)).wait(5)
        kv.check()
        assert kv.namespace(OTHER, MIXED).lookup(prompt(0)).num_tokens == 0


def test_a_damaged_part_stays_behind(tmp_path: Path) -> None:
    path, out = tmp_path / "store", tmp_path / "out"
    with opened(path) as kv:
        assert store(kv.namespace(IDENTITY, MIXED), prompt(1)).wait(5)
    slab = max((path / "slabs").iterdir(), key=lambda file: file.stat().st_size)
    with open(slab, "r+b") as file:
        file.seek(4096 + 100)
        file.write(b"\xff\xfe\xfd")
    num_parts = fsck(path).num_parts
    found = rescue(path, out)
    assert found.not_rescued == {"corrupt": 1} and found.num_parts == num_parts - 1
    assert fsck(out).exit_code == 0
    with pytest.raises(BadInput):
        rescue(path, out)
