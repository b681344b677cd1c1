"""Both ends of the pipe between the command and its child processes.

A child gets one job as JSON on its standard input and says events as JSON lines on its standard output.
Whatever its libraries print goes to its standard error, which the parent shows only if the child fails.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from .. import errors

Event = dict[str, Any]


class Child:
    """The parent's end: one running child of this package. Use as a scope; leaving it ends the child."""

    def __init__(self, module: str, job: Mapping[str, Any]) -> None:
        self.killed = False
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (closed by __exit__)
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"tieredkv.cli.{module}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=_environment(),
        )
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(job).encode())
            self._process.stdin.close()
        except BrokenPipeError:
            pass  # it died at once; `events` says why

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._stderr.close()

    def events(self) -> Iterator[Event]:
        """What the child says, as it says it, until it ends; after a `kill`, what it had said until then.

        Raises:
            TieredKVError: the error the child reported, as the same class; or the child failed.
        """
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if not line.endswith(b"\n"):
                break  # cut off by its death
            event: Event = json.loads(line)
            if event["event"] == "error":
                raise getattr(errors, event["kind"])(event["text"])
            yield event
        if self._process.wait() and not self.killed:
            raise errors.TieredKVError(
                f"the child process failed ({self._process.returncode}): {self._last_words()}"
            )

    def kill(self) -> None:
        """SIGKILL, now. `killed` says whether that is what ended the child."""
        self._process.kill()
        self.killed = self._process.wait() == -signal.SIGKILL

    def _last_words(self) -> str:
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"


class Channel:
    """The child's end: says events. Takes standard output for itself alone."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)

    def say(self, event: str, **values: Any) -> None:
        self._out.write(json.dumps({"event": event, **values}) + "\n")
        self._out.flush()


def serve(work: Callable[[Channel, Mapping[str, Any]], None]) -> None:
    """Run one job from standard input; an error of ours is said, any other ends the process with a trace."""
    channel = Channel()
    try:
        work(channel, json.load(sys.stdin))
    except errors.TieredKVError as error:
        channel.say("error", kind=type(error).__name__, text=str(error))
    except BrokenPipeError:
        os._exit(1)  # the parent is gone, and with it everyone who would read more


def _environment() -> dict[str, str]:
    """The parent's environment, with this very package first on the path and no way to the network."""
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH", "")) if p)
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {**os.environ, **offline, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
