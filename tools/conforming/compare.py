"""One turn over a restored cache against the stock cache that never evicted anything."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from .family import ATTENTION, RECURRENT
from .forwards import Forward, by_position
from .scene import BLOCK_SIZE, GREEDY, Row, Scene, Turn, all_forwards
from .states import first_difference
from .stock import Stock, cache_name, together
from .verdict import CHECKPOINT, EXACT, WRONG, DidNotHappen, Finding

MOST_FP32 = 1e-4
MOST_BF16_SHARE = 2**-4
"""bf16 keeps 8 bits, so every product is off by up to 2^-9 of itself; cutting the prompt otherwise moves these
errors through all layers. A sixteenth of the largest logit is twice what stock caches show among themselves."""


@dataclass(frozen=True)
class Wanted:
    """What a turn must show.

    Attributes:
        num_shared: tokens of the prompt that the store or the session has seen, so may be reused.
        least: so many must come from the cache, or the operation did not happen.
    """

    num_shared: int
    least: int = 1


def judge(scene: Scene, history: Sequence[Turn], turn: Turn, wanted: Wanted) -> Finding:
    """Tensors and logits against stock: `exact`, `checkpoint` or `wrong`."""
    if turn.num_reused < wanted.least:
        raise DidNotHappen(f"{turn.num_reused} tokens were reused, not {wanted.least}: {turn.reason}")
    before = all_forwards(list(history))
    different = same_lengths(scene, before, turn)
    error = as_it_was(scene, before, turn, wanted.num_shared)
    reusable = min(wanted.num_shared, turn.num_prompt - 1)
    logits = [forward.logits for forward in turn.forwards]
    return _verdict(scene, different, error, turn.num_reused, reusable, logits)


def _verdict(
    scene: Scene, different: str, error: float, num_reused: int, reusable: int, logits: Sequence[torch.Tensor]
) -> Finding:
    if different:
        return Finding(WRONG, error, different)
    limit = most_error(scene.model, logits)
    if not error <= limit:
        return Finding(WRONG, error, f"logits differ by {error:.1e} from the run as it was, over {limit:.1e}")
    boundary = reusable // BLOCK_SIZE * BLOCK_SIZE
    if num_reused >= boundary:
        return Finding(EXACT, error, "")
    return Finding(CHECKPOINT, error, f"{num_reused} of {boundary} tokens, the rest recomputed")


def most_error(model: Any, logits: Sequence[torch.Tensor]) -> float:
    """The largest difference allowed between these and those of the same tokens in other calls."""
    if model.dtype == torch.float32:
        return MOST_FP32
    return MOST_BF16_SHARE * max(part.abs().max().item() for part in logits)


def judge_later(scene: Scene, history: Sequence[Turn], row: Row, turn: Turn) -> Finding:
    """A turn after the first sequence of a row: that its logits are right, however the row was computed.

    What is kept was: the history, the row's prompt, then its answer token by token, alone.
    """
    prompt, said = row.prompt.shape[1], row.sequences[:1]
    before = calls_up_to(scene, all_forwards(list(history)), row.forwards[0].start) + row.forwards
    before += [Forward(at, said[:, at : at + 1], said, 1) for at in range(prompt - 1, said.shape[1] - 1)]
    error = as_it_was(scene, before, turn, said.shape[1] - 1)
    logits = [forward.logits for forward in turn.forwards]
    return _verdict(scene, "", error, turn.num_reused, turn.num_reused, logits)


def same_lengths(scene: Scene, before: Sequence[Forward], turn: Turn) -> str:
    """Where the turn differs in any bit from a stock cache driven by the same calls, or nothing."""
    stock = Stock(scene.model, scene.family)
    stock.play(calls_up_to(scene, before, turn.num_reused))
    stock.back_to(turn.num_reused)
    early, late = turn.forwards[: turn.num_early], turn.forwards[turn.num_early :]
    played = stock.play(early)
    if stock.num_tokens:
        different = first_difference(turn.attached, stock.states())
        if different:
            return f"restored tensors: {different}"
    for ours, logits in zip(turn.forwards, [*played, *stock.play(late)], strict=True):
        if not torch.equal(ours.logits, logits):
            error = (ours.logits.double() - logits.double()).abs().max().item()
            return (
                f"logits of tokens {ours.start} to {ours.end} differ by {error:.1e} from an unevicted cache"
            )
    return ""


def as_it_was(scene: Scene, before: Sequence[Forward], turn: Turn, num_shared: int) -> float:
    """The largest difference of any logit from a stock cache that kept all that was shared.

    The run as it was: the calls that computed the shared tokens, then the rest of the prompt in one call (or in
    the steps that the family needs), then token by token.
    """
    stock = Stock(scene.model, scene.family)
    kept = min(num_shared, turn.num_prompt - 1)
    stock.play(calls_up_to(scene, before, kept))
    stock.back_to(min(kept, stock.num_tokens))
    ids = turn.tokens.to(scene.model.device)
    done = stock.forward_in_steps(ids[:, stock.num_tokens : turn.num_prompt], num_asked=1)
    for at in range(turn.num_prompt, ids.shape[1] - 1):
        done += stock.forward_in_steps(ids[:, at : at + 1])
    theirs, ours = by_position(done), by_position(turn.forwards)
    positions = [at for at in ours if at in theirs and at >= turn.num_prompt - 1]
    if len(positions) < ids.shape[1] - turn.num_prompt:
        raise AssertionError("logits of the answer are missing")
    return max((ours[at].double() - theirs[at].double()).abs().max().item() for at in positions)


def judge_rows(
    scene: Scene,
    histories: Sequence[Sequence[Turn]],
    rows: Sequence[Row],
    forwards: Sequence[Forward],
    options: Mapping[str, Any],
) -> Finding:
    """Several rows in one call, against the same over stock caches put together, and each alone as it was."""
    stocks = [_before(scene, history, row) for history, row in zip(histories, rows, strict=True)]
    cache = together(stocks, max((1, *options.values())))
    longest = max(row.prompt.shape[1] for row in rows)
    ids = torch.cat([_padded(row.prompt, longest) for row in rows])
    mask = torch.cat([_padded(torch.ones_like(row.prompt), longest) for row in rows])
    given = {"input_ids": ids, "attention_mask": mask, cache_name(scene.model): cache}
    if scene.family.kind == RECURRENT:  # such a cache knows no length: whole prompts would run over it again
        given = {"input_ids": ids[:, -1:], cache_name(scene.model): cache}
    theirs = _recorded(scene, options, **given)
    different = ""
    if not all(torch.equal(a.ids, b.ids) for a, b in zip(forwards, theirs, strict=True)):
        different = "other tokens than with an unevicted cache"
    elif not all(torch.equal(a.logits, b.logits) for a, b in zip(forwards, theirs, strict=True)):
        different = f"logits differ by {_apart(forwards, theirs):.1e} from an unevicted cache"
    error = 0.0
    for number, (history, row) in enumerate(zip(histories, rows, strict=True)):
        alone = _row_as_it_was(scene, history, row, options)
        num_each = alone[-1].ids.shape[0]
        mine = [_rows_of(forward, number * num_each, num_each) for forward in forwards]
        error = max(error, _apart(mine, alone))
        if not all(torch.equal(a.ids[:, -1:], b.ids[:, -1:]) for a, b in zip(mine, alone, strict=True)):
            error = math.inf  # other tokens: what follows them cannot be compared
    num_reused = min(row.forwards[0].start for row in rows)
    reusable = min(history[-1].tokens.shape[1] for history in histories) - 1
    return _verdict(scene, different, error, num_reused, reusable, [forward.logits for forward in forwards])


def _before(scene: Scene, history: Sequence[Turn], row: Row) -> Stock:
    """A stock cache that holds a row's prompt but for its last token, computed by the calls that computed it."""
    stock = Stock(scene.model, scene.family)
    start = row.forwards[0].start
    stock.play(calls_up_to(scene, all_forwards(list(history)), start))
    stock.back_to(start)
    stock.play(row.forwards)
    return stock


