"""What was in a store's log, what survived, and what would be lost at any point. Reads only, but for --truncate.

python tools/replay.py DIR                          the timeline
python tools/replay.py DIR --at LSN                 table, sessions and budgets then
python tools/replay.py DIR --diff A B               what changed between two LSNs
python tools/replay.py DIR --why DIGEST             the life of one block; --session NAME of one conversation
python tools/replay.py DIR --follow                 the log of a living store, as it is written
python tools/replay.py DIR --crash-at every-record  crashes of a copy; or every-byte, or an LSN
python tools/replay.py DIR --verify                 every byte that the log says is there
python tools/replay.py DIR --salvage OUT            a clean store of all that can be proved
python tools/replay.py DIR --truncate               cuts a torn end off the log
python tools/replay.py DIR --export jsonl           the records, or what the trace saw (--trace), as lines
python tools/replay.py --bench                      how fast all this is

With --json the last line is one JSON object. Exit codes: 0 clean, 1 loss but recoverable, 2 damage or an error,
3 not a store.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from replaying import view
from rich.console import Console

from tieredkv.audit.crash import EVERY_BYTE, EVERY_RECORD, crash_at
from tieredkv.audit.follow import Follower
from tieredkv.audit.history import difference, life_of_block, life_of_session, records_of, state_at
from tieredkv.audit.repair import truncate
from tieredkv.audit.report import Condition, fsck, read
from tieredkv.audit.rescue import rescue
from tieredkv.audit.timeline import timeline
from tieredkv.cli.inspect import visible
from tieredkv.errors import BadInput, NotAStore, TieredKVError
from tieredkv.table import trace

_POLL_S = 0.05


class Output:
    """Standard output: tables for people, or one JSON object at the end."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.console = Console(width=None if sys.stdout.isatty() else 160)

    def give(self, found: Any, show: Callable[[Console], None], exit_code: int = 0) -> int:
        """`found` as JSON, or by `show`; returns the exit code."""
        if self.as_json:
            values = dict(found) if isinstance(found, dict) else asdict(found)
            condition = values.pop("condition", {})
            self.line({**values, **condition, "exit_code": exit_code})
        else:
            show(self.console)
        return exit_code

    def give_of(self, condition: Condition, found: Any, show: Callable[[Console], None]) -> int:
        """As `give`, of a store in that condition: what is wrong with it is said too, and is the exit code."""
        code = self.give(found, show, condition.exit_code)
        if code:
            print(f"replay: {visible(str(condition))}", file=sys.stderr)
        return code

    def line(self, values: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps(values) + "\n")
        sys.stdout.flush()


def main(
    directory: Annotated[Path | None, typer.Argument(metavar="DIR", help="A store directory.")] = None,
    at: Annotated[int | None, typer.Option(metavar="LSN", help="The state at this LSN.")] = None,
    diff: Annotated[
        tuple[int, int] | None, typer.Option(metavar="A B", help="What changed from A to B.")
    ] = None,
    why: Annotated[str | None, typer.Option(metavar="DIGEST", help="The life of a block.")] = None,
    session: Annotated[str | None, typer.Option(metavar="NAME", help="The life of a session.")] = None,
    follow: Annotated[bool, typer.Option("--follow", help="The log as it is written, until Ctrl-C.")] = False,
    crash: Annotated[
        str | None, typer.Option("--crash-at", metavar="WHERE", help="every-record, every-byte or an LSN.")
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Check every byte that the log says is there.")
    ] = False,
    salvage: Annotated[
        Path | None, typer.Option(metavar="OUT", help="Make a clean store of what is proved.")
    ] = None,
    cut: Annotated[bool, typer.Option("--truncate", help="Cut a torn end, keeping a .broken copy.")] = False,
    export: Annotated[str | None, typer.Option(metavar="jsonl", help="The records as lines.")] = None,
    of_trace: Annotated[bool, typer.Option("--trace", help="With --export: the access trace.")] = False,
    bench: Annotated[bool, typer.Option("--bench", help="Measure; needs no DIR.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object as the last line.")] = False,
) -> None:
    """Replay the log of a store, wholly or in part, and say what it holds."""
    out = Output(as_json)
    acts: list[tuple[Any, Callable[[str], int]]] = [
        (at, lambda path: show_at(out, path, at)),
        (diff, lambda path: show_diff(out, path, diff)),
        (why, lambda path: show_why(out, path, str(why))),
        (session, lambda path: show_session(out, path, str(session))),
        (follow or None, lambda path: run_follow(out, path)),
        (crash, lambda path: run_crashes(out, path, str(crash))),
        (verify or None, lambda path: run_verify(out, path)),
        (salvage, lambda path: run_salvage(out, path, str(salvage))),
        (cut or None, lambda path: run_truncate(out, path)),
        (export, lambda path: run_export(out, path, str(export), of_trace)),
    ]
    chosen = [act for wanted, act in acts if wanted is not None]
    if bench:
        from replaying.bench import run_bench

        raise typer.Exit(run_bench(as_json))
    try:
        if directory is None or len(chosen) > 1:
            raise BadInput("give one DIR, and at most one thing to do with it")
        if of_trace and export is None:
            raise BadInput("--trace goes with --export jsonl")
        code = (chosen or [lambda path: show_timeline(out, path)])[0](str(directory))
    except (TieredKVError, OSError) as error:
        code = refuse(out, error)
    raise typer.Exit(code)


