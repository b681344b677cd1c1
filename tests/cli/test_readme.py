"""What the README says can be typed works, and what it says is there is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_has_the_two_commands_on_lines_of_their_own() -> None:
    lines = README.splitlines()
    assert 'pip install ".[demo]" && tieredkv demo' in lines
    assert 'pip install ".[test]" && pytest' in lines


def test_tree_names_every_module() -> None:
    tree = README.partition("## The file tree")[2]
    shipped = [path for path in (ROOT / "tieredkv").rglob("*.py") if "testing" not in path.parts]
    missing = [path.name for path in shipped if path.name != "__init__.py" and path.name not in tree]
    assert not missing


def test_examples_run(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ten_lines, generate = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    small = (
        ten_lines.replace("~/.cache/app/kv", str(tmp_path / "kv"))
        .replace("GiB", "MiB")
        .replace("8MiB", "9MiB")
    )
    assert small.count("MiB") == 2 and small.rstrip().endswith("kv.close()")
    small = small.replace("Config(", 'Config(device_nbytes="8MiB", ').replace("kv.close()", "")
    names: dict[str, object] = {"path": str(tiny_model)}
    exec(small, names)
    assert capsys.readouterr().out
    exec("import torch; ids = torch.arange(2, 40)[None]", names)
    exec(generate.replace("alice/42", "alice/43"), names)
    exec("kv.check(); kv.close()", names)