def _row_as_it_was(
    scene: Scene, history: Sequence[Turn], row: Row, options: Mapping[str, Any]
) -> list[Forward]:
    """The row alone behind a stock cache that kept its history; the rest of its prompt as in `as_it_was`."""
    stock = Stock(scene.model, scene.family)
    kept = history[-1].tokens.shape[1] - 1
    stock.play(calls_up_to(scene, all_forwards(list(history)), kept))
    stock.back_to(min(kept, stock.num_tokens))
    if scene.family.step or scene.family.kind == RECURRENT:
        stock.forward_in_steps(row.prompt[:, stock.num_tokens : -1])
    cache = together([stock], max((1, *options.values())))
    given = {"input_ids": row.prompt[:, stock.num_tokens :], cache_name(scene.model): cache}
    if scene.family.kind != RECURRENT:  # such a cache knows no length, so neither does a mask
        given["attention_mask"] = torch.ones_like(row.prompt)
    return _recorded(scene, options, **given)


def _recorded(scene: Scene, options: Mapping[str, Any], **given: Any) -> list[Forward]:
    scene.recorder.take()
    scene.model.generate(**given, **GREEDY, **options)
    return scene.recorder.take()


def _rows_of(forward: Forward, first: int, num_rows: int) -> Forward:
    rows = slice(first, first + num_rows)
    return replace(forward, ids=forward.ids[rows], logits=forward.logits[rows])


def _padded(ids: torch.Tensor, num_tokens: int) -> torch.Tensor:
    return torch.nn.functional.pad(ids, (num_tokens - ids.shape[1], 0))


def _apart(ours: Sequence[Forward], theirs: Sequence[Forward]) -> float:
    """The largest difference of any logit behind the last token of a call."""
    pairs = [(a.logits[:, -1].double(), b.logits[:, -1].double()) for a, b in zip(ours, theirs, strict=True)]
    return max((a - b).abs().max().item() for a, b in pairs)


def calls_up_to(scene: Scene, forwards: Sequence[Forward], num_tokens: int) -> list[Forward]:
    """The calls that led to the first `num_tokens`.

    One that goes beyond is kept whole where its end can be cut off afterwards. A recurrent state cannot be cut,
    so there the call itself is.
    """
    calls = [forward for forward in forwards if forward.start < num_tokens]
    if scene.family.kind == ATTENTION:
        return calls
    return [replace(call, ids=call.ids[:, : num_tokens - call.start]) for call in calls]
