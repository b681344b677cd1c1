"""A table copied in slices while it changes is the table of the moment at which the copy was begun."""

from __future__ import annotations

import random

import numpy as np
import pytest
from core_helpers import prompt

from tieredkv.block.hashing import chain
from tieredkv.outcomes import Tier
from tieredkv.table import snapshot as module
from tieredkv.table.block_table import BlockTable
from tieredkv.wal.records import DROP, DROP_DTYPE, PUT, PUT_DTYPE, Run

ROOT = b"\7" * 32


class Life:
    """Random puts, drops, new chains and freed rows on one table."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.table = BlockTable(2)
        self.seq = 0

    def step(self) -> None:
        self.rng.choice((self._put, self._put, self._drop, self._free))()
        if self.rng.random() < 0.02:
            self.table.ensure_groups(self.table.num_groups + 1)

    def _put(self) -> None:
        digests = chain(ROOT, prompt(self.rng.randrange(60), 16 * self.rng.randint(1, 12)), 16)
        self.table.register(1, digests)
        records = np.zeros(len(digests), PUT_DTYPE)
        records["digest"], records["namespace"] = digests, 1
        records["parent"][1:] = digests[:-1]
        records["group"] = self.rng.randrange(self.table.num_groups)
        records["put_seq"] = self.seq + 1 + np.arange(len(digests))
        records["slot"] = records["checksum"] = records["put_seq"]
        self._apply(PUT, records)

    def _drop(self) -> None:
        rows = self.table.live_rows()
        groups, at = np.nonzero(self.table.slot[Tier.DISK][:, rows] >= 0)
        chosen = [n for n in range(len(at)) if self.rng.random() < 0.2]
        groups, rows = groups[chosen], rows[at[chosen]]
        records = np.zeros(len(rows), DROP_DTYPE)
        records["digest"], records["group"] = self.table.digest[rows], groups
        records["put_seq"] = self.table.put_seq[groups, rows]
        self._apply(DROP, records)

    def _apply(self, kind: int, records: np.ndarray) -> None:
        self.table.apply(self.seq + 1, Run(kind, records))
        self.seq += len(records)

    def _free(self) -> None:
        rows = self.table.live_rows()
        self.table.free_if_empty(rows[np.array([self.rng.random() < 0.7 for _ in rows], dtype=np.bool_)])


@pytest.mark.parametrize("seed", range(12))
def test_what_changes_meanwhile_does_not_show(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    print(f"seed {seed}")
    monkeypatch.setattr(module, "_SLICE_ROWS", 16)
    life = Life(random.Random(seed))
    for _ in range(6):
        for _ in range(20):
            life.step()
        expected = life.table.snapshot()
        growing = life.table.begin_snapshot()
        while not growing.is_whole:
            for _ in range(life.rng.randrange(6)):
                life.step()
            growing.copy_next()
        life.table.end_snapshot()
        life.step()
        found = growing.arrays()
        assert found.keys() == expected.keys()
        for name, array in expected.items():
            assert found[name].shape == array.shape and found[name].dtype == array.dtype
            assert (found[name] == array).all(), name
    life.table.check()


def test_a_row_is_copied_once_and_only_if_it_is_in_the_snapshot() -> None:
    life = Life(random.Random(1))
    for _ in range(30):
        life.step()
    expected = life.table.snapshot()
    growing = life.table.begin_snapshot()
    everything = np.arange(life.table._next_row, dtype=np.int32)
    growing.before_change(everything)
    life.table.digest[:] = 0
    growing.before_change(everything)
    while not growing.is_whole:
        growing.copy_next()
    assert (growing.arrays()["digest"] == expected["digest"]).all()


def test_an_empty_table_has_an_empty_snapshot() -> None:
    table = BlockTable()
    assert table.begin_snapshot().is_whole
    table.end_snapshot()
    assert len(table.snapshot()["digest"]) == 0
