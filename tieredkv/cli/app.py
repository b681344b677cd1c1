"""The commands. Errors of ours and of the disk are one line; others are bugs and show a trace."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from ..errors import NotAStore, TieredKVError

if TYPE_CHECKING:
    from ..audit.report import Condition
    from ..audit.sessions import Listing, ResumeInfo

app = typer.Typer(
    help="A tiered KV cache for LLM chats that survives anything.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on the last line.")]
Directory = Annotated[Path, typer.Argument(metavar="DIR", help="A store directory.")]


@app.command()
def demo(
    model: Annotated[Path | None, typer.Option(help="A local folder of a transformers causal LM.")] = None,
    document: Annotated[Path | None, typer.Option(help="A UTF-8 text of at least 3,000 tokens.")] = None,
    directory: Annotated[Path | None, typer.Option("--dir", help="Keep the chat's store here.")] = None,
    as_json: AsJson = False,
) -> None:
    """Chat in little memory, be killed in the middle of an answer, come back without a prefill."""
    from .demo import run_demo
    from .document import own_document, read_document
    from .model import check_folder, require
    from .report import print_outcome
    from .script import Script

    require("transformers")
    if model is not None:
        check_folder(model)
    text = own_document() if document is None else read_document(document)
    console = Console()
    outcome = run_demo(
        console, model, Script.about(text, None if document is None else str(document)), directory
    )
    print_outcome(console, outcome)
    if as_json:
        print(json.dumps(outcome.as_json()))
    raise typer.Exit(0 if outcome.ok else 1)


@app.command()
def stat(directory: Directory, as_json: AsJson = False) -> None:
    """What is in a store: namespaces, sessions, parts by tier, log, checkpoints, last recovery."""
    from ..audit.report import stat as read_stat
    from .inspect import print_stat

    found = read_stat(directory)
    if as_json:
        print(json.dumps(asdict(found)))
    else:
        print_stat(Console(), found)
    raise typer.Exit(found.exit_code)


@app.command()
def sessions(directory: Directory, as_json: AsJson = False) -> None:
    """The conversations in a store: messages, tokens, bytes, wishes, last use. Never what was said."""
    from ..audit.sessions import list_sessions
    from .sessions import print_sessions

    found = list_sessions(directory)
    if as_json:
        print(json.dumps(flat(found)))
    else:
        print_sessions(Console(), found.sessions)
    raise typer.Exit(end(found.condition))


@app.command()
def explain(
    directory: Directory,
    session: Annotated[str, typer.Argument(metavar="SESSION", help="A session's name.")],
    as_json: AsJson = False,
) -> None:
    """What a resume of a session would find after a restart, by tier, and why not more."""
    from ..audit.sessions import explain_session
    from .sessions import print_resume

    found = explain_session(directory, session)
    if as_json:
        print(json.dumps(flat(found)))
    else:
        print_resume(Console(), found)
    raise typer.Exit(end(found.condition))


@app.command()
def fsck(
    directory: Directory,
    mend: Annotated[
        bool, typer.Option("--repair", help="Then recover the store without what is bad.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Verify every reachable byte of a store. Exit code 0 clean, 1 loss, 2 damage, 3 no store."""
    from ..audit.repair import repair
    from ..audit.report import fsck as check
    from .inspect import print_fsck, with_progress

    report = with_progress(lambda progress: check(directory, progress))
    if mend and report.exit_code:
        repair(directory, report.bad)
        report = replace(report, repaired=True)
    if as_json:
        print(json.dumps(asdict(report)))
    else:
        print_fsck(Console(), report)
    raise typer.Exit(report.exit_code)


def flat(found: Listing | ResumeInfo) -> dict[str, Any]:
    """As values, with what is wrong with the store beside them, as `stat` and `fsck` have it."""
    values = asdict(found)
    condition = values.pop("condition")
    return {**values, **condition}


def end(condition: Condition) -> int:
    """The exit code; what is wrong with the store is said on standard error."""
    from .inspect import visible

    if condition.exit_code:
        print(f"tieredkv: {visible(str(condition))}", file=sys.stderr)
    return condition.exit_code


def run() -> None:
    """The command line. Exit codes: 0 clean, 1 loss or an unmet figure, 2 damage or an error, 3 no store."""
    try:
        app()
    except (TieredKVError, OSError) as error:
        from .inspect import visible

        code = 3 if isinstance(error, NotAStore) else 2
        print(f"tieredkv: {visible(str(error))}", file=sys.stderr)
        if "--json" in sys.argv[1:]:
            print(json.dumps({"error": str(error), "exit_code": code}))
        raise SystemExit(code) from None
