"""Named conversations: what was committed comes back, what was removed does not, and what is shared stays."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_helpers import (
    IDENTITY,
    MIXED,
    SIZE,
    Gate,
    HookedFs,
    assert_nothing_stranded,
    comes_true,
    kv_of,
    load_checked,
    memory_only_disk,
    opened,
    prompt,
    quiet,
    small,
    store,
)

from tieredkv import Identity, Reason, Turn
from tieredkv.errors import BadConfig, BadInput, SessionError
from tieredkv.outcomes import Tier
from tieredkv.plan import Parts
from tieredkv.spiller import Cause

OTHER = Identity(weights="cd" * 32)


class FakeClock:
    def __init__(self, wall: float = 1_000_000.0) -> None:
        self.now, self.wall_now = 50.0, wall

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.wall_now


def raw_bytes(path: Path) -> bytes:
    return b"".join(p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file())


def test_a_session_comes_back_as_it_was(tmp_path: Path) -> None:
    said = prompt(0)
    turns = [Turn("user", 20), Turn("assistant", 300)]
    with opened(tmp_path) as kv:
        space = kv.namespace(IDENTITY, MIXED)
        with kv.session("alice/42", space) as session:
            assert len(session.tokens) == 0 and session.turns == () and not session.pinned
            stored = store(space, said)
            session.commit(
                said, turns, anchors=[320, 32, 320], stored=[stored], meta={"title": "ü", "n": [1, None]}
            )
        for extra in range(5):
            with kv.session("alice/42", space) as session:
                session.commit(
                    np.append(session.tokens, [extra] * 10), session.turns, anchors=session.anchors
                )
    with opened(tmp_path) as kv:
        space = kv.namespace(IDENTITY, MIXED)
        session = kv.session("alice/42", space)
        assert session.tokens.tolist() == [*said.tolist(), *(n for n in range(5) for _ in range(10))]
        assert session.turns == tuple(turns) and session.anchors == (32, 320)
        assert session.meta == {"title": "ü", "n": [1, None]}
        assert [row.name for row in kv.sessions()] == ["alice/42"]
        assert kv.recovery.num_sessions == 1
        assert load_checked(space, session.tokens)[0] == 320


def test_a_name_is_open_once(tmp_path: Path) -> None:
    with opened(tmp_path) as kv:
        space = kv.namespace(IDENTITY, MIXED)
        session = kv.session("a", space)
        with pytest.raises(SessionError, match="open already"):
            kv.session("a", space)
        session.close()
        session.close()
        with kv.session("a", space), pytest.raises(SessionError, match="closed"):
            session.commit([1], [])


def test_bad_commits_change_nothing(tmp_path: Path) -> None:
    with opened(tmp_path) as kv:
        space = kv.namespace(IDENTITY, MIXED)
        session = kv.session("a", space)
        session.commit(prompt(0), [Turn("user", 5)])
        for call in (
            lambda: session.commit([1, 2], [Turn("user", 3)]),
            lambda: session.commit(prompt(0), [], anchors=[7]),
            lambda: session.commit(prompt(0), [], anchors=[4096]),
            lambda: session.commit(prompt(0), [], anchors=[-16]),
            lambda: session.commit([1.5], []),
            lambda: session.rollback(1000),
            lambda: session.rollback(-1),
            lambda: session.rollback(1.5),  # type: ignore[arg-type]
            lambda: session.rollback(True),
            lambda: session.commit(prompt(0), [Turn("user", -5)]),
            lambda: session.commit(prompt(0), [Turn("user", 1.5)]),  # type: ignore[arg-type]
            lambda: session.commit(prompt(0), [Turn(None, 5)]),  # type: ignore[arg-type]
            lambda: session.commit(prompt(0), [Turn("user", 9), Turn("user", 5)]),
            lambda: session.commit(prompt(0), [], anchors=[16.0]),  # type: ignore[list-item]
            lambda: session.expire(0),
            lambda: session.expire(float("nan")),
            lambda: session.expire("3"),  # type: ignore[arg-type]
            lambda: session.commit(prompt(0), None),  # type: ignore[arg-type]
            lambda: session.commit(prompt(0), ["user"]),  # type: ignore[list-item]
            lambda: kv.session(42, space),  # type: ignore[arg-type]
            lambda: kv.session("\ud800", space),
        ):
            with pytest.raises(BadInput):
                call()
        assert session.tokens.tolist() == prompt(0).tolist() and session.turns == (Turn("user", 5),)


@pytest.mark.parametrize("cut", [0, 1, 31, 32, 33, 160, 319, 320, 325])
def test_after_a_rollback_nothing_past_it_is_matched(tmp_path: Path, cut: int) -> None:
    """P12, B68."""
    with opened(tmp_path) as kv:
        space = kv.namespace(IDENTITY, MIXED)
        one, other = kv.session("one", space), kv.session("other", space)
        said = prompt(0)
        anchors = [160, 320]
        for session in (one, other):
            stored = store(space, said, anchors=anchors)
            session.commit(
                said, [Turn("user", 100), Turn("assistant", 325)], anchors=anchors, stored=[stored]
            )
        one.rollback(cut)
        assert one.tokens.tolist() == said[:cut].tolist()
        assert all(turn.end <= cut for turn in one.turns) and all(a <= cut for a in one.anchors)
        edited = np.concatenate((said[:cut], prompt(7, 200)))
        found = space.lookup(edited).num_tokens
        assert found <= cut and found in (0, 160, 320)
        load_checked(space, edited)
        assert load_checked(space, np.append(other.tokens, 1)) == (320, Reason.NEVER_STORED) or True
        assert load_checked(space, other.tokens)[0] == 320
        kv.check()


def test_a_fork_shares_and_lives_on(tmp_path: Path) -> None:
    with opened(tmp_path) as kv:
        space = kv.namespace(IDENTITY, MIXED)
        one = kv.session("one", space)
        one.commit(
            prompt(0), [Turn("user", 9)], anchors=[320], stored=[store(space, prompt(0))], meta={"k": 1}
        )
        num_blocks = kv.stats().num_blocks
        two = one.fork("two")
        assert (two.tokens.tolist(), two.turns, two.anchors, two.meta) == (
            one.tokens.tolist(), one.turns, one.anchors, one.meta,
        )  # fmt: skip
        assert kv.stats().num_blocks == num_blocks
        with pytest.raises(SessionError, match="exists"):
            one.fork("two")
        one.delete()
        assert [row.name for row in kv.sessions()] == ["two"]
        assert load_checked(space, prompt(0))[0] == 320
        two.delete()
        assert not kv.sessions() and space.lookup(prompt(0)).num_tokens == 0
        kv.check()


def test_anchors_that_move_on_free_their_window_parts(tmp_path: Path) -> None:
    said = prompt(0, 640)
    with opened(tmp_path, device_nbytes="1MiB", host_nbytes="1MiB") as kv:
        space = kv.namespace(IDENTITY, MIXED)
        session = kv.session("a", space)
        for end in range(64, 640, 64):
            stored = store(space, said[:end], anchors=[end])
            session.commit(said[:end], [], anchors=[end], stored=[stored])
            quiet(kv)
            with kv._lock:
                rows = kv._table.find(space.chain(said[:end]))
                held = (kv._table.slot[:, 1, rows] >= 0).any(axis=0)
                assert held.sum() == min(3, end // SIZE), (
                    f"window parts at {np.flatnonzero(held)} of {end // SIZE}"
                )
            kv.check()
        assert load_checked(space, np.append(said[:576], 1))[0] == 576
    with opened(tmp_path) as kv:
        space = kv.namespace(IDENTITY, MIXED)
        assert load_checked(space, np.append(said[:576], 1))[0] == 576
        assert space.lookup(said[:321]).num_tokens == 0


def test_a_delete_leaves_what_is_shared(tmp_path: Path) -> None:
    shared = prompt(0, 10 * SIZE)
    one_tail, other_tail = np.concatenate((shared, prompt(1))), np.concatenate((shared, prompt(2)))
    with opened(tmp_path, device_nbytes="1MiB") as kv:
        space = kv.namespace(IDENTITY, MIXED)
        for name, said in (("one", one_tail), ("other", other_tail)):
            end = len(said) // SIZE * SIZE
            stored = store(space, said, anchors=[160, end])
            with kv.session(name, space) as session:
                session.commit(said, [], anchors=[160, end], stored=[stored])
        used = kv.stats().num_blocks
        with kv.session("one", space) as session:
            session.delete()
        assert kv.stats().num_blocks == used - 20
        assert load_checked(space, other_tail)[0] == len(other_tail) // SIZE * SIZE
        assert load_checked(space, one_tail)[0] == 160
        kv.check()
        raw = raw_bytes(tmp_path)
        assert prompt(1)[:64].tobytes() not in raw and prompt(2)[:64].tobytes() in raw
    with opened(tmp_path) as kv:
        space = kv.namespace(IDENTITY, MIXED)
        assert load_checked(space, other_tail)[0] == len(other_tail) // SIZE * SIZE
        assert [row.name for row in kv.sessions()] == ["other"]


@pytest.mark.parametrize("disk_io", ["direct", "buffered"])
def test_a_purge_leaves_no_byte(tmp_path: Path, disk_io: str) -> None:
    """Tokens, payloads and names: out of slabs, log, checkpoints and memory; also after a restart."""
    marker = b"MARKERMARKERMARKERMARKERMARKERMA" * 2
    tokens = np.frombuffer(marker * 20, dtype=np.int32).copy() & 0x7FFFFFFF
    mark = tokens[:16].tobytes()
    with opened(
        tmp_path, disk_io=disk_io, device_nbytes="64KiB", host_nbytes="64KiB", disk_nbytes="16MiB"
    ) as kv:
        keep, gone = kv.namespace(IDENTITY, MIXED), kv.namespace(OTHER, MIXED)
        store(keep, prompt(5)).wait(60)
        payload = kv_of(gone, tokens)
        piece = payload[0][0][0, :SIZE].contiguous().numpy().tobytes()
        assert store(gone, tokens).wait(60)
        with kv.session("secret name", gone) as session:
            session.commit(tokens, [], anchors=[320], meta={"who": "MARKED PERSON"})
        with kv.session("kept name", keep) as session:
            session.commit(prompt(5), [], anchors=[320])
        kv.checkpoint()
        assert kv.flush(60).ok
        raw = raw_bytes(tmp_path)
        marks = [mark, piece, b"secret name", b"MARKED PERSON", gone.chain(tokens)[0].tobytes()]
        assert all(m in raw for m in marks), "the marks are there before"
        kv.purge(gone)
        raw = raw_bytes(tmp_path)
        assert [m for m in marks if m in raw] == []
        for memory in kv._memories.values():
            held = memory.buffer.numpy().tobytes()
            assert piece not in held
        assert load_checked(keep, prompt(5))[0] == 320
        kv.check()
    with opened(tmp_path) as kv:
        raw = raw_bytes(tmp_path)
        assert [m for m in marks if m in raw] == []
        assert load_checked(kv.namespace(IDENTITY, MIXED), prompt(5))[0] == 320
        again = kv.namespace(OTHER, MIXED)
        assert again.lookup(tokens).num_tokens == 0
        assert [row.name for row in kv.sessions()] == ["kept name"]


def test_a_purge_takes_evicted_leftovers_too(tmp_path: Path) -> None:
    """Slots that were given up before the purge still hold old bytes; they go as well."""
    with opened(
        tmp_path, device_nbytes="64KiB", host_nbytes="64KiB", disk_nbytes="8MiB", log_keep_nbytes=0
    ) as kv:
        space = kv.namespace(IDENTITY, MIXED)
        for seed in range(60):
            store(space, prompt(seed)).wait(60)
        kv.purge(space)
        raw = raw_bytes(tmp_path)
        left = [seed for seed in range(60) if prompt(seed)[:64].tobytes() in raw]
        assert left == []


def test_expiry_counts_open_time_and_time_while_closed(tmp_path: Path) -> None:
    """P16."""
    clock = FakeClock()
    day = 86_400.0
    with opened(tmp_path, clock=clock) as kv:
        space = kv.namespace(IDENTITY, MIXED)
        with kv.session("a", space) as session:
            session.commit(prompt(0), [], anchors=[320], stored=[store(space, prompt(0))])
            session.expire(days=3)
        clock.now += day
        clock.wall_now += day
        assert len(kv.sessions()) == 1
    clock = FakeClock(clock.wall_now + day)  # a day while closed
    with opened(tmp_path, clock=clock) as kv:
        assert len(kv.sessions()) == 1
        clock.now += 0.9 * day
        assert len(kv.sessions()) == 1
    clock = FakeClock(0.0)  # the wall clock jumps back: no time passed
    with opened(tmp_path, clock=clock) as kv:
        assert len(kv.sessions()) == 1
        clock.now += 0.2 * day
        assert kv.sessions() == ()
        with kv.session("a", kv.namespace(IDENTITY, MIXED)) as session:
            assert len(session.tokens) == 0
    with opened(tmp_path) as kv:
        assert kv.sessions() == ()
        assert prompt(0)[:64].tobytes() not in raw_bytes(tmp_path), "erased with the next pass"


def test_pins_are_a_durable_wish(tmp_path: Path) -> None:
    with opened(
        tmp_path, disk_nbytes="8MiB", log_keep_nbytes=0, device_nbytes="64KiB", host_nbytes="64KiB"
    ) as kv:
        space = kv.namespace(IDENTITY, MIXED)
        with kv.session("a", space) as session:
            session.commit(prompt(0), [], anchors=[320], stored=[store(space, prompt(0))])
            session.pin()
    with opened(
        tmp_path, disk_nbytes="8MiB", log_keep_nbytes=0, device_nbytes="64KiB", host_nbytes="64KiB"
    ) as kv:
        space = kv.namespace(IDENTITY, MIXED)
        for seed in range(1, 60):
            store(space, prompt(seed)).wait(60)
        assert space.lookup(prompt(1)).num_tokens == 0
        assert load_checked(space, prompt(0))[0] == 320
        with kv.session("a", space) as session:
            assert session.pinned
            session.unpin()
        for seed in range(60, 120):
            store(space, prompt(seed)).wait(60)
        assert space.lookup(prompt(0)).num_tokens == 0
        assert kv.stats().num_pins == 0
        kv.check()


def test_commits_that_timed_out_never_mix(tmp_path: Path) -> None:
    """A record still under way when the next is made: what arrives is one of them, never a mixture."""
    gate = Gate()
    fs = HookedFs(lambda op, path: gate.pass_through() if op == "pwritev" and "/wal/" in path else None)
    with opened(tmp_path, fs=fs, deadline_s=0.2) as kv:
        session = kv.session("a", kv.namespace(IDENTITY, MIXED))
        session.commit([1, 2, 3], [])
        gate.shut()
        with pytest.raises(SessionError):
            session.commit([1, 9, 9, 9, 9], [])
        with pytest.raises(SessionError):
            session.commit([1, 2, 3, 4], [])
        gate.open()
        assert comes_true(lambda: len(kv._state.catalog.sessions["a"].tokens) == 4)
        assert kv._state.catalog.sessions["a"].tokens.tolist() == [1, 2, 3, 4]
    with opened(tmp_path) as kv:
        assert kv.session("a", kv.namespace(IDENTITY, MIXED)).tokens.tolist() == [1, 2, 3, 4]


def test_sessions_without_a_disk(tmp_path: Path) -> None:
    with opened(tmp_path, disk_nbytes=0) as kv:
        space = kv.namespace(IDENTITY, MIXED)
        with kv.session("a", space) as session:
            session.commit(prompt(0), [], anchors=[320], stored=[store(space, prompt(0))])
            session.fork("b").close()
            session.delete()
        assert [row.name for row in kv.sessions()] == ["b"]
        kv.purge(space)
        assert kv.sessions() == ()
        assert kv.namespace(IDENTITY, MIXED).lookup(prompt(0)).num_tokens == 0


def test_tokens_as_a_delta(tmp_path: Path) -> None:
    """A long session's next turn costs a record of what is new."""
    with opened(tmp_path) as kv:
        session = kv.session("a", kv.namespace(IDENTITY, MIXED))
        said = prompt(0, 8000)
        session.commit(said, [])
        before = kv._disk._journal_bytes() if hasattr(kv._disk, "_journal_bytes") else written(tmp_path)
        for n in range(20):
            said = np.append(said, [n])
            session.commit(said, [])
        assert written(tmp_path) - before < 20 * 1024


