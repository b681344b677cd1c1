"""A life of a store, drawn from a seed: stores, loads, turns, forks, rollbacks, pins, deletes, purges,
flushes, checkpoints, pauses and reopenings, each noted before it begins and after it is acknowledged."""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import tieredkv
import tieredkv.disk
from tieredkv import (
    TOKENS,
    BlockLayout,
    Config,
    Identity,
    LayerGroup,
    Namespace,
    TensorSpec,
    TieredCache,
    Turn,
)
from tieredkv.errors import SessionError, StoreUnusable
from tieredkv.system import Clock, Fs
from tieredkv.testing.oracle import (
    Event,
    Part,
    Prompt,
    Recorder,
    SessionFacts,
    differences,
    recount,
    state_of,
    stranded,
)
from tieredkv.tier.lmdb_store import LmdbStore
from tieredkv.tier.slab import SlabStore

BLOCK_SIZE = 16
TENANTS = ("a", "b", "a2")
"""`a2` is `a` after its weights changed: sessions go on from one to the other."""
_WINDOW = 24
_INTERVAL_MS = 10.0
_PAUSE_S = 0.4


def _tensors(layers: Sequence[int]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(layer, name, (2, TOKENS, 8), "int32") for layer in layers for name in ("k", "v"))


HYBRID = BlockLayout(
    BLOCK_SIZE, (LayerGroup("full", _tensors([0, 1])), LayerGroup("window", _tensors([2, 3]), window=_WINDOW))
)
FULL = BlockLayout(BLOCK_SIZE, (LayerGroup("full", _tensors([0, 1])),))


@contextlib.contextmanager
def small_scale() -> Iterator[None]:
    """Chunks and segments small enough that a short life fills, evicts, rotates and checkpoints.

    The sizes are constants of the package that its own tests never vary; nothing else depends on them.
    """
    disk: Any = tieredkv.disk
    defaults: list[Any] = [store.__init__.__kwdefaults__ for store in (SlabStore, LmdbStore)]
    before = disk._CHUNK_NBYTES, disk._MIN_SEGMENT_NBYTES
    assert {d["chunk_nbytes"] for d in defaults} == {before[0]}, "arena and stores have one size of chunk"

    def use(chunk_nbytes: int, segment_nbytes: int) -> None:
        disk._CHUNK_NBYTES, disk._MIN_SEGMENT_NBYTES = chunk_nbytes, segment_nbytes
        for each in defaults:
            each["chunk_nbytes"] = chunk_nbytes

    use(64 << 10, 16 << 10)
    try:
        yield
    finally:
        use(*before)


@contextlib.contextmanager
def seeded_salts(seed: int) -> Iterator[None]:
    """Segment salts from a seed, so that equal lives make equal images and nothing differs by chance alone."""
    rng, urandom = random.Random(seed), os.urandom
    os.urandom = rng.randbytes
    try:
        yield
    finally:
        os.urandom = urandom


def draw_config(rng: random.Random, **fixed: Any) -> Config:
    """A configuration of tiny tiers."""
    choices: dict[str, Any] = {
        "device_nbytes": rng.choice(("64KiB", "128KiB")),
        "host_nbytes": rng.choice(("0", "64KiB", "128KiB")),
        "disk_nbytes": rng.choice(("2MiB", "8MiB")),
        "block_size": BLOCK_SIZE,
        "policy": rng.choice(("lru", "arc")),
        "spill": rng.choice(("eager", "eager", "evict")),
        "durability": rng.choice(("group", "flush", "none")),
        "commit_interval_ms": _INTERVAL_MS,
        "disk_io": rng.choice(("direct", "buffered")),
        "log_keep_nbytes": rng.choice(("32KiB", "1MiB")),
        "device": "cpu",
    }
    return Config(**{**choices, **fixed})


def identity(tenant: str) -> Identity:
    return Identity(weights=tenant[1:].rjust(64, "0"), salt=tenant[:1])


@dataclass
class Events:
    """A recorder that keeps events with the position that `where` tells."""

    where: Callable[[], int]
    kept: list[Event] = field(default_factory=list)

    def note(self, what: str, **args: Any) -> None:
        self.kept.append(Event(self.where(), what, args))


class StillClock:
    """Time that does not pass, so that no image differs from another by when it was made."""

    def monotonic(self) -> float:
        return 1.0

    def wall(self) -> float:
        return 1.0


