"""Time to the first token of one prompt by where its KV is: the session's own memory, device, host, disk."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

from bench import child, workload
from bench.child import Say
from bench.figures import Figure, shown

from tieredkv.units import MiB

from .restoring import needed_nbytes
from .setting import Chats, K, Setting, ask, generate_s, loaded, opened, prompt, reused

NUM_TOKENS = 2 * K


def figures(setting: Setting) -> Iterator[Figure]:
    setting.progress.say(f"{NUM_TOKENS} tokens, cold and from each tier")
    found = child.run(
        by_tier, model=str(setting.model), path=str(setting.root / "tiers"), num_tokens=NUM_TOKENS,
        rounds=setting.runs,
    )  # fmt: skip
    for name, times in found.items():
        yield shown(
            f"ttft_{NUM_TOKENS // K}k_{name}_ms", median(times) * 1e3,
            f"median of {len(times)}, {min(times) * 1e3:.0f} to {max(times) * 1e3:.0f}",
        )  # fmt: skip


def by_tier(say: Say, model: str, path: str, num_tokens: int, rounds: int) -> dict[str, list[float]]:
    """Seconds to the first token: stock and cold, then by the tier that most of the prompt came from."""
    live, tokenizer = loaded(model)
    ids = prompt(tokenizer, num_tokens, "tiers")
    found: dict[str, list[float]] = {"cold": []}
    with opened(path, live, tokenizer) as chats, chats.session("first") as session:
        session.commit(ask(live, session, ids)[1])
        nbytes = needed_nbytes(chats.layout, num_tokens)
        kv = workload.kv(0, num_tokens, chats.layout)
    budget = -(-int(1.2 * nbytes) // MiB) * MiB
    for number in range(rounds):
        found["cold"].append(generate_s(live, ids, {}))
        with opened(path, live, tokenizer, device_nbytes=budget, host_nbytes=2 * budget) as chats:
            _note(found, chats, live, ids, f"disk {number}")
            _note(found, chats, live, ids, f"device {number}")
            # another prompt takes the device, and this one goes to the host
            anchors = [chats.boundary(num_tokens)]
            chats.space.store(workload.tokens(number, num_tokens), kv, anchors=anchors)
            _note(found, chats, live, ids, f"host {number}")
    return found


def _note(found: dict[str, list[float]], chats: Chats, model: Any, ids: list[int], name: str) -> None:
    with chats.session(name) as session:
        seconds, _ = ask(model, session, ids)
        tiers = reused(session)
        found.setdefault(max(tiers, key=lambda tier: tiers[tier]), []).append(seconds)
