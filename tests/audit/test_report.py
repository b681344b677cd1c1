"""Looking in from outside: what recovery would find, verdicts by name, nothing changed."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from core_helpers import IDENTITY, MIXED, opened, prompt, store

from tieredkv.audit.report import fsck, read, stat
from tieredkv.errors import NotAStore


def test_stat_of_a_living_store_sees_what_a_crash_would_leave(tmp_path: Path) -> None:
    with opened(tmp_path) as kv:
        assert store(kv.namespace(IDENTITY, MIXED), prompt(1)).wait(60)
        found, live = stat(tmp_path), kv.stats()
        assert found.last_lsn == live.last_lsn and found.num_blocks == live.num_blocks
        assert found.log_end == "clean" and found.damage == ()
        report = fsck(tmp_path)
        assert report.exit_code == 0 and report.counts == {"ok": report.num_parts}


def test_what_recovery_would_salvage_is_counted(tmp_path: Path) -> None:
    with opened(tmp_path) as kv:
        assert store(kv.namespace(IDENTITY, MIXED), prompt(1)).wait(60)
    whole = stat(tmp_path)
    for file in [*(tmp_path / "wal").iterdir(), *tmp_path.glob("table-*")]:
        file.unlink()
    reading = read(tmp_path)
    assert reading.num_salvaged == whole.parts_by_tier["disk"]
    assert stat(tmp_path).parts_by_tier == whole.parts_by_tier
    with opened(tmp_path) as kv:
        assert kv.recovery.num_salvaged == reading.num_salvaged


def test_nothing_of_ours_is_no_store(tmp_path: Path) -> None:
    for call in (stat, fsck, read):
        with pytest.raises(NotAStore):
            call(tmp_path / "nowhere")


def test_a_store_without_its_slabs_is_damaged_and_still_looked_at(tmp_path: Path) -> None:
    with opened(tmp_path) as kv:
        assert store(kv.namespace(IDENTITY, MIXED), prompt(1)).wait(60)
    whole = fsck(tmp_path)
    shutil.rmtree(tmp_path / "slabs")
    report = fsck(tmp_path)
    assert report.num_parts == whole.num_parts == len(report.bad) and report.exit_code == 2
    assert "ok" not in report.counts
    assert not (tmp_path / "slabs").exists(), "it only looks"