class Life:
    """One store, used by one thread.

    Args:
        recorder: told of everything.
        sessions, prompts: what earlier lives of the same directory left, for this one to go on with.
    """

    def __init__(
        self,
        path: str,
        config: Config,
        recorder: Recorder,
        rng: random.Random,
        *,
        fs: Fs | None = None,
        layout: BlockLayout = HYBRID,
        sessions: dict[str, SessionFacts] | None = None,
        prompts: Sequence[Prompt] = (),
        weights: dict[str, int] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.path = path
        self.config = config
        self.layout = layout
        self.wrong: list[str] = []
        self.errors: list[str] = []
        self.raised: list[str] = []  # errors of the system, which no call may let out
        self.refusals = (StoreUnusable, SessionError)
        self.noticed: set[str] = set()  # what counters and health said went wrong
        self.stranded: list[str] = []
        self._headless: set[str] = set()  # by a crash or a deletion, which are no evictions
        self._recorder = recorder
        self._rng = rng
        self._fs = fs
        self._clock = clock
        self._prompts = list(prompts)
        self._alive = {name for name, facts in (sessions or {}).items() if facts.states[-1] is not None}
        self._weights = {**_WEIGHTS, **(weights or {})}
        self._forgets = config.disk == "lmdb"  # a removal there begins a new payload file
        self._cache: TieredCache | None = None

    @property
    def cache(self) -> TieredCache:
        assert self._cache is not None, "the store is not open"
        return self._cache

    def open(self) -> None:
        self._note("phase", name="open")
        self._cache = tieredkv.open(self.path, self.config, fs=self._fs, clock=self._clock)
        for tenant in TENANTS:
            self.space(tenant)
        self._note("phase", name="use")
        self._excuse_stranded()

    def space(self, tenant: str) -> Namespace:
        return space_of(self.cache, tenant, self.layout)

    def run(self, num_steps: int) -> None:
        """Take that many steps. What the disk refuses is kept in `errors`."""
        names = list(self._weights)
        for _ in range(num_steps):
            name = self._rng.choices(names, [self._weights[n] for n in names])[0]
            try:
                getattr(self, f"_{name}")()
            except (SessionError, StoreUnusable) as error:
                self.errors.append(f"{name}: {error}")
                if self._cache is None:
                    return
            except OSError as error:
                self.raised.append(f"{name}: {error!r}")
            self._notice()
            if self._prompts and not self.stranded and name != "delete":
                self._look_for_stranded()

    def _excuse_stranded(self) -> None:
        for prompt in self._prompts:
            self._headless.update(stranded(self.cache, self.space(prompt.tenant), prompt))

    def _look_for_stranded(self) -> None:
        """Evictions take tails before heads. A moment may be between two steps of one, so it is asked twice."""
        if self._forgets:
            return
        prompt = self._rng.choice(self._prompts)
        try:
            space = self.space(prompt.tenant)
        except SessionError as error:  # purged, and the log does not take it again
            self.errors.append(f"space: {error}")
            return
        for _ in range(20):
            lost = set(stranded(self.cache, space, prompt)) - self._headless
            if not lost:
                return
            time.sleep(0.02)
        seen = ", ".join(sorted(self.noticed)) or "nothing"
        self.stranded.append(
            f"{prompt.tenant}: {len(lost)} blocks lie behind a block that is gone; noticed before: {seen}"
        )

    def close(self) -> None:
        self._note("phase", name="close")
        self._notice()
        flushed = self.cache.close()
        if flushed.ok:
            self._note("closed")
        self.noticed.update(flushed.failures)
        self._notice_counts(self.cache._counters.snapshot())
        self._cache = None

    def finish(self) -> None:
        """Close, if a failed reopening has not left it closed."""
        if self._cache is not None:
            self.close()

    def recounted(self) -> list[str]:
        """Where the ledger is wrong once nothing moves any more."""
        wrong: list[str] = []
        for _ in range(100 if self._cache is not None else 0):
            wrong = recount(self.cache)
            if not wrong:
                break
            time.sleep(0.05)
        return wrong

    def _notice(self) -> None:
        """Remember what was counted as a failure; an opening begins new counts."""
        self._notice_counts(self.cache.stats().counters)
        self.noticed.update(trouble.what for trouble in self.cache.health().troubles)
        self.noticed.update(self.cache.recovery.damage)

    def _notice_counts(self, counters: Mapping[str, int]) -> None:
        failures = (
            name for name, count in counters.items() if count and any(w in name for w in _FAILURE_WORDS)
        )
        self.noticed.update(failures)

    # ---- steps ---------------------------------------------------------------------------------

    def _note(self, what: str, **args: Any) -> None:
        self._recorder.note(what, **args)

    def _draw_prompt(self, grow: bool = False) -> Prompt:
        """A prompt of a small tree, so that beginnings are shared and branches differ."""
        rng = self._rng
        tenant = rng.choice(TENANTS)
        if self._prompts and rng.random() < 0.3:
            old = rng.choice(self._prompts)
            if not grow:
                return old
            tenant, tokens = old.tenant, list(old.tokens[:-1])
        else:
            root = rng.randrange(3)
            tokens = [1000 * root + n for n in range(2 * BLOCK_SIZE)]
        for _ in range(rng.randint(1, 3)):
            mark = rng.randrange(200)
            tokens += [100_000 + 64 * mark + n for n in range(BLOCK_SIZE)]
        tokens = tokens[: 10 * BLOCK_SIZE]
        return Prompt(tenant, (*tokens, 7))

    def _store_prompt(self, prompt: Prompt) -> Any:
        space = self.space(prompt.tenant)
        digests = prompt.digests(space)
        end = len(digests) * BLOCK_SIZE
        anchors = sorted({min(end, self._rng.choice((BLOCK_SIZE * 2, end))), end})
        self._note(
            "storing", tenant=prompt.tenant, tokens=list(prompt.tokens), digests=digests,
            marks=prompt.marks(BLOCK_SIZE),
        )  # fmt: skip
        self._prompts = [*self._prompts[-30:], prompt]
        stored = space.store(prompt.ids(), prompt.kv(space), anchors=anchors)
        done = stored.wait(10.0)
        healthy = self.cache.health().ok and self.config.spill == "eager"
        if done and healthy and stored.num_refused == 0 and self._is_counted_clean():
            self._note("stored", parts=_needed(space.layout, digests, anchors))
        return stored

    def _is_counted_clean(self) -> bool:
        """No spill was refused or failed so far: a part that was taken has been committed."""
        counters = self.cache.stats().counters
        return not any(counters.get(name) for name in _REFUSALS)

    def _store(self) -> None:
        self._store_prompt(self._draw_prompt())

    def _load(self) -> None:
        if not self._prompts:
            return
        prompt = self._rng.choice(self._prompts)
        space = self.space(prompt.tenant)
        with space.load(prompt.ids()) as prefix:
            self.wrong += differences(space, prompt, prefix)

    def _turn(self) -> None:
        prompt = self._draw_prompt(grow=True)
        name = f"{prompt.tenant[0]}{self._rng.randrange(4)}"
        space = self.space(prompt.tenant)
        stored = self._store_prompt(prompt)
        ids = prompt.ids()
        end = len(ids) // BLOCK_SIZE * BLOCK_SIZE
        with self.cache.session(name, space) as session:
            turns = [*(t for t in session.turns if t.end <= len(ids) // 2), Turn("user", len(ids))]
            state = {
                "tokens": ids.tolist(),
                "turns": [[t.role, t.end] for t in turns],
                "pinned": session.pinned,
            }
            self._note("turning", name=name, state=state)
            session.commit(ids, turns, anchors=[end], stored=[stored])
            self._note("turned", name=name)
        self._alive.add(name)

    def _some_session(self) -> tuple[str, str] | None:
        """A session that is there, with its tenant."""
        rows = {row.name: row for row in self.cache.sessions()}
        names = sorted(self._alive & set(rows))
        if not names:
            return None
        row = rows[self._rng.choice(names)]
        tenant = next(t for t in TENANTS if self.space(t).row.number == row.namespace)
        return row.name, tenant

    def _change(self, name: str, tenant: str, act: Callable[[Any], Any], **after: Any) -> None:
        with self.cache.session(name, self.space(tenant)) as session:
            state = {**state_of(session._row), **after}
            self._note("turning", name=name, state=state)
            act(session)
            self._note("turned", name=name)

    def _rollback(self) -> None:
        found = self._some_session()
        if found is None:
            return
        name, tenant = found
        with self.cache.session(name, self.space(tenant)) as session:
            cut = self._rng.randint(0, len(session.tokens))
            kept = [[t.role, t.end] for t in session.turns if t.end <= cut]
            state = {"tokens": session.tokens[:cut].tolist(), "turns": kept, "pinned": session.pinned}
            self._note("turning", name=name, state=state)
            session.rollback(cut)
            self._note("turned", name=name)

    def _pin(self) -> None:
        found = self._some_session()
        if found is not None:
            self._change(*found, lambda s: s.pin(), pinned=True)

    def _unpin(self) -> None:
        found = self._some_session()
        if found is not None:
            self._change(*found, lambda s: s.unpin(), pinned=False)

    def _fork(self) -> None:
        found = self._some_session()
        here = {row.name for row in self.cache.sessions()}
        free = [n for n in ("f0", "f1") if n not in here]
        if found is None or not free:
            return
        name, tenant = found
        with self.cache.session(name, self.space(tenant)) as session:
            state = {**state_of(session._row), "pinned": False}
            self._note("turning", name=free[0], state=state)
            session.fork(free[0]).close()
            self._note("turned", name=free[0])
        self._alive.add(free[0])

    def _delete(self) -> None:
        found = self._some_session()
        if found is None:
            return
        name, tenant = found
        space = self.space(tenant)
        others = set[str]()
        for row in self.cache.sessions():
            if row.name != name:
                owner = next(t for t in TENANTS if self.space(t).row.number == row.namespace)
                others.update(_chain(self.space(owner), row.tokens))
        with self.cache.session(name, space) as session:
            lost = sorted(set(_chain(space, session.tokens)) - others)
            self._note("phase", name="removing")
            self._note("removing", digests=lost, sessions=[name], forgets=self._forgets)
            session.delete()
            self._note("removed", digests=lost, sessions=[name])
            self._note("phase", name="use")
        self._excuse_stranded()
        self._alive.discard(name)

    def _purge(self) -> None:
        tenant = self._rng.choice(TENANTS)
        space = self.space(tenant)
        digests = sorted({d for p in self._prompts if p.tenant == tenant for d in p.digests(space)})
        sessions = [r.name for r in self.cache.sessions() if r.namespace == space.row.number]
        digests = sorted({*digests, *(d for r in self.cache.sessions() for d in _chain(space, r.tokens))})
        self._note("phase", name="removing")
        self._note("removing", digests=digests, sessions=sessions, forgets=self._forgets)
        self.cache.purge(space)
        self._note("removed", digests=digests, sessions=sessions)
        self._note("phase", name="use")
        self._alive -= set(sessions)

    def _flush(self) -> None:
        if self.cache.flush(10.0).ok:
            self._note("flushed")

    def _checkpoint(self) -> None:
        self.cache.checkpoint(10.0)

    def _pause(self) -> None:
        time.sleep(_PAUSE_S)
        self._note("settled")

    def _reopen(self) -> None:
        self.close()
        self.open()


def space_of(cache: TieredCache, tenant: str, layout: BlockLayout = HYBRID) -> Namespace:
    return cache.namespace(identity(tenant), layout)


def _chain(space: Namespace, tokens: Any) -> list[str]:
    return [row.tobytes().hex() for row in space.chain(np.asarray(tokens, dtype=np.int32))]


def _needed(layout: BlockLayout, digests: Sequence[str], anchors: Sequence[int]) -> list[Part]:
    """The parts that restores at `anchors` read."""
    parts: set[Part] = set()
    for group, need in enumerate(layout.num_window_blocks):
        for anchor in (a // BLOCK_SIZE for a in anchors):
            first = max(0, anchor - need) if need else 0
            parts.update((digest, group) for digest in digests[first:anchor])
    return sorted(parts)


_WEIGHTS = {
    "store": 40, "load": 12, "turn": 14, "rollback": 3, "pin": 2, "unpin": 2, "fork": 2, "delete": 3,
    "purge": 2, "flush": 8, "checkpoint": 4, "pause": 0, "reopen": 3,
}  # fmt: skip

_FAILURE_WORDS = (
    "error", "failed", "corrupt", "timed_out", "superseded", "no_space", "bypassed", "refused", "dropped",
    "damage", "late", "not_logged",
)  # fmt: skip
_REFUSALS = (
    "spill_queue_full_parts", "spill_no_space_parts", "spill_bypassed_parts", "disk_write_errors",
    "log_write_errors", "drop_not_logged_parts", "dropped_blocks", "refused_blocks",
)  # fmt: skip
