"""The N-th call fails, is cut short, comes late, lies, or lands elsewhere: a life on a disk with one fault.

No fault may raise out of a call that serves, give a wrong byte, go uncounted, or cost what was promised. A disk
that lies or misdirects may cost anything but truth.
"""

from __future__ import annotations

import errno
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

from tieredkv.testing.oracle import Findings, Oracle, observed
from tieredkv.testing.sim_disk import Image
from tieredkv.testing.sim_fs import Fault, Op, SimFs

from .processes import Say
from .simulated import PATH, Examination
from .workload import Events, Life, StillClock, draw_config, seeded_salts, small_scale

_CALLS = (
    "pwritev", "pwritev", "datasync", "datasync", "preadv", "preadv", "allocate", "create", "open_file",
    "sync_dir", "rename", "unlink", "punch", "list_names", "make_dir",
)  # fmt: skip
_ERRNOS = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)
_EFFECTS = {
    "pwritev": ("fail", "short", "delay", "misdirect"),
    "datasync": ("fail", "keep", "revert", "delay", "lie"),
}
_DISHONEST = ("lie", "misdirect")
_DEADLINE_S = 1.0
_CLOSE_S = 10.0


def draw_fault(rng: random.Random) -> Fault:
    call = rng.choice(_CALLS)
    effect = rng.choice(_EFFECTS.get(call, ("fail", "fail", "delay")))
    path = rng.choice(("", "", ".wal", ".slab", "table-", ".tmp"))
    if call in ("sync_dir", "list_names", "make_dir"):
        path = ""
    return Fault(
        call, nth=rng.randint(1, 30), path=path, effect=effect, error=rng.choice(_ERRNOS), delay_s=3 * _DEADLINE_S,
        again=effect in ("fail", "lie") and rng.random() < 0.3,
    )  # fmt: skip


def fault_batch(say: Say, seed: int, num_lives: int) -> dict[str, Any]:
    """Lives with one fault each, and a few crashes of each."""
    findings, digests, num_fired = Findings(), set[bytes](), 0
    with small_scale():
        for number in range(num_lives):
            life_seed = seed * 10_007 + number
            with seeded_salts(life_seed):
                num_fired += _faulted(life_seed, findings, digests)
            say(done=number)
    return {
        "digests": [d.hex() for d in digests], "findings": vars(findings), "num_fired": num_fired,
    }  # fmt: skip


def _faulted(seed: int, findings: Findings, digests: set[bytes]) -> bool:
    """One life; returns whether its fault struck."""
    rng = random.Random(seed)
    fault = draw_fault(rng)
    config = draw_config(rng, deadline_s=_DEADLINE_S)
    where = (
        f"seed {seed}, {fault.effect} at {fault.call} {fault.nth} {fault.path} {errno.errorcode[fault.error]}"
    )
    images: list[tuple[int, bool, Image]] = []

    def before(op: Op) -> None:
        if rng.random() < 0.04 and len(images) < 4:
            power = fault.effect == "revert" or rng.random() < 0.8
            frozen = fs.disk.freeze()
            # A kill leaves what readers see, also where a failed sync has left that in the page cache alone.
            image = frozen.image(frozen.draw(rng)) if power else fs.disk.seen()
            images.append((op.number, power, image))

    fs = SimFs(before_op=before, seed=seed, direct=rng.random() < 0.5)
    events = Events(lambda: fs.num_ops)
    life = Life(PATH, config, events, rng, fs=fs, clock=StillClock())
    fs.faults.append(fault)
    with observed(events):
        opened = _live(life, rng, findings, where)
    if fault.num_fired and opened:
        _judge_counting(life, fault, findings, where, f"{phase_of(events, fs.struck_at)} on {fs.struck_path}")
    oracle = Oracle()
    oracle.add(events.kept)
    for at, power, image in images:
        if image.digest() not in digests:
            digests.add(image.digest())
            expected = oracle.expect(power=power, at=at, level="flush")
            examination = Examination(
                config, expected, where, rng, deeper=False, lossless=fault.effect not in _DISHONEST
            )
            found = examination.of(image)
            if fault.effect in _DISHONEST:
                found.resurrected.clear()  # the record of a removal is among what such a disk may lose
            findings.add(found)
    return bool(fault.num_fired)


def phase_of(events: Events, at: int) -> str:
    """What the life was doing at a position: the last event noted before it."""
    return next((f"{e.what} {e.args.get('name', '')}" for e in reversed(events.kept) if e.at <= at), "open")


def _live(life: Life, rng: random.Random, findings: Findings, where: str) -> bool:
    """Open, live and close; returns whether it opened."""
    try:
        life.open()
    except Exception as error:
        if not isinstance(error, life.refusals):
            findings.open_failures.append(f"{where}: {type(error).__name__}: {error}")
        return False
    try:
        life.run(rng.choice((8, 20)))
        findings.broken += [f"{where}: {line}" for line in life.recounted()]
        began = time.monotonic()
        life.finish()
        if time.monotonic() - began > _CLOSE_S:
            findings.hangs.append(f"{where}: close took {time.monotonic() - began:.0f} s")
    except Exception as error:
        findings.broken.append(f"{where}: {type(error).__name__} out of a call: {error}")
    findings.wrong_bytes += [f"{where}: {line}" for line in life.wrong]
    findings.broken += [f"{where}: OSError out of a call: {line}" for line in life.raised]
    return True


def _judge_counting(life: Life, fault: Fault, findings: Findings, where: str, struck: str) -> None:
    """Something the caller can see has changed: a counter, the health, an error, or a miss with its reason."""
    if fault.effect in ("fail", "short", "keep", "revert") and not (life.errors or life.noticed):
        findings.uncounted_failures.append(f"{where}, struck in {struck}")


def jobs(seed: int, num_lives: int, per_batch: int = 20) -> Iterator[tuple[str, Callable[[Say], Any]]]:
    for number in range(-(-num_lives // per_batch)):

        def job(say: Say, number: int = number) -> dict[str, Any]:
            return fault_batch(say, seed * 1009 + number, per_batch)

        yield f"faults, batch {number}", job
