"""The child that measures: first tokens cold and resumed, and whether what comes back is what was stored.

Everything happens in one process that loads its model once, on a store of its own. Cold: a session about the
document in a namespace where nothing is stored. Resumed: the store is closed and opened again, so that memory
holds nothing, and a session of the same namespace asks the same. So cold and resumed runs are the same calls
with the same prompt, each in an opening of its own; they take turns, so that a busy machine slows both.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from ..cache import TieredCache, open_cache
from ..hf import ChatModel, ChatSession
from .chatter import chat_model, prepare, spent
from .child import Channel, serve
from .equality import compare, remember, top_two_gap
from .script import Script

NUM_RUNS = 5


def measure(channel: Channel, job: Mapping[str, Any]) -> None:
    """Say the medians, what was reused, and the differences found; says its stages."""
    script = Script.from_json(job["script"])
    model, tokenizer, config = prepare(channel, Path(job["model"]), script)
    question = next(script.turns()).question
    gaps = [top_two_gap(model, tokens) for tokens in job["doubts"]]

    def chats(kv: TieredCache, run: int) -> ChatModel:
        return chat_model(kv, model, tokenizer, salt=f"run {run}")

    channel.say("stage", text="warming up")
    model.generate(**tokenizer(question, return_tensors="pt"), max_new_tokens=2, do_sample=False)
    cold: list[float] = []
    resumed: list[float] = []
    for run in range(NUM_RUNS):
        for name, seconds in (("cold", cold), ("resumed", resumed)):
            channel.say("stage", text=f"first token {name}, {run + 1} of {NUM_RUNS}")
            with (
                open_cache(job["store"], config) as kv,
                chats(kv, run).session(f"{name} {run}", system=script.document) as session,
            ):
                seconds.append(first_token_s(session, question))
                reused = spent(session)
    channel.say("stage", text="an answer to compare")
    with open_cache(job["store"], config) as kv, chats(kv, NUM_RUNS).session("comparison") as session:
        ids = remember(session, model, tokenizer(script.document)["input_ids"])
    channel.say("stage", text="restored against never evicted")
    with open_cache(job["store"], config) as kv, chats(kv, NUM_RUNS).session("comparison") as session:
        kv_differences, logits_differences = compare(session, model, *ids)
    channel.say(
        "measured",
        cold_ttft_s=median(cold),
        resumed_ttft_s=median(resumed),
        kv_differences=kv_differences,
        logits_differences=logits_differences,
        gaps=gaps,
        **reused,
    )


def first_token_s(session: ChatSession, question: str) -> float:
    """From `send` to its first token, in seconds."""
    began = time.perf_counter()
    pieces = session.send(question, max_new_tokens=1)
    next(pieces)
    seconds = time.perf_counter() - began
    for _ in pieces:
        pass  # the end of the turn, which commits it
    return seconds


if __name__ == "__main__":
    serve(measure)
