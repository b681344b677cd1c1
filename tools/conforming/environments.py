"""Other releases of transformers beside the installed one, and the tool run under them, in parallel."""

from __future__ import annotations

import contextlib
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
from typing import IO

import transformers

import tieredkv

from .verdict import CELL, READY, Cell

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
    """The cells of families as they come; so many processes each take the next family when they have done one.

    Raises:
        ChildFailed: a process ended before its last cell.
    """
    waiting = deque(families)
    found: Queue[Cell | ChildFailed | None] = Queue()
    children = [_start(packages, operations) for _ in range(min(num_jobs, len(families)))]
    try:
        for child in children:
            threading.Thread(target=_serve, args=(child, waiting, found), daemon=True).start()
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


def _start(packages: Path | None, operations: Sequence[str]) -> subprocess.Popen[str]:
    program = "from conforming import cells; cells.main()"
    command = [sys.executable, "-c", program, json.dumps(list(operations))]
    surroundings = _surroundings(packages)
    pipe, together = subprocess.PIPE, subprocess.STDOUT
    return subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=together, text=True, cwd=_TOOLS, env=surroundings
    )


def _serve(
    child: subprocess.Popen[str], waiting: deque[str], found: Queue[Cell | ChildFailed | None]
) -> None:
    """Give `child` a family whenever it is ready; hand on its cells, one a line among whatever else it says."""
    assert child.stdin is not None and child.stdout is not None
    said: deque[str] = deque(maxlen=20)
    for line in child.stdout:
        if line.startswith(CELL):
            found.put(Cell(**json.loads(line.removeprefix(CELL))))
        elif line.startswith(READY):
            with contextlib.suppress(OSError):  # it has ended: its exit status says how
                _give(child.stdin, waiting)
        else:
            said.append(line)
    failed = child.wait() != 0
    found.put(ChildFailed("".join(said).strip() or f"exit status {child.returncode}") if failed else None)


def _give(to: IO[str], waiting: deque[str]) -> None:
    """The next family, or the end."""
    try:
        family = waiting.popleft()
    except IndexError:  # another process took the last one
        to.close()
        return
    to.write(f"{family}\n")
    to.flush()


def _surroundings(packages: Path | None) -> dict[str, str]:
    home = Path(tieredkv.__file__).parents[1]
    path = [str(part) for part in (packages, home) if part is not None]
    path += [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
