"""Real processes, killed for real at random moments: what was committed is there, byte for byte."""

from __future__ import annotations

import os
import random
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_helpers import (
    IDENTITY,
    LAYOUTS,
    SIZE,
    directory_nbytes,
    load_checked,
    opened,
    prompt,
    quiet,
    small,
    store,
)

from tieredkv import Reason, Turn
from tieredkv.cache import open_cache

Say = Callable[[str], None]


def child(act: Callable[[Say], None]) -> tuple[int, int]:
    """Fork a process that runs `act(say)`; its pid, and the pipe on which it says lines."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(read_end)
            act(lambda line: os.write(write_end, f"{line}\n".encode()) and None)
            status = 0
        except BaseException as failure:
            os.write(2, f"child: {failure!r}\n".encode())
        finally:
            os._exit(status)
    os.close(write_end)
    return pid, read_end


def killed_after(act: Callable[[Say], None], seconds: float) -> list[str]:
    """Let a child act for so long, kill it, and return the whole lines it said."""
    pid, pipe = child(act)
    until, said = time.monotonic() + seconds, b""
    while (left := until - time.monotonic()) > 0:
        if select.select([pipe], [], [], left)[0]:
            piece = os.read(pipe, 1 << 16)
            if not piece:
                break
            said += piece
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    while piece := os.read(pipe, 1 << 16):
        said += piece
    os.close(pipe)
    assert os.waitstatus_to_exitcode(status) in (-signal.SIGKILL, 0), "the child failed by itself"
    return said.decode().rpartition("\n")[0].splitlines()


def busy(path: Path, layout: str, base: int, changes: dict[str, Any]) -> Callable[[Say], None]:
    """Stores prompt after prompt, commits sessions, sometimes flushes or checkpoints; says what was promised."""

    def act(say: Say) -> None:
        kv = open_cache(path, small(**changes))
        say("opened")
        space = kv.namespace(IDENTITY, LAYOUTS[layout])
        rng = random.Random(base)
        session = kv.session(f"s{base}", space)
        tokens = np.zeros(0, dtype=np.int32)
        for number in range(10_000):
            seed = base * 10_000 + number
            stored = store(space, prompt(seed, 6 * SIZE + 3))
            if rng.random() < 0.7 and stored.wait(60):
                say(f"block {seed}")
            if rng.random() < 0.3:
                tokens = np.concatenate((tokens[: rng.randrange(len(tokens) + 1)], prompt(seed, 37)))
                session.commit(tokens, [Turn("user", len(tokens))], meta={"n": number})
                say(f"session s{base} {number} {tokens.tobytes().hex()}")
            if rng.random() < 0.1:
                assert kv.flush(60).ok
            if rng.random() < 0.1:
                kv.checkpoint()

    return act


@pytest.mark.parametrize("durability", ["group", "flush", "none"])
@pytest.mark.parametrize("layout", ["mixed", "uneven"])
def test_killed_again_and_again(tmp_path: Path, durability: str, layout: str) -> None:
    """P3, B30, B34: each round kills a process at a random moment, also while it recovers from the last."""
    seed = random.randrange(1 << 20)
    print("seed", seed)
    rng = random.Random(seed)
    changes = {"durability": durability, "disk_nbytes": "96MiB", "log_keep_nbytes": 0}
    blocks: set[int] = set()
    sessions: dict[str, tuple[int, bytes]] = {}
    for round_number in range(5):
        lines = killed_after(busy(tmp_path, layout, seed + round_number, changes), rng.uniform(0.02, 0.3))
        for line in lines:
            kind, *rest = line.split(" ")
            if kind == "block":
                blocks.add(int(rest[0]))
            elif kind == "session":
                sessions[rest[0]] = (int(rest[1]), bytes.fromhex(rest[2]))
        if rng.random() < 0.5:  # the next one is killed while it opens, or soon after
            continue
        with opened(tmp_path, **changes) as kv:
            check_promises(kv, layout, blocks, sessions)
    with opened(tmp_path, strict=True, **changes) as kv:
        check_promises(kv, layout, blocks, sessions)
    assert directory_nbytes(tmp_path) <= 96 << 20


def check_promises(kv: Any, layout: str, blocks: set[int], sessions: dict[str, tuple[int, bytes]]) -> None:
    kv.check()
    assert not kv.recovery.damage, kv.recovery
    space = kv.namespace(IDENTITY, LAYOUTS[layout])
    for seed in blocks:
        assert load_checked(space, prompt(seed, 6 * SIZE + 3)) == (6 * SIZE, Reason.COMPLETE), seed
    for name, (number, tokens) in sessions.items():
        with kv.session(name, space) as session:
            assert session.meta["n"] >= number
            if session.meta["n"] == number:
                assert session.tokens.tobytes() == tokens
                assert session.turns == (Turn("user", len(tokens) // 4),)
    quiet(kv)
    kv.check()


def evicting(path: Path, base: int, budget: str) -> Callable[[Say], None]:
    def act(say: Say) -> None:
        kv = open_cache(path, small(disk_nbytes=budget, log_keep_nbytes=0, device_nbytes="128KiB"))
        space = kv.namespace(IDENTITY, LAYOUTS["uneven"])
        rng = random.Random(base)
        for number in range(100_000):
            tokens = np.concatenate(
                (prompt(rng.randrange(5), rng.randrange(1, 6) * SIZE), prompt(number, 6 * SIZE))
            )
            store(space, tokens)
            load_checked(space, tokens)
            if number % 20 == 0:
                say(f"n {number}")

    return act


def test_killed_while_evicting(tmp_path: Path) -> None:
    """Slots change hands all the time; what comes back is right, and the directory keeps its budget."""
    seed = random.randrange(1 << 20)
    print("seed", seed)
    rng = random.Random(seed)
    for round_number in range(6):
        killed_after(evicting(tmp_path, seed + round_number, "13MiB"), rng.uniform(0.1, 0.6))
        assert directory_nbytes(tmp_path) <= 13 << 20
        with opened(tmp_path, disk_nbytes="13MiB", log_keep_nbytes=0) as kv:
            kv.check()
            assert not kv.recovery.damage
            space = kv.namespace(IDENTITY, LAYOUTS["uneven"])
            for head in range(5):
                for number in range(0, 200, 7):
                    for cut in range(1, 6):
                        load_checked(
                            space, np.concatenate((prompt(head, cut * SIZE), prompt(number, 6 * SIZE)))
                        )
            counters = kv.stats().counters
            assert not any(counters.get(name) for name in ("corrupt_parts", "superseded_parts")), counters
            quiet(kv)
            kv.check()


def purging(path: Path) -> Callable[[Say], None]:
    def act(say: Say) -> None:
        kv = open_cache(path, small(log_keep_nbytes=0))
        for number in range(1000):
            space = kv.namespace(IDENTITY, LAYOUTS["mixed"])
            store(space, prompt(1)).wait(60)
            with kv.session("gone", space) as session:
                session.commit(prompt(1), [], anchors=[320])
            say(f"purge {number}")
            kv.purge(space)
            say(f"purged {number}")

    return act


def test_killed_while_purging(tmp_path: Path) -> None:
    """A removal that was answered is whole; one cut short is finished by the next open, or never began."""
    rng = random.Random(5)
    marker = prompt(1)[: 4 * SIZE].tobytes()
    for _ in range(8):
        said = killed_after(purging(tmp_path), rng.uniform(0.05, 0.4))
        with opened(tmp_path, log_keep_nbytes=0) as kv:
            kv.check()
            space = kv.namespace(IDENTITY, LAYOUTS["mixed"])
            found, _ = load_checked(space, prompt(1))
            begun = found or kv.sessions()
            if not begun:
                raw = b"".join(p.read_bytes() for p in sorted(tmp_path.rglob("*")) if p.is_file())
                assert marker not in raw, said[-1:]
            if said and said[-1].startswith("purged"):
                assert not kv.sessions() or begun