def written(path: Path) -> int:
    """Bytes of the log that are not blank."""
    return sum(len(p.read_bytes().rstrip(b"\0")) for p in (path / "wal").iterdir())


def test_a_session_that_moved_keeps_memory_tiers_honest(tmp_path: Path) -> None:
    with opened(tmp_path, device_nbytes="128KiB", host_nbytes="128KiB") as kv:
        space = kv.namespace(IDENTITY, MIXED)
        session = kv.session("a", space)
        said = np.zeros(0, dtype=np.int32)
        for turn in range(8):
            said = np.concatenate((said, prompt(turn, 4 * SIZE)))
            stored = store(space, said, anchors=[len(said)])
            session.commit(said, [Turn("user", len(said))], anchors=[len(said)], stored=[stored])
            memory_only_disk(kv)
            assert load_checked(space, np.append(said, 1))[0] == len(said)
        quiet(kv)
        kv.check()
        with kv._lock:
            assert int((kv._table.slot[Tier.DISK, 1] >= 0).sum()) == 3


def test_names_are_listed_in_order(tmp_path: Path) -> None:
    with opened(tmp_path) as kv:
        space = kv.namespace(IDENTITY, MIXED)
        for name in ("c", "a", "b", f"{os.getpid()}"):
            with kv.session(name, space) as session:
                session.commit([1], [])
        names = [row.name for row in kv.sessions()]
        assert names == sorted(names) and len(names) == 4


