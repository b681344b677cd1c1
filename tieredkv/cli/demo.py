"""The demo: a chat that outgrows its memory, is killed in the middle of an answer, and comes back.

The command itself loads no model. It starts children, shows what they say, kills one, and compares.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from ..errors import TieredKVError
from .child import Child, Event
from .model import PACKAGE, local_copy, require, user_folder
from .report import MAX_NEAR_TIE, Outcome, figures
from .scratch import scratch_folder
from .script import Script
from .view import View

KILL_PIECES = 5
"""The kill comes when this many pieces of the answer have been shown."""


class Run:
    """What one conversation left behind, over all its processes."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.recovery: Mapping[str, Any] = {}
        self.killed = False
        self.disk_parts = 0
        self.disk_nbytes = 0
        self._evictions: list[dict[str, int]] = []

    def num_evictions(self, tier: str) -> int:
        return sum(process.get(tier, 0) for process in self._evictions)

    def note(self, event: Event) -> None:
        """Keep what `event` says about the run."""
        if event["event"] == "opened":
            self.recovery = event["recovery"]
            self._evictions.append({})
        elif event["event"] == "conversation":
            self.tokens[event["session"]] = event["tokens"]
        elif event["event"] == "stats":
            tiers = {tier["name"]: tier for tier in event["tiers"]}
            self._evictions[-1] = {name: tier["num_evictions"] for name, tier in tiers.items()}
            self.disk_parts = tiers["disk"]["num_parts"]
            self.disk_nbytes = event["disk_nbytes"]


def run_demo(console: Console, model: Path | None, script: Script, directory: Path | None) -> Outcome:
    """Chat, kill, resume, compare, measure.

    `model` None takes the demo's own one. `directory` None takes a folder that is removed at the end.

    Raises:
        TieredKVError: a child reported it: a bad model or document, an unusable directory.
    """
    with ExitStack() as stack:
        view = View(console)
        stack.callback(view.close)
        scratch = stack.enter_context(scratch_folder(user_folder()))
        demo = Demo(view, model or _own_model(view), script, scratch)
        killed = demo.killed_run(directory or scratch / "chat")
        reference = demo.reference_run()
        return demo.outcome(killed, reference)


class Trigger:
    """When to kill: in the middle of an answer, of the second turn of `last_session` or one that follows it."""

    def __init__(self, last_session: str) -> None:
        self.in_answer = False
        self._last_session = last_session
        self._armed = False
        self._num_pieces = 0

    def pulled_by(self, event: Event) -> bool:
        """Whether to kill now, having seen `event`."""
        kind = event["event"]
        if kind == "turn":
            self._armed |= event["session"] == self._last_session and event["index"] == 1
            self.in_answer, self._num_pieces = True, 0
        elif kind == "answer":
            self.in_answer = False
        elif kind == "piece":
            self._num_pieces += 1
        return self._armed and kind == "piece" and self._num_pieces == KILL_PIECES


class Demo:
    """The runs of one demo; each has a store of its own and processes of its own."""

    def __init__(self, view: View, model: Path, script: Script, scratch: Path) -> None:
        self.view = view
        self.scratch = scratch
        self.script = script
        self._job = {
            "model": str(model.resolve()),
            "script": asdict(script),
            "salt": f"demo {secrets.token_hex(4)}",
        }

    def killed_run(self, store: Path) -> Run:
        """A chat that is killed, and the process that takes it up again."""
        run = Run()
        self.view.heading("a chat in little memory, in a process of its own")
        self._chat(run, store, Trigger(list(self.script.questions)[-1]))
        self.view.heading("a new process opens the store")
        self._chat(run, store)
        return run

    def reference_run(self) -> Run:
        """The same chat in a fresh store, never killed."""
        run = Run()
        self.view.heading("the same chat once more, never killed, to compare")
        self._chat(run, self.scratch / "reference")
        return run

    def outcome(self, killed: Run, reference: Run) -> Outcome:
        """Compare the two runs token by token and measure first tokens."""
        doubts = [
            reference.tokens[name][:at]
            for name in self.script.questions
            if (at := first_difference(killed.tokens[name], reference.tokens[name])) is not None
        ]
        self.view.heading("time to first token, cold and resumed")
        measured = self._measure(doubts)
        near_ties = sum(gap < MAX_NEAR_TIE for gap in measured["gaps"])
        return Outcome(
            prompt_tokens=measured["prompt_tokens"],
            reused_tokens=measured["reused_tokens"],
            reused_by_tier=measured["by_tier"],
            cold_ttft_s=measured["cold_ttft_s"],
            resumed_ttft_s=measured["resumed_ttft_s"],
            recovery_s=killed.recovery["seconds"],
            identical_output=not doubts,
            near_ties=near_ties,
            killed=killed.killed,
            device_evictions=killed.num_evictions("device"),
            host_evictions=killed.num_evictions("host"),
            disk_parts=killed.disk_parts,
            disk_nbytes=killed.disk_nbytes,
            sessions=len(killed.tokens),
            figures=figures(measured, len(doubts) - near_ties),
        )

    def _chat(self, run: Run, store: Path, trigger: Trigger | None = None) -> None:
        """One chatting process, to its end or up to where `trigger` says."""
        with Child("chatter", {**self._job, "store": str(store.resolve())}) as child:
            for event in child.events():
                self.view.show(event)
                run.note(event)
                if trigger is not None and trigger.pulled_by(event):
                    child.kill()
            if child.killed and trigger is not None:
                run.killed = trigger.in_answer  # not if the answer was complete after all
                self.view.killed(child.pid)

    def _measure(self, doubts: list[list[int]]) -> Event:
        with Child(
            "measure", {**self._job, "store": str(self.scratch / "measure"), "doubts": doubts}
        ) as child:
            for event in child.events():
                self.view.show(event)
                if event["event"] == "measured":
                    return event
        raise TieredKVError("the measuring process ended without a result")


def first_difference(ours: list[int], theirs: list[int]) -> int | None:
    """The first position where the two differ, or None."""
    pairs = enumerate(zip(ours, theirs, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), None)
    if at is None and len(ours) != len(theirs):
        return min(len(ours), len(theirs))
    return at


def _own_model(view: View) -> Path:
    """The folder of the demo's own model, converted now if this is the first run."""
    require("transformers", "gguf", "accelerate", PACKAGE)
    with Child("model", {"target": str(local_copy())}) as child:
        for event in child.events():
            view.show(event)
    return local_copy()
