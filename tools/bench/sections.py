"""The parts of the benchmark by name, in the order in which a whole run measures them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from . import basics, caller, hits, speed, table, tiers
from .figures import Figure
from .plan import Plan
from .rivals import ranking
from .sheet import Sheet

Section = Callable[[Plan], Iterable[Figure | Sheet]]

SECTIONS: Mapping[str, Section] = {
    "basics": lambda plan: basics.measure(plan.root, plan.progress, plan.num_blocks, plan.runs),
    "speed": lambda plan: speed.measure(plan.root, plan.progress, plan.rounds, plan.quick),
    "rivals": lambda plan: ranking.measure(
        plan.root, plan.progress, plan.runs, ranking.QUICK if plan.quick else ranking.FULL, plan.rivals_home
    ),
    "tiers": tiers.measure,
    "caller": caller.measure,
    "table": table.measure,
    "workloads": hits.measure,
}
QUICK_RUNS = 1
QUICK_NUM_BLOCKS = 5_000
