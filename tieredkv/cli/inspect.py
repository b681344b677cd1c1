"""What `stat` and `fsck` found, for people."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Column, Table

from ..audit.report import FsckReport, StoreStat
from ..units import format_nbytes

_MAX_SHOWN = 20


def visible(text: str) -> str:
    """Names and paths as a terminal may have them: what would steer it is shown as an escape."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def plain(text: str) -> str:
    """`visible`, for rich: no markup in it counts."""
    return escape(visible(text))


def print_stat(console: Console, stat: StoreStat) -> None:
    console.print(f"[bold]{plain(stat.path)}[/]", highlight=False, soft_wrap=True)
    facts = _grid()
    facts.add_row("blocks", f"{stat.num_blocks:,}")
    for tier, num_parts in stat.parts_by_tier.items():
        facts.add_row(f"on {tier}", f"{num_parts:,} parts, {format_nbytes(stat.nbytes_by_tier[tier])}")
    segments = f"{stat.num_segments} segments, {format_nbytes(stat.log_nbytes)}"
    facts.add_row(
        "log", f"{segments}, LSN {stat.first_lsn} to {stat.last_lsn}, durable to {stat.durable_lsn}"
    )
    facts.add_row("log ends", stat.log_end)
    checkpoints = ", ".join(f"LSN {lsn}" for lsn in stat.checkpoints)
    newest = f"{checkpoints}; the newest {format_nbytes(stat.checkpoint_nbytes)}"
    facts.add_row("checkpoints", newest if checkpoints else "none")
    facts.add_row("last recovery", f"began opening {stat.last_open_number} of this store")
    facts.add_row("the next", f"from LSN {stat.checkpoint_lsn}, {stat.num_to_replay:,} records to replay")
    for line in stat.damage:
        facts.add_row("[red]damage[/]", plain(line))
    console.print(facts)
    if stat.namespaces:
        console.print(_namespaces(stat))
    if stat.sessions:
        console.print(_sessions(stat))


def print_fsck(console: Console, report: FsckReport) -> None:
    console.print(f"[bold]{plain(report.path)}[/]", highlight=False, soft_wrap=True)
    facts = _grid()
    facts.add_row("verified", f"{report.num_parts:,} parts, {format_nbytes(report.nbytes)}")
    for verdict, count in sorted(report.counts.items()):
        facts.add_row(verdict, f"{count:,} parts")
    facts.add_row("log ends", report.log_end)
    for line in report.damage:
        facts.add_row("[red]damage[/]", plain(line))
    for part in report.bad[:_MAX_SHOWN]:
        facts.add_row(
            part.verdict, f"block {part.digest[:16]} group {part.group}, slot {part.slot}, LSN {part.lsn}"
        )
    if len(report.bad) > _MAX_SHOWN:
        facts.add_row("", f"and {len(report.bad) - _MAX_SHOWN:,} more")
    console.print(facts)
    console.print(
        ("clean", "something was lost, nothing is wrong", "damaged")[report.exit_code], highlight=False
    )


def with_progress(work: Callable[[Callable[[int, int], None]], FsckReport]) -> FsckReport:
    """Run `work` under a progress bar on standard error, so that standard output is the report alone."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("verifying", total=None)
        return work(lambda done, total: progress.update(task, completed=done, total=total))


def _grid() -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    return grid


def _namespaces(stat: StoreStat) -> Table:
    table = Table("namespace", "groups", "blocks", "parts", "bytes")
    for space in stat.namespaces:
        name = f"{space.number} {space.digest[:16]}"
        counts = f"{space.num_blocks:,}", f"{space.num_parts:,}", format_nbytes(space.nbytes)
        table.add_row(name, plain(", ".join(space.groups)), *counts)
    return table


def _sessions(stat: StoreStat) -> Table:
    name = Column("session", overflow="fold")
    table = Table(name, "namespace", "tokens", "messages", "anchors", "pinned")
    for session in stat.sessions:
        anchors = ", ".join(f"{anchor:,}" for anchor in session.anchors)
        counts = f"{session.num_tokens:,}", f"{session.num_turns}", anchors, "yes" if session.pinned else ""
        table.add_row(plain(session.name), str(session.namespace), *counts)
    return table