def test_a_write_back_turn_is_committed_when_it_ends(tmp_path: Path) -> None:
    """spill="evict" writes nothing by itself, but a session's record never names blocks that are not there."""
    with opened(tmp_path, spill="evict") as kv:
        space = kv.namespace(IDENTITY, MIXED)
        stored = store(space, prompt(0))
        assert kv.stats().tiers[-1].num_parts == 0
        with kv.session("a", space) as session:
            session.commit(prompt(0), [Turn("user", 320)], anchors=[320], stored=[stored])
        assert kv.stats().tiers[-1].num_parts > 0 and space.lookup(prompt(0)).num_tokens == 320
        memory_only_disk(kv)
        assert load_checked(space, prompt(0))[0] == 320


def test_a_fork_takes_no_time_and_copies_nothing(tmp_path: Path) -> None:
    """16k tokens, not waiting for a sync: the record says which session it is like, and nothing is hashed."""
    with opened(tmp_path, device_nbytes="8MiB") as kv:
        space = kv.namespace(IDENTITY, MIXED)
        said = prompt(0, 16_384)
        one = kv.session("one", space)
        turns = [Turn("user", end) for end in range(160, 16_384, 160)]
        one.commit(said, turns, anchors=[16_384], stored=[store(space, said)], meta={"k": 1})
        before, took = written(tmp_path), []
        for number in range(20):
            began = time.thread_time()
            forked = one.fork(f"fork {number}")
            took.append(time.thread_time() - began)
            assert np.shares_memory(forked.tokens, one.tokens) and forked.turns == one.turns
        assert written(tmp_path) - before < 20 * 512
        assert sorted(took)[10] < 0.01, f"seconds: {took}"  # a bound for any machine; the figure is a tool's
        again = forked.fork("of a fork")
        one.delete()
        again.commit(np.append(said, 7), turns)
    with opened(tmp_path) as kv:
        space = kv.namespace(IDENTITY, MIXED)
        assert kv.session("of a fork", space).tokens.tolist() == [*said.tolist(), 7]
        assert kv.session("fork 3", space).tokens.tolist() == said.tolist()
        assert len(kv.sessions()) == 21


