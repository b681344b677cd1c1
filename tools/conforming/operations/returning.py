"""A conversation goes back: rollbacks, an edited message, the same prompt again, a shorter one."""

from __future__ import annotations

from ..compare import Wanted, judge
from ..scene import NUM_SAID, Scene, Turn, following
from ..verdict import DidNotHappen, Finding, worst

_NAME = "talk"


def rollback_to_boundary(scene: Scene) -> Finding:
    return _rolled_back(scene, 96 + 2 * scene.family.num_more)


def rollback_inside_block(scene: Scene) -> Finding:
    return _rolled_back(scene, 103 + 2 * scene.family.num_more)


def rollback_past_window(scene: Scene) -> Finding:
    """Further back than any window and what is kept before it."""
    return _rolled_back(scene, 69 + scene.family.num_more)


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
    """The second of three messages is another: by its ids alone, in the session and after a restart."""

    def go_on(session: object, turns: list[Turn]) -> Turn:
        at = turns[0].tokens.shape[1] + 7
        return scene.say(session, following(turns[2].tokens[:, :at], NUM_SAID, 80))

    return _twice(scene, go_on, lambda turns: turns[0].tokens.shape[1] + 7)


def same_prompt_again(scene: Scene) -> Finding:
    """The last prompt once more gives the same answer; one token at least is computed again."""

    def go_on(session: object, turns: list[Turn]) -> Turn:
        again = scene.say(session, turns[2].tokens[:, : turns[2].num_prompt])
        if again.tokens.tolist() != turns[2].tokens.tolist():
            raise AssertionError("another answer than before")
        return again

    return _twice(scene, go_on, lambda turns: turns[2].num_prompt)


def shorter_prompt(scene: Scene) -> Finding:
    """A prompt that ends long before what the cache holds."""
    end = 93 + 2 * scene.family.num_more
    return _twice(
        scene, lambda session, turns: scene.say(session, turns[2].tokens[:, :end]), lambda turns: end
    )


def _rolled_back(scene: Scene, end: int) -> Finding:
    def go_on(session: object, turns: list[Turn]) -> Turn:
        num_again = session.rollback(num_tokens=end)  # type: ignore[attr-defined]
        turn = scene.say(session, following(turns[2].tokens[:, :end], NUM_SAID, 81))
        if turn.num_reused != end - num_again:
            computed = end - turn.num_reused
            raise AssertionError(
                f"rollback said {num_again} of {end} tokens are computed again, {computed} were"
            )
        return turn

    return _twice(scene, go_on, lambda turns: end)


def _twice(scene: Scene, go_on: object, num_shared: object) -> Finding:
    """In the session that holds the conversation, and in another store after a restart."""
    with scene.open("one").session(_NAME) as session:
        turns = scene.converse(session)
        own = go_on(session, turns)  # type: ignore[operator]
    with scene.open("two").session(_NAME) as session:
        scene.converse(session)
    with scene.open("two").session(_NAME) as session:
        after = go_on(session, turns)  # type: ignore[operator]
    if set(after.by_tier) != {"disk"}:
        raise DidNotHappen(f"after a restart {after.num_reused} tokens came from {dict(after.by_tier)}")
    shared = num_shared(turns)  # type: ignore[operator]
    return worst([judge(scene, turns, turn, Wanted(shared)) for turn in (own, after)])
