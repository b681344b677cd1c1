"""Jobs in forked children, some at a time, watched: a child that dies or stops talking is a finding.

A child sends JSON lines through a pipe. `heartbeat` says that it lives; its last line is its result.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import select
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch

Say: TypeAlias = Callable[..., None]
Job: TypeAlias = Callable[[Say], Any]


@dataclass
class Outcome:
    """How a job ended: its result, or the signal or error that ended it, or that it hung."""

    name: str
    result: Any = None
    died: str = ""
    hung: str = ""
    words: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class _Child:
    name: str
    pid: int
    pipe: int
    trace: Path
    silent_since: float
    timeout_s: float
    raw: bytearray = field(default_factory=bytearray)
    outcome: Outcome = field(init=False)

    def __post_init__(self) -> None:
        self.outcome = Outcome(self.name)


def run_jobs(
    jobs: Iterable[tuple[str, Job]], *, width: int = 2, timeout_s: float = 60.0
) -> Iterator[Outcome]:
    """Run `(name, job)` pairs, `width` at a time; outcomes as they come.

    A child silent for `timeout_s` is hung: its threads' stacks are kept and it is killed.
    """
    waiting, running = iter(jobs), dict[int, _Child]()
    exhausted = False
    try:
        while running or not exhausted:
            while len(running) < width and not exhausted:
                pair = next(waiting, None)
                if pair is None:
                    exhausted = True
                else:
                    child = _start(*pair, timeout_s)
                    running[child.pipe] = child
            if running:
                yield from _poll(running)
    finally:
        for child in running.values():
            _end(child)


def _poll(running: dict[int, _Child]) -> Iterator[Outcome]:
    ready, _, _ = select.select(list(running), [], [], 0.5)
    for pipe in ready:
        child = running[pipe]
        piece = os.read(pipe, 1 << 16)
        child.silent_since = time.monotonic()
        if piece:
            child.raw += piece
            _take_lines(child)
        else:
            del running[pipe]
            yield _reap(child)
    for child in [c for c in running.values() if time.monotonic() - c.silent_since > c.timeout_s]:
        del running[child.pipe]
        yield _give_up(child)


def _take_lines(child: _Child) -> None:
    *lines, rest = bytes(child.raw).split(b"\n")
    child.raw[:] = rest
    for line in lines:
        word = json.loads(line)
        if "result" in word:
            child.outcome.result = word["result"]
        elif "error" in word:
            child.outcome.died = word["error"]
        else:
            child.outcome.words.append(word)


def _start(name: str, job: Job, timeout_s: float) -> _Child:
    reading, writing = os.pipe()
    handle, trace = tempfile.mkstemp(prefix="campaign-", suffix=".trace")
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        _run_child(job, writing, handle)
    os.close(writing)
    os.close(handle)
    return _Child(name, pid, reading, Path(trace), time.monotonic(), timeout_s)


def _run_child(job: Job, writing: int, handle: int) -> None:
    """The whole life of a child; never returns."""
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        faulthandler.enable(handle, all_threads=True)
        faulthandler.register(signal.SIGUSR1, handle, all_threads=True)
        torch.set_num_threads(1)
        gc.freeze()

        turn = threading.Lock()

        def say(**word: Any) -> None:
            line = memoryview(json.dumps(word).encode() + b"\n")
            with turn:
                while line:
                    line = line[os.write(writing, line) :]

        try:
            say(result=job(say))
            code = 0
        except BaseException:
            say(error=traceback.format_exc()[-3000:])
    finally:
        os._exit(code)


def _reap(child: _Child) -> Outcome:
    _, status = os.waitpid(child.pid, 0)
    os.close(child.pipe)
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        child.outcome.died = f"{name}\n{child.trace.read_text()[-3000:]}"
    elif child.outcome.result is None and not child.outcome.died:
        child.outcome.died = f"exit status {os.waitstatus_to_exitcode(status)} without a result"
    child.trace.unlink()
    return child.outcome


def _give_up(child: _Child) -> Outcome:
    os.kill(child.pid, signal.SIGUSR1)
    time.sleep(0.3)
    child.outcome.hung = child.trace.read_text()[-6000:] or "no trace of its threads"
    _end(child)
    return child.outcome


def _end(child: _Child) -> None:
    os.kill(child.pid, signal.SIGKILL)
    os.waitpid(child.pid, 0)
    os.close(child.pipe)
    child.trace.unlink(missing_ok=True)
