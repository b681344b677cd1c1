"""SIGKILL at a chosen durable operation of a real store, again and again on one directory.

A lane is one directory. Its victims are forked one after the other: each opens the store, is examined against
all that earlier victims were told, lives on, and is killed at a named step; some are killed while they open,
twice in a row. What a victim learns it says through a pipe before and after each step, so the lane knows it.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from typing import Any, Protocol

import tieredkv.table.recovery as layout_of_store
from tieredkv import Config
from tieredkv.system import Buffer, File, OsFs
from tieredkv.testing.oracle import EVICTED, Event, Findings, Oracle, examine, observed, states_of

from .processes import Outcome, Say, run_jobs
from .workload import HYBRID, Life, draw_config, small_scale, space_of

STEPS = (
    "payload", "append", "sync", "rotate", "checkpoint write", "checkpoint sync", "checkpoint switch",
    "unlink", "evict", "purge", "close", "recovery",
)  # fmt: skip
_PIECE_NBYTES = 4096


class Weapon(Protocol):
    """How a victim ends, and what its directory must go through before it is opened again."""

    power: bool

    @property
    def home(self) -> str:
        """Where the store's directory is made."""
        ...

    def strike(self) -> None:
        """End this process, now."""
        ...

    def recover(self) -> None:
        """After a victim ended: make the directory what the crash left of it."""
        ...

    def renew(self) -> None:
        """An empty place for a new store."""
        ...

    def remove(self) -> None: ...


