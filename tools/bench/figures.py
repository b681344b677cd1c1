"""A measured number beside what it must reach."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

MAX_SPREAD = 0.25
"""The most that raw against raw may differ in a run that judges anything."""


@dataclass(frozen=True)
class Figure:
    """One row of the result; the name ends with its unit.

    `met` is None for what could not be measured, and for what is shown without a target; `detail` says why,
    or how the number came about.
    """

    name: str
    value: float | None
    must: str
    met: bool | None
    detail: str = ""
    more: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def at_most(
    name: str, value: float, limit: float, detail: str = "", spread: float = 0.0, **more: Any
) -> Figure:
    """A number that is met at its limit and the spread, in the number's unit, of what it was measured beside.

    Where that spread is more than the limit itself, a value above the limit says nothing: `met` is None.
    """
    more |= {"spread": round(spread, 4)} if spread else {}
    met: bool | None = value <= limit + spread
    if value > limit and spread > limit:
        met, detail = None, f"{detail}; too noisy to judge"
    return Figure(name, round(value, 4), f"<= {limit:g}", met, detail, more)


def at_least(name: str, value: float, limit: float, spread: float, detail: str = "", **more: Any) -> Figure:
    """A ratio that is met at its target less the spread that raw against raw showed in the same run.

    Where raw differed from raw by more than `MAX_SPREAD`, a value below the target says nothing: `met` is None.
    """
    more |= {"spread": round(spread, 4)}
    met: bool | None = value >= limit - min(spread, MAX_SPREAD)
    if value < limit and spread > MAX_SPREAD:
        met, detail = None, f"{detail}; too noisy to judge"
    return Figure(name, round(value, 4), f">= {limit:g}", met, detail, more)


def none_of(name: str, count: int, detail: str = "", **more: Any) -> Figure:
    """A count that must be zero."""
    return Figure(name, count, "0", count == 0, detail, more)


def shown(name: str, value: float, detail: str = "", **more: Any) -> Figure:
    """A number without a target."""
    return Figure(name, round(value, 4), "-", None, detail, more)


def unmeasured(name: str, must: str, why: str) -> Figure:
    return Figure(name, None, must, None, why)
