"""Many threads on tiny pools over a fake device whose copies come late; whatever is freed is poisoned at once.

A block's payload is a function of its digest, so any thread can tell what it should read.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from tieredkv import TieredCache, Turn
from tieredkv.errors import SessionError, TieredKVError
from tieredkv.outcomes import Tier
from tieredkv.residency import Residency
from tieredkv.system import OsFs, SystemClock
from tieredkv.testing.fake_device import POISON, LateStream
from tieredkv.testing.oracle import Findings, Prompt, differences

from .processes import Say
from .workload import BLOCK_SIZE, TENANTS, draw_config, small_scale, space_of

NUM_THREADS = 32
_NUM_ROOTS = 4
_STUCK_S = 25.0


@contextlib.contextmanager
def poisoned_when_freed() -> Iterator[None]:
    """Memory slots are filled with poison in the moment they are given back."""
    free = Residency.free

    def poisoning(self: Residency, stride_nbytes: int, slots: Any) -> Any:
        memory = _MEMORIES.get(id(self.arena))
        if memory is not None and self.tier is not Tier.DISK:
            for slot in slots.tolist():
                memory.parts(stride_nbytes, slot, 1).fill_(POISON)
        return free(self, stride_nbytes, slots)

    Residency.free = poisoning  # type: ignore[method-assign]
    try:
        yield
    finally:
        Residency.free = free  # type: ignore[method-assign]
        _MEMORIES.clear()


_MEMORIES: dict[int, Any] = {}


class Crowd:
    """The threads, what they do, and what they saw."""

    def __init__(self, cache: TieredCache, seed: int) -> None:
        self.cache = cache
        self.findings = Findings()
        self.num_calls = 0
        self.num_hits = 0
        self.last_seen = [time.monotonic()] * NUM_THREADS
        self._seed = seed
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._work, args=(n,), name=f"crowd-{n}", daemon=True)
            for n in range(NUM_THREADS)
        ]

    def run(self, seconds: float, say: Say) -> None:
        until = time.monotonic() + seconds
        for thread in self._threads:
            thread.start()
        while time.monotonic() < until and self._is_moving():
            time.sleep(0.5)
            say(calls=self.num_calls)
        self._stop.set()
        for thread in self._threads:
            thread.join(_STUCK_S)
        stuck = [thread.name for thread in self._threads if thread.is_alive()]
        if stuck:
            self.findings.hangs.append(f"{len(stuck)} threads do not end: {stuck[:3]}")
            while True:  # the watcher takes the stacks
                time.sleep(1.0)

    def _is_moving(self) -> bool:
        return time.monotonic() - min(self.last_seen) < _STUCK_S

    def _work(self, number: int) -> None:
        rng = random.Random(self._seed * 100 + number)
        acts: list[Callable[[random.Random, int], None]] = [
            self._store, self._store, self._load, self._load, self._load, self._abandon, self._hurry, self._turn,
            self._flush, self._look,
        ]  # fmt: skip
        while not self._stop.is_set():
            try:
                rng.choice(acts)(rng, number)
            except SessionError:
                pass
            except TieredKVError as error:
                self.findings.broken.append(f"{type(error).__name__}: {error}")
            except Exception as error:
                self.findings.broken.append(f"{type(error).__name__} out of a call: {error}")
            self.last_seen[number] = time.monotonic()
            self.num_calls += 1

    def _prompt(self, rng: random.Random) -> Prompt:
        root = rng.randrange(_NUM_ROOTS)
        tokens = [1000 * root + n for n in range(BLOCK_SIZE)]
        for _ in range(rng.randint(1, 4)):
            mark = rng.randrange(4)
            tokens += [100_000 + 64 * mark + n for n in range(BLOCK_SIZE)]
        return Prompt(rng.choice(TENANTS), (*tokens, 7))

    def _store(self, rng: random.Random, _number: int) -> None:
        prompt = self._prompt(rng)
        space = space_of(self.cache, prompt.tenant)
        stored = space.store(prompt.ids(), prompt.kv(space), anchors=[len(prompt.tokens) - 1])
        if rng.random() < 0.3:
            stored.wait(5.0)

    def _load(self, rng: random.Random, _number: int) -> None:
        prompt = self._prompt(rng)
        space = space_of(self.cache, prompt.tenant)
        with space.load(prompt.ids()) as prefix:
            self.findings.wrong_bytes += differences(space, prompt, prefix)
            self.num_hits += prefix.num_tokens > 0
            if rng.random() < 0.3:
                time.sleep(rng.random() * 0.01)
                self.findings.wrong_bytes += [f"{d}, held" for d in differences(space, prompt, prefix)]

    def _abandon(self, rng: random.Random, _number: int) -> None:
        """The caller is cancelled while it holds a prefix."""
        prompt = self._prompt(rng)
        with contextlib.suppress(_Cancelled), space_of(self.cache, prompt.tenant).load(prompt.ids()):
            raise _Cancelled

    def _hurry(self, rng: random.Random, _number: int) -> None:
        """No time to wait for the disk."""
        prompt = self._prompt(rng)
        space = space_of(self.cache, prompt.tenant)
        with space.load(prompt.ids(), timeout_s=rng.choice((0.0, 0.001))) as prefix:
            self.findings.wrong_bytes += [f"{d}, in a hurry" for d in differences(space, prompt, prefix)]

    def _turn(self, rng: random.Random, number: int) -> None:
        prompt = self._prompt(rng)
        space = space_of(self.cache, prompt.tenant)
        end = len(prompt.tokens) - 1
        stored = space.store(prompt.ids(), prompt.kv(space), anchors=[end])
        with self.cache.session(f"t{number}", space) as session:
            session.commit(prompt.ids(), [Turn("user", end)], anchors=[end], stored=[stored])
            if rng.random() < 0.1:
                session.delete()

    def _flush(self, rng: random.Random, _number: int) -> None:
        if rng.random() < 0.2:
            self.cache.flush(5.0)

    def _look(self, rng: random.Random, _number: int) -> None:
        prompt = self._prompt(rng)
        space_of(self.cache, prompt.tenant).lookup(prompt.ids())
        if rng.random() < 0.1:
            self.cache.check()


class _Cancelled(Exception):
    pass


def crowd(say: Say, seed: int, seconds: float) -> dict[str, Any]:
    """Open a store with pools of a few blocks, let the crowd at it, and look at what is left."""
    rng = random.Random(seed)
    folder = tempfile.mkdtemp(prefix="crowd-")
    stream = LateStream(delay_s=0.002, seed=seed)
    config = draw_config(rng, disk_nbytes="2MiB", durability="group", deadline_s=5.0)
    before = threading.active_count()
    try:
        with small_scale(), poisoned_when_freed():
            cache = TieredCache(f"{folder}/store", config, OsFs(), SystemClock(), stream=stream)
            for tenant in TENANTS:
                space_of(cache, tenant)
            _MEMORIES.update({id(memory.arena): memory for memory in cache._memories.values()})
            people = Crowd(cache, seed)
            people.run(seconds, say)
            found = people.findings
            _look_back(cache, found, f"seed {seed}, {config}")
            cache.close()
            stream.close()
            time.sleep(0.1)
            if threading.active_count() > before:
                found.leaks.append(f"{threading.active_count() - before} threads are left")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if people.num_hits < people.num_calls // 100:
        found.broken.append(
            f"only {people.num_hits} hits in {people.num_calls} calls: the crowd sees nothing"
        )
    return {"findings": vars(found), "calls": people.num_calls}


def _look_back(cache: TieredCache, found: Findings, where: str) -> None:
    cache.flush(10.0)
    try:
        cache.check()
    except AssertionError as error:
        found.broken.append(f"{where}: check: {error}")
    if cache.stats().num_pins:
        found.leaks.append(f"{where}: {cache.stats().num_pins} pins are left")
    moving, uses = (
        int(column[cache._table.live_rows()].sum()) for column in (cache._table.moving, cache._table.uses)
    )
    if moving or uses:
        found.leaks.append(f"{where}: {moving} moves and {uses} uses are left")


def jobs(seed: int, seconds: float, crowds: int = 1) -> Iterator[tuple[str, Callable[[Say], Any]]]:
    for number in range(crowds):

        def job(say: Say, number: int = number) -> dict[str, Any]:
            return crowd(say, seed * 31 + number, seconds)

        yield f"threads, crowd {number}", job
