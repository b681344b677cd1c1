"""The replay tool run in this process: beginning one of its own takes seconds."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import typer
from click.testing import Result
from typer.testing import CliRunner

TOOL = Path(__file__).parents[1] / "tools" / "replay.py"
sys.path.insert(0, str(TOOL.parent))

_APP = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
_APP.command()(import_module("replay").main)


def replay(*arguments: Any) -> Result:
    return CliRunner().invoke(_APP, [*map(str, arguments)])
