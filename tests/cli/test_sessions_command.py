"""`tieredkv sessions` and `tieredkv explain`: read-only, never what was said."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_helpers import IDENTITY, MIXED, SIZE, opened, prompt, quiet, store
from replay_tool import replay
from typer.testing import CliRunner

from tieredkv.audit.sessions import explain_session
from tieredkv.cli.app import app
from tieredkv.errors import BadInput
from tieredkv.table.catalog import Turn
from tieredkv.tier.slab_format import SLOT_HEADER_NBYTES

SHARED = prompt(0, 6 * SIZE)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """`one` and `two` share 6 blocks; `one` is pinned, `two` goes first, and `empty` has no blocks."""
    with opened(tmp_path) as kv:
        space = kv.namespace(IDENTITY, MIXED)
        for name, seed in (("one", 1), ("two", 2)):
            said = np.concatenate((SHARED, prompt(seed, 10 * SIZE + 3)))
            with kv.session(name, space) as session:
                stored = store(space, said, anchors=[6 * SIZE, 16 * SIZE])
                turns = [Turn("user", 50), Turn("assistant", len(said))]
                session.commit(said, turns, anchors=[6 * SIZE, 16 * SIZE], stored=[stored])
                if name == "one":
                    session.pin()
                    session.expire(days=3)
                else:
                    session.prioritise("low")
        with kv.session("empty", space) as session:
            session.commit(prompt(3), [Turn("user", 5)])
        quiet(kv)
    return tmp_path


def as_json(*arguments: str) -> Any:
    done = CliRunner().invoke(app, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout.splitlines()[-1])


def test_sessions_are_listed_with_their_own_and_their_shared_bytes(folder: Path) -> None:
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    empty, one, two = as_json("sessions", str(folder))["sessions"]
    full, window = (nbytes + SLOT_HEADER_NBYTES for nbytes in MIXED.part_nbytes)
    assert (one["num_turns"], one["num_tokens"]) == (2, 16 * SIZE + 3)
    assert one["shared_nbytes"] == two["shared_nbytes"] == 6 * full + 3 * window
    assert one["unshared_nbytes"] == two["unshared_nbytes"] == 10 * full + 3 * window
    assert one["pinned"] and not two["pinned"] and (one["priority"], two["priority"]) == (0, -1)
    assert 2.9 * 86_400 < one["expires_in_s"] <= 3 * 86_400 and two["expires_in_s"] is None
    assert abs(one["used_at"] - (folder / "LOCK").stat().st_mtime) < 3600
    assert empty["unshared_nbytes"] == empty["shared_nbytes"] == 0
    shown = CliRunner().invoke(app, ["sessions", str(folder)], env={"COLUMNS": "200"})
    assert shown.exit_code == 0 and all(name in shown.stdout for name in ("one", "two", "empty", "low"))
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_explain_says_what_a_resume_would_find(folder: Path) -> None:
    found = as_json("explain", str(folder), "one")
    assert found["num_restorable"] == 16 * SIZE and found["by_tier"] == {"disk": 16 * SIZE}
    assert found["anchors"] == {str(6 * SIZE): True, str(16 * SIZE): True} and found["reason"] == "complete"
    found = as_json("explain", str(folder), "empty")
    assert found["num_restorable"] == 0 and "from token 0" in found["detail"]
    shown = CliRunner().invoke(app, ["explain", str(folder), "one"])
    assert shown.exit_code == 0 and "256 of 259 tokens" in shown.stdout
    with pytest.raises(BadInput, match="no session 'three'; there are: empty, one, two"):
        explain_session(folder, "three")


def test_of_many_sessions_the_names_most_like_it_are_told(tmp_path: Path) -> None:
    with opened(tmp_path) as kv:
        space = kv.namespace(IDENTITY, MIXED)
        for number in range(30):
            with kv.session(f"alice/{number:02}", space) as session:
                session.commit(SHARED, [])
    with pytest.raises(BadInput) as told:
        explain_session(tmp_path, "alice/7")
    assert "alice/07" in str(told.value) and str(told.value).endswith(" and 25 more")


def test_a_resume_that_lacks_its_anchor_says_so(tmp_path: Path) -> None:
    with opened(tmp_path) as kv:
        space = kv.namespace(IDENTITY, MIXED)
        with kv.session("a", space) as session:
            session.commit(SHARED, [], anchors=[6 * SIZE], stored=[store(space, SHARED, anchors=[])])
    found = explain_session(tmp_path, "a")
    assert (found.num_restorable, found.num_full, found.reason) == (0, 6 * SIZE, "no anchor here")
    assert found.anchors == {6 * SIZE: False}


def test_a_damaged_store_is_said_and_is_the_exit_code(folder: Path) -> None:
    for file in folder.glob("table-*.lmdb"):
        file.unlink()
    segment = min((folder / "wal").iterdir())
    with open(segment, "r+b") as file:
        file.seek(4096 + 20)
        file.write(b"\xff" * 8)
    for arguments in (["sessions", str(folder)], ["stat", str(folder)], ["fsck", str(folder)]):
        done = CliRunner().invoke(app, [*arguments, "--json"])
        found = json.loads(done.stdout.splitlines()[-1])
        assert done.exit_code == found["exit_code"] == 2 and found["damage"], arguments
    done = CliRunner().invoke(app, ["sessions", str(folder)])
    assert done.exit_code == 2 and "the store is damaged" in done.stderr and done.stderr.count("\n") == 1
    with pytest.raises(BadInput, match="no session 'one'; there are: none; the store is damaged"):
        explain_session(folder, "one")


def test_what_is_left_of_a_store_without_slabs_is_damage(folder: Path) -> None:
    shutil.rmtree(folder / "slabs")
    done = CliRunner().invoke(app, ["explain", str(folder), "one", "--json"])
    found = json.loads(done.stdout.splitlines()[-1])
    assert done.exit_code == found["exit_code"] == 2 and "slabs is missing" in found["damage"][0]


def test_names_that_steer_a_terminal_are_shown_and_do_nothing(tmp_path: Path) -> None:
    """Markup in the name of a session or of a folder ended every table in a traceback; escapes went through."""
    folder, name = tmp_path / "a[/x][red]", "role[/x]\x1b[31m" + 60 * "long "
    with opened(folder) as kv:
        space = kv.namespace(IDENTITY, MIXED)
        said = prompt(1, 3 * SIZE + 1)
        with kv.session(name, space) as session:
            session.commit(said, [Turn("user", len(said))], stored=[store(space, said)])
    outputs = {}
    for command in (["stat"], ["sessions"], ["fsck"], ["explain", name]):
        done = CliRunner().invoke(app, [command[0], str(folder), *command[1:]])
        assert done.exit_code == 0, (command, done.output, done.exception)
        outputs[command[0]] = done.output
    out, last = str(tmp_path / "b[/y]"), f"{as_json('stat', str(folder))['last_lsn']}"
    for arguments in ([], ["--at", last], ["--session", name], ["--verify"], ["--salvage", out]):
        ran = replay(folder, *arguments)
        assert ran.exit_code == 0, (arguments, ran.stderr)
        outputs[" ".join(["replay", *arguments[:1]])] = ran.stdout
    for what, text in outputs.items():
        assert "\x1b" not in text, what
    assert all("a[/x][red]" in outputs[what].replace("\n", "") for what in ("stat", "fsck", "replay"))
    for what in ("stat", "sessions", "replay --at"):
        cells = "".join(
            line.split("│")[1].strip() for line in outputs[what].splitlines() if line.count("│") > 2
        )
        assert "role[/x]\\x1b[31mlong" in cells.replace(" ", ""), outputs[what]
