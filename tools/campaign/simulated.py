"""Simulated crashes: a life on a simulated disk, frozen before many of its operations; every image that a
crash there could leave is opened and compared with what the oracle expects of that moment."""

from __future__ import annotations

import json
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tieredkv import Config
from tieredkv import open as open_store
from tieredkv.errors import StoreUnusable
from tieredkv.testing.oracle import Event, Expectation, Findings, Oracle, examine, observed, traces
from tieredkv.testing.sim_disk import Frozen, Image, Item, shrink
from tieredkv.testing.sim_fs import Op, SimFs
from tieredkv.units import parse_nbytes

from .processes import Say
from .workload import (
    HYBRID,
    Events,
    Life,
    Prompt,
    StillClock,
    draw_config,
    seeded_salts,
    small_scale,
    space_of,
)

PATH = "/sim/store"
_FILLED = 0.35  # of all lives
_ENOUGH = 20  # findings after which one life has nothing more to tell


@dataclass
class Tally:
    """What a batch of simulated crashes did."""

    digests: list[str] = field(default_factory=list)
    findings: Findings = field(default_factory=Findings)
    num_in_recovery: int = 0
    num_ops: int = 0


@dataclass(frozen=True)
class _Moment:
    op: Op
    frozen: Frozen


def crash_batch(say: Say, seed: int, num_images: int) -> dict[str, Any]:
    """One life and `num_images` crashes of it."""
    rng = random.Random(seed)
    tally = Tally()
    with small_scale(), seeded_salts(seed):
        fills = rng.random() < _FILLED
        config = draw_config(rng, **({"disk_nbytes": "2MiB"} if fills else {}))
        events, moments, life = _live(seed, config, rng, fills, num_moments=max(4, num_images // 3))
        tally.findings.wrong_bytes += life.wrong
        tally.findings.broken += [
            f"seed {seed}, on a sound disk: {line}" for line in life.errors + life.stranded
        ]
        oracle = Oracle()
        oracle.add(events.kept)
        tally.findings.broken += [f"seed {seed}: {line}" for line in oracle.expect(power=False).disorders[:3]]
        seen: set[bytes] = set()
        tries = 0
        while len(seen) < num_images and tries < 4 * num_images and moments:
            if len(tally.findings.lines()) > _ENOUGH:
                break
            tries += 1
            moment = moments[tries % len(moments)]
            _crash(moment, oracle, config, rng, seen, tally, seed)
            if tries % 10 == 0:
                say(done=len(seen))
    tally.digests = [digest.hex() for digest in seen]
    return {
        "digests": tally.digests, "findings": vars(tally.findings), "in_recovery": tally.num_in_recovery,
        "ops": events.where(),
    }  # fmt: skip


def _live(
    seed: int, config: Config, rng: random.Random, fills: bool, num_moments: int
) -> tuple[Events, list[_Moment], Life]:
    """Run a life, which `fills` its disk so that it evicts; freeze the disk before about `num_moments` operations."""
    moments: list[_Moment] = []
    over: list[str] = []
    chance = random.Random(seed ^ 0x5EED)

    def before(op: Op) -> None:
        used = fs.disk.used_nbytes
        if used > parse_nbytes(config.disk_nbytes):
            over.append(
                f"seed {seed}, op {op.number}: {used} bytes on disk, the budget is {config.disk_nbytes}"
            )
        if chance.random() < 0.25 and len(moments) < 4 * num_moments:
            moments.append(_Moment(op, fs.disk.freeze()))

    fs = SimFs(before_op=before, seed=seed, direct=rng.random() < 0.5)
    events = Events(lambda: fs.num_ops)
    weights = {"pause": 1} if config.durability == "group" else {}
    num_steps = rng.choice((6, 12, 25, 50))
    if fills:
        num_steps, weights = 130, {**weights, "store": 100, "purge": 0, "delete": 0, "load": 4}
    life = Life(PATH, config, events, rng, fs=fs, weights=weights, clock=StillClock())
    with observed(events):
        life.open()
        life.run(num_steps)
        life.close()
    life.errors += over[:1]
    moments.append(_Moment(Op(fs.num_ops, "end", ""), fs.disk.freeze()))
    chance.shuffle(moments)
    return events, moments[:num_moments], life


def _crash(
    moment: _Moment,
    oracle: Oracle,
    config: Config,
    rng: random.Random,
    seen: set[bytes],
    tally: Tally,
    seed: int,
) -> None:
    """One crash at this moment: what SIGKILL would leave, or a draw of what power loss would."""
    power, stale = rng.random() < 0.85, rng.random() < 0.2
    lost = moment.frozen.draw(rng) if power else frozenset[Item]()
    image = moment.frozen.image(lost, stale=stale)
    digest = image.digest()
    if digest in seen:
        return
    seen.add(digest)
    op = moment.op
    expected = oracle.expect(power=power, at=op.number, level=config.durability)
    where = f"seed {seed} op {op.number} ({op.call} {os.path.basename(op.path)}), {len(lost)} lost"
    examination = Examination(config, expected, where, rng)
    found = examination.of(image)
    if found and not tally.findings:
        found.broken.append(_keep(moment, lost, stale, power, oracle, config, expected, seed))
    tally.findings.add(found)
    for again in examination.crashes_in_recovery:
        if again.digest() not in seen:
            seen.add(again.digest())
            tally.num_in_recovery += 1
            once_more = Examination(config, expected, f"{where}, again in recovery", rng, deeper=False)
            tally.findings.add(once_more.of(again))


def _keep(
    moment: _Moment, lost: frozenset[Item], stale: bool, power: bool, oracle: Oracle, config: Config,
    expected: Expectation, seed: int,
) -> str:  # fmt: skip
    """Shrink a failing crash and keep it as a directory that `replay` opens again; says where."""

    def fails(items: frozenset[Item]) -> bool:
        image = moment.frozen.image(items, stale=stale)
        return bool(Examination(config, expected, "", random.Random(seed), deeper=False).of(image))

    least = shrink(lost, fails, max_tries=40) if fails(lost) else lost
    folder = Path(tempfile.mkdtemp(prefix=f"crash-{seed}-{moment.op.number}-"))
    moment.frozen.image(least, stale=stale).write_to(folder / "store", PATH)
    events = [event.line() for event in oracle.events if event.at <= moment.op.number]
    (folder / "events.jsonl").write_bytes(b"".join(events))
    what = {"power": power, "config": asdict(config), "lost": [list(item) for item in sorted(least)]}
    (folder / "crash.json").write_text(json.dumps(what))
    return f"kept in {folder}, {len(least)} losses are enough"


def replay(folder: Path) -> Findings:
    """Open a kept crash again and judge it as before."""
    what = json.loads((folder / "crash.json").read_text())
    oracle = Oracle()
    oracle.add(Event.parse(line) for line in (folder / "events.jsonl").read_bytes().splitlines())
    config = Config(**what["config"])
    expected = oracle.expect(power=what["power"], level=config.durability)
    with small_scale():
        image = Image.read_from(folder / "store", PATH)
        return Examination(config, expected, folder.name, random.Random(0), deeper=False).of(image)


@dataclass
class Examination:
    """Opens images and judges them.

    Attributes:
        crashes_in_recovery: images of crashes during the opening itself.
    """

    config: Config
    expected: Expectation
    where: str
    rng: random.Random
    deeper: bool = True
    lossless: bool = True
    crashes_in_recovery: list[Image] = field(default_factory=list)

    def of(self, image: Image) -> Findings:
        found = Findings()
        gone = sorted(self.expected.gone.items())
        sample = dict(self.rng.sample(gone, min(8, len(gone))))
        left = traces(image.files.values(), sample, HYBRID)
        found.resurrected += [
            f"{self.where}: bytes of removed block {digest[:8]} are left" for digest in left
        ]
        num_threads = threading.active_count()
        fs = SimFs(image, before_op=lambda op: None)
        if self.deeper and self.rng.random() < 0.3:
            fs.before_op = self._freeze_once(fs, self.rng.randrange(12))
        try:
            cache = open_store(PATH, self.config, fs=fs)
        except StoreUnusable as error:
            found.open_failures.append(f"{self.where}: {error}")
            return found
        except Exception as error:
            found.open_failures.append(f"{self.where}: {type(error).__name__}: {error}")
            return found
        fs.before_op = lambda op: None
        try:
            if self.deeper and self.rng.random() < 0.2:
                self._open_twice(fs, cache, found)
            found.add(examine(cache, self.expected, space_of, lossless=self.lossless))
            self._use(cache, found)
            if not cache.close().ok:
                found.broken.append("close: not all flushed on a sound disk")
        except Exception as error:
            found.broken.append(f"{type(error).__name__}: {error}")
        if fs.num_open:
            found.leaks.append(f"{fs.num_open} files are open after closing")
        _await(lambda: threading.active_count() <= num_threads)
        if threading.active_count() > num_threads:
            found.leaks.append(
                f"{threading.active_count()} threads after closing, {num_threads} before opening"
            )
        return _placed(found, self.where)

    def _freeze_once(self, fs: SimFs, number: int) -> Callable[[Op], None]:
        def before(op: Op) -> None:
            if op.number == number:
                frozen = fs.disk.freeze()
                self.crashes_in_recovery.append(frozen.image(frozen.draw(self.rng)))

        return before

    def _open_twice(self, fs: SimFs, cache: Any, found: Findings) -> None:
        """A second recovery, of what the first one left, brings the same state."""
        with fs.mutex:
            left = fs.disk.seen()
        again = open_store(PATH, self.config, fs=SimFs(left))
        try:
            if table_of(again) != table_of(cache):
                found.broken.append("a second recovery gives another table or other sessions")
        finally:
            again.close()

    def _use(self, cache: Any, found: Findings) -> None:
        """The store takes and gives blocks after all that, unless pinned sessions may fill its device."""
        if any(row.pinned for row in cache.sessions()):
            return
        space = space_of(cache, "b")
        prompt = Prompt("b", (*(900_000 + n for n in range(32)), 7))
        stored = space.store(prompt.ids(), prompt.kv(space), anchors=[32])
        if not stored.wait(10.0) or stored.num_refused or space.lookup(prompt.ids()).num_tokens != 32:
            found.broken.append(f"nothing can be stored after opening: {stored}")


def table_of(cache: Any) -> tuple[Any, ...]:
    """The durable state of an opened store, to be compared."""
    with cache._lock:
        state = cache._state
        table = state.table
        rows = table.live_rows()
        parts = {
            (table.digest[r].tobytes(), g, int(table.slot[2, g, r]), int(table.put_seq[g, r]))
            for r in rows.tolist()
            for g in range(table.num_groups)
            if table.slot[2, g, r] >= 0
        }
        sessions = {name: row.encode() for name, row in state.catalog.sessions.items()}
        return parts, sessions, sorted(state.catalog.namespaces)


def _await(condition: Callable[[], bool], timeout_s: float = 2.0) -> None:
    until = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < until:
        time.sleep(0.005)


def _placed(found: Findings, where: str) -> Findings:
    return Findings(**{name: [f"{where}: {line}" for line in lines] for name, lines in vars(found).items()})


def jobs(seed: int, num_images: int, per_batch: int = 25) -> Iterator[tuple[str, Callable[[Say], Any]]]:
    """Batches that together make about `num_images` distinct crashes."""
    for number in range(-(-num_images // per_batch)):
        batch_seed = seed * 1_000_003 + number

        def job(say: Say, batch_seed: int = batch_seed) -> dict[str, Any]:
            return crash_batch(say, batch_seed, per_batch)

        yield f"simulated crashes, seed {batch_seed}", job