def test_a_commit_that_meets_a_removal_builds_on_nothing_that_goes(tmp_path: Path) -> None:
    gate = Gate()
    fs = HookedFs(lambda op, path: gate.pass_through() if op == "pwritev" and "/wal/" in path else None)
    with opened(tmp_path, fs=fs, deadline_s=5.0) as kv:
        space = kv.namespace(IDENTITY, MIXED)
        one = kv.session("one", space)
        one.commit(prompt(0), [])
        gate.shut()
        with ThreadPoolExecutor(2) as pool:
            removal = pool.submit(kv._remove_sessions, ["one"])
            assert comes_true(lambda: "one" in kv._sessions._in_doubt)
            fork = pool.submit(one.fork, "two")
            gate.open()
            removal.result(60)
            assert fork.result(60).tokens.tolist() == prompt(0).tolist()
        assert [row.name for row in kv.sessions()] == ["two"]


def test_a_delete_takes_what_continues_its_chain(tmp_path: Path) -> None:
    """Nothing is stranded: neither prompts of no session nor what a rollback left behind."""
    shared = prompt(0, 4 * SIZE)
    with opened(tmp_path, device_nbytes="1MiB") as kv:
        space = kv.namespace(IDENTITY, MIXED)
        keep, one = kv.session("keep", space), kv.session("one", space)
        keep.commit(shared, [], anchors=[4 * SIZE], stored=[store(space, shared)])
        said = np.concatenate((shared, prompt(1)))
        end = len(said) // SIZE * SIZE
        one.commit(said, [], anchors=[end], stored=[store(space, said)])
        longer = np.concatenate((said[:end], prompt(2)))
        assert store(space, longer).wait(60)
        one.rollback(end - 10 * SIZE)
        one.delete()
        assert kv.stats().num_blocks == 4
        assert_nothing_stranded(kv)
        assert load_checked(space, longer)[0] == load_checked(space, np.append(shared, 1))[0] == 4 * SIZE
        raw = raw_bytes(tmp_path)
        assert prompt(1)[:64].tobytes() not in raw and prompt(2)[:64].tobytes() not in raw
        kv.check()


