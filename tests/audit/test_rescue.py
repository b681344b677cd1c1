"""What a rescue counts as lost, and where it will not write."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from core_helpers import IDENTITY, MIXED, opened, prompt, store

from tieredkv.audit.report import fsck
from tieredkv.audit.rescue import rescue
from tieredkv.errors import BadInput


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with opened(tmp_path / "store") as kv:
        assert store(kv.namespace(IDENTITY, MIXED), prompt(1)).wait(60)
    return tmp_path / "store"


def test_parts_without_their_slabs_are_counted_as_unreadable(path: Path, tmp_path: Path) -> None:
    num_parts = fsck(path).num_parts
    shutil.rmtree(path / "slabs")
    found = rescue(path, tmp_path / "new")
    assert (found.not_rescued, found.exit_code) == ({"unreadable": num_parts}, 2)
    assert fsck(tmp_path / "new").exit_code == 0
    assert not (path / "slabs").exists(), "it is only read"


def test_the_new_store_may_not_lie_in_the_old_one(path: Path, tmp_path: Path) -> None:
    before = sorted(path.rglob("*"))
    (tmp_path / "link").symlink_to(path)
    for out in (path / "sub", path / "slabs" / "deep", tmp_path / "link" / "sub"):
        with pytest.raises(BadInput) as refused:
            rescue(path, out)
        assert str(out) in str(refused.value) and str(path) in str(refused.value)
    assert sorted(path.rglob("*")) == before
    assert rescue(path, tmp_path / "store2").exit_code == 0, "a like name beside it is another directory"
