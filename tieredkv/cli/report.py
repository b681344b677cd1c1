"""What a demo run found, as a table for people and one object for programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from ..units import format_nbytes

MAX_TTFT_RATIO = 0.05
MAX_NEAR_TIE = 1e-3


@dataclass(frozen=True)
class Figure:
    """A measured number and what it must reach; the name ends with its unit."""

    name: str
    value: float
    must: str
    met: bool


@dataclass(frozen=True)
class Outcome:
    """One run. The prompt of `prompt_tokens` is the one whose first token was timed cold and resumed."""

    prompt_tokens: int
    reused_tokens: int
    reused_by_tier: Mapping[str, int]
    cold_ttft_s: float
    resumed_ttft_s: float
    recovery_s: float
    identical_output: bool
    near_ties: int
    killed: bool
    device_evictions: int
    host_evictions: int
    disk_parts: int
    disk_nbytes: int
    sessions: int
    figures: tuple[Figure, ...]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def ok(self) -> bool:
        return self.killed and all(figure.met for figure in self.figures)


def figures(measured: Mapping[str, Any], num_differences: int) -> tuple[Figure, ...]:
    """The figures of a run: `measured` is what the measuring child said at its end."""
    ratio = measured["resumed_ttft_s"] / measured["cold_ttft_s"]
    return (
        Figure("resumed_over_cold_ratio", round(ratio, 4), "<= 0.05", ratio <= MAX_TTFT_RATIO),
        Figure("output_differences_num", num_differences, "0, near ties reported", num_differences == 0),
        *(
            Figure(
                f"restored_{what}_differences_num",
                measured[f"{what}_differences"],
                "0",
                measured[f"{what}_differences"] == 0,
            )
            for what in ("kv", "logits")
        ),
    )


def print_outcome(console: Console, outcome: Outcome) -> None:
    table = Table(title="what came of it", show_header=False)
    for name, value in _rows(outcome):
        table.add_row(name, value)
    console.print(table)
    for figure in outcome.figures:
        mark = "[green]met[/]" if figure.met else "[red]not met[/]"
        console.print(f"  {figure.name} = {figure.value:g}  (must be {figure.must}): {mark}")


def _rows(outcome: Outcome) -> list[tuple[str, str]]:
    tiers = ", ".join(f"{name} {count:,}" for name, count in outcome.reused_by_tier.items() if count)
    same = "yes" if outcome.identical_output else "no"
    return [
        ("prompt", f"{outcome.prompt_tokens:,} tokens"),
        ("of these not computed again", f"{outcome.reused_tokens:,} tokens, from {tiers or 'nowhere'}"),
        ("time to first token, cold", f"{outcome.cold_ttft_s:.2f} s"),
        ("time to first token, resumed", f"{outcome.resumed_ttft_s:.3f} s"),
        ("recovery after the kill", f"{outcome.recovery_s * 1e3:.0f} ms"),
        ("evictions", f"{outcome.device_evictions:,} from device, {outcome.host_evictions:,} from host"),
        ("on disk", f"{outcome.disk_parts:,} parts, {format_nbytes(outcome.disk_nbytes)}"),
        (
            "same output as a run never killed",
            f"{same} ({outcome.sessions} sessions, {outcome.near_ties} near ties)",
        ),
    ]