def test_a_session_goes_on_under_another_identity(tmp_path: Path) -> None:
    """After the weights changed: the tokens are the conversation's, the blocks are the old weights' alone."""
    said, turns = prompt(0), (Turn("user", 20), Turn("assistant", len(prompt(0))))
    with opened(tmp_path, device_nbytes="1MiB") as kv:
        space = kv.namespace(IDENTITY, MIXED)
        with kv.session("a", space) as session:
            session.commit(said, turns, anchors=[SIZE], stored=[store(space, said)], meta={"x": 1})
            session.pin()
    with opened(tmp_path, device_nbytes="1MiB") as kv:
        space, elsewhere = kv.namespace(IDENTITY, MIXED), kv.namespace(OTHER, MIXED)
        with kv.session("a", elsewhere) as session:
            assert session.tokens.tolist() == said.tolist() and session.turns == turns
            assert session.meta == {"x": 1} and session.pinned and session.anchors == ()
            assert elsewhere.lookup(session.tokens).num_tokens == 0
        with kv.session("a", space) as session:
            assert session.anchors == (SIZE,), "opening it elsewhere changed nothing"
            assert load_checked(space, session.tokens)[0] == len(said) // SIZE * SIZE
        with kv.session("a", elsewhere) as session:
            session.commit(said, turns, stored=[store(elsewhere, said)])
        kv.check()
    with opened(tmp_path, device_nbytes="1MiB") as kv:
        elsewhere = kv.namespace(OTHER, MIXED)
        assert [row.namespace for row in kv.sessions()] == [elsewhere.row.number]
        assert load_checked(elsewhere, said)[0] == len(said) // SIZE * SIZE
        kv.session("a", elsewhere).delete()
        assert kv.stats().num_blocks == 0, "those of before went with it"


