"""The command's own folder: gone at its end, and after a kill at the next start."""

from __future__ import annotations

from pathlib import Path

import pytest

from tieredkv.cli.scratch import scratch_folder
from tieredkv.errors import PathUnusable


def test_is_removed_at_the_end(tmp_path: Path) -> None:
    with scratch_folder(tmp_path / "new") as folder:
        (folder / "file").write_text("x")
    assert list((tmp_path / "new").iterdir()) == []


def test_removes_what_a_killed_command_left_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "demo-dead" / "store").mkdir(parents=True)
    (tmp_path / "models").mkdir()
    with scratch_folder(tmp_path) as first, scratch_folder(tmp_path) as second:
        assert first.is_dir() and second.is_dir()
        assert sorted(p.name for p in tmp_path.iterdir()) == sorted([first.name, second.name, "models"])


def test_says_where_it_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(PathUnusable, match="file"), scratch_folder(tmp_path / "file"):
        pass
