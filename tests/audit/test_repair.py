"""Mending: parts that failed their check are dropped, and what a log left behind is not used twice."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from core_helpers import IDENTITY, MIXED, load_checked, opened, prompt, store

from tieredkv.audit.repair import repair
from tieredkv.audit.report import fsck, read
from tieredkv.system import OsFs
from tieredkv.table.recovery import unlink_broken


def test_repair_drops_what_is_bad_and_keeps_the_rest(tmp_path: Path) -> None:
    with opened(tmp_path) as kv:
        space = kv.namespace(IDENTITY, MIXED)
        for seed in range(3):
            assert store(space, prompt(seed)).wait(60)
    slab = max((tmp_path / "slabs").iterdir(), key=lambda file: file.stat().st_size)
    with open(slab, "r+b") as file:
        file.seek(4096 + 7)
        file.write(b"\xff\x00\xff")
    report = fsck(tmp_path)
    assert report.exit_code == 2 and [part.verdict for part in report.bad] == ["corrupt"]
    repair(tmp_path, report.bad)
    again = fsck(tmp_path)
    assert again.exit_code == 0 and again.num_parts == report.num_parts - 1
    with opened(tmp_path) as kv:
        space = kv.namespace(IDENTITY, MIXED)
        assert all(load_checked(space, prompt(seed)) for seed in range(3))
        kv.check()


def test_put_numbers_go_on_above_what_slots_prove(tmp_path: Path) -> None:
    """With the log gone nothing but slot headers tells how often the store was opened."""
    for seed in range(3):
        with opened(tmp_path) as kv:
            assert store(kv.namespace(IDENTITY, MIXED), prompt(seed)).wait(60)
    before = int(read(tmp_path).state.table.put_seq.max())
    for file in [*(tmp_path / "wal").iterdir(), *tmp_path.glob("table-*")]:
        file.unlink()
    repair(tmp_path, ())
    with opened(tmp_path) as kv:
        assert store(kv.namespace(IDENTITY, MIXED), prompt(9)).wait(60)
    assert int(read(tmp_path).state.table.put_seq.max()) >> 32 > before >> 32


def test_copies_left_aside_go_with_a_removal(tmp_path: Path) -> None:
    with opened(tmp_path) as kv:
        assert store(kv.namespace(IDENTITY, MIXED), prompt(1)).wait(60)
    left = [tmp_path / "wal" / "0000000001.wal.broken", tmp_path / "wal.broken"]
    for path in left:
        path.write_bytes(b"old")
    unlink_broken(OsFs(), str(tmp_path))
    assert not any(path.exists() for path in left)
    assert fsck(tmp_path).exit_code == 0
