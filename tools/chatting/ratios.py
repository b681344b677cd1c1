"""Ratios of two measurements that took turns, so that a busy machine slows both."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from bench.figures import Figure


def spread_of(ratios: Sequence[float]) -> float:
    """How far a ratio typically lies from the median of all."""
    middle = median(ratios)
    return median(abs(ratio - middle) for ratio in ratios)


def paired(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    return [one / other for one, other in zip(ours, theirs, strict=True)]


def ratio_at_most(name: str, ratios: Sequence[float], limit: float, detail: str, **more: Any) -> Figure:
    """The median ratio, met at its limit plus the printed spread."""
    value, spread = median(ratios), spread_of(ratios)
    return _figure(name, ratios, f"<= {limit:g}", value <= limit + spread, detail, more)


def ratio_at_least(name: str, ratios: Sequence[float], limit: float, detail: str, **more: Any) -> Figure:
    """The median ratio, met at its limit less the printed spread."""
    value, spread = median(ratios), spread_of(ratios)
    return _figure(name, ratios, f">= {limit:g}", value >= limit - spread, detail, more)


def _figure(
    name: str, ratios: Sequence[float], must: str, met: bool, detail: str, more: dict[str, Any]
) -> Figure:
    spread = spread_of(ratios)
    more = {**more, "spread": round(spread, 5), "ratios": [round(ratio, 5) for ratio in ratios]}
    text = f"{detail}; median of {len(ratios)}, spread {spread:.2g}"
    return Figure(name, round(median(ratios), 5), must, met, text, more)