def refuse(out: Output, error: Exception) -> int:
    code = 3 if isinstance(error, NotAStore) else 2
    print(f"replay: {visible(str(error))}", file=sys.stderr)
    if out.as_json:
        out.line({"error": str(error), "exit_code": code})
    return code


# ---- looking -------------------------------------------------------------------------------------


def show_timeline(out: Output, path: str) -> int:
    with view.bar("reading the log") as progress:
        found = timeline(path, progress)
    return out.give(found, lambda console: view.show_timeline(console, found), found.exit_code)


def show_at(out: Output, path: str, lsn: int | None) -> int:
    moment = state_at(path, lsn)
    parts = list(moment.parts())
    tiers = trace.tiers_at(path, moment.lsn)
    values = {
        "lsn": moment.lsn, "base_lsn": moment.base_lsn, "earliest_lsn": moment.earliest_lsn,
        "last_lsn": moment.last_lsn, "budgets": asdict(moment.budgets), "num_blocks": len(moment.state.table),
        "num_parts": len(parts), "sessions": [asdict(s) for s in moment.sessions()],
        "parts": [asdict(part) for part in parts], "tiers": None if tiers is None else asdict(tiers),
        "condition": asdict(moment.condition),
    }  # fmt: skip
    return out.give_of(
        moment.condition, values, lambda console: view.show_moment(console, moment, parts, tiers)
    )


def show_diff(out: Output, path: str, lsns: tuple[int, int] | None) -> int:
    assert lsns is not None, "chosen without its LSNs"
    found = difference(path, *lsns)
    return out.give_of(found.condition, found, lambda console: view.show_difference(console, found))


def show_why(out: Output, path: str, digest: str) -> int:
    life = life_of_block(path, digest)
    moves = list(trace.moves_of(path, life.subject))
    values = {**asdict(life), "moves": moves}
    return out.give_of(life.condition, values, lambda console: view.show_life(console, life, moves))


def show_session(out: Output, path: str, name: str) -> int:
    life = life_of_session(path, name)
    return out.give_of(life.condition, life, lambda console: view.show_life(console, life, []))


def run_follow(out: Output, path: str) -> int:
    """Until a signal ends it; the last line then says how much was seen."""
    follower, stop = Follower(path), threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda _number, _frame: stop.set())
    while True:
        last_look = stop.is_set()
        for event in follower.poll():
            if out.as_json:
                out.line(event)
            else:
                view.show_event(out.console, event)
        if last_look:
            break
        stop.wait(_POLL_S)
    follower.close()
    seen = {
        "event": "end", "last_lsn": follower.last_lsn, "num_records": follower.num_records,
        "num_segments": follower.num_segments, "num_cuts": follower.num_cuts, "num_jumps": follower.num_jumps,
    }  # fmt: skip
    return out.give(seen, lambda console: view.show_event(console, seen))


# ---- acting --------------------------------------------------------------------------------------


def run_crashes(out: Output, path: str, where: str) -> int:
    place: str | int = where
    if where not in (EVERY_BYTE, EVERY_RECORD):
        try:
            place = int(where)
        except ValueError:
            raise BadInput(f"--crash-at {where}: say {EVERY_RECORD}, {EVERY_BYTE} or an LSN") from None
    with view.bar("crashing a copy") as progress:
        report = crash_at(path, place, progress)
    return out.give(report, lambda console: view.show_crashes(console, report), report.exit_code)


def run_verify(out: Output, path: str) -> int:
    with view.bar("verifying") as progress:
        report = fsck(path, progress)

    def show(console: Console) -> None:
        from tieredkv.cli.inspect import print_fsck

        print_fsck(console, report)

    return out.give(report, show, report.exit_code)


def run_salvage(out: Output, path: str, new: str) -> int:
    with view.bar("salvaging") as progress:
        found = rescue(path, new, progress)
    return out.give(found, lambda console: view.show_rescued(console, found), found.exit_code)


def run_truncate(out: Output, path: str) -> int:
    found = truncate(path)
    return out.give(found, lambda console: view.show_truncated(console, found), found.exit_code)


def run_export(out: Output, path: str, form: str, of_trace: bool) -> int:
    if form != "jsonl":
        raise BadInput(f"--export {form}: jsonl is the form there is")
    reading = read(path)
    lines: Iterator[dict[str, Any]] = trace.accesses(path) if of_trace else records_of(reading)
    count = 0
    for line in lines:
        sys.stdout.write(json.dumps(line) + "\n")
        count += 1
    sys.stdout.flush()
    values = {"num_lines": count, "condition": asdict(reading.condition)}
    return out.give_of(reading.condition, values, lambda _console: None)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()
