"""The advisory trace: it tells which part sat where, keeps its bound, and a removal reaches it."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from core_helpers import IDENTITY, MIXED, load_checked, opened, prompt, quiet, store

from tieredkv.outcomes import Counters, Tier
from tieredkv.system import OsFs
from tieredkv.table.block_table import BlockTable
from tieredkv.table.trace import (
    HEADER_NBYTES,
    Event,
    Trace,
    accesses,
    list_traces,
    read_trace,
    tiers_at,
    traces_nbytes,
)


def test_it_tells_where_every_part_sat(tmp_path: Path) -> None:
    with opened(tmp_path, trace=True) as kv:
        space = kv.namespace(IDENTITY, MIXED)
        for seed in range(8):
            assert store(space, prompt(seed)).wait(60)
        for seed in range(8):
            load_checked(space, prompt(seed))
        quiet(kv)
        table, rows = kv._table, kv._table.live_rows().tolist()
        held = {
            tier.name.lower(): {
                (table.digest[r].tobytes().hex(), g)
                for r in rows for g in range(table.num_groups) if table.slot[tier, g, r] >= 0
            }
            for tier in (Tier.DEVICE, Tier.HOST)
        }  # fmt: skip
        lsn = kv.stats().last_lsn
        disk = kv._disk
        assert disk is not None
        disk.trace.close()
    found = tiers_at(tmp_path, lsn)
    assert found is not None and found.note == ""
    assert {tier: set(parts) for tier, parts in found.parts.items()} == held
    events = {line["event"] for line in accesses(tmp_path)}
    assert events >= {"open", "allocate", "touch", "promote", "demote", "spill", "evict"}


def traced(path: Path, table: BlockTable, max_nbytes: int) -> Trace:
    lock = threading.Condition(threading.RLock())
    return Trace(
        OsFs(), str(path), table, lock=lock, max_nbytes=max_nbytes, lsn=lambda: 7, counters=Counters()
    )


def test_an_event_names_whose_row_it_was_when_the_row_is_another_blocks_by_now(tmp_path: Path) -> None:
    table, digests = BlockTable(), np.random.default_rng(1).integers(0, 256, (6, 32), dtype=np.uint8)
    rows = table.register(1, digests[:3])
    trace = traced(tmp_path, table, max_nbytes=1 << 20)
    trace.note(Event.TOUCH, Tier.DEVICE, rows)
    table.free_rows(rows)
    assert set(table.register(1, digests[3:]).tolist()) == set(rows.tolist()), "the rows are given again"
    rows[:] = 0
    trace.start()
    trace.close()
    (records,) = read_trace(tmp_path)
    touched = records[records["event"] == Event.TOUCH]
    assert (touched["digest"] == digests[:3]).all()
    assert (touched["parent"][1:] == digests[:2]).all() and not touched["parent"][0].any()


def test_its_files_keep_their_bound(tmp_path: Path) -> None:
    table, bound = BlockTable(), 64 * 1024
    rows = table.register(1, np.random.default_rng(0).integers(0, 256, (200, 32), dtype=np.uint8))
    trace = traced(tmp_path, table, max_nbytes=bound)
    trace.start()
    for _ in range(20):
        trace.note(Event.TOUCH, Tier.DEVICE, rows)
        with trace._writing:
            trace._drain()
        assert traces_nbytes(OsFs(), str(tmp_path)) <= bound
        assert trace.nbytes == traces_nbytes(OsFs(), str(tmp_path))
    trace.close()
    assert list_traces(OsFs(), f"{tmp_path}/trace")[0] > 1, "the oldest files went"
    assert sum(map(len, read_trace(tmp_path))) > 300


def test_damage_and_strange_files_are_left_out(tmp_path: Path) -> None:
    with opened(tmp_path, trace=True) as kv:
        assert store(kv.namespace(IDENTITY, MIXED), prompt(1)).wait(60)
    (file,) = (tmp_path / "trace").iterdir()
    raw = bytearray(file.read_bytes())
    raw[HEADER_NBYTES + 88] = 200  # an event that there is not
    file.write_bytes(raw[:-5])
    (tmp_path / "trace" / "0000000002.trace").write_bytes(b"rubbish")
    (tmp_path / "trace" / "notes.txt").write_text("hello")
    assert sum(map(len, read_trace(tmp_path))) == (len(raw) - HEADER_NBYTES) // 96 - 2
    assert tiers_at(tmp_path, 1 << 40) is not None


def test_a_purge_removes_it_also_when_it_is_off(tmp_path: Path) -> None:
    with opened(tmp_path, trace=True) as kv:
        assert store(kv.namespace(IDENTITY, MIXED), prompt(1)).wait(60)
    assert traces_nbytes(OsFs(), str(tmp_path)) > 0
    with opened(tmp_path) as kv:
        kv.purge(kv.namespace(IDENTITY, MIXED))
        assert traces_nbytes(OsFs(), str(tmp_path)) == 0