class Sigkill:
    """The process dies, the system lives."""

    power = False

    def __init__(self, parent: str | None) -> None:
        self._parent = parent
        self.home = ""
        self.renew()

    def strike(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    def recover(self) -> None:
        """Nothing is lost but the process."""

    def renew(self) -> None:
        self.remove()
        self.home = tempfile.mkdtemp(prefix="kills-", dir=self._parent)

    def remove(self) -> None:
        shutil.rmtree(self.home, ignore_errors=True)


class Killer:
    """Counts durable operations by step and ends the process at one of them.

    Args:
        strike: how it is ended.
        step: which; "" for the `nth` of all.
        how: "before" the operation, in the "middle" of it, or "after" it.
    """

    def __init__(self, strike: Callable[[], None], step: str, nth: int, how: str, say: Say) -> None:
        self._strike = strike
        self.step = step
        self.nth = nth
        self.how = how
        self.phase = ""
        self.armed = False
        self.num_evicting = 0
        self._say = say
        self._counts: Counter[str] = Counter()
        self._turn = threading.Lock()

    @contextlib.contextmanager
    def at(self, call: str, path: str, half: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Around one operation; `half` does some of it."""
        step = self._step_of(call, path)
        with self._turn:
            strikes = self.armed and step is not None and self._strikes(step)
        if not strikes:
            yield
            return
        self._say(killing=step)
        if self.how == "before":
            self._strike()
        if self.how == "middle":
            half()
            self._strike()
        try:
            yield
        finally:
            self._strike()

    def _strikes(self, step: str) -> bool:
        self._counts[step] += 1
        self._counts[""] += 1
        return self._counts[self.step] == self.nth and self.step in ("", step)

    def _step_of(self, call: str, path: str) -> str:
        if self.phase == "open":
            return "recovery"
        if self.phase == "close":
            return "close"
        if self.phase == "removing":
            return "purge"
        name = os.path.basename(path)
        if call == "pwritev" and name.endswith(".wal"):
            evicting, self.num_evicting = self.num_evicting, 0
            return "evict" if evicting else "append"
        if name.endswith(".tmp") and call in ("create", "real", "datasync", "rename"):
            return {
                "create": "checkpoint write",
                "real": "checkpoint write",
                "datasync": "checkpoint sync",
            }.get(call, "checkpoint switch")
        return {
            "pwritev": "payload", "datasync": "sync", "sync_dir": "sync", "unlink": "unlink", "create": "rotate",
        }.get(call, "other")  # fmt: skip


class KillFs(OsFs):
    """The operating system's files, with a killer at each durable operation."""

    def __init__(self, killer: Killer) -> None:
        self._killer = killer

    def sync_dir(self, path: str) -> None:
        with self._killer.at("sync_dir", path):
            super().sync_dir(path)

    def unlink(self, path: str) -> None:
        with self._killer.at("unlink", path):
            super().unlink(path)

    def rename(self, old: str, new: str) -> None:
        with self._killer.at("rename", old):
            super().rename(old, new)

    def open_file(
        self, path: str, *, create: bool = False, writable: bool = False, direct: bool = False
    ) -> Any:
        def opened() -> Any:
            return OsFs.open_file(self, path, create=create, writable=writable, direct=direct)

        if not create:
            return KillFile(opened(), path, self._killer)
        with self._killer.at("create", path):
            return KillFile(opened(), path, self._killer)

    @contextlib.contextmanager
    def as_real_file(self, path: str) -> Iterator[str]:
        if not path.endswith(".tmp"):
            yield path
            return
        with self._killer.at("real", path, lambda: None):
            yield path


class KillFile:
    """A `File` whose writes and syncs the killer may strike."""

    def __init__(self, file: File, path: str, killer: Killer) -> None:
        self._file = file
        self._path = path
        self._killer = killer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def pwritev(self, buffers: Sequence[Buffer], offset: int) -> None:
        def half() -> None:
            data = b"".join(memoryview(b).cast("B") for b in buffers)
            cut = len(data) // 2 // _PIECE_NBYTES * _PIECE_NBYTES if self._file.direct else len(data) // 2
            if cut and not self._file.direct:
                self._file.pwritev([data[:cut]], offset)

        with self._killer.at("pwritev", self._path, half):
            self._file.pwritev(buffers, offset)

    def datasync(self) -> None:
        with self._killer.at("datasync", self._path):
            self._file.datasync()


@contextlib.contextmanager
def short_transfers(rng: random.Random) -> Iterator[None]:
    """The system reads and writes less than asked, now and then, as it may."""
    pwritev, preadv = os.pwritev, os.preadv

    def cut(buffers: Any) -> Any:
        if rng.random() < 0.1 and len(buffers) > 1 and memoryview(buffers[0]).nbytes % _PIECE_NBYTES == 0:
            return buffers[:1]
        if rng.random() < 0.1 and memoryview(buffers[0]).nbytes > 2 * _PIECE_NBYTES:
            return [memoryview(buffers[0])[:_PIECE_NBYTES]]
        return buffers

    os.pwritev = lambda fd, buffers, *rest: pwritev(fd, cut(buffers), *rest)
    os.preadv = lambda fd, buffers, *rest: preadv(fd, cut(buffers), *rest)
    try:
        yield
    finally:
        os.pwritev, os.preadv = pwritev, preadv


class Telling:
    """A recorder that says every event through the pipe, and tells the killer where the run is."""

    def __init__(self, say: Say, killer: Killer) -> None:
        self._say = say
        self._killer = killer

    def note(self, what: str, **args: Any) -> None:
        if what == "phase":
            self._killer.phase = args["name"]
        if what == "dropping" and args["cause"] == EVICTED:
            self._killer.num_evicting += 1
        self._say(event=[0, what, args])


def lane(
    say: Say, seed: int, num_kills: int, steps: Sequence[str], weapon: Weapon, **fixed: Any
) -> dict[str, Any]:
    """One directory, its victims, and what they found.

    Args:
        steps: at which to kill, in turn.
        fixed: configuration values that are not drawn.
    """
    rng = random.Random(seed)
    oracle, findings = Oracle(), Findings()
    by_step: Counter[str] = Counter()
    config = draw_config(rng, **fixed)
    tries = 0
    try:
        for step in cycle(steps):
            for _ in range(2 if step == "recovery" else 1):
                tries += 1
                where = f"seed {seed}, victim {tries}, {step}, {config}"
                killed = _fell(weapon, config, oracle, findings, rng, step, where)
                by_step[killed] += bool(killed)
            disorders = oracle.expect(power=False).disorders[:3]
            findings.broken += [f"seed {seed}, {config}: {line}" for line in disorders]
            if len(oracle.events) > 4000 or findings:
                weapon.renew()
                oracle, config = Oracle(), draw_config(rng, **fixed)
            say(kills=by_step.total())
            if by_step.total() >= num_kills or tries > 3 * num_kills:
                break
        _fell(weapon, config, oracle, findings, rng, "", f"seed {seed}, the last")
    finally:
        weapon.remove()
    return {"by_step": dict(+by_step), "findings": vars(findings)}


def _fell(
    weapon: Weapon,
    config: Config,
    oracle: Oracle,
    findings: Findings,
    rng: random.Random,
    step: str,
    where: str,
) -> str:
    """Run one victim; returns at which step it was killed, "" if it was not."""
    victim = Victim(weapon, config, oracle, rng.randrange(1 << 30), step, rng)
    outcome = next(run_jobs([("victim", victim)], width=1, timeout_s=40.0))
    if outcome.died:
        weapon.recover()
    return _judge(outcome, oracle, findings, where)


def _judge(outcome: Outcome, oracle: Oracle, findings: Findings, where: str) -> str:
    """Take over what a victim said; returns at which step it was killed, "" if it was not."""
    killed = ""
    for word in outcome.words:
        if "event" in word:
            oracle.add([Event(*word["event"])])
        killed = word.get("killing", killed)
        if "findings" in word:
            lines = {name: [f"{where}: {line}" for line in found] for name, found in word["findings"].items()}
            findings.add(Findings(**lines))
    if outcome.hung:
        findings.hangs.append(f"{where}: {outcome.hung}")
    elif outcome.died and not (killed and outcome.died.startswith("SIGKILL")):
        findings.dead_processes.append(f"{where}: {outcome.died}")
    return killed if outcome.died.startswith("SIGKILL") else ""


class Victim:
    """The job of one child: open, be examined, live, be killed."""

    def __init__(
        self, weapon: Weapon, config: Config, oracle: Oracle, seed: int, step: str, rng: random.Random
    ) -> None:
        self._weapon = weapon
        self._config = config
        self._oracle = oracle
        self._seed = seed
        self._step = step
        self._nth = rng.randint(1, 8 if step in ("recovery", "close", "payload", "append", "purge") else 3)
        self._how = rng.choice(("before", "middle", "after"))

    def __call__(self, say: Say) -> str:
        rng = random.Random(self._seed)
        killer = Killer(self._weapon.strike, self._step, self._nth, self._how, say)
        expected = self._oracle.expect(power=self._weapon.power, level=self._config.durability)
        life = Life(
            f"{self._weapon.home}/store", self._config, Telling(say, killer), rng, fs=KillFs(killer), layout=HYBRID,
            sessions=expected.sessions, prompts=expected.prompts[-30:], weights=self._weights(),
        )  # fmt: skip
        with small_scale(), short_transfers(rng), observed(Telling(say, killer)):
            killer.armed = self._step == "recovery"
            try:
                life.open()
            except Exception as error:
                say(findings={"open_failures": [f"{type(error).__name__}: {error}"]})
                return "not opened"
            killer.armed = False
            say(findings=vars(examine(life.cache, expected, space_of)))
            if self._weapon.power:
                say(event=[0, "reborn", {"sessions": states_of(life.cache)}])
            if not self._step or self._step == "recovery":
                return self._leave(life, say)
            killer.armed = True
            life.run(rng.choice((2, 10, 40)) if self._step == "close" else 200)
            if life.wrong or life.errors or life.raised or life.stranded:
                broken = life.errors + life.raised + life.stranded
                say(findings={"wrong_bytes": life.wrong, "broken": broken})
            return self._leave(life, say)

    def _weights(self) -> dict[str, int]:
        """Make the step likely, and pauses where they promise something."""
        weights = {"pause": 1} if self._weapon.power and self._config.durability == "group" else {}
        if self._step.startswith("checkpoint") or self._step in ("rotate", "unlink"):
            weights["checkpoint"] = 20
        if self._step == "purge":
            weights |= {"purge": 10, "delete": 10}
        if self._step == "sync":
            weights["flush"] = 20
        if self._step == "evict":
            weights |= {"purge": 0, "delete": 0, "store": 100, "load": 2, "flush": 1}
        return weights

    def _leave(self, life: Life, say: Say) -> str:
        life.close()
        return "closed"


def jobs(seed: int, num_kills: int, lanes: int) -> Iterator[tuple[str, Callable[[Say], Any]]]:
    """Lanes over all kinds of store; together about `num_kills`, each step in turn."""
    kinds: tuple[dict[str, Any], ...] = (
        {}, {"disk_io": "mmap"}, {"disk_nbytes": "2MiB", "host_nbytes": "0"}, {"disk": "lmdb"},
    )  # fmt: skip
    for number in range(lanes):
        home = "/dev/shm" if number % 2 == 0 and os.path.isdir("/dev/shm") else None
        order = STEPS[number % len(STEPS) :] + STEPS[: number % len(STEPS)]

        def job(
            say: Say, number: int = number, home: str | None = home, order: Sequence[str] = order
        ) -> dict[str, Any]:
            share = -(-num_kills // lanes)
            return lane(say, seed * 7919 + number, share, order, Sigkill(home), **kinds[number % len(kinds)])

        yield f"kills, lane {number}", job


assert layout_of_store.WAL == "wal", "steps are told by the names of files"
