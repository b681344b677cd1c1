"""Which boundaries a session keeps restorable. Pure: numbers of tokens in, numbers of tokens out."""

from __future__ import annotations

from collections.abc import Sequence

from ..table.catalog import Turn

_NUM_TURN_ENDS = 3
"""A session keeps its end and its last two turn ends."""
_NUM_BRANCHES = 2
"""And the last places where other chains left its own."""


def boundary(num_tokens: int, block_size: int) -> int:
    """The last boundary that a sequence of `num_tokens` can be restored at: one token is left to compute."""
    return max(0, num_tokens - 1) // block_size * block_size


def system_head(num_system_tokens: int, block_size: int) -> int:
    """The boundary at the end of a system message, whose tokens others may share to the last."""
    return num_system_tokens // block_size * block_size


def with_branch(heads: Sequence[int], branch: int) -> list[int]:
    """Heads are the system message's end, then the last places where other chains left this one; 0 is none."""
    heads = list(heads) or [0]
    if branch and branch not in heads:
        heads = [heads[0], *[*heads[1:], branch][-_NUM_BRANCHES:]]
    return heads


def lasting(turns: Sequence[Turn], heads: Sequence[int], block_size: int) -> set[int]:
    """What is kept from turn to turn: the heads and the last turn ends."""
    ends = [turn.end for turn in turns if turn.role == "assistant"][-_NUM_TURN_ENDS:]
    return {*heads, *(boundary(end, block_size) for end in ends)} - {0}


def at_question(
    turns: Sequence[Turn], heads: Sequence[int], held: Sequence[int], num_shared: int, block_size: int
) -> list[int]:
    """When a prompt is committed: of the anchors `held` those it still has, its heads, and its end.

    Its end is held before it is there, so that a turn that breaks can be made again.
    """
    kept = lasting(turns, heads, block_size).intersection(held)
    end = boundary(turns[-1].end, block_size)
    return sorted({a for a in kept if a <= num_shared} | {*heads, end} - {0})


def at_answer(turns: Sequence[Turn], heads: Sequence[int], num_tokens: int, block_size: int) -> list[int]:
    """When an answer is committed: what lasts, and the end of its prompt."""
    prompt_end = next((turn.end for turn in reversed(turns) if turn.role == "user"), 0)
    named = lasting(turns, heads, block_size) | {boundary(prompt_end, block_size)}
    return sorted(anchor for anchor in named if 0 < anchor <= num_tokens)
