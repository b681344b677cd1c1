"""What the replay tool found, for people."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column, Table

from tieredkv.audit.crash import CrashReport
from tieredkv.audit.history import Difference, Life, Moment, PartAt
from tieredkv.audit.repair import Truncated
from tieredkv.audit.rescue import Rescued
from tieredkv.audit.timeline import Timeline
from tieredkv.cli.inspect import plain, visible
from tieredkv.units import format_nbytes

_MAX_SHOWN = 20
_TELL_S = 3.0
_VERDICTS = (
    "[green]clean[/]",
    "[yellow]something was lost, recovery goes on without it[/]",
    "[red]damaged[/]",
)
_COLOURS = {"clean": "green", "torn or damaged": "yellow", "corrupt": "red"}


@contextmanager
def bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on standard error, so that standard output is the report alone."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines(console, title)
        return
    columns = (
        TextColumn(title),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(title, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def _lines(console: Console, title: str) -> Callable[[int, int], None]:
    """Progress without a terminal: a line every few seconds."""
    last = time.monotonic()

    def tell(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= _TELL_S:
            last = time.monotonic()
            console.print(f"{title}: {done:,} of {total:,}", highlight=False)

    return tell


def verdict(console: Console, exit_code: int) -> None:
    console.print(_VERDICTS[exit_code])


# ---- the timeline --------------------------------------------------------------------------------


def show_timeline(console: Console, found: Timeline) -> None:
    console.print(f"[bold]{plain(found.path)}[/]", highlight=False, soft_wrap=True)
    console.print(_segments(found))
    console.print(_checkpoints(found))
    facts = _grid()
    facts.add_row(
        "log",
        f"LSN {found.first_lsn} to {found.last_lsn}, durable to {found.durable_lsn}; ends {found.log_end}",
    )
    rebuilt = found.rebuilt
    facts.add_row(
        "recovery would rebuild",
        f"{rebuilt.num_blocks:,} blocks, {rebuilt.num_parts:,} parts, {rebuilt.num_sessions:,} sessions,"
        f" {rebuilt.num_namespaces:,} namespaces",
    )
    salvaged = f"; {rebuilt.num_salvaged:,} parts from slot headers" if rebuilt.num_salvaged else ""
    facts.add_row(
        "from",
        f"the checkpoint at LSN {rebuilt.checkpoint_lsn} and {rebuilt.num_replayed:,} records{salvaged}",
    )
    for loss in found.lost:
        facts.add_row("[yellow]lost[/]", f"{loss.what}{_detail(loss)}: {plain(loss.why)}")
    if not found.lost:
        facts.add_row("lost", "nothing")
    for line in found.damage:
        facts.add_row("[red]damage[/]", plain(line))
    console.print(facts)
    verdict(console, found.exit_code)


def _detail(loss: Any) -> str:
    parts = [f"{loss.nbytes:,} bytes"] if loss.nbytes else []
    if loss.first_lsn:
        parts.append(f"LSN {loss.first_lsn} to {max(loss.first_lsn, loss.last_lsn)}")
    if loss.records:
        parts.append(f"whole records behind it: {_kinds(loss.records)}")
    return f" ({', '.join(parts)})" if parts else ""


def _segments(found: Timeline) -> Table:
    table = Table("segment", "open", "LSN", "durable", "frames", "records", "names", "ends", title="log")
    for line in found.segments:
        lsns = (
            f"{line.first_lsn}-{line.last_lsn}"
            if line.last_lsn >= line.first_lsn
            else f"from {line.first_lsn}"
        )
        end = line.end
        if line.rest_nbytes:
            end += f" at byte {line.end_offset}, {line.rest_nbytes:,} bytes"
        colour = _COLOURS.get(line.end, "red")
        name = f"{line.number}" + ("" if line.standing == "counts" else f" ({line.standing})")
        trouble = f" {plain(line.trouble)}" if line.trouble else ""
        table.add_row(
            name, f"{line.open_number}", lsns, f"{line.durable_lsn}", f"{line.num_frames:,}", _kinds(line.records),
            f"LSN {line.checkpoint_lsn}", f"[{colour}]{end}[/]{trouble}",
        )  # fmt: skip
    return table


def _checkpoints(found: Timeline) -> Table:
    table = Table("checkpoint", "bytes", "vouches for", "named by", "", title="checkpoints")
    for line in found.checkpoints:
        holds = (
            f"{line.num_blocks:,} blocks, {line.num_parts:,} parts, {line.num_sessions:,} sessions,"
            f" {line.num_namespaces:,} namespaces"
        )
        what = holds if line.lsn else "the empty table"
        state = "in use" if line.in_use else "whole" if line.whole else f"[red]{plain(line.trouble)}[/]"
        named = ", ".join(f"segment {number}" for number in line.named_by)
        table.add_row(
            f"LSN {line.lsn}", format_nbytes(line.nbytes), what if line.whole else "nothing", named, state
        )
    return table


def _kinds(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {kind}" for kind, count in counts.items()) or "none"


# ---- states --------------------------------------------------------------------------------------


def show_moment(console: Console, moment: Moment, parts: list[PartAt], tiers: Any) -> None:
    console.print(
        f"LSN {moment.lsn}, from the checkpoint at LSN {moment.base_lsn}"
        f" (any LSN from {moment.earliest_lsn} to {moment.last_lsn} can be shown)", highlight=False,
    )  # fmt: skip
    facts = _grid()
    budgets = moment.budgets
    facts.add_row("blocks", f"{len(moment.state.table):,} in {len(parts):,} parts on disk")
    facts.add_row("parts", format_nbytes(budgets.parts_nbytes))
    facts.add_row("log", format_nbytes(budgets.log_nbytes))
    facts.add_row("checkpoint", format_nbytes(budgets.checkpoint_nbytes))
    for number, nbytes in budgets.by_namespace.items():
        digest = moment.state.catalog.namespaces[number].digest.hex()[:16]
        facts.add_row(f"namespace {number}", f"{digest}, {format_nbytes(nbytes)}")
    if tiers is not None:
        counts = ", ".join(f"{count:,} parts on {tier}" for tier, count in tiers.num_parts.items())
        facts.add_row("by the trace", f"{counts}; {tiers.note}" if tiers.note else counts)
    console.print(facts)
    if moment.sessions():
        name = Column("session", overflow="fold")
        table = Table(name, "namespace", "tokens", "turns", "anchors", "pinned")
        for session in moment.sessions():
            anchors = ", ".join(map(str, session.anchors))
            table.add_row(
                plain(session.name), f"{session.namespace}", f"{session.num_tokens:,}", f"{session.num_turns}",
                anchors, "yes" if session.pinned else "",
            )  # fmt: skip
        console.print(table)
    console.print(_parts("part", parts))


def _parts(title: str, parts: list[PartAt] | tuple[PartAt, ...]) -> Table:
    table = Table(title, "namespace", "group", "slot", "put", "LSN")
    for part in parts[:_MAX_SHOWN]:
        put = f"{part.put_seq >> 32}.{part.put_seq & 0xFFFFFFFF}"
        table.add_row(
            part.digest[:16], f"{part.namespace}", f"{part.group}", f"{part.slot}", put, f"{part.lsn}"
        )
    if len(parts) > _MAX_SHOWN:
        table.add_row(f"and {len(parts) - _MAX_SHOWN:,} more")
    return table


def show_difference(console: Console, found: Difference) -> None:
    console.print(f"from LSN {found.from_lsn} to LSN {found.to_lsn}", highlight=False)
    for title, parts in (("added", found.added), ("gone", found.gone), ("moved", found.moved)):
        if parts:
            console.print(_parts(f"{title} ({len(parts):,})", parts))
    facts = _grid()
    for session in found.sessions_added:
        facts.add_row("session added", f"{plain(session.name)}: {session.num_tokens:,} tokens")
    for session in found.sessions_gone:
        facts.add_row("session gone", f"{plain(session.name)}: {session.num_tokens:,} tokens")
    for before, after in found.sessions_changed:
        facts.add_row(
            "session changed", f"{plain(after.name)}: {before.num_tokens:,} to {after.num_tokens:,} tokens"
        )
    before_nbytes, after_nbytes = found.parts_nbytes
    facts.add_row("parts", f"{format_nbytes(before_nbytes)} to {format_nbytes(after_nbytes)}")
    console.print(facts)


def show_life(console: Console, life: Life, moves: list[dict[str, Any]]) -> None:
    console.print(f"[bold]{plain(life.subject)}[/]", highlight=False)
    console.print(
        f"known record by record from LSN {life.known_from_lsn} to {life.last_lsn}", highlight=False
    )
    for first, last in life.gaps:
        console.print(f"damage took LSN {first} to {last}", style="red", highlight=False)
    table = Table("LSN", "segment", "record", "what")
    if life.before:
        table.add_row("", "", "before", plain(life.before))
    for event in life.events:
        rest = {
            k: v for k, v in event.items() if k not in ("lsn", "segment", "kind", "digest", "counts", "name")
        }
        what = ", ".join(f"{name} {_short(value)}" for name, value in rest.items())
        behind = "" if event["counts"] else "[red]behind the end of the log: does not count[/] "
        table.add_row(f"{event['lsn']}", f"{event['segment']}", event["kind"], behind + plain(what))
    for move in moves[-_MAX_SHOWN:]:
        table.add_row(
            f"~{move['lsn']}", "trace", move["event"], f"tier {move['tier']}, group {move['group']}"
        )
    for part in life.now:
        what = ", ".join(
            f"{name} {_short(value)}" for name, value in part.items() if name not in ("digest", "name")
        )
        table.add_row("", "", "now", plain(what))
    if not life.now:
        table.add_row("", "", "now", "not there")
    console.print(table)


def _short(value: Any) -> str:
    return value[:16] if isinstance(value, str) else str(value)


# ---- acts ----------------------------------------------------------------------------------------


def show_crashes(console: Console, report: CrashReport) -> None:
    console.print(
        f"{report.num_crashes:,} crashes between LSN {report.first_lsn} and {report.last_lsn},"
        f" {report.num_recoveries:,} recoveries", highlight=False,
    )  # fmt: skip
    table = Table(
        "segment", "cut at byte", "written to", "recovered to", "blocks", "parts", "sessions", "log ends"
    )
    shown = report.survivors if len(report.survivors) <= 2 * _MAX_SHOWN else (
        *report.survivors[:_MAX_SHOWN], *report.survivors[-_MAX_SHOWN:]
    )  # fmt: skip
    for line in shown:
        where = (
            f"{line.first_offset}-{line.last_offset}"
            if line.last_offset > line.first_offset
            else f"{line.first_offset}"
        )
        table.add_row(
            f"{line.segment}", where, f"LSN {line.written_lsn}", f"LSN {line.last_lsn}", f"{line.num_blocks:,}",
            f"{line.num_parts:,}", f"{line.num_sessions:,}", line.log_end,
        )  # fmt: skip
    if len(shown) < len(report.survivors):
        table.add_row("...", f"{len(report.survivors) - len(shown):,} more outcomes between")
    console.print(table)
    for line in report.violations[:_MAX_SHOWN]:
        console.print(visible(line), style="red", markup=False, highlight=False)
    held = "every invariant held" if not report.violations else f"{len(report.violations):,} did not hold"
    console.print(held, style="red" if report.violations else "green")


def show_rescued(console: Console, found: Rescued) -> None:
    facts = _grid()
    facts.add_row("from", plain(found.path))
    facts.add_row("to", plain(found.out))
    facts.add_row(
        "parts", f"{found.num_parts:,} of {found.num_blocks:,} blocks, {format_nbytes(found.nbytes)}"
    )
    facts.add_row("sessions", f"{found.num_sessions:,}")
    for name, count in found.not_rescued.items():
        facts.add_row(f"[red]left behind, {plain(name)}[/]", f"{count:,} parts")
    for line in found.damage:
        facts.add_row("[red]damage[/]", plain(line))
    console.print(facts)


def show_truncated(console: Console, found: Truncated) -> None:
    if not found.segment:
        console.print(f"the log ends {found.log_end}: nothing to cut", highlight=False)
        return
    console.print(
        f"cut {found.cut_nbytes:,} bytes off segment {found.segment} at byte {found.offset};"
        f" as it was: {found.kept_copy}", markup=False, highlight=False, soft_wrap=True,
    )  # fmt: skip


def show_event(console: Console, event: dict[str, Any]) -> None:
    """One line of `--follow`."""
    rest = {name: value for name, value in event.items() if name not in ("event", "lsn", "kind")}
    what = " ".join(f"{name}={_short(value)}" for name, value in rest.items() if value not in (None, [], ""))
    title = (
        f"{event['lsn']:>10} {event['kind']}" if event["event"] == "record" else f"{'':>10} {event['event']}"
    )
    console.print(f"{title} {visible(what)}", markup=False, highlight=False, soft_wrap=True)


def _grid() -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    return grid