def test_the_name_of_another_salt_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path) as kv:
        space = kv.namespace(IDENTITY, MIXED)
        other = kv.namespace(replace(IDENTITY, salt="a secret"), MIXED)
        with kv.session("a", space) as session:
            session.commit(prompt(0), [])
        with pytest.raises(SessionError, match="session 'a' is not of this salt") as told:
            kv.session("a", other)
        assert "secret" not in str(told.value)
        with kv.session("a", space) as session, kv.session("b", other):
            assert session.tokens.tolist() == prompt(0).tolist()
            with pytest.raises(SessionError, match="not of this salt"):
                session.follow(other)


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("way", ["rolled back to nothing", "edited", "of another identity", "expired"])
def test_a_delete_takes_what_the_session_held_once(tmp_path: Path, way: str, restart: bool) -> None:
    """Also where nothing that goes leads to it: it begins at the root, behind what is shared, or elsewhere."""
    shared = prompt(0, 4 * SIZE)
    secret, other = np.concatenate((shared, prompt(1))), np.concatenate((shared, prompt(2)))
    clock = FakeClock()
    with opened(tmp_path, clock=clock, device_nbytes="1MiB") as kv:
        space, elsewhere = kv.namespace(IDENTITY, MIXED), kv.namespace(OTHER, MIXED)
        keep, one = kv.session("keep", space), kv.session("one", space)
        keep.commit(shared, [], stored=[store(space, shared)])
        one.commit(secret, [], stored=[store(space, secret)])
        if way == "rolled back to nothing":
            one.rollback(0)
            other = prompt(2)
        elif way == "expired":
            one.expire(days=1)
            clock.now += 2 * 86_400
        if way in ("expired", "of another identity"):
            one.close()
            one = kv.session("one", elsewhere if way == "of another identity" else space)
        one.commit(other, [], stored=[store(one.space, other)])
        one.commit(other, [Turn("user", len(other))])
        with one.fork("fork") as fork:
            assert fork._row.left == () != one._row.left, "a fork never held it"
        if restart:
            kv.close()
    with opened(tmp_path, clock=clock, device_nbytes="1MiB") as kv:
        space = kv.namespace(IDENTITY, MIXED)
        one = kv.session("one", kv.namespace(OTHER, MIXED) if way == "of another identity" else space)
        assert one.tokens.tolist() == other.tolist()
        one.delete()
        assert load_checked(space, secret)[0] == 4 * SIZE, "only what another session shares is there"
        assert load_checked(kv.session("fork", one.space).space, other)[0] == len(other) // SIZE * SIZE
        assert prompt(1)[:64].tobytes() not in raw_bytes(tmp_path)
        kv.check()


