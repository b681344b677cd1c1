"""Load or recompute: a prompt that is on disk against the same prompt computed, from the shortest prompts on.

Each round opens a store, asks a prompt that it does not hold, and commits it; opens it again, so that memory
holds nothing, and asks the same. Whether that is loaded is left to the library, as it is for everybody.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

from bench import child
from bench.child import Say
from bench.figures import Figure, shown, unmeasured

from tieredkv.outcomes import Reason

from .ratios import paired, ratio_at_most
from .setting import K, Setting, ask, explained, loaded, opened, prompt, reused

LENGTHS = (33, 64, 128, 256, 512, K, 2 * K)
_NAME = "disk_hit_over_recompute_ratio"


def figures(setting: Setting) -> Iterator[Figure]:
    """The worst length decides; the break-even length is the shortest from which a disk hit always wins.

    A hit is what is stored whole, also where computing it again was chosen.
    """
    setting.progress.say(f"prompts of {LENGTHS[0]} to {LENGTHS[-1]} tokens, from disk and computed")
    found = child.run(
        take_turns, model=str(setting.model), store=str(setting.root / "even"), lengths=list(LENGTHS),
        rounds=setting.runs,
    )["rounds"]  # fmt: skip
    ratios = {n: paired(found[str(n)]["hit_s"], found[str(n)]["cold_s"]) for n in LENGTHS}
    missed = [n for n in LENGTHS if not all(found[str(n)]["hit"])]
    if missed:
        yield unmeasured(_NAME, "<= 1", f"not all that was stored of prompts of {missed} tokens was found")
        return
    worst = max(LENGTHS, key=lambda n: median(ratios[n]))
    each = ", ".join(
        f"{n}: {median(found[str(n)]['hit_s']) * 1e3:.0f} of {median(found[str(n)]['cold_s']) * 1e3:.0f} ms"
        for n in LENGTHS
    )
    num_computed = sum(sum(found[str(n)]["computed"]) for n in LENGTHS)
    yield ratio_at_most(
        _NAME, ratios[worst], 1.0,
        f"the worst of {len(LENGTHS)} lengths, {worst}; {each}; computed again {num_computed} of"
        f" {len(LENGTHS) * len(ratios[worst])} times",
    )  # fmt: skip
    wins = [n for n in LENGTHS if all(median(ratios[m]) < 1 for m in LENGTHS if m >= n)]
    if wins:
        yield shown(
            "break_even_prompt_tokens", wins[0], "the shortest measured from which a disk hit is faster"
        )


def take_turns(say: Say, model: str, store: str, lengths: list[int], rounds: int) -> dict[str, Any]:
    """By length: seconds to the first token computed and from disk; whether all was found, and whether computed."""
    live, tokenizer = loaded(model)
    found: dict[str, dict[str, list[float]]] = {
        str(n): {"cold_s": [], "hit_s": [], "hit": [], "computed": []} for n in lengths
    }
    for number in range(rounds):
        for num_tokens in lengths:
            of, ids = found[str(num_tokens)], prompt(tokenizer, num_tokens, f"{num_tokens}/{number}")
            name = f"{num_tokens}/{number}"
            with opened(store, live, tokenizer) as chats, chats.session(name) as session:
                seconds, out = ask(live, session, ids)
                session.commit(out)
            of["cold_s"].append(seconds)
            with opened(store, live, tokenizer) as chats, chats.session(f"{name} again") as session:
                of["hit_s"].append(ask(live, session, ids)[0])
                computed = explained(session).reason == str(Reason.RECOMPUTED)
                of["hit"].append(computed or reused(session) == {"disk": chats.boundary(num_tokens)})
                of["computed"].append(computed)
    return {"rounds": found}
