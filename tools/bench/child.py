"""Jobs in fresh processes: what a process has done before changes its memory, its caches and its imports.

A job is a function `job(say, **arguments) -> result`. The child writes one JSON object a line: what it says
on its way, then its result.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tieredkv

Say = Callable[..., None]


class ChildFailed(Exception):
    """A job ended without a result; the message is the end of what it wrote to stderr."""


def run(
    job: Callable[..., Any], on_word: Say = lambda **_: None, python: str = sys.executable, **arguments: Any
) -> dict[str, Any]:
    """Run a job in a new process, to its end, and return its result: the first, where a job says one itself.

    Args:
        python: the interpreter, for what lives in an environment of its own.

    Raises:
        ChildFailed: it ended in another way.
    """
    name = f"{job.__module__}:{job.__qualname__}"
    command = [python, "-m", "bench.child", name, json.dumps(arguments)]
    results: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryFile("w+") as errors,  # a pipe that nobody reads would stop who writes much to it
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment()
        ) as child,
    ):
        assert child.stdout is not None, "it is a pipe"
        for line in child.stdout:
            word = json.loads(line)
            if "result" in word:
                results.append(word["result"])
            else:
                on_word(**word)
        if not results:
            child.wait()
            errors.seek(0)
            raise ChildFailed(f"{name}: {errors.read()[-2000:]}")
    return results[0]


def environment() -> Mapping[str, str]:
    """This process's environment, in which a child finds the same `tieredkv` and this package."""
    homes = [str(Path(__file__).parents[1]), str(Path(tieredkv.__file__).parents[1])]
    path = os.pathsep.join([*homes, *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path}


def main(name: str, arguments: str) -> None:
    words = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no word of ours

    def say(**word: Any) -> None:
        print(json.dumps(word), file=words, flush=True)

    module, function = name.split(":")
    job = getattr(importlib.import_module(module), function)
    say(result=job(say, **json.loads(arguments)))


if __name__ == "__main__":
    main(*sys.argv[1:])
