"""Virtual environments for rivals that would not go beside each other, made once and kept.

Their wheels are installed without their requirements, then the requirements less what wants CUDA: it installs
on any machine, and none of it runs in what is measured.
"""

from __future__ import annotations

import subprocess
import venv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

_READY = "ready"
_LIST_REQUIREMENTS = """
import importlib.metadata, re, sys
for line in importlib.metadata.requires(sys.argv[1]) or ():
    if "extra ==" not in line and re.match(r"[A-Za-z0-9._-]+", line)[0].lower() not in sys.argv[2:]:
        print(line)
"""


class CannotInstall(Exception):
    """pip said no; the message is its last line."""


@dataclass(frozen=True)
class Environment:
    """What to install beside torch and what this package needs, and which requirements to leave out.

    `without=None` leaves them all out; `pins` are installed before.
    """

    wheel: str
    pins: tuple[str, ...] = ()
    without: tuple[str, ...] | None = ()

    def python(self, home: Path, say: Callable[[str], None]) -> Path:
        """The interpreter of this environment below `home`, built if it is not there.

        Raises:
            CannotInstall: with pip's own reason.
        """
        root = home / self.wheel.replace("==", "-")
        python = root / "bin" / "python"
        if not (root / _READY).exists():
            say(f"building an environment for {self.wheel} in {root}: minutes, and gigabytes, once")
            venv.create(root, clear=True, with_pip=True)
            self._install(python)
            (root / _READY).touch()
        return python

    def _install(self, python: Path) -> None:
        release = torch.__version__.partition("+")[0]
        _pip(python, f"torch=={release}", "numpy", "lmdb", "xxhash", *self.pins)
        _pip(python, "--no-deps", self.wheel)
        if self.without is not None:
            name = self.wheel.partition("==")[0]
            command = [str(python), "-c", _LIST_REQUIREMENTS, name, *self.without]
            listed = subprocess.run(command, capture_output=True, text=True, check=True)
            _pip(python, *listed.stdout.splitlines())


def _pip(python: Path, *what: str) -> None:
    done = subprocess.run(
        [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *what],
        capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or [done.stderr]
        raise CannotInstall(f"pip install {' '.join(what)[:80]}: {lines[0].strip()}")


def default_home() -> Path:
    return Path.home() / ".cache" / "tieredkv" / "rivals"
