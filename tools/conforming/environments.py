"""Other releases of transformers beside the installed one, and the tool run under them, in parallel."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from queue import Queue

import transformers

import tieredkv

from .verdict import CELL, Cell

_TOOLS = Path(__file__).parents[1]


class ChildFailed(Exception):
    """A release that cannot be installed, or a run that ended without a result."""


def installed() -> str:
    """The minor release that this process runs."""
    return ".".join(transformers.__version__.split(".")[:2])


def environment(minor: str, folder: Path) -> Path | None:
    """A folder that holds that minor of transformers with what it needs, made once; None for the installed one.

    It goes before everything else on the path, so torch is the running one.

    Raises:
        ChildFailed: pip could not install it.
    """
    if minor == installed():
        return None
    target = folder / f"transformers-{minor}"
    if target.is_dir():
        return target
    scratch = target.with_name(target.name + ".unfinished")
    shutil.rmtree(scratch, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(scratch)]
    done = subprocess.run([*pip, f"transformers=={minor}.*"], capture_output=True, text=True)
    if done.returncode:
        raise ChildFailed(f"transformers {minor} cannot be installed: {done.stderr.strip()[-500:]}")
    scratch.rename(target)
    return target


def run_all(
    packages: Path | None, families: Sequence[str], operations: Sequence[str], num_jobs: int
) -> Iterator[Cell]:
    """The cells of families as they come; the families are dealt to so many processes.

    Raises:
        ChildFailed: a process ended before its last cell.
    """
    dealt = [part for n in range(num_jobs) if (part := families[n::num_jobs])]
    found: Queue[Cell | ChildFailed | None] = Queue()
    children = [_start(packages, part, operations) for part in dealt]
    try:
        for child in children:
            threading.Thread(target=_read, args=(child, found), daemon=True).start()
        num_running = len(children)
        while num_running:
            cell = found.get()
            if isinstance(cell, ChildFailed):
                raise cell
            if cell is None:
                num_running -= 1
            else:
                yield cell
    finally:
        for child in children:
            child.kill()
            child.wait()


def _start(
    packages: Path | None, families: Sequence[str], operations: Sequence[str]
) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", "from conforming import cells; cells.main()"]
    job = json.dumps([list(families), list(operations)])
    surroundings = _surroundings(packages)
    pipe, together = subprocess.PIPE, subprocess.STDOUT
    return subprocess.Popen(
        [*command, job], stdout=pipe, stderr=together, text=True, cwd=_TOOLS, env=surroundings
    )


def _read(child: subprocess.Popen[str], found: Queue[Cell | ChildFailed | None]) -> None:
    """Hand on the cells that `child` prints, one a line among whatever else it says."""
    assert child.stdout is not None
    said: deque[str] = deque(maxlen=20)
    for line in child.stdout:
        if line.startswith(CELL):
            found.put(Cell(**json.loads(line.removeprefix(CELL))))
        else:
            said.append(line)
    failed = child.wait() != 0
    found.put(ChildFailed("".join(said).strip() or f"exit status {child.returncode}") if failed else None)


def _surroundings(packages: Path | None) -> dict[str, str]:
    home = Path(tieredkv.__file__).parents[1]
    path = [str(part) for part in (packages, home) if part is not None]
    path += [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