def test_what_a_session_comes_back_to_is_its_own_again(tmp_path: Path) -> None:
    one, two = prompt(1), prompt(2)
    with opened(tmp_path, device_nbytes="1MiB") as kv:
        space = kv.namespace(IDENTITY, MIXED)
        session = kv.session("a", space)
        for tokens, num_left in ((one, 0), (two, 20), (one, 20), (one[: 10 * SIZE], 30), (one, 20)):
            session.commit(tokens, [], stored=[store(space, tokens)])
            assert len(session._row.left) == num_left
        session.pin()
        assert len(session._row.left) == 20
        session.rollback(0)
        assert len(session._row.left) == 40
        session.delete()
        assert kv.stats().num_blocks == 0 and kv.sessions() == ()


def test_a_refused_delete_changes_nothing(tmp_path: Path) -> None:
    with opened(tmp_path, deadline_s=2.0) as kv:
        space = kv.namespace(IDENTITY, MIXED)
        session = kv.session("a", space)
        session.commit(prompt(0), [], stored=[store(space, prompt(0))])
        with space.load(prompt(0)) as prefix:
            assert prefix.num_tokens
            with pytest.raises(SessionError, match="in use"):
                session.delete()
            session.pin()
            assert kv.sessions()[0].pinned and kv.is_session_open("a")
        session.delete()
        assert kv.sessions() == () and not kv.is_session_open("a")


def test_a_closed_session_touches_nothing_of_its_name(tmp_path: Path) -> None:
    with opened(tmp_path) as kv:
        space = kv.namespace(IDENTITY, MIXED)
        closed, deleted = kv.session("a", space), kv.session("b", space)
        for session in (closed, deleted):
            session.commit(prompt(0), [])
        closed.close()
        deleted.delete()
        with kv.session("b", space) as anew:
            anew.commit(prompt(1), [])
        for session in (closed, deleted):
            for call in (
                session.delete,
                session.pin,
                lambda s=session: s.fork("c"),
                lambda s=session: s.export(tmp_path / "f"),
            ):
                with pytest.raises(SessionError, match="is closed"):
                    call()
        assert [(row.name, len(row.tokens)) for row in kv.sessions()] == [
            (n, len(prompt(0))) for n in ("a", "b")
        ]


def test_a_session_follows_to_another_namespace_with_its_wishes(tmp_path: Path) -> None:
    with opened(tmp_path) as kv:
        session = kv.session("a", kv.namespace(IDENTITY, MIXED))
        session.commit(prompt(0), [Turn("user", 5)], meta={"k": 1})
        session.pin()
        session.prioritise("high")
        session.expire(days=2)
        session.follow(kv.namespace(OTHER, MIXED))
        before = kv.sessions()[0]
    with opened(tmp_path) as kv, kv.session("a", kv.namespace(OTHER, MIXED)) as session:
        assert session.tokens.tolist() == prompt(0).tolist() and session.turns == (Turn("user", 5),)
        assert session.meta == {"k": 1} and session.pinned and session.priority == "high"
        assert kv.sessions()[0].expires_at == before.expires_at > 0


def test_tokens_stay_what_was_committed(tmp_path: Path) -> None:
    given = prompt(0).astype(np.int32)
    with opened(tmp_path) as kv, kv.session("a", kv.namespace(IDENTITY, MIXED)) as session:
        session.commit(given, [])
        given[:] = 0
        assert session.tokens.tolist() == prompt(0).tolist()
        with pytest.raises(ValueError, match="read-only"):
            session.tokens[0] = 0


