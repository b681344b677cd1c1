"""The replay tool from outside: what it prints, its exit codes, that it changes nothing, and a living store."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from core_helpers import IDENTITY, MIXED, opened, prompt, store
from replay_tool import TOOL, replay

import tieredkv
from tieredkv.sessions import Session
from tieredkv.table.catalog import Turn

HOME = str(Path(tieredkv.__file__).parents[1])


def run(*arguments: Any) -> tuple[int, dict[str, Any], str]:
    """Exit code, the object of the last line, and all that was printed."""
    done = replay(*arguments, "--json")
    assert done.stdout, done.stderr
    return done.exit_code, json.loads(done.stdout.splitlines()[-1]), done.stdout


def run_as_process(*arguments: Any) -> tuple[int, dict[str, Any], str]:
    """The same as people run it."""
    done = subprocess.run(
        [sys.executable, str(TOOL), *map(str, arguments), "--json"],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": HOME},
    )  # fmt: skip
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout.splitlines()[-1]), done.stdout


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with three prompts, a session and a checkpoint, closed."""
    path = tmp_path_factory.mktemp("replay") / "store"
    with opened(path, trace=True) as kv:
        space = kv.namespace(IDENTITY, MIXED)
        for seed in range(3):
            assert store(space, prompt(seed, 85)).wait(60)
        with kv.session("alice/42", space) as session:
            session.commit(prompt(0, 85), [Turn("user", 40)], anchors=[80], meta={"secret": "hush"})
        assert isinstance(session, Session)
        assert kv.checkpoint()
        assert store(space, prompt(3, 85)).wait(60)
    return path


