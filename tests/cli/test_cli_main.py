"""The console script without its extras, and the errors it turns into one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from core_helpers import IDENTITY, MIXED, opened, prompt, store

WITHOUT = """
import sys
class Without:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in {blocked!r} else self.finder.find_spec(name, path, target)
sys.meta_path[:] = map(Without, sys.meta_path)
sys.argv = ["tieredkv", *{arguments!r}]
from tieredkv.cli import main
main()
"""


def run(*arguments: str, blocked: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    source = WITHOUT.format(blocked=blocked, arguments=arguments)
    root = Path(__file__).parents[2]
    return subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=False, cwd=root
    )


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_names_the_extra_for_the_command_line(package: str) -> None:
    done = run("--help", blocked=(package,))
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        f'tieredkv: the command line needs {package}: pip install "tieredkv[cli]"'
    ]


def test_names_the_extra_for_the_demo() -> None:
    done = run("demo", blocked=("transformers",))
    assert done.returncode == 2
    assert done.stderr.splitlines() == ['tieredkv: the demo needs transformers: pip install "tieredkv[demo]"']


def test_help_needs_no_transformers() -> None:
    done = run("--help", blocked=("transformers",))
    assert done.returncode == 0
    assert all(command in done.stdout for command in ("demo", "stat", "fsck"))


def test_model_path_errors_are_one_line(tmp_path: Path) -> None:
    done = run("demo", "--model", str(tmp_path / "missing"), "--json")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [f"tieredkv: model {tmp_path}/missing: not a folder"]


def test_document_errors_name_file_and_reason(tmp_path: Path) -> None:
    path = tmp_path / "document.txt"
    path.write_bytes(b"caf\xe9 " * 5000)
    done = run("demo", "--document", str(path))
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert str(path) in line and "not UTF-8" in line


@pytest.mark.parametrize("command", ["stat", "fsck"])
def test_a_folder_of_other_things_is_no_store(tmp_path: Path, command: str) -> None:
    (tmp_path / "letter.txt").write_text("dear reader")
    done = run(command, str(tmp_path), "--json")
    assert done.returncode == 3, done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]
    found = json.loads(done.stdout.splitlines()[-1])
    assert done.stderr == f"tieredkv: {found['error']}\n" and found["exit_code"] == 3


def test_a_repair_that_cannot_write_is_one_line(tmp_path: Path) -> None:
    with opened(tmp_path) as kv:
        assert store(kv.namespace(IDENTITY, MIXED), prompt(1)).wait(60)
    max(tmp_path.glob("table-*.lmdb")).unlink()  # something to repair
    (tmp_path / "LOCK").unlink()
    (tmp_path / "LOCK").mkdir()
    done = run("fsck", str(tmp_path), "--repair", "--json")
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert "Is a directory" in line and str(tmp_path) in line
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "error": line.removeprefix("tieredkv: "),
        "exit_code": 2,
    }
