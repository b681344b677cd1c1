"""What a prompt cost: tokens reused and from where, the seconds that saved, why not more, where it diverged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..block.hashing import common_prefix
from ..outcomes import Reason
from ..table.catalog import Turn
from .capture import Tokens
from .gate import Choice
from .template import Message, Template

_NUM_SHOWN = 6
"""Ids shown on either side of a divergence."""


@dataclass(frozen=True)
class Divergence:
    """Where a prompt left what the session held.

    Attributes:
        token: the first token that differs; what follows it is computed anew.
        message: the message of the session that it lies in, from 0; None for ids without messages.
        held, given: the text from there on in the session and in the prompt.
        cause: an edited message, a template that writes an old one otherwise, or other ids.
    """

    token: int
    message: int | None
    held: str = field(repr=False)
    given: str = field(repr=False)
    cause: str

    def __str__(self) -> str:
        where = f"token {self.token}" + (f", in message {self.message}" if self.message is not None else "")
        return f"diverged at {where}: {self.given!r} instead of {self.held!r} ({self.cause})"


@dataclass(frozen=True)
class Explain:
    """What the last prompt cost.

    Attributes:
        prompt_tokens, reused_tokens: tokens of the prompt, and how many of them were not computed.
        by_tier: the reused tokens by where they were: `session` is this session's own memory.
        reason, detail: why not more.
        divergence: where the prompt left what the session held, or None.
        restore_s: seconds spent on finding and reading the prefix.
        ttft_s: seconds from `send` to the first token; None before it.
        skipped_s: seconds of prefill that the reused tokens should have taken; None before any was measured.
        choice: what loading and computing should take, which was chosen, and why.
    """

    prompt_tokens: int
    reused_tokens: int
    by_tier: Mapping[str, int] = field(default_factory=dict)
    reason: str = str(Reason.COMPLETE)
    detail: str = ""
    divergence: Divergence | None = None
    restore_s: float = 0.0
    ttft_s: float | None = None
    skipped_s: float | None = None
    choice: Choice | None = None

    @property
    def diverged_at(self) -> int | None:
        """The token at which the prompt left what the session held."""
        return None if self.divergence is None else self.divergence.token

    def __str__(self) -> str:
        tiers = ", ".join(f"{tier} {count:,}" for tier, count in self.by_tier.items())
        text = f"{self.reused_tokens:,} of {self.prompt_tokens:,} tokens reused" + (
            f" ({tiers})" if tiers else ""
        )
        if self.skipped_s is not None:
            text += f", {self.skipped_s:.2f} s of prefill skipped"
        if self.reason != str(Reason.COMPLETE):
            text += f"; not more: {self.reason}" + (f", {self.detail}" if self.detail else "")
        if self.choice is not None:
            text += f"; {self.choice}"
        return text + (f"; {self.divergence}" if self.divergence is not None else "")


def divergence(
    template: Template,
    held: Tokens,
    given: Tokens,
    turns: Sequence[Turn] = (),
    said: Sequence[Message] = (),
    messages: Sequence[Message] = (),
) -> Divergence | None:
    """Where `given` leaves `held`, or None if it goes on from it.

    Args:
        turns, said: the messages in `held`: where each ends, and its text.
        messages: those of the prompt.
    """
    at = common_prefix(held, given)
    if at >= len(held):
        return None
    message = next((i for i, turn in enumerate(turns) if turn.end > at), None)
    here, there = (template.decode(ids[at : at + _NUM_SHOWN], keep_special=True) for ids in (held, given))
    if at == len(given):
        cause = "the prompt is shorter"
    elif message is None or not messages:
        cause = "other ids"
    elif list(said[: message + 1]) == list(messages[: message + 1]):
        cause = "the chat template writes this old message otherwise"
    else:
        cause = "the message was edited"
    return Divergence(at, message, here, there, cause)
