"""A conversation goes on: in its process, after a restart, from each tier, as a fork."""

from __future__ import annotations

from ..compare import Wanted, judge
from ..scene import BLOCK_SIZE, NUM_NEW, NUM_PROMPT, NUM_SAID, Scene, Turn
from ..verdict import DidNotHappen, Finding, worst
from .new_process import say_elsewhere

_STORE, _NAME, _FORK = "store", "talk", "talk/other"
_MOST_FILLERS = 12


def in_process(scene: Scene) -> Finding:
    """From the session's own memory, then, closed and opened again, from the blocks in memory."""
    chat = scene.open()
    with chat.session(_NAME) as session:
        turns = scene.converse(session, 2)
        own = _go_on(scene, session, turns)
    if set(own.by_tier) != {"session"}:
        raise DidNotHappen(f"the second turn was read from {dict(own.by_tier)}, not from the session")
    with chat.session(_NAME) as session:
        again = _go_on(scene, session, [*turns, own])
    found = [_judged(scene, turns, own), _judged(scene, [*turns, own], again)]
    return worst(found)


def after_restart(scene: Scene) -> Finding:
    """A new cache object over the same directory; for some families, also a process that did nothing else."""
    turns = _restarted(scene)
    found = [_judged(scene, turns[:-1], turns[-1])]
    if scene.family.in_new_process:
        ids = scene.following(turns[-1].tokens, NUM_SAID, 73)
        elsewhere = say_elsewhere(scene, _STORE, _NAME, ids)
        check_tier(elsewhere, "disk")
        found.append(_judged(scene, turns, elsewhere))
    return worst(found)


def after_restart_here(scene: Scene) -> Finding:
    """A new cache object over the same directory, for a model that only this process has."""
    turns = _restarted(scene)
    return _judged(scene, turns[:-1], turns[-1])


def _restarted(scene: Scene) -> list[Turn]:
    """Two turns, a restart, and a third."""
    with scene.open(_STORE).session(_NAME) as session:
        turns = scene.converse(session, 2)
    with scene.open(_STORE).session(_NAME) as session:
        turn = _go_on(scene, session, turns)
    check_tier(turn, "disk")
    return [*turns, turn]


def from_host(scene: Scene) -> Finding:
    return _after_eviction(scene, "host", host_nbytes="8MiB")


def from_disk(scene: Scene) -> Finding:
    return _after_eviction(scene, "disk", host_nbytes=0)


def fork(scene: Scene) -> Finding:
    """The fork goes on its way, then the parent on another; neither sees the other's tokens."""
    chat = scene.open("forked")
    with chat.session(_NAME) as session:
        turns = scene.converse(session, 2)
        with session.fork(_FORK) as other:
            forked = _go_on(scene, other, turns, seed=71)
        parent = _go_on(scene, session, turns, seed=72)
    return worst([_judged(scene, turns, forked), _judged(scene, turns, parent)])


def _after_eviction(scene: Scene, tier: str, host_nbytes: int | str) -> Finding:
    """Other conversations push this one off the device; then it goes on from `tier` alone."""
    nbytes = _device_nbytes(scene)
    chat = scene.open("small", device_nbytes=nbytes, host_nbytes=host_nbytes)
    with chat.session(_NAME) as session:
        turns = scene.converse(session, 2)
    scene.settle()
    for number in range(_MOST_FILLERS):
        with chat.session(f"filler/{number}") as session:
            scene.converse(session, 2, seed=100 + number)
        scene.settle()
        with chat.session(_NAME) as session:
            if set(session.explain().by_tier) == {tier}:
                break
    with chat.session(_NAME) as session:
        turn = _go_on(scene, session, turns)
    check_tier(turn, tier)
    return _judged(scene, turns, turn)


def _device_nbytes(scene: Scene) -> int:
    """A device tier that holds about two conversations of this family."""
    part_nbytes = scene.open("measure").layout.part_nbytes
    num_tokens = NUM_PROMPT + NUM_SAID + 2 * NUM_NEW + scene.num_more
    num_blocks = 2 * num_tokens // BLOCK_SIZE + 1
    return num_blocks * sum(part_nbytes)


def _go_on(scene: Scene, session: object, turns: list[Turn], seed: int = 70) -> Turn:
    return scene.say(session, scene.following(turns[-1].tokens, NUM_SAID, seed))


def _judged(scene: Scene, turns: list[Turn], turn: Turn) -> Finding:
    return judge(scene, turns, turn, Wanted(turns[-1].tokens.shape[1] - 1))


def check_tier(turn: Turn, tier: str) -> None:
    if set(turn.by_tier) != {tier}:
        raise DidNotHappen(
            f"{turn.num_reused} tokens came from {dict(turn.by_tier)}, not from the {tier} tier"
        )
