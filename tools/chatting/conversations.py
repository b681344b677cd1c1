"""Real conversations, eight at a time: how many tokens are prefilled, against the block-granular ideal.

A request is the text before an assistant's message; that message's own text, as given, is part of the next
request. Each request opens its session anew, so that whatever is reused comes from the tiers.
"""

from __future__ import annotations

import gzip
import json
import os
import signal
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench import child
from bench.child import Say
from bench.figures import Figure, at_most, shown, unmeasured

from tieredkv.block.hashing import Tokens, as_tokens, chain
from tieredkv.block.layout import BlockLayout
from tieredkv.hf import ChatSession
from tieredkv.hf.identity import layout_of

from .setting import Setting, loaded, opened

FILE = "text_tau_airline_gpt4o.jsonl.gz"
NUM_CONVERSATIONS = 20
MAX_OVER_IDEAL = 1.05
_AT_A_TIME = 8
_NUM_WORST = 5

Message = Sequence[str]
"""Role and text."""


@dataclass(frozen=True)
class Request:
    """The ids of one prompt, and whose conversation it continues."""

    conversation: int
    ids: Tokens


class Ideal:
    """A cache of whole blocks that forgets nothing: what it would have to compute of each prompt."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._seen: set[bytes] = set()

    def num_computed(self, ids: Tokens) -> int:
        """Tokens beyond the longest whole-block prefix ever seen, at least one; all of `ids` is seen from now on."""
        digests = [row.tobytes() for row in chain(bytes(32), ids, self._block_size)]
        known = next((i for i, digest in enumerate(digests) if digest not in self._seen), len(digests))
        self._seen.update(digests)
        return max(1, len(ids) - known * self._block_size)


@dataclass
class Replayed:
    """What a stretch of requests cost, and the requests that cost most beyond the ideal."""

    num_computed: int = 0
    num_ideal: int = 0
    num_requests: int = 0
    by_tier: dict[str, int] = field(default_factory=dict)
    worst: list[tuple[int, str]] = field(default_factory=list)

    def add(self, number: int, computed: int, ideal: int, session: ChatSession) -> None:
        explain = session.last_explain
        assert explain is not None, "a request was attached"
        self.num_computed += computed
        self.num_ideal += ideal
        self.num_requests += 1
        for tier, num_tokens in explain.by_tier.items():
            self.by_tier[tier] = self.by_tier.get(tier, 0) + num_tokens
        if computed > ideal:
            what = f"request {number} of {explain.prompt_tokens} tokens: {computed}, ideal {ideal}"
            self.worst.append((computed - ideal, f"{what} ({explain.reason}; {explain.detail})"))
            self.worst = sorted(self.worst, reverse=True)[:_NUM_WORST]


def figures(setting: Setting) -> Iterator[Figure]:
    """Prefilled over ideal, in one process and with a process killed in the middle."""
    whole = setting.num_conversations == NUM_CONVERSATIONS
    names = [f"conversations_prefilled_over_ideal{restarted}_ratio" for restarted in ("", "_restarted")]
    if setting.data is None or not (setting.data / FILE).is_file():
        why = f"no {FILE}: name its folder with --data or TIEREDKV_DATA"
        yield from (unmeasured(name, f"<= {MAX_OVER_IDEAL:g}", why) for name in names)
        return
    for name, restarts in zip(names, (False, True), strict=True):
        parts = _replays(setting, setting.root / name, restarts)
        computed, ideal = (sum(part[key] for part in parts) for key in ("num_computed", "num_ideal"))
        worst = sorted((tuple(w) for part in parts for w in part["worst"]), reverse=True)[:_NUM_WORST]
        tiers = [part["by_tier"] for part in parts]
        detail = (
            f"{computed} tokens of {sum(part['num_requests'] for part in parts)} requests computed, ideal {ideal};"
            f" reused {tiers}; most beyond it: {'; '.join(text for _, text in worst) or 'nothing'}"
        )
        more = {"computed": computed, "ideal": ideal, "worst": [text for _, text in worst]}
        if whole:
            yield at_most(name, computed / ideal, MAX_OVER_IDEAL, detail, **more)
        else:
            few = f"{setting.num_conversations} conversations alone: "
            yield shown(name, computed / ideal, few + detail, **more)


def _replays(setting: Setting, path: Path, restarts: bool) -> list[dict[str, Any]]:
    common = {
        "model": str(setting.model), "data": str(setting.data), "path": str(path),
        "num_conversations": setting.num_conversations,
    }  # fmt: skip
    how = "a restart in the middle" if restarts else "one process"
    ends = ((0.0, 0.5), (0.5, 1.0)) if restarts else ((0.0, 1.0),)
    found = []
    for start, stop in ends:
        with setting.progress.bar(f"{setting.num_conversations} conversations, {how}", 100) as advance:
            found.append(
                child.run(
                    replay, lambda done: advance(done), start=start, stop=stop, die=stop < 1.0, **common
                )
            )
    return found


def replay(
    say: Say, model: str, data: str, path: str, num_conversations: int, start: float, stop: float, die: bool
) -> dict[str, Any]:
    """Requests from `start` to `stop`, as shares of all; `die` ends the process by SIGKILL after the last."""
    live, tokenizer = loaded(model)
    requests = schedule(
        [prompts(messages, tokenizer) for messages in conversations(Path(data), num_conversations)]
    )
    budget = needed_by_all(layout_of(live), requests) // 10
    first, last = round(start * len(requests)), round(stop * len(requests))
    with opened(path, live, tokenizer, device_nbytes=budget, host_nbytes=budget) as chats:
        ideal, replayed = Ideal(chats.layout.block_size), Replayed()
        for number, request in enumerate(requests[:last]):
            wanted = ideal.num_computed(request.ids)
            if number < first:
                continue
            with chats.session(f"conversation {request.conversation}") as session:
                computed = _forward(live, session, request.ids)
                replayed.add(number, computed, wanted, session)
            say(done=100 * (number + 1 - first) // (last - first))
        result = vars(replayed)
        if die:
            say(result=result)
            os.kill(os.getpid(), signal.SIGKILL)
    return result


def _forward(model: Any, session: ChatSession, ids: Tokens) -> int:
    """Compute what the session does not have of a prompt, and keep it; returns how many tokens that were."""
    attached = session.attach(ids)
    cache = next(value for value in attached.values() if hasattr(value, "get_seq_length"))
    name = next(key for key, value in attached.items() if value is cache)
    rest = attached["input_ids"][:, int(cache.get_seq_length()) :]
    with torch.inference_mode():
        model(input_ids=rest, **{name: cache}, logits_to_keep=1)
    session.commit(ids)
    return int(rest.shape[1])


# The conversations


def conversations(data: Path, count: int) -> Iterator[list[Message]]:
    """The messages of the first `count` conversations."""
    with gzip.open(data / FILE, "rt", encoding="utf-8") as lines:
        for _, line in zip(range(count), lines, strict=False):
            yield json.loads(line)["msgs"]


def prompts(messages: Sequence[Message], tokenizer: Any) -> list[Tokens]:
    """The ids before each assistant's message: each message's own ids, one after the other."""
    found, ids = [], [tokenizer.bos_token_id] if tokenizer.bos_token_id is not None else []
    for role, text in messages:
        if role == "assistant":
            ids += _ids(tokenizer, "Assistant:")
            found.append(as_tokens(np.array(ids)))
            ids += _ids(tokenizer, f" {text}\n\n")
        else:
            ids += _ids(tokenizer, f"{role.capitalize()}: {text}\n\n")
    return found


def _ids(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def schedule(all_prompts: Sequence[Sequence[Tokens]]) -> list[Request]:
    """Requests in turn, some conversations at a time; where one ends the next begins."""
    waiting = deque((number, deque(of)) for number, of in enumerate(all_prompts))
    active = deque(waiting.popleft() for _ in range(min(_AT_A_TIME, len(waiting))))
    requests = []
    while active:
        number, left = active.popleft()
        requests.append(Request(number, left.popleft()))
        if left:
            active.append((number, left))
        elif waiting:
            active.append(waiting.popleft())
    return requests


def needed_by_all(layout: BlockLayout, requests: Sequence[Request]) -> int:
    """Bytes that hold every conversation, each resumable at its end; blocks they share count once."""
    last = {request.conversation: request.ids for request in requests}
    digests = {row.tobytes() for ids in last.values() for row in chain(bytes(32), ids, layout.block_size)}
    nbytes = 0
    for group, part_nbytes in enumerate(layout.part_nbytes):
        need = layout.num_window_blocks[group]
        each = [min(need, len(ids) // layout.block_size) for ids in last.values()]
        nbytes += part_nbytes * (sum(each) if need else len(digests))
    return nbytes
