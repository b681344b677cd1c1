"""Percentiles of times, as every table of the benchmark shows them."""

from __future__ import annotations

from collections.abc import Sequence

SHARES = (50, 95, 99)
COLUMNS = tuple(f"p{share}" for share in SHARES)


def percentiles_ms(seconds: Sequence[float]) -> tuple[float, ...]:
    """p50, p95 and p99 in milliseconds: each the smallest time that so many of all do not exceed."""
    ordered = sorted(seconds)
    return tuple(ordered[max(0, -(-share * len(ordered) // 100) - 1)] * 1e3 for share in SHARES)
