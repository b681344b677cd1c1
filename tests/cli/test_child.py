"""The pipe to a child process: what it says, how it fails, how it is killed."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tieredkv.cli.child import Child
from tieredkv.errors import BadInput, TieredKVError


def test_error_of_ours_arrives_as_its_class(tmp_path: Path, tiny_script: dict[str, object]) -> None:
    job = {"model": str(tmp_path / "missing"), "script": tiny_script, "store": "", "salt": ""}
    with Child("chatter", job) as child, pytest.raises(BadInput, match="missing: not a folder"):
        assert [event["event"] for event in child.events()] == ["stage"]


def test_any_other_failure_tells_its_last_words() -> None:
    with Child("nonesuch", {}) as child, pytest.raises(TieredKVError, match="No module named"):
        list(child.events())


def test_killed_child_leaves_what_it_had_said(tmp_path: Path, tiny_script: dict[str, object]) -> None:
    (tmp_path / "config.json").write_text("{}")
    with Child("chatter", {"model": str(tmp_path), "script": tiny_script, "store": "", "salt": ""}) as child:
        events = child.events()
        assert next(events)["event"] == "stage"
        child.kill()
        assert child.killed
        assert list(events) == []
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, 0)


def test_leaving_the_scope_ends_the_child(tmp_path: Path, tiny_script: dict[str, object]) -> None:
    job = {"model": str(tmp_path), "script": tiny_script, "store": "", "salt": ""}
    began = time.monotonic()
    with Child("chatter", job) as child:
        pass
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, signal.SIGTERM)
    assert time.monotonic() - began < 30
