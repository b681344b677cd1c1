"""Other releases of transformers beside the installed one, and the tool run under them, in parallel."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import transformers

import tieredkv

from .verdict import Cell

_TOOL = Path(__file__).parents[1] / "conformance.py"


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
) -> Iterator[list[Cell]]:
    """The rows of families as they come, each family in a process of its own, so many at once.

    Raises:
        ChildFailed: a process ended without a result.
    """
    pool = ThreadPoolExecutor(num_jobs)
    try:
        jobs = [pool.submit(_run, packages, family, operations) for family in families]
        for job in as_completed(jobs):
            yield job.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _run(packages: Path | None, family: str, operations: Sequence[str]) -> list[Cell]:
    named = [option for name in operations for option in ("--operation", name)]
    command = [sys.executable, str(_TOOL), "--json", "--jobs", "0", "--family", family, *named]
    done = subprocess.run(command, capture_output=True, text=True, env=_surroundings(packages))
    if done.returncode not in (0, 1) or not done.stdout.strip():
        raise ChildFailed(f"{family}: {done.stderr.strip()[-2000:]}")
    return [Cell(**cell) for cell in json.loads(done.stdout.splitlines()[-1])["cells"]]


def _surroundings(packages: Path | None) -> dict[str, str]:
    home = Path(tieredkv.__file__).parents[1]
    path = [str(part) for part in (packages, home) if part is not None]
    path += [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
