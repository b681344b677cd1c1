"""What a cell of the table says, and how several looks at it make one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

EXACT, CHECKPOINT, REFUSED, WRONG, ABSENT = "exact", "checkpoint", "refused", "wrong", "absent"
CELL = "cell: "
"""How a line begins by which a process hands on a cell."""
READY = "ready for a family"
"""The line by which it asks for the next one."""
_WORST_FIRST = (WRONG, REFUSED, CHECKPOINT, EXACT)


class DidNotHappen(Exception):
    """The operation of a cell did not really take place, so nothing was shown."""


@dataclass(frozen=True)
class Finding:
    """One look: a verdict, the largest error of any logit against the run as it was, and why.

    Attributes:
        by_transformers: a refusal that is transformers' own, for the stock cache as well.
    """

    verdict: str
    max_abs_logit_error: float | None
    reason: str
    by_transformers: bool = False


@dataclass(frozen=True)
class Cell:
    """One cell of the table.

    Attributes:
        transformers: the minor release it was found in.
    """

    family: str
    operation: str
    verdict: str
    max_abs_logit_error: float | None
    reason: str
    by_transformers: bool = False
    transformers: str = ""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def worst(findings: Sequence[Finding]) -> Finding:
    """Several looks at one operation as one: the worst verdict, the largest error, all reasons."""
    verdict = min((finding.verdict for finding in findings), key=_WORST_FIRST.index)
    errors = [f.max_abs_logit_error for f in findings if f.max_abs_logit_error is not None]
    reasons = [f.reason for f in findings if f.verdict == verdict] if verdict == WRONG else []
    reasons = reasons or [finding.reason for finding in findings]
    by_transformers = all(f.by_transformers for f in findings if f.verdict == verdict)
    text = "; ".join(dict.fromkeys(filter(None, reasons)))
    return Finding(verdict, max(errors, default=None), text, by_transformers)
