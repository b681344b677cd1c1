"""All parts of a campaign after one another, and what they add up to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from tieredkv.testing.oracle import Findings

from . import environment, faults, hostile, kills, power, simulated, threads
from .processes import Job, Outcome, Say, run_jobs

_HANG_S = 90.0


@dataclass(frozen=True)
class Plan:
    """How much of each part. `hostile_every`: every that many of the bit flips and truncations; 0: none."""

    num_kills: int
    num_cuts: int
    num_images: int
    num_faults: int
    hostile_every: int
    crowd_s: float
    environment: bool = True


SHORT = Plan(num_kills=200, num_cuts=12, num_images=2_000, num_faults=60, hostile_every=400, crowd_s=10.0)
FULL = Plan(num_kills=1_000, num_cuts=200, num_images=20_000, num_faults=2_000, hostile_every=1, crowd_s=60.0)


Tell = Callable[[Findings], None]


def _tell_nobody(_found: Findings) -> None:
    pass


@dataclass
class Totals:
    """What was done and what was found, over all parts.

    Attributes:
        tell: called with whatever a job finds, as soon as it is known.
        stop_early: begin no further job once anything was found.
        skipped: parts that cannot run here, and why.
        found_by: findings by part and kind.
    """

    tell: Tell = _tell_nobody
    stop_early: bool = False
    findings: Findings = field(default_factory=Findings)
    kills_by_step: Counter[str] = field(default_factory=Counter)
    cuts_by_step: Counter[str] = field(default_factory=Counter)
    images: set[str] = field(default_factory=set)
    num_faults_fired: int = 0
    num_hostile: int = 0
    num_calls: int = 0
    skipped: dict[str, str] = field(default_factory=dict)
    found_by: Counter[str] = field(default_factory=Counter)

    @property
    def is_over(self) -> bool:
        return self.stop_early and bool(self.findings)

    def take(self, part: str, outcome: Outcome) -> None:
        """Add what one job of a part did; a job that died or hung is a finding itself."""
        result: dict[str, Any] = outcome.result or {}
        found = Findings(**result.get("findings", {}))
        if outcome.hung:
            found.hangs.append(f"{outcome.name}: {outcome.hung}")
        elif outcome.died:
            found.dead_processes.append(f"{outcome.name}: {outcome.died}")
        self.add(part, found)
        self.images.update(result.get("digests", ()))
        self.num_faults_fired += result.get("num_fired", 0)
        self.num_calls += result.get("calls", 0)
        if part == "kills":
            self.kills_by_step.update(result.get("by_step", {}))
        if part == "power cuts":
            self.cuts_by_step.update(result.get("by_step", {}))

    def add(self, part: str, found: Findings) -> None:
        if found:
            self.tell(found)
        self.findings.add(found)
        self.found_by.update({f"{part}: {kind}": count for kind, count in found.counts().items() if count})

    def as_json(self, seed: int) -> dict[str, Any]:
        counts = self.findings.counts()
        counts["broken_invariants"] = counts.pop("broken")
        return {
            "kills": self.kills_by_step.total(), "kills_by_step": dict(self.kills_by_step),
            "power_cuts": self.cuts_by_step.total(), "power_cuts_by_step": dict(self.cuts_by_step),
            "simulated_crashes": len(self.images), "faults_struck": self.num_faults_fired,
            "hostile_files": self.num_hostile, "crowd_calls": self.num_calls, **counts,
            "skipped": self.skipped, "seed": seed,
        }  # fmt: skip


Report = Callable[[str, int, int], None]
"""Told the part, how much of it is done, and how much it is."""


def run(
    plan: Plan,
    seed: int,
    report: Report,
    stop_early: bool = False,
    tell: Tell = _tell_nobody,
    part_is_over: Callable[[str, Totals], None] = lambda _part, _totals: None,
) -> Totals:
    """Run every part of `plan`; with `stop_early` only until something is found."""
    totals = Totals(tell, stop_early)
    for name, part in PARTS.items():
        part(plan, seed, totals, report)
        part_is_over(name, totals)
        if totals.is_over:
            break
    return totals


def _drain(part: str, jobs: Iterator[tuple[str, Job]], totals: Totals, done: Callable[[], None]) -> None:
    for outcome in run_jobs(takewhile(lambda _job: not totals.is_over, jobs), timeout_s=_HANG_S):
        totals.take(part, outcome)
        done()


def _images(plan: Plan, seed: int, totals: Totals, report: Report) -> None:
    """Batches until enough images differ."""

    def until_enough() -> Iterator[tuple[str, Job]]:
        for name, job in simulated.jobs(seed, 4 * plan.num_images):
            if len(totals.images) >= plan.num_images:
                return
            yield name, job

    _drain(
        "simulated crashes", until_enough(), totals,
        lambda: report("simulated crashes", len(totals.images), plan.num_images),
    )  # fmt: skip


def _faults(plan: Plan, seed: int, totals: Totals, report: Report) -> None:
    if plan.num_faults:
        _drain(
            "faults", faults.jobs(seed, plan.num_faults), totals,
            lambda: report("faults that struck", totals.num_faults_fired, plan.num_faults),
        )  # fmt: skip


def _kills(plan: Plan, seed: int, totals: Totals, report: Report) -> None:
    lanes = max(4, plan.num_kills // 60)
    _drain(
        "kills", kills.jobs(seed, plan.num_kills, lanes), totals,
        lambda: report("kills", totals.kills_by_step.total(), plan.num_kills),
    )  # fmt: skip


def _threads(plan: Plan, seed: int, totals: Totals, report: Report) -> None:
    if plan.crowd_s:
        _drain("threads", threads.jobs(seed, plan.crowd_s), totals, lambda: report("threads", 1, 1))


def _hostile(plan: Plan, seed: int, totals: Totals, report: Report) -> None:
    if plan.hostile_every:

        def on_done(done: int, total: int, found: Findings) -> None:
            totals.add("hostile files", found)
            report("hostile files", done, total)

        totals.num_hostile += hostile.run_all(seed, plan.hostile_every, on_done)


def _environment(plan: Plan, seed: int, totals: Totals, report: Report) -> None:
    if not plan.environment:
        return
    totals.skipped["quota"] = "few kernels mount ext4 with quota; its error, EDQUOT, strikes among the faults"
    why = power.unavailable()
    if why:
        totals.skipped["full and read-only disks"] = why
    _drain("environment", environment.jobs(mounts=not why), totals, lambda: report("environment", 1, 1))


def _cuts(plan: Plan, seed: int, totals: Totals, report: Report) -> None:
    why = power.unavailable() if plan.num_cuts else "not asked for"
    if why:
        totals.skipped["power cuts"] = why
        return
    _drain(
        "power cuts", power.jobs(seed, plan.num_cuts, max(4, plan.num_cuts // 25)), totals,
        lambda: report("power cuts", totals.cuts_by_step.total(), plan.num_cuts),
    )  # fmt: skip


def only(part: str, plan: Plan, seed: int, report: Report, tell: Tell = _tell_nobody) -> Totals:
    """One part alone, by the name it has in `PARTS`."""
    totals = Totals(tell)
    PARTS[part](plan, seed, totals, report)
    return totals


PARTS: dict[str, Callable[[Plan, int, Totals, Report], None]] = {
    "simulated": _images, "faults": _faults, "kills": _kills, "threads": _threads, "environment": _environment,
    "hostile": _hostile, "power": _cuts,
}  # fmt: skip


def quiet(_part: str, _done: int, _total: int) -> None:
    """A report that says nothing."""


def as_job(plan: Plan, seed: int) -> Callable[[Say], Any]:
    """A campaign inside one child, stopped at the first finding: for seeded bugs."""

    def job(say: Say) -> dict[str, Any]:
        totals = run(plan, seed, lambda part, done, total: say(part=part), stop_early=True)
        return {"found_by": dict(totals.found_by), "lines": totals.findings.lines()[:3]}

    return job
