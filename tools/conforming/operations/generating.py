"""What `generate` can do over a restored prefix: rows, beams, drafts, a prompt in chunks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch

from ..compare import Wanted, judge, judge_later, judge_rows
from ..family import Family
from ..scene import NUM_NEW, NUM_SAID, Scene, Turn
from ..verdict import REFUSED, DidNotHappen, Finding, worst

_NAME, _OTHER = "talk", "other"
_CHUNK = 7
BEAMS: Mapping[str, Any] = {"num_beams": 3}
SEQUENCES: Mapping[str, Any] = {"num_beams": 3, "num_return_sequences": 3}
LOOKUP: Mapping[str, Any] = {"prompt_lookup_num_tokens": 3}
CHUNKS: Mapping[str, Any] = {"prefill_chunk_size": _CHUNK}
_DRAFTS = 3


def beams(scene: Scene) -> Finding:
    return _rows(scene, BEAMS)


def return_sequences(scene: Scene) -> Finding:
    return _rows(scene, SEQUENCES)


def prompt_lookup(scene: Scene) -> Finding:
    return _drafted(scene, LOOKUP)


def draft_model(scene: Scene) -> Finding:
    return _drafted(scene, drafting(scene.model, scene.family))


def drafting(model: Any, family: Family) -> dict[str, Any]:
    """A draft model that is often right, and often wrong: the same weights, shaken."""
    draft = family.build(model.dtype)
    shake = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in draft.parameters():
            noise = torch.randn(parameter.shape, generator=shake) * parameter.float().std().nan_to_num()
            parameter.add_(0.05 * noise.to(parameter.dtype))
    draft.generation_config.num_assistant_tokens = _DRAFTS
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0
    return {"assistant_model": draft}


def chunked_prefill(scene: Scene) -> Finding:
    """The prompt behind the prefix goes through the model in chunks."""
    turns, turn = _after_two(scene, CHUNKS)
    prompt = [call for call in turn.forwards[turn.num_early :] if call.start < turn.num_prompt]
    if prompt and all(call.ids.shape[1] == 1 for call in prompt):
        return Finding(
            REFUSED, None, "its calls of several tokens do not go on from a state: it runs one by one"
        )
    if len(prompt) < 2 or any(call.ids.shape[1] > _CHUNK for call in prompt):
        raise DidNotHappen(f"the prompt went in calls of {[call.ids.shape[1] for call in prompt]} tokens")
    return judge(scene, turns, turn, Wanted(turns[-1].tokens.shape[1] - 1))


def _drafted(scene: Scene, options: Mapping[str, Any]) -> Finding:
    turns, turn = _after_two(scene, options, 3 * NUM_NEW, _rejected)
    if not _rejected(turn):
        raise DidNotHappen(f"no draft was rejected in {len(turn.forwards)} calls")
    return judge(scene, turns, turn, Wanted(turns[-1].tokens.shape[1] - 1))


def _rejected(turn: Turn) -> bool:
    """Whether the cache was cut back: a call began before the end of the one before."""
    return any(before.end > call.start for before, call in pairwise(turn.forwards))


def _after_two(
    scene: Scene,
    options: Mapping[str, Any],
    num_new: int = NUM_NEW,
    happened: Callable[[Turn], bool] = lambda turn: True,
) -> tuple[list[Turn], Turn]:
    """Two plain turns; over their blocks a third with options, and others until what is to happen did."""
    chat = scene.open()
    with chat.session(_NAME) as session:
        turns = scene.converse(session, 2)
    ids = repeating(scene, turns[-1].tokens)
    for seed in range(90, 98):
        with chat.session(_NAME) as session:
            turn = scene.say(session, ids, num_new, **options)
        if happened(turn):
            break
        turns.append(turn)
        ids = repeating(scene, scene.following(turn.tokens, NUM_SAID, seed))
    return turns, turn


def _rows(scene: Scene, options: Mapping[str, Any]) -> Finding:
    """Several rows over one restored prefix; the first sequence becomes the session's."""
    chat = scene.open()
    with chat.session(_NAME) as session:
        turns = scene.converse(session, 2)
    with chat.session(_NAME) as session:
        asked = [(session, scene.following(turns[-1].tokens, NUM_SAID, 90))]
        rows, forwards = scene.say_in_rows(chat, asked, **options)
        after = scene.say(session, scene.following(rows[0].sequences[:1], NUM_SAID, 91))
    found = judge_rows(scene, [turns], rows, forwards, options)
    return worst([found, judge_later(scene, turns, rows[0], after)])


def two_prefixes(scene: Scene) -> Finding:
    """Two conversations of different length, both restored, in one call; then both go on by themselves."""
    chat = scene.open()
    with chat.session(_NAME) as one, chat.session(_OTHER) as other:
        histories = [scene.converse(one, 2), scene.converse(other, 3, seed=2)]
    with chat.session(_NAME) as one, chat.session(_OTHER) as other:
        sessions = [one, other]
        prompts = [scene.following(turns[-1].tokens, NUM_SAID, 94 + n) for n, turns in enumerate(histories)]
        rows, forwards = scene.say_in_rows(chat, list(zip(sessions, prompts, strict=True)))
        later = [
            scene.say(session, scene.following(row.sequences[:1], NUM_SAID, 96))
            for session, row in zip(sessions, rows, strict=True)
        ]
    found = [judge_rows(scene, histories, rows, forwards, {})]
    found += [
        judge_later(scene, turns, row, turn) for turns, row, turn in zip(histories, rows, later, strict=True)
    ]
    return worst(found)


def repeating(scene: Scene, tokens: torch.Tensor) -> torch.Tensor:
    """A prompt that repeats some of what was said, for a lookup of drafts."""
    return torch.cat([scene.following(tokens, NUM_SAID - 6, 92), tokens[:, -6:]], dim=1)
