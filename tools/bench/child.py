"""Jobs in fresh processes: what a process has done before changes its memory, its caches and its imports.

A job is a function `job(say, **arguments) -> result`. The child writes one JSON object a line: what it says
on its way, then its result. Importing torch takes seconds of processor time, so that one process does only
that, and each job runs in a fork of it.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
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
    nursery = _nursery(python)
    results: list[dict[str, Any]] = []
    for word in nursery.words_of(name, arguments):
        if "result" in word:
            results.append(word["result"])
        else:
            on_word(**word)
    if not results:
        raise ChildFailed(f"{name}: {nursery.errors()}")
    return results[0]


def environment() -> Mapping[str, str]:
    """This process's environment, in which a child finds the same `tieredkv` and this package."""
    homes = [str(Path(__file__).parents[1]), str(Path(tieredkv.__file__).parents[1])]
    path = os.pathsep.join([*homes, *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path}


class _Nursery:
    """A process that has imported what every job needs and has done nothing else. One job at a time."""

    def __init__(self, python: str, of: Mapping[str, str]) -> None:
        self.environment = of
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (a pipe that nobody reads would stop it)
        self._process = subprocess.Popen(
            [python, "-m", "bench.child"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
            text=True, env=of,
        )  # fmt: skip

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def words_of(self, name: str, arguments: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """What a job says, to its end."""
        assert self._process.stdin is not None and self._process.stdout is not None, "both are pipes"
        self._errors.seek(0)
        self._errors.truncate()
        with contextlib.suppress(BrokenPipeError):  # it could not even import: `errors` says why
            print(json.dumps([name, arguments]), file=self._process.stdin, flush=True)
        for line in self._process.stdout:
            word = json.loads(line)
            if word == _ENDED:
                return
            yield word

    def errors(self) -> str:
        """The end of what the last job wrote to stderr."""
        self._errors.seek(0)
        return self._errors.read()[-2000:]

    def close(self) -> None:
        self._process.communicate()  # it ends when its stdin does
        self._errors.close()


_nurseries: dict[str, _Nursery] = {}
"""One for each interpreter."""


def _nursery(python: str) -> _Nursery:
    now, found = environment(), _nurseries.get(python)
    if found is None or found.environment != now or not found.is_alive:
        if found is not None:
            found.close()
        found = _nurseries[python] = _Nursery(python, now)
    return found


@atexit.register
def _close_all() -> None:
    for nursery in _nurseries.values():
        nursery.close()


_ENDED: dict[str, Any] = {"ended": True}


def main() -> None:
    """Read jobs from stdin, a line each, and run each in a fork."""
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            _run(*json.loads(line))
        os.waitpid(pid, 0)
        print(json.dumps(_ENDED), flush=True)


def _run(name: str, arguments: Mapping[str, Any]) -> None:
    """In the fork: one job, to the end of the process."""
    words, code = os.fdopen(os.dup(1), "w"), 1
    os.dup2(2, 1)  # what a library prints is no word of ours

    def say(**word: Any) -> None:
        print(json.dumps(word), file=words, flush=True)

    try:
        module, function = name.split(":")
        say(result=getattr(importlib.import_module(module), function)(say, **arguments))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
