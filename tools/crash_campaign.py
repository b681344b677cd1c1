"""Kills, power cuts, simulated crashes, hostile files, faults and crowds, against an oracle that remembers.

python tools/crash_campaign.py --short --json     what CI runs, under five minutes; the last line is one object
python tools/crash_campaign.py --full             hours: every bit of every header, a thousand kills
python tools/crash_campaign.py --seeded-bugs      plants known bugs, and says which check catches which
"""

from __future__ import annotations

import json
import os
import secrets
import time
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from bench.figures import Figure, none_of, unmeasured
from campaign import bugs, campaign, simulated
from campaign.campaign import FULL, SHORT, Plan, Totals
from campaign.processes import Job, run_jobs
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tieredkv.testing.oracle import Findings

_FOR_A_BUG = Plan(num_kills=24, num_cuts=0, num_images=300, num_faults=40, hostile_every=2000, crowd_s=6.0)
_MIN_BUGS = 20
_TELL_S = 60.0
_MOST_TOLD = 40
_BUG_HANG_S = 300.0


def main(
    short: Annotated[bool, typer.Option("--short", help="Under five minutes; the default.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Everything; hours.")] = False,
    seeded_bugs: Annotated[bool, typer.Option("--seeded-bugs", help="Plant known bugs one by one.")] = False,
    only: Annotated[str, typer.Option(help=f"One part: {', '.join(campaign.PARTS)}; or one bug.")] = "",
    replay: Annotated[
        Path | None, typer.Option(help="A crash that an earlier run kept; opened and judged again.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of all that is drawn; 0 draws one.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object as the last line.")] = False,
) -> None:
    """Run a campaign; the exit code is 1 where anything was found."""
    torch.set_num_threads(1)
    seed = seed or secrets.randbelow(1 << 20) + 1
    console = Console(stderr=True)
    console.print(f"seed {seed}, process {os.getpid()}", style="dim")
    if replay:
        lines = simulated.replay(replay).lines()
        result, ok = {"replayed": str(replay), "findings": lines}, not lines
        console.print("\n".join(lines) or "nothing is wrong any more", markup=False)
    elif seeded_bugs:
        result, ok = _plant_all(console, seed, only)
    else:
        result, ok = _campaign(console, FULL if full else SHORT, seed, only, full)
    if as_json:
        typer.echo(json.dumps(result))
    raise typer.Exit(0 if ok else 1)


def _campaign(console: Console, plan: Plan, seed: int, only: str, full: bool) -> tuple[dict[str, Any], bool]:
    began = time.monotonic()

    def tell(found: Findings) -> None:
        """At once, for hours may pass before the end."""
        for line in found.lines()[:_MOST_TOLD]:
            console.print(line[:2000], style="red", markup=False, highlight=False)

    def part_is_over(part: str, totals: Totals) -> None:
        found = ", ".join(f"{count} {what}" for what, count in totals.found_by.items()) or "nothing found"
        console.print(f"{part} over after {time.monotonic() - began:.0f} s: {found} so far", style="dim")

    with _bars(console) as report:
        if only:
            totals = campaign.only(only, plan, seed, report, tell)
        else:
            totals = campaign.run(plan, seed, report, tell=tell, part_is_over=part_is_over)
    figures = _figures(totals, plan, full, only)
    _show(console, totals, figures, time.monotonic() - began)
    result = {**totals.as_json(seed), "seconds": round(time.monotonic() - began, 1)}
    result["figures"] = [figure.as_json() for figure in figures]
    return result, not totals.findings and all(figure.met is not False for figure in figures)


def _figures(totals: Totals, plan: Plan, full: bool, only: str) -> list[Figure]:
    found = totals.findings.counts()
    which = "--full" if full else "--short"
    figures = [none_of(f"{which}: {name}", count) for name, count in found.items()]
    wanted = (
        ("simulated", "simulated crashes", len(totals.images), plan.num_images),
        ("kills", "kills", totals.kills_by_step.total(), plan.num_kills),
        ("power", "power cuts", totals.cuts_by_step.total(), plan.num_cuts),
    )
    for part, name, count, least in wanted:
        if only in ("", part):
            why = totals.skipped.get(name)
            figures.append(
                unmeasured(f"{which}: {name}", f">= {least}", why)
                if why
                else Figure(f"{which}: {name}", count, f">= {least}", count >= least)
            )
    return figures


