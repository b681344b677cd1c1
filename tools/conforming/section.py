"""The README's section: the table of all releases, and why a cell is not exact."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from .verdict import ABSENT, CHECKPOINT, EXACT, REFUSED, WRONG, Cell

BEGIN = "<!-- conformance: written by tools/conformance.py --markdown -->"
END = "<!-- end of conformance -->"
MARKS = {EXACT: "●", CHECKPOINT: "○", REFUSED: "–", WRONG: "✗", ABSENT: "·"}
_INTRODUCTION = """\
Each cell is measured by `tools/conformance.py`: a tiny model of random weights, built from the real configuration
class, does the operation through the public API, and every tensor and logit is compared with the model's own cache.
Gemma 3 270M has its real weights and tokenizer; its prompts run past its window of 512 where the window matters.

- ● exact: restored tensors are bit-equal to those of a stock cache that never evicted anything and was driven by
  forward calls of the same lengths, and so are all logits after; all whole blocks that could be reused were. Against
  the run as it was, cut into other calls, no logit differs by more than 1e-4 in fp32, nor in bf16 by more than a
  sixteenth of the largest logit.
- ○ checkpoint: the same, from an earlier anchor; the rest is computed again.
- – refused, with the reason below. ✗ wrong. · not run, as the release does not have the family, or the weights are
  not here.
"""


def section(cells: Sequence[Cell]) -> str:
    """As Markdown: the newest release's verdicts, and where an older one differs."""
    releases = sorted({cell.transformers for cell in cells}, key=_version, reverse=True)
    operations = list(dict.fromkeys(cell.operation for cell in cells))
    families = list(dict.fromkeys(cell.family for cell in cells))
    by_release = {
        release: {(c.family, c.operation): c for c in cells if c.transformers == release}
        for release in releases
    }
    newest = by_release[releases[0]]
    lines = [_INTRODUCTION, f"The marks are those of transformers {releases[0]}.", ""]
    for release, of_release in by_release.items():
        counts = Counter(cell.verdict for cell in of_release.values())
        shown = ", ".join(f"{counts[verdict]} {verdict}" for verdict in MARKS if counts[verdict])
        rows = {cell.family for cell in of_release.values()}
        others = ", ".join(family for family in families if family not in rows)
        lines.append(
            f"- {release}: {len(of_release)} cells: {shown}{f'; not yet: {others}' if others else ''}."
        )
    lines += [
        "",
        f"| | {' | '.join(str(n) for n, _ in enumerate(operations, 1))} |",
        "|---|" + "---|" * len(operations),
    ]
    for family in families:
        marks = [MARKS[newest[family, op].verdict] if (family, op) in newest else "" for op in operations]
        lines.append(f"| {family} | {' | '.join(marks)} |")
    lines += ["", "; ".join(f"{n} {name}" for n, name in enumerate(operations, 1)) + ".", ""]
    lines += _notes("Not exact, and not from a checkpoint", _reasons(newest.values()), operations)
    for release in releases[1:]:
        differing = [cell for key, cell in by_release[release].items() if _differs(cell, newest.get(key))]
        lines += _notes(f"Otherwise in {release}", _reasons(differing, everything=True), operations)
    return "\n".join(lines)


def write_section(readme: Path, text: str) -> None:
    """Put `text` between the README's two marks.

    Raises:
        ValueError: the marks are not there, once each and in order.
    """
    whole = readme.read_text(encoding="utf-8")
    head, begin, rest = whole.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in tail:
        raise ValueError(f"{readme} must hold {BEGIN!r} and then {END!r}, once each")
    readme.write_text(f"{head}{BEGIN}\n\n{text.strip()}\n\n{END}{tail}", encoding="utf-8")


def _version(release: str) -> list[int]:
    return [int(part) for part in release.split(".")]


def _differs(cell: Cell, newest: Cell | None) -> bool:
    return newest is None or cell.verdict != newest.verdict


def _reasons(cells: Iterable[Cell], everything: bool = False) -> dict[str, dict[str, list[str]]]:
    """By what is said of a cell: the families, and of each the operations."""
    said: dict[str, dict[str, list[str]]] = {}
    for cell in cells:
        if everything or cell.verdict in (REFUSED, WRONG, ABSENT):
            what = f"{cell.verdict}: {_brief(cell.reason)}" if cell.reason else cell.verdict
            said.setdefault(what, {}).setdefault(cell.family, []).append(cell.operation)
    return said


def _brief(reason: str) -> str:
    """Its first sentence, with whatever model it names: so many families have the same."""
    return re.sub(r"\b\w+(For(CausalLM|ConditionalGeneration)|LMHeadModel)\b", "the model", reason).partition(
        ". "
    )[0]


def _notes(
    title: str, said: Mapping[str, Mapping[str, Sequence[str]]], operations: Sequence[str]
) -> list[str]:
    if not said:
        return [f"{title}: nothing.", ""]
    lines = [f"{title}:", ""]
    for what, where in said.items():
        same: dict[str, list[str]] = {}
        for family, of_family in where.items():
            named = "all" if len(of_family) == len(operations) > 1 else ", ".join(of_family)
            same.setdefault(named, []).append(family)
        places = "; ".join(f"{', '.join(families)}: {named}" for named, families in same.items())
        lines.append(f"- {places}. *{what}*")
    return [*lines, ""]
