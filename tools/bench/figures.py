"""A measured number beside what it must reach."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


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


def at_most(name: str, value: float, limit: float, detail: str = "", **more: Any) -> Figure:
    return Figure(name, round(value, 4), f"<= {limit:g}", value <= limit, detail, more)


def at_least(name: str, value: float, limit: float, spread: float, detail: str = "", **more: Any) -> Figure:
    """A ratio that is met at its target less the spread that raw against raw showed in the same run."""
    more |= {"spread": round(spread, 4)}
    return Figure(name, round(value, 4), f">= {limit:g}", value >= limit - spread, detail, more)


def none_of(name: str, count: int, detail: str = "", **more: Any) -> Figure:
    """A count that must be zero."""
    return Figure(name, count, "0", count == 0, detail, more)


def shown(name: str, value: float, detail: str = "", **more: Any) -> Figure:
    """A number without a target."""
    return Figure(name, round(value, 4), "-", None, detail, more)


def unmeasured(name: str, must: str, why: str) -> Figure:
    return Figure(name, None, must, None, why)
