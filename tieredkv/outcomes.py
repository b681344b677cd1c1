"""Named outcomes: why a lookup ended where it did, what a store took, how the cache is."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Protocol


class Tier(IntEnum):
    """Where a part can lie, fastest first."""

    DEVICE = 0
    HOST = 1
    DISK = 2


class Reason(str, Enum):
    """Why a lookup gave no more tokens, or a store took no more blocks."""

    COMPLETE = "complete"
    NEVER_STORED = "never stored"
    EVICTED = "evicted"
    NO_ANCHOR = "no anchor here"
    REFUSED = "refused"
    IDENTITY = "identity differs"
    CORRUPT = "corrupt"
    UNWRITTEN = "unwritten"
    SUPERSEDED = "superseded"
    TIMED_OUT = "timed out"
    DIVERGED = "diverged"
    TOO_SHORT = "shorter than one block and one token"
    NO_SPACE = "no space"
    NOT_GIVEN = "its tensors were not given"
    KEY_TAKEN = "key held by another digest"
    RECOMPUTED = "sooner computed than loaded"
    WANTED_WHOLE = "an argument reads the whole prompt"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Lookup:
    """What a prompt can skip: `num_tokens` of prefill, read from `by_tier` (tokens by the tier's name).

    `num_full_tokens` may be larger: full parts present beyond the last restorable boundary.
    """

    num_tokens: int
    by_tier: Mapping[str, int]
    reason: Reason
    detail: str = ""
    num_full_tokens: int = 0


class Wait(Protocol):
    """Blocks until something is done, at most `timeout_s`, for ever if None; returns whether it is."""

    def __call__(self, timeout_s: float | None = None) -> bool: ...


def _done(timeout_s: float | None = None) -> bool:
    return True


@dataclass(frozen=True)
class Stored:
    """What a `store` took: blocks new here, blocks already present, blocks refused and why.

    `wait(timeout_s=None)` returns True once every block taken is committed or no longer wanted.
    """

    num_new: int
    num_present: int
    num_refused: int
    reason: Reason
    detail: str = ""
    wait: Wait = field(default=_done, repr=False, compare=False)


@dataclass(frozen=True)
class Flushed:
    """What `flush` made durable; `failures` says what could not be and why."""

    durable_lsn: int
    num_spilled: int
    failures: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.failures


@dataclass(frozen=True)
class TierStats:
    """One tier: its budget, the bytes its chunks hold, the bytes in live parts, and what it did."""

    name: str
    budget_nbytes: int
    used_nbytes: int
    live_nbytes: int
    num_parts: int
    num_blocks: int
    num_evictions: int
    hit_tokens: int


@dataclass(frozen=True)
class Stats:
    """A snapshot of the whole cache; `counters` holds every counted event by name."""

    tiers: tuple[TierStats, ...]
    num_blocks: int
    num_namespaces: int
    num_sessions: int
    num_pins: int
    working_nbytes: int
    log_nbytes: int
    checkpoint_nbytes: int
    disk_nbytes: int
    last_lsn: int
    durable_lsn: int
    counters: Mapping[str, int]


@dataclass(frozen=True)
class Trouble:
    """One thing that is wrong: which tier or file, the errno or cause, and since when (seconds since open)."""

    where: str
    what: str
    since_s: float


@dataclass(frozen=True)
class Health:
    """`ok` when every tier serves; `troubles` names what does not."""

    ok: bool
    mode: str
    troubles: tuple[Trouble, ...] = ()


@dataclass(frozen=True)
class RecoveryReport:
    """What `open` found and what it dropped."""

    seconds: float = 0.0
    new_store: bool = True
    checkpoint_lsn: int = 0
    num_segments: int = 0
    num_replayed: int = 0
    last_lsn: int = 0
    durable_lsn: int = 0
    log_end: str = "clean"
    num_blocks: int = 0
    num_parts: int = 0
    num_sessions: int = 0
    num_dropped: int = 0
    num_salvaged: int = 0
    damage: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.new_store:
            return "a new store"
        text = (
            f"{self.num_blocks} blocks and {self.num_sessions} sessions in {self.seconds * 1e3:.0f} ms: checkpoint at"
            f" LSN {self.checkpoint_lsn}, {self.num_replayed} records replayed to LSN {self.last_lsn},"
            f" log ends {self.log_end}"
        )
        return text + "".join(f"\n  damage: {line}" for line in self.damage)


class Counters:
    """Thread-safe counts by name: every swallowed failure, every decision worth a number."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, name: str, count: int = 1) -> None:
        with self._lock:
            self._counts[name] += count

    def get(self, name: str) -> int:
        with self._lock:
            return self._counts[name]

    def snapshot(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)
