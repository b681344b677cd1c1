"""The race: everybody brings back what was put, who does not is out, and who wins is said right."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from tieredkv.units import KiB

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from bench import child
from bench.figures import Figure
from bench.machine import file_system, read_nbytes
from bench.progress import Progress
from bench.rivals import environment, race, ranking
from bench.rivals.contestant import BlockStore, Load, drop_cached_pages

LOAD = Load(16, 256 * KiB)
ENTRIES = (*ranking.OURS, *ranking.LIGHT)


@pytest.mark.parametrize("entry", ENTRIES, ids=[entry.name for entry in ENTRIES])
def test_brings_back_what_was_put_also_in_another_process(entry: ranking.Entry, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"contestant": entry.kind, "path": str(tmp_path / "raced"), **vars(LOAD)}
    found = child.run(race.fill, **arguments)
    assert found["num_wrong"] == 0
    assert min(found[way] for way in ("fresh_s", "over_s", "warm_s")) > 0
    again = child.run(race.cold, **arguments)
    assert again["num_wrong_cold"] == 0


class Forgetful(BlockStore):
    """Keeps blocks in memory, and changes one byte of the last."""

    def __init__(self, path: str, load: Load) -> None:
        self.kept: dict[str, torch.Tensor] = {}
        super().__init__(path, load)

    def holds(self, key: str) -> bool:
        return key in self.kept

    def put(self, keys: Sequence[str], blocks: torch.Tensor) -> None:
        self.kept |= zip(keys, blocks.clone(), strict=True)
        self.kept[keys[-1]][17] ^= 1

    def get(self, keys: Sequence[str], out: torch.Tensor) -> None:
        for key, block in zip(keys, out, strict=True):
            block.copy_(self.kept[key])

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            del self.kept[key]


def test_a_changed_byte_is_seen(tmp_path: Path) -> None:
    one = Forgetful(str(tmp_path), LOAD)
    one.fresh()
    one.read()
    assert one.num_wrong() == 1
    one.over()
    one.read()
    assert one.num_wrong() == 1


def test_who_changes_a_byte_or_fails_is_out_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = ranking.Times()
    good = {"fresh_s": 1.0, "over_s": 1.0, "warm_s": 1.0, "cold_s": 1.0, "cold_share": 1.0}
    answers = {"num_wrong": 3, "num_wrong_cold": 0}
    monkeypatch.setattr(child, "run", lambda *_args, **_more: {**good, **answers})
    ranking._one(times, tmp_path, LOAD, ranking.LIGHT[0], "")
    assert "3 blocks" in times.missing[ranking.LIGHT[0].name]

    missing = replace(ranking.LIGHT[1], kind="nobody.Nobody")
    monkeypatch.undo()
    ranking._one(times, tmp_path, LOAD, missing, "")
    assert "nobody" in times.missing[missing.name]
    assert '".[bench]"' in times.missing[missing.name], "it says how to get what is missing"


def test_a_read_that_the_page_cache_answered_is_not_called_cold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {
        "fresh_s": 1.0, "over_s": 1.0, "warm_s": 1.0, "cold_s": 1.0, "cold_share": 0.1, "num_wrong": 0,
        "num_wrong_cold": 0,
    }  # fmt: skip
    monkeypatch.setattr(child, "run", lambda *_args, **_more: dict(found))
    times = ranking.Times()
    ranking._one(times, tmp_path, LOAD, ranking.LIGHT[0], "")
    name = ranking.LIGHT[0].name
    assert set(times.seconds[name]) == {"fresh_s", "over_s", "warm_s"}
    assert "10%" in times.notes[name]


def test_dropped_pages_come_from_the_disk_again(tmp_path: Path) -> None:
    if file_system(tmp_path).startswith(("tmpfs", "overlay", "unknown")):
        pytest.skip(f"{tmp_path} is no disk: {file_system(tmp_path)}")
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 4 * KiB)
    drop_cached_pages(tmp_path)
    before = read_nbytes()
    path.read_bytes()
    assert read_nbytes() - before >= 0.7 * path.stat().st_size
    before = read_nbytes()
    path.read_bytes()
    assert read_nbytes() - before == 0, "the second read is answered by the page cache"


def raced(speeds: dict[str, float], spread: float = 0.0) -> list[Figure]:
    """The rankings after two rounds in which everybody needed the seconds named."""
    times = ranking.Times()
    for _ in range(2):
        for name, seconds in {**speeds, ranking.RAW: 1.0}.items():
            times.add(name, dict.fromkeys(ranking.WAYS, seconds))
        times.add(ranking.RAW, dict.fromkeys(ranking.WAYS, 1.0 + spread))
    return list(ranking.rankings(times, LOAD, ENTRIES))


def test_the_fastest_rival_of_the_kind_is_the_measure() -> None:
    synced, lmdb, plain, saved = (ranking.LIGHT[at].name for at in range(4))
    seconds = {ranking.DURABLE: 2.0, ranking.UNSYNCED: 1.0, synced: 3.0, lmdb: 8.0, plain: 0.9, saved: 4.0}
    rows = {row.name: row for row in raced(seconds)}
    assert rows["durable_in_fresh_over_best_rival_ratio"].value == 1.5
    assert rows["durable_in_fresh_over_best_rival_ratio"].met, (
        "an unsynced rival is no measure of a durable write"
    )
    assert rows["unsynced_in_fresh_over_best_rival_ratio"].value == 0.9
    assert rows["unsynced_in_fresh_over_best_rival_ratio"].met is False
    assert rows["cold_out_over_best_rival_ratio"].value == 0.45
    assert {row.met for row in raced(seconds, spread=0.11)[2:4]} == {True}
    assert {row.met for row in raced(seconds, spread=2.0)[2:4]} == {None}, "nothing is judged in such noise"


def test_a_race_without_us_or_without_rivals_is_no_figure() -> None:
    assert {row.met for row in raced({ranking.LIGHT[0].name: 1.0})} == {None}
    assert {row.met for row in raced({ranking.DURABLE: 1.0, ranking.UNSYNCED: 1.0})} == {None}


def test_a_rival_that_cannot_be_installed_or_was_not_asked_for_says_why() -> None:
    with pytest.raises(environment.CannotInstall, match="nowhere"):
        environment._pip(Path(sys.executable), "/nowhere/nobody.whl")
    times, progress = ranking.Times(), Progress(Console(stderr=True))
    assert ranking._environments(times, progress, None) == {}
    assert set(times.missing) == {entry.name for entry in ranking.HEAVY}
    assert all("--rivals all" in why for why in times.missing.values())