def test_what_is_stored_while_its_drop_is_queued_stays(tmp_path: Path) -> None:
    """A part whose drop the log has not taken yet is no part any more: an anchor just accepted must not vanish."""
    gate = Gate()
    fs = HookedFs(lambda op, path: gate.pass_through() if op == "pwritev" and "/wal/" in path else None)
    with opened(tmp_path, fs=fs, device_nbytes="1MiB", host_nbytes=0) as kv:
        space = kv.namespace(IDENTITY, MIXED)
        assert store(space, prompt(0)).wait(60)
        memory_only_disk(kv)
        gate.shut()
        with kv._lock:
            rows = space._core.table.find(space.chain(prompt(0))).tolist()
            assert kv._room is not None
            kv._room.release(Parts.of((row, group) for row in rows for group in (0, 1)), Cause.RELEASED)
        assert space.lookup(prompt(0)).num_tokens == 0
        again = store(space, prompt(0))
        assert again.num_new == 20 and not again.wait(0.1)
        gate.open()
        assert again.wait(60)
        memory_only_disk(kv)
        assert load_checked(space, prompt(0))[0] == 320
        kv.check()
    with opened(tmp_path) as kv:
        assert load_checked(kv.namespace(IDENTITY, MIXED), prompt(0))[0] == 320


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_a_session_of_lower_priority_is_evicted_first(tmp_path: Path, policy: str) -> None:
    """Whatever was used last; the wish is durable, and what sessions share goes with the highest of them."""
    budgets = {"device_nbytes": "64KiB", "host_nbytes": 0, "disk_nbytes": "8MiB", "log_keep_nbytes": 0}
    shared = prompt(0, 4 * SIZE)
    tails = {name: prompt(seed) for seed, name in enumerate(("high", "normal", "low"), 1)}
    said = {name: np.concatenate((shared, tail)) for name, tail in tails.items()}

    def crowd(space: Any, seeds: range) -> None:
        for seed in seeds:
            store(space, prompt(seed)).wait(60)

    with opened(tmp_path, policy=policy, **budgets) as kv:
        space = kv.namespace(IDENTITY, MIXED)
        for name, tokens in said.items():
            with kv.session(name, space) as session:
                end = len(tokens) // SIZE * SIZE
                session.commit(tokens, [], anchors=[end], stored=[store(space, tokens)])
                session.prioritise(name)
                assert session.priority == name
    with opened(tmp_path, policy=policy, **budgets) as kv:
        space = kv.namespace(IDENTITY, MIXED)
        load_checked(space, said["low"])
        number = 100
        while space.lookup(said["low"]).num_tokens > 4 * SIZE:
            crowd(space, range(number, number + 1))
            number += 1
            assert number < 400, "the low session is never evicted"
            assert space.lookup(said["normal"]).num_tokens > 4 * SIZE
        crowd(space, range(number, number + 60))
        assert space.lookup(said["normal"]).num_tokens == 0
        assert space.lookup(said["high"]).num_tokens > 4 * SIZE
        with kv.session("high", space) as session:
            with pytest.raises(BadInput, match="'low', 'normal', 'high'"):
                session.prioritise("top")
            session.prioritise("normal")
        crowd(space, range(500, 560))
        assert space.lookup(said["high"]).num_tokens == 0
        kv.check()


def test_the_store_lets_unused_sessions_go(tmp_path: Path) -> None:
    clock, day = FakeClock(), 86_400.0
    with opened(tmp_path, clock=clock, expire_days=10) as kv:
        space = kv.namespace(IDENTITY, MIXED)
        for name in ("used", "unused", "pinned", "longer", "shorter"):
            kv.session(name, space).commit(prompt(0), [])
        with kv._lock:
            kv._sessions._open.clear()
        kv.session("pinned", space).pin()
        kv.session("longer", space).expire(days=30)
        kv.session("shorter", space).expire(days=5)
        clock.now += 6 * day
        assert [row.name for row in kv.sessions()] == ["longer", "pinned", "unused", "used"]
        kv.session("used", space).commit(prompt(1), [])
        clock.now += 5 * day
        assert [row.name for row in kv.sessions()] == ["longer", "pinned", "used"]
    with opened(tmp_path, clock=clock) as kv:
        assert [row.name for row in kv.sessions()] == ["longer", "pinned", "used"], "erased at the close"
    with pytest.raises(BadConfig, match="expire_days"):
        small(expire_days=0)
