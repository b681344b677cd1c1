"""Load or recompute: of what is stored of a prompt, as much is loaded as makes its first token come soonest.

Loading wins unless both sides are known and computing is clearly sooner: an estimate that is wrong by a little
must not cost anybody what is stored. A disk that became slow is noticed by the loads themselves; one that became
fast again by a load now and then that is tried all the same, and once that was sooner than computing, what was
known of its tier is forgotten.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..cache import TieredCache
from ..errors import CorruptFormat, TieredKVError
from ..namespace import Namespace
from ..outcomes import Lookup, Reason
from ..speeds import (
    Key,
    Sample,
    Speeds,
    encode,
    is_worth,
    nbytes_by_tier,
    read_speeds,
    slowest,
    write_speeds,
)
from .capture import Tokens
from .restore import Restored

log = logging.getLogger("tieredkv.hf")

_TRY_EVERY = 8
"""Of so many times that computing would win one loads all the same."""
_WARM: set[Key] = set()
"""What this process has had a first forward of, in whatever store."""
_WRITING: weakref.WeakKeyDictionary[TieredCache, threading.Lock] = weakref.WeakKeyDictionary()
"""Held by whoever replaces the file of a store: the gates of several models have one file."""
_FAILED = (str(Reason.CORRUPT), str(Reason.SUPERSEDED), str(Reason.UNWRITTEN))


@dataclass(frozen=True)
class Choice:
    """What the gate chose for a prompt.

    Attributes:
        num_found: tokens that could be loaded.
        num_tokens: those that are.
        restore_s: seconds that loading all of them should take; None while too little was measured.
        compute_s: seconds that computing them again should take; None while too little was measured.
        why: in words.
        is_trial: loaded although computing should be sooner, to see whether that still holds.
    """

    num_found: int
    num_tokens: int
    restore_s: float | None
    compute_s: float | None
    why: str
    is_trial: bool = False

    def is_late(self, seconds: float) -> bool:
        """Whether a restore that began so many seconds ago takes longer yet than computing would."""
        if self.restore_s is None or self.compute_s is None:
            return False
        return is_worth(self.restore_s - seconds - self.compute_s, self.restore_s)

    def __str__(self) -> str:
        known = [
            f"{what} about {_duration(seconds)}"
            for what, seconds in (("loading takes", self.restore_s), ("computing", self.compute_s))
            if seconds is not None
        ]
        chosen = "loaded" if self.num_tokens == self.num_found else "computed" if not self.num_tokens else (
            f"{self.num_tokens:,} of {self.num_found:,} loaded"
        )  # fmt: skip
        return ", ".join([*known, f"{chosen}: {self.why}"])


class Gate:
    """Chooses for one namespace on one device, and learns. Any thread may call.

    What it learned is kept in the store's directory, if there is one, and taken up from there.
    """

    def __init__(self, kv: TieredCache, space: Namespace, device: torch.device) -> None:
        self._kv = kv
        self._space = space
        self._key = Key(space.digest.hex(), device_name(device))
        self._lock = threading.Lock()
        self._is_new = False
        self._writer: threading.Thread | None = None
        self._write_until = 0.0  # monotonic; how long the writer is waited for
        self._speeds = self._read_in_time().get(self._key) or Speeds()
        self._speeds.prefill.is_warm = self._key in _WARM

    # What to do

    def choose(self, tokens: Tokens, hit: Lookup, num_held: int = 0) -> Choice:
        """How much of `hit`, what is stored of `tokens`, to load; 0 or what is held: compute instead.

        Args:
            num_held: tokens that are at hand and go on being used if nothing is loaded.
        """
        with self._lock:
            choice = self._estimate(tokens, hit, num_held)
            if choice.num_tokens == choice.num_found:
                return choice
            self._is_new = True
            if self._speeds.num_passed_by >= _TRY_EVERY - 1:
                self._space.counters.add("tried_restores")
                why = f"computing should be sooner, yet of {_TRY_EVERY} times one loads to see whether it is"
                return replace(choice, num_tokens=choice.num_found, why=why, is_trial=True)
            self._speeds.num_passed_by += 1
            self._space.counters.add("recomputed_prompts")
            self._space.counters.add("recomputed_tokens", choice.num_found - max(choice.num_tokens, num_held))
            return choice

    def estimate(self, tokens: Tokens, hit: Lookup, num_held: int = 0) -> Choice:
        """As `choose`, of a prompt that is not asked yet: nothing is counted, and nothing tried."""
        with self._lock:
            return self._estimate(tokens, hit, num_held)

    def skipped_s(self, num_reused: int, num_tokens: int) -> float | None:
        """Seconds of prefill that reusing the head of a prompt saves; None before any was measured."""
        with self._lock:
            whole = self._speeds.prefill.seconds(0, num_tokens)
            rest = self._speeds.prefill.seconds(num_reused, num_tokens - num_reused)
        return None if whole is None or rest is None else whole - rest

    def _estimate(self, tokens: Tokens, hit: Lookup, num_held: int) -> Choice:
        found, total = hit.num_tokens, len(tokens)
        if found <= num_held:
            return Choice(found, found, None, None, "no more than is at hand")
        restore_s = self._restore_s(hit)
        compute_s = self._speeds.compute_s(num_held, found, total)
        if restore_s is None or compute_s is None:
            what = "loading" if restore_s is None else "computing"
            return Choice(found, found, restore_s, compute_s, f"how long {what} takes is not known yet")
        loaded = [(restore_s, hit), *self._shorter(tokens, hit, num_held)]
        totals = {cut.num_tokens: seconds + self._compute_s(cut.num_tokens, total) for seconds, cut in loaded}
        totals[0] = self._compute_s(num_held, total)
        best = min(totals, key=totals.__getitem__)
        if not is_worth(totals[found] - totals[best], restore_s):
            return Choice(found, found, restore_s, compute_s, "that is soonest, or as soon")
        return Choice(found, best, restore_s, compute_s, "that is sooner")

    def _shorter(self, tokens: Tokens, hit: Lookup, num_held: int) -> list[tuple[float, Lookup]]:
        """Less may be best where a head lies in a faster tier: within one tier, all or nothing is.

        For with every token computing grows dearer and loading does not.
        """
        counts, cuts = list(hit.by_tier.values()), []
        for at in {sum(counts[:n]) for n in range(1, len(counts))}:
            cut = self._space.lookup(tokens[: at + 1])
            seconds = self._restore_s(cut) if cut.num_tokens > num_held else None
            cuts += [(seconds, cut)] if seconds is not None else []
        return cuts

    def _restore_s(self, hit: Lookup) -> float | None:
        return self._speeds.restore_s(nbytes_by_tier(self._space.layout, hit.by_tier))

    def _compute_s(self, start: int, end: int) -> float:
        seconds = self._speeds.prefill.seconds(start, end - start)
        assert seconds is not None, "asked of a prefill that is known"
        return seconds

    # What was done

    def note_forwards(self, samples: list[Sample]) -> None:
        with self._lock:
            self._is_new |= bool(samples)
            self._speeds.prefill.note(samples)
            if samples:
                _WARM.add(self._key)

    def note_restore(self, got: Restored, hit: Lookup | None = None, choice: Choice | None = None) -> None:
        """Learn from a restore.

        Args:
            hit: what should have been loaded: one that the deadline ended took at least as long for all of that.
            choice: why it was loaded.
        """
        by_tier: Mapping[str, int] = got.by_tier
        if got.reason == str(Reason.TIMED_OUT):  # asked of a disk that is left alone, it says so at once
            late = hit is not None and got.seconds >= self._kv.deadline_s / 2
            by_tier = hit.by_tier if hit is not None and late else {}
        if got.reason in _FAILED or not sum(by_tier.values()):
            return
        with self._lock:
            self._is_new = True
            nbytes = nbytes_by_tier(self._space.layout, by_tier)
            if choice is not None and choice.is_trial:
                self._speeds.num_passed_by = 0
                if choice.compute_s is not None and got.seconds < choice.compute_s:
                    self._speeds.restores[slowest(nbytes)].forget()
            self._speeds.note_restore(nbytes, got.seconds)

    # What is kept

    def save(self) -> None:
        """Keep what was learned since this was last done; a disk that hangs is waited for until the deadline."""
        try:
            self._kv.check_open()
        except TieredKVError:
            return
        if self._kv.health().mode != "tiered":
            return
        with self._lock:
            is_writing = self._writer is not None and self._writer.is_alive()
            if self._is_new and not is_writing:
                self._start_writer()
            writer, until = self._writer, self._write_until
        if writer is not None:
            writer.join(max(0.0, until - time.monotonic()))

    def _start_writer(self) -> None:
        """One at a time, and started before anybody else sees it (lock held)."""
        writer = threading.Thread(target=self._write_news, name="tieredkv-speeds", daemon=True)
        try:
            writer.start()
        except RuntimeError as error:  # no more threads, or the interpreter goes down
            self._failed(error)
            return
        self._writer, self._write_until = writer, time.monotonic() + self._kv.deadline_s

    def _read_in_time(self) -> dict[Key, Speeds]:
        """What is kept; nothing from a disk that hangs."""
        found: list[dict[Key, Speeds]] = []
        reader = threading.Thread(
            target=lambda: found.append(self._read()), name="tieredkv-speeds", daemon=True
        )
        reader.start()
        reader.join(self._kv.deadline_s)
        return found[0] if found else {}

    def _write_news(self) -> None:
        """Write until nothing is new: who saves meanwhile waits for this, and goes away with it kept."""
        while True:
            with _WRITING.setdefault(self._kv, threading.Lock()):
                self._write()
            with self._lock:
                if not self._is_new:
                    self._writer = None
                    return

    def _write(self) -> None:
        known = self._read()
        known.pop(self._key, None)
        with self._lock:
            self._is_new = False
            raw = encode({**known, self._key: self._speeds})
        try:
            write_speeds(self._kv.fs, self._kv.path, raw)
        except OSError as error:
            self._failed(error)

    def _read(self) -> dict[Key, Speeds]:
        if self._kv.health().mode == "memory":
            return {}
        try:
            return read_speeds(self._kv.fs, self._kv.path)
        except (OSError, CorruptFormat) as error:
            self._failed(error)
            return {}

    def _failed(self, error: Exception) -> None:
        self._space.counters.add("speeds_errors")
        log.info("what was learned of speeds is not kept: %s", error)


def device_name(device: Any) -> str:
    """What a speed is of: a GPU by its name, a CPU by the threads that compute."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu, {torch.get_num_threads()} threads" if device.type == "cpu" else str(device)


def _duration(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
