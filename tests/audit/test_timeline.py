"""What the log tells: ends and losses, states at an LSN, lives, and crashes of a copy at every byte."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from core_helpers import IDENTITY, MIXED, opened, prompt, store

from tieredkv.audit.crash import EVERY_BYTE, EVERY_RECORD, crash_at, fingerprint
from tieredkv.audit.history import difference, life_of_block, records, state_at
from tieredkv.audit.repair import truncate
from tieredkv.audit.timeline import timeline
from tieredkv.errors import BadInput, StoreHeld
from tieredkv.system import OsFs
from tieredkv.table.recovery import claim


def make(path: Path, num_prompts: int = 2, num_tokens: int = 69) -> Path:
    with opened(path) as kv:
        space = kv.namespace(IDENTITY, MIXED)
        for seed in range(num_prompts):
            assert store(space, prompt(seed, num_tokens)).wait(60)
    return path


def tear(path: Path, nbytes: int = 100) -> Path:
    """Garbage behind the last frame of the newest segment."""
    end = timeline(path).segments[-1]
    segment = path / "wal" / f"{end.number:010d}.wal"
    with open(segment, "r+b") as file:
        file.seek(end.end_offset)
        file.write(b"\x5a" * nbytes)
    return segment


def test_a_clean_log_loses_nothing(tmp_path: Path) -> None:
    found = timeline(make(tmp_path))
    assert found.exit_code == 0 and found.lost == () and found.log_end == "clean"
    assert [line.standing for line in found.segments] == ["counts"] * len(found.segments)
    newest = found.checkpoints[-1]
    assert newest.whole and newest.in_use and newest.num_parts == found.rebuilt.num_parts > 0


def test_a_torn_end_is_told_and_cut_with_a_copy_kept(tmp_path: Path) -> None:
    segment = tear(make(tmp_path))
    torn, raw = timeline(tmp_path), segment.read_bytes()
    assert torn.exit_code == 1 and torn.lost[0].nbytes == 100
    assert torn.segments[-1].end == "torn or damaged" and torn.segments[-1].rest_nbytes == 100
    with pytest.raises(StoreHeld):
        held = claim(OsFs(), str(tmp_path))
        try:
            truncate(tmp_path)
        finally:
            held.close()
    assert segment.read_bytes() == raw, "a held store is not touched"
    cut = truncate(tmp_path)
    assert (cut.exit_code, cut.cut_nbytes) == (1, 100)
    assert Path(cut.kept_copy).read_bytes() == raw
    assert timeline(tmp_path).exit_code == 0 and truncate(tmp_path).exit_code == 0


def test_damage_below_the_durable_lsn_is_damage(tmp_path: Path) -> None:
    path = make(tmp_path)
    for checkpoint in path.glob("table-*.lmdb"):
        checkpoint.unlink()
    segment = path / "wal" / "0000000001.wal"
    with open(segment, "r+b") as file:
        file.seek(6000)
        file.write(b"\xff" * 64)
    found = timeline(path)
    assert found.exit_code == 2 and found.lost
    assert found.segments[0].end == "corrupt"
    with pytest.raises(BadInput):
        truncate(path)
    assert found.rebuilt.num_salvaged > 0, "slot headers give back what the log lost"


def test_every_state_is_that_of_a_plain_replay(tmp_path: Path) -> None:
    path = make(tmp_path)
    last = state_at(path).last_lsn
    parts = [len(list(state_at(path, lsn).parts())) for lsn in range(last + 1)]
    kinds = [record["kind"] for record in records(path)]
    assert parts == [sum(kind == "put" for kind in kinds[:lsn]) for lsn in range(last + 1)]
    found = difference(path, 2, last)
    assert len(found.added) == parts[last] - parts[2] and not found.gone and not found.moved
    assert fingerprint(state_at(path).state) == fingerprint(state_at(path, last).state)
    with pytest.raises(BadInput, match=f"LSN {last}"):
        state_at(path, last + 1)


def test_a_life_is_every_record_of_a_block(tmp_path: Path) -> None:
    path = make(tmp_path)
    put = next(record for record in records(path) if record["kind"] == "put")
    life = life_of_block(path, put["digest"][:10])
    assert life.subject == put["digest"] and life.events[0]["lsn"] == put["lsn"] and life.now
    with pytest.raises(BadInput):
        life_of_block(path, "abc")
    digests = {record["digest"] for record in records(path) if record["kind"] == "put"}
    for count in (9, 11, 63):
        assert life_of_block(path, put["digest"][:count].upper()).subject == put["digest"]
    for digest in digests:
        differs = digest[:8] + f"{int(digest[8], 16) ^ 1:x}"
        assert life_of_block(path, differs).events == (), "the last of an odd number of digits counts"
    for wrong in ("", "1234567", "0123 4567", "xyzw0123", digest + "0"):
        with pytest.raises(BadInput, match="8 to 64 hex digits"):
            life_of_block(path, wrong)


def test_a_crash_at_every_byte_recovers_the_whole_frames(tmp_path: Path) -> None:
    path = make(tmp_path, num_prompts=1, num_tokens=20)
    report = crash_at(path, EVERY_BYTE)
    assert report.violations == () and report.exit_code == 0
    assert report.num_crashes > 300
    assert {line.log_end for line in report.survivors} == {"clean", "torn or damaged"}
    assert all(line.last_lsn <= line.written_lsn for line in report.survivors)


def test_a_crash_without_the_newest_checkpoint_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path) as kv:
        assert store(kv.namespace(IDENTITY, MIXED), prompt(0, 69)).wait(60)
        assert kv.checkpoint()
    max(tmp_path.glob("table-*.lmdb")).unlink()
    for where in (20, EVERY_RECORD, EVERY_BYTE):
        with pytest.raises(BadInput, match="is not whole"):
            crash_at(tmp_path, where)
