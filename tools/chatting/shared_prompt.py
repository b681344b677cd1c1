"""A shared prompt that is only ever hit on the device: is it still on disk after long pressure and a restart?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from bench import child, workload
from bench.child import Say
from bench.figures import Figure, unmeasured

from tieredkv.units import MiB, format_nbytes

from .restoring import needed_nbytes
from .setting import Chats, K, Setting, loaded, opened, prompt, reused

_NAME = "shared_prompt_on_disk_after_restart_num"
_NUM_TOKENS = 2 * K
_NUM_ROUNDS, _OTHERS_A_ROUND = 20, 4
_BUDGETS = {"device_nbytes": 256 * MiB, "disk_nbytes": 512 * MiB}


def figures(setting: Setting) -> Iterator[Figure]:
    """1 if the whole shared prompt, the window parts of its anchor included, is on disk; else 0."""
    setting.progress.say("one shared prompt, and long pressure on the disk")
    common = {"model": str(setting.model), "path": str(setting.root / "shared")}
    pressed = child.run(press, **common)
    after = child.run(look, boundary=pressed["boundary"], ids=pressed["ids"], **common)
    elsewhere = [tiers for tiers in pressed["hits"] if tiers != {"device": pressed["boundary"]}]
    disk = format_nbytes(_BUDGETS["disk_nbytes"])
    written = f"{format_nbytes(pressed['stored_nbytes'])} stored on a disk of {disk}"
    if elsewhere or not pressed["num_evictions"]:
        yield unmeasured(_NAME, "1", f"not only hit on the device, or no pressure: {elsewhere}, {written}")
        return
    there = after["by_tier"] == {"disk": pressed["boundary"]}
    yield Figure(
        _NAME, int(there), "1", there,
        f"{after['by_tier']} of {pressed['boundary']} tokens ({after['reason']}); {len(pressed['hits'])} sessions hit"
        f" it on the device, {written}, {pressed['num_evictions']} blocks evicted there",
    )  # fmt: skip


def press(say: Say, model: str, path: str) -> dict[str, Any]:
    """Sessions with one system message, and between them much that is used once."""
    live, tokenizer = loaded(model)
    system = tokenizer.decode(prompt(tokenizer, _NUM_TOKENS, "shared"))
    with opened(path, live, tokenizer, **_BUDGETS) as chats:
        kv, chain_nbytes = workload.kv(0, _NUM_TOKENS, chats.layout), needed_nbytes(chats.layout, _NUM_TOKENS)
        ids, _ = _ask(chats, system, 0)
        boundary, hits = _system_boundary(chats), []
        for number in range(1, _NUM_ROUNDS + 1):
            hits.append(_ask(chats, system, number)[1])
            for other in range(_OTHERS_A_ROUND):
                seed = number * _OTHERS_A_ROUND + other
                stored = chats.space.store(workload.tokens(seed, _NUM_TOKENS), kv, anchors=[_NUM_TOKENS])
                if not stored.wait(60.0):
                    raise RuntimeError(f"chain {seed} did not reach the disk: {stored}")
        disk = next(tier for tier in chats.kv.stats().tiers if tier.name == "disk")
        return {
            "boundary": boundary, "ids": ids[: boundary + 1], "hits": hits, "num_evictions": disk.num_evictions,
            "stored_nbytes": _NUM_ROUNDS * _OTHERS_A_ROUND * chain_nbytes,
        }  # fmt: skip


def _ask(chats: Chats, system: str, number: int) -> tuple[list[int], dict[str, int]]:
    """A short question in a session of its own: the ids up to its answer, and what was reused of them."""
    with chats.session(_name(number), system=system) as session:
        for _ in session.send(f"{number}?", max_new_tokens=1, do_sample=False):
            pass
        return session.tokens.tolist(), reused(session)


def _system_boundary(chats: Chats) -> int:
    """The last boundary within the system message, as the first session's record has it."""
    row = next(row for row in chats.kv.sessions() if row.name == _name(0))
    size = chats.layout.block_size
    return next(turn.end for turn in row.turns if turn.role == "system") // size * size


def _name(number: int) -> str:
    return f"session {number}"


def look(say: Say, model: str, path: str, boundary: int, ids: list[int]) -> dict[str, Any]:
    """In a new process: what is there of the shared prompt, and where."""
    live, tokenizer = loaded(model)
    with opened(path, live, tokenizer, **_BUDGETS) as chats:
        hit = chats.space.lookup(np.array(ids[: boundary + 1]))
        return {"by_tier": dict(hit.by_tier), "reason": str(hit.reason)}