def snapshot(path: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


def test_every_view_reads_only_and_shows_no_token(path: Path) -> None:
    before = snapshot(path)
    code, found, text = run(path)
    assert (code, found["exit_code"], found["log_end"]) == (0, 0, "clean")
    digest = run(path, "--at", found["last_lsn"])[1]["parts"][0]["digest"]
    outputs = [text]
    for arguments in (
        ["--at", found["last_lsn"]], ["--diff", found["checkpoints"][0]["lsn"], found["last_lsn"]],
        ["--why", digest[:12]], ["--session", "alice/42"], ["--verify"], ["--export", "jsonl"],
        ["--export", "jsonl", "--trace"], ["--crash-at", found["last_lsn"]],
    ):  # fmt: skip
        code, _, text = run(path, *arguments)
        assert code == 0, (arguments, text)
        outputs.append(text)
    assert snapshot(path) == before
    tokens = prompt(0, 85).tolist()
    for text in outputs:
        assert "hush" not in text
        assert f"{tokens[0]}, {tokens[1]}" not in text


def test_a_state_before_the_previous_checkpoint_is_refused_by_its_lsn(path: Path) -> None:
    earliest = run(path, "--at", run(path)[1]["last_lsn"])[1]["earliest_lsn"]
    assert earliest > 0
    code, found, _ = run(path, "--at", earliest - 1)
    assert code == 2 and f"LSN {earliest}" in found["error"]
    assert run(path, "--at", earliest)[0] == 0


@pytest.mark.parametrize("where", ["²", "9" * 5000, "some"])
def test_a_crash_at_no_number_is_refused(path: Path, where: str) -> None:
    code, found, _ = run(path, "--crash-at", where)
    assert code == 2 and "say every-record, every-byte or an LSN" in found["error"]


@pytest.mark.parametrize("arguments", [["--trace"], ["--verify", "--truncate"], ["--export", "csv"]])
def test_what_is_not_understood_is_refused(path: Path, arguments: list[str]) -> None:
    code, found, _ = run(path, *arguments)
    assert (code, found["exit_code"]) == (2, 2) and found["error"]


def test_exit_codes(path: Path, tmp_path: Path) -> None:
    assert run_as_process(tmp_path / "nowhere")[0] == 3
    other = tmp_path / "other"
    other.mkdir()
    (other / "letter.txt").write_text("hello")
    assert run_as_process(other)[0] == 3
    with opened(tmp_path / "held") as kv:
        store(kv.namespace(IDENTITY, MIXED), prompt(1, 85)).wait(60)
        assert run_as_process(tmp_path / "held", "--truncate")[0] == 2
        assert kv.flush(60).ok


@pytest.mark.parametrize("arguments", [[], ["--export", "jsonl", "--trace"]])
def test_what_holds_no_store_is_none_for_every_view(tmp_path: Path, arguments: list[str]) -> None:
    (tmp_path / "file").write_text("hello")
    (tmp_path / "empty").mkdir()
    for name in ("empty", "file", "."):
        code, found, _ = run(tmp_path / name, *arguments)
        assert (code, found["exit_code"]) == (3, 3), name


def test_damage_is_the_exit_code_of_every_view(path: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(path, damaged)
    digest = run(path, "--at", run(path)[1]["last_lsn"])[1]["parts"][0]["digest"]
    shutil.rmtree(damaged / "slabs")
    last = run(path)[1]["last_lsn"]
    for arguments in (
        [], ["--export", "jsonl"], ["--why", digest], ["--session", "alice/42"], ["--at", last],
        ["--diff", last - 1, last],
    ):  # fmt: skip
        code, found, _ = run(damaged, *arguments)
        assert (code, found["exit_code"]) == (2, 2) and found["damage"], arguments


def test_a_life_says_where_its_knowledge_begins(path: Path) -> None:
    _, life, _ = run(path, "--session", "alice/42")
    assert [event["kind"] for event in life["events"]] == ["session"]
    assert life["events"][0]["num_added"] == 85 and life["known_from_lsn"] == 1
    _, nobody, _ = run(path, "--session", "bob")
    assert nobody["events"] == [] and nobody["now"] == [] and "never logged" in nobody["before"]


def test_the_life_of_a_fork_begins_with_what_it_shares(tmp_path: Path) -> None:
    with opened(tmp_path / "store") as kv:
        space = kv.namespace(IDENTITY, MIXED)
        with kv.session("one", space) as one:
            one.commit(prompt(0, 85), [Turn("user", 85)])
            one.fork("other").close()
            one.pin()
        assert kv.flush(60).ok
    _, life, _ = run(tmp_path / "store", "--session", "other")
    (event,) = life["events"]
    assert (event["base"], event["num_kept"], event["num_added"]) == ("one", 85, 0)
    assert life["before"] == "begun as a fork of 'one'"
    _, life, _ = run(tmp_path / "store", "--session", "one")
    assert [event.get("pinned") for event in life["events"]] == [None, True]


def test_salvage_makes_a_store_that_opens_clean(path: Path, tmp_path: Path) -> None:
    code, found, _ = run(path, "--salvage", tmp_path / "new")
    assert code == 0 and found["num_sessions"] == 1
    assert run(tmp_path / "new", "--verify")[1]["counts"] == {"ok": found["num_parts"]}
    assert run(path, "--salvage", tmp_path / "new")[0] == 2, "it is there already"


WRITER = """
import os, signal, sys
sys.path.insert(0, sys.argv[2])
from core_helpers import IDENTITY, MIXED, opened, prompt, store
with opened(sys.argv[1], log_keep_nbytes="1MiB") as kv:
    space = kv.namespace(IDENTITY, MIXED)
    for seed in range(int(sys.argv[3]), int(sys.argv[3]) + 6):
        store(space, prompt(seed, 85)).wait(60)
        if seed % 3 == 0:
            kv.checkpoint()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_follow_sees_every_record_across_rotations_and_kills(tmp_path: Path) -> None:
    path, helpers = tmp_path / "store", str(Path(__file__).parents[1])
    with opened(path, log_keep_nbytes="1MiB") as kv:
        kv.namespace(IDENTITY, MIXED)
    environment = {**os.environ, "PYTHONPATH": HOME}
    command = [sys.executable, str(TOOL), str(path), "--follow", "--json"]
    follower = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert follower.stdout is not None
    first = follower.stdout.readline()
    for start in (0, 6, 12):
        writer = [sys.executable, "-c", WRITER, str(path), helpers, str(start)]
        assert subprocess.run(writer, env=environment).returncode == -signal.SIGKILL
    time.sleep(0.5)
    follower.send_signal(signal.SIGTERM)
    output, _ = follower.communicate(timeout=30)
    events = [json.loads(line) for line in [first, *output.splitlines()]]
    assert follower.returncode == 0 and events[-1]["event"] == "end"
    followed = [event for event in events if event["event"] == "record"]
    lsns = [event["lsn"] for event in followed]
    assert lsns == sorted(set(lsns)), "in order, each once"
    assert sum(event.get("opened", False) for event in events) == 4
    kept = [json.loads(line) for line in run(path, "--export", "jsonl")[2].splitlines()[:-1]]
    seen = {(event["lsn"], event["kind"], event.get("digest")) for event in followed}
    assert kept and all((r["lsn"], r["kind"], r.get("digest")) in seen for r in kept)