def _show(console: Console, totals: Totals, figures: list[Figure], seconds: float) -> None:
    table = Table(title=f"ran {seconds:.0f} s")
    for column in ("figure", "value", "must be", ""):
        table.add_column(column)
    marks = {True: "[green]met[/]", False: "[red]not met[/]", None: ""}
    for figure in figures:
        value = figure.detail if figure.value is None else f"{figure.value:g}"
        table.add_row(figure.name, value, figure.must, marks[figure.met])
    console.print(table)
    for name, why in totals.skipped.items():
        console.print(f"skipped {name}: {why}", style="yellow")
    steps = ", ".join(f"{step} {count}" for step, count in sorted(totals.kills_by_step.items()))
    console.print(f"kills by step: {steps}", style="dim")


class _Bars:
    """A bar for each part on a terminal, a line now and then elsewhere."""

    def __init__(self, console: Console, progress: Progress | None) -> None:
        self._console = console
        self._progress = progress
        self._tasks: dict[str, Any] = {}
        self._told_at = 0.0

    def __call__(self, part: str, done: int, total: int) -> None:
        if self._progress is None:
            if part not in self._tasks or time.monotonic() - self._told_at > _TELL_S:
                self._console.print(f"  ... {part}: {done} of {total}", style="dim")
                self._told_at = time.monotonic()
            self._tasks[part] = done
            return
        if part not in self._tasks:
            self._tasks[part] = self._progress.add_task(part, total=total)
        self._progress.update(self._tasks[part], completed=min(done, total), total=total)


class _bars:
    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console) if console.is_terminal else None
        self._console = console

    def __enter__(self) -> _Bars:
        (self._progress or nullcontext()).__enter__()
        return _Bars(self._console, self._progress)

    def __exit__(self, *details: Any) -> None:
        (self._progress or nullcontext()).__exit__(*details)


# ---- seeded bugs ---------------------------------------------------------------------------------


def _plant_all(console: Console, seed: int, only: str) -> tuple[dict[str, Any], bool]:
    """The same small campaign without a bug, then with each; it must find nothing, then something each time."""
    names = [only] if only else list(bugs.BUGS)
    jobs: list[tuple[str, Job]] = [("no bug", campaign.as_job(_FOR_A_BUG, seed))]
    jobs += [(name, _planted(name, seed)) for name in names]
    caught: dict[str, str] = {}
    clean = ""
    for outcome in run_jobs(jobs, width=1, timeout_s=_BUG_HANG_S):
        result = outcome.result or {}
        by = (
            ", ".join(result.get("found_by", {}))
            or outcome.died[-300:]
            or ("hangs: the campaign" * bool(outcome.hung))
        )
        if outcome.name == "no bug":
            clean = by
            console.print(
                f"without a bug: {by or 'green'} {result.get('lines', '')}", markup=False, highlight=False
            )
        else:
            caught[outcome.name] = by
            line = next(iter(result.get("lines", [])), "")
            console.print(
                f"{outcome.name}: {by or 'NOT CAUGHT'} | {line[:160]}", markup=False, highlight=False
            )
    num_caught = sum(map(bool, caught.values()))
    figures = [
        Figure("seeded bugs caught", num_caught, f"all of {len(names)}, at least {_MIN_BUGS}",
               num_caught == len(names) and (bool(only) or len(names) >= _MIN_BUGS)),
        Figure("findings without a bug", len(clean and [clean]), "0", not clean),
    ]  # fmt: skip
    result = {
        "seeded": len(names), "caught": num_caught, "caught_by": caught, "without_a_bug": clean or "green",
        "seed": seed, "figures": [figure.as_json() for figure in figures],
    }  # fmt: skip
    console.print(f"{len(names)} seeded, {num_caught} caught")
    return result, all(figure.met for figure in figures)


def _planted(name: str, seed: int) -> Job:
    run = campaign.as_job(_FOR_A_BUG, seed)

    def job(say: Any) -> Any:
        with ExitStack() as stack:
            try:
                stack.enter_context(bugs.BUGS[name]())
            except (KeyError, AttributeError) as error:
                return {"found_by": {}, "lines": [f"it cannot be planted any more: {error!r}"]}
            return run(say)

    return job


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()
