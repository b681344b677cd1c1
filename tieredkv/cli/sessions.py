"""What `sessions` and `explain` found, for people."""

from __future__ import annotations

import time

from rich.console import Console
from rich.table import Column, Table

from ..audit.sessions import ResumeInfo, SessionInfo
from ..sessions import PRIORITIES
from ..units import format_nbytes
from .inspect import plain

_DAY_S = 86_400.0


def print_sessions(console: Console, sessions: tuple[SessionInfo, ...]) -> None:
    """One line a session; never what was said in it."""
    names = (
        Column("session", overflow="fold"),
        "messages",
        "tokens",
        "unshared",
        "shared",
        "pinned",
        "priority",
        "expires in",
        "last use",
    )
    table = Table(*names)
    ranks = {rank: name for name, rank in PRIORITIES.items()}
    for info in sessions:
        expires = "" if info.expires_in_s is None else f"{max(0.0, info.expires_in_s) / _DAY_S:.1f} days"
        used = "" if info.used_at is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(info.used_at))
        sizes = format_nbytes(info.unshared_nbytes), format_nbytes(info.shared_nbytes)
        wishes = "yes" if info.pinned else "", ranks.get(info.priority, "") if info.priority else ""
        counts = f"{info.num_turns}", f"{info.num_tokens:,}"
        table.add_row(plain(info.name), *counts, *sizes, *wishes, expires, used)
    console.print(table if sessions else "no sessions")


def print_resume(console: Console, found: ResumeInfo) -> None:
    """What a resume would find, by tier, and why not more."""
    facts = Table.grid(padding=(0, 2))
    facts.add_column(no_wrap=True)
    facts.add_row("session", plain(found.name))
    tiers = ", ".join(f"{tier} {count:,}" for tier, count in found.by_tier.items())
    facts.add_row(
        "found", f"{found.num_restorable:,} of {found.num_tokens:,} tokens" + (f" ({tiers})" if tiers else "")
    )
    facts.add_row("why not more", plain(found.reason + (f": {found.detail}" if found.detail else "")))
    anchors = ", ".join(
        f"{at:,}" + ("" if good else " (not restorable)") for at, good in found.anchors.items()
    )
    facts.add_row("anchors", anchors or "none")
    for expected in found.expected:
        loading, computing = map(_duration, (expected.restore_s, expected.compute_s))
        chosen = "loaded" if expected.is_loaded else "computed again"
        facts.add_row(
            plain(expected.device), f"loading takes {loading}, computing {computing}: would be {chosen}"
        )
    console.print(facts, highlight=False, soft_wrap=True)


def _duration(seconds: float | None) -> str:
    return "not known" if seconds is None else f"about {seconds:.3f} s"
