"""A session of 16k tokens: what it keeps on disk, from where it can be resumed, and what a fork costs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import numpy as np
from bench import child, workload
from bench.child import Say
from bench.figures import Figure, at_most, none_of, unmeasured

import tieredkv
from tieredkv import Namespace, TieredCache
from tieredkv.hf import ChatSession
from tieredkv.units import format_nbytes

from .setting import K, Setting, loaded, opened, prompt

NUM_TOKENS = 16 * K
MAX_KEPT = 1 / 3
MAX_FORK_MS = 1.0
_NUM_TURNS = 8
_NUM_ANSWER_TOKENS = 8
_SESSION = "long"
_DISK = {"disk_nbytes": "2GiB", "device_nbytes": "1GiB"}


def figures(setting: Setting) -> Iterator[Figure]:
    """Bytes against keeping every part, and the fork."""
    size, root = f"{NUM_TOKENS // K}k", setting.root
    common = {"model": str(setting.model), "num_tokens": NUM_TOKENS}
    setting.progress.say(f"a conversation of {NUM_TOKENS} tokens")
    forked = child.run(converse, path=str(root / "long"), forks=2 * setting.runs + 1, **common)
    setting.progress.say("the same with every part, and from where it can be resumed")
    kept = child.run(boundaries, path=str(root / "long"), model=str(setting.model))
    whole = child.run(keep_everything, path=str(root / "whole"), **common)
    name = f"kept_{size}_session_over_every_part_ratio"
    if kept["lost"]:
        yield unmeasured(name, f"<= {MAX_KEPT:.3g}", f"cannot be resumed at {kept['lost']}")
    else:
        yield at_most(
            name, kept["live_nbytes"] / whole["live_nbytes"], MAX_KEPT,
            f"{format_nbytes(kept['live_nbytes'])} of {format_nbytes(whole['live_nbytes'])}, slot headers included;"
            f" resumable at {kept['resumable']} of {kept['num_tokens']} tokens; files"
            f" {format_nbytes(kept['file_nbytes'])} and {format_nbytes(whole['file_nbytes'])}",
            file_ratio=round(kept["file_nbytes"] / whole["file_nbytes"], 4),
        )  # fmt: skip
    yield at_most(
        f"fork_{size}_ms", median(forked["fork_ms"]), MAX_FORK_MS,
        f"{forked['num_tokens']} tokens; from {min(forked['fork_ms']):.2f} to {max(forked['fork_ms']):.2f} ms"
        f" in {len(forked['fork_ms'])} forks",
        runs=[round(ms, 3) for ms in forked["fork_ms"]],
    )  # fmt: skip
    yield none_of(
        f"fork_{size}_copied_parts_num",
        forked["new_parts"],
        "parts in all tiers after all forks, less before",
    )


def converse(say: Say, path: str, model: str, num_tokens: int, forks: int) -> dict[str, Any]:
    """A system message, then turns up to about `num_tokens`; then forks of it."""
    live, tokenizer = loaded(model)
    text = tokenizer.decode(prompt(tokenizer, num_tokens // _NUM_TURNS - 4 * _NUM_ANSWER_TOKENS, "long"))
    with opened(path, live, tokenizer, **_DISK) as chats:
        with chats.session(_SESSION, system=text) as session:
            for number in range(1, _NUM_TURNS):
                for _ in session.send(
                    f"{number}. {text}", max_new_tokens=_NUM_ANSWER_TOKENS, do_sample=False
                ):
                    pass
            forked = _fork(chats.kv, session, forks)
        return {**forked, "num_tokens": len(session.tokens)}


def _fork(kv: TieredCache, session: ChatSession, forks: int) -> dict[str, Any]:
    kv.flush()
    before, took_ms = _num_parts(kv), []
    for number in range(forks):
        began = time.perf_counter()
        fork = session.fork(f"fork {number}")
        took_ms.append((time.perf_counter() - began) * 1e3)
        fork.close()
    return {"fork_ms": took_ms, "new_parts": _num_parts(kv) - before}


def boundaries(say: Say, path: str, model: str) -> dict[str, Any]:
    """In a new process: which of the wanted boundaries can be resumed at, and the bytes on disk."""
    live, tokenizer = loaded(model)
    with opened(path, live, tokenizer, **_DISK) as chats:
        space, size = chats.space, chats.layout.block_size
        with chats.kv.session(_SESSION, space) as session:
            ids = session.tokens
            answers = [turn.end for turn in session.turns if turn.role == "assistant"]
            first = next(turn.end for turn in session.turns if turn.role == "system")
        # one token is always left to compute
        wanted = [(end - 1) // size * size for end in answers[-3:]] + [first // size * size]
        found = {at: _resumed(space, ids, at) for at in wanted}
        return {
            "resumable": sorted(found), "lost": sorted(at for at, got in found.items() if got < at),
            "num_tokens": len(ids), **_on_disk(chats.kv),
        }  # fmt: skip


def _resumed(space: Namespace, ids: Any, boundary: int) -> int:
    """How much is there for a prompt that leaves the session at `boundary`."""
    return space.lookup(np.append(ids[:boundary], np.int32(0))).num_tokens


def keep_everything(say: Say, path: str, model: str, num_tokens: int) -> dict[str, Any]:
    """A store of as many tokens with every part of every block."""
    live, tokenizer = loaded(model)
    with opened(path, live, tokenizer, **_DISK) as chats:
        layout, space = chats.layout, chats.space
        anchors = workload.every_anchor(layout, num_tokens // layout.block_size)
        kv = workload.kv(0, num_tokens, layout)
        stored = space.store(workload.tokens(0, num_tokens), kv, anchors=anchors)
        flushed = chats.kv.flush()
        if stored.num_refused or not flushed.ok:
            raise RuntimeError(f"not everything was kept: {stored}, {flushed}")
        return _on_disk(chats.kv)


def _on_disk(kv: TieredCache) -> dict[str, int]:
    stats = kv.stats()
    live = next(tier.live_nbytes for tier in stats.tiers if tier.name == tieredkv.Tier.DISK.name.lower())
    return {"live_nbytes": live, "file_nbytes": stats.disk_nbytes}


def _num_parts(kv: TieredCache) -> int:
    return sum(tier.num_parts for tier in kv.stats().tiers)
