"""A conversation goes back: rollbacks, an edited message, the same prompt again, a shorter one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tieredkv.block.hashing import common_prefix

from ..compare import Wanted, judge
from ..scene import NUM_SAID, Scene, Turn
from ..verdict import REFUSED, DidNotHappen, Finding, worst

_NAME = "talk"
Converse = Callable[[Any], Sequence[Turn]]
GoOn = Callable[[Any, Sequence[Turn]], Turn]


def rollback_to_boundary(scene: Scene) -> Finding:
    return _rolled_back(scene, 96 + 2 * scene.num_more)


def rollback_inside_block(scene: Scene) -> Finding:
    return _rolled_back(scene, 103 + 2 * scene.num_more)


def rollback_past_window(scene: Scene) -> Finding:
    """Further back than any window and what is kept before it."""
    return _rolled_back(scene, 69 + scene.num_more)


def rollback_to_zero(scene: Scene) -> Finding:
    """Nothing of the old conversation may show in one that begins otherwise."""
    chat = scene.open()
    with chat.session(_NAME) as session:
        turns = scene.converse(session, 2)
        if session.rollback(num_tokens=0) != 0 or len(session.tokens):
            raise DidNotHappen("tokens were left")
        anew = scene.converse(session, 1, seed=5)[0]
    if anew.num_reused:
        raise AssertionError(f"{anew.num_reused} tokens of another conversation were reused")
    return judge(scene, turns, anew, Wanted(0, least=0))


def edited_message(scene: Scene) -> Finding:
    """The second of three questions becomes another: by its ids alone, and in messages."""

    def by_ids(session: Any, turns: Sequence[Turn]) -> Turn:
        at = turns[0].tokens.shape[1] + 7
        return scene.say(session, scene.following(turns[2].tokens[:, :at], NUM_SAID, 80))

    def in_messages(session: Any, turns: Sequence[Turn]) -> Turn:
        said, answer, question = session.messages[:3]
        edited = {**question, "content": question["content"][:7] + scene.text(NUM_SAID, 80)}
        turn = scene.ask(session, [said, answer, edited])
        found = session.last_explain.divergence
        if (found.message, found.token) != (2, _num_shared(turns, turn)):
            raise AssertionError(f"message 2 was edited, and the session says: {found}")
        return turn

    return worst([_twice(scene, by_ids), _twice(scene, in_messages, scene.converse_in_messages)])


def same_prompt_again(scene: Scene) -> Finding:
    """The last prompt once more gives the same answer; one token at least is computed again."""

    answers = set()

    def go_on(session: Any, turns: Sequence[Turn]) -> Turn:
        again = scene.say(session, turns[2].tokens[:, : turns[2].num_prompt])
        answers.update(tuple(turn.tokens[0].tolist()) for turn in (turns[2], again))
        return again

    found = _twice(scene, go_on)
    if len(answers) > 1 and found.verdict != REFUSED:
        raise AssertionError("another answer than before")
    return found


def shorter_prompt(scene: Scene) -> Finding:
    """A prompt that ends long before what the cache holds."""
    end = 93 + 2 * scene.num_more
    return _twice(scene, lambda session, turns: scene.say(session, turns[2].tokens[:, :end]))


def _rolled_back(scene: Scene, end: int) -> Finding:
    def go_on(session: Any, turns: Sequence[Turn]) -> Turn:
        num_again = session.rollback(num_tokens=end)
        turn = scene.say(session, scene.following(turns[2].tokens[:, :end], NUM_SAID, 81))
        if turn.num_reused != end - num_again:
            computed = end - turn.num_reused
            raise AssertionError(
                f"rollback said {num_again} of {end} tokens are computed again, {computed} were"
            )
        return turn

    return _twice(scene, go_on)


def _twice(scene: Scene, go_on: GoOn, converse: Converse | None = None) -> Finding:
    """In the session that holds the conversation, and in another store after a restart."""
    converse = converse or scene.converse
    one, two = f"{converse.__name__}/one", f"{converse.__name__}/two"
    with scene.open(one).session(_NAME) as session:
        turns = converse(session)
        own = go_on(session, turns)
    with scene.open(two).session(_NAME) as session:
        converse(session)
    with scene.open(two).session(_NAME) as session:
        after = go_on(session, turns)
    if set(after.by_tier) != {"disk"}:
        where = dict(after.by_tier)
        raise DidNotHappen(f"after a restart {after.num_reused} tokens came from {where}: {after.reason}")
    return worst([judge(scene, turns, turn, Wanted(_num_shared(turns, turn))) for turn in (own, after)])


def _num_shared(turns: Sequence[Turn], turn: Turn) -> int:
    """How many tokens of a prompt the conversation before it has seen."""
    prompt = turn.tokens[0, : turn.num_prompt]
    return common_prefix(turns[-1].tokens[0].numpy(), prompt.numpy())
