"""The child that chats: opens the store, takes up every conversation where it stands, and finishes it.

The same work serves a first run, the run after a kill, and the run that is never killed: a turn that has its
answer is passed over, a turn that was interrupted is generated again from its user message.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..cache import TieredCache, open_cache
from ..config import Config
from ..hf import ChatModel, ChatSession, layout_of
from .child import Channel, serve
from .document import check_num_tokens
from .model import load
from .script import PLAIN_TEMPLATE, Script, Turn, small_config


def prepare(channel: Channel, folder: Path, script: Script) -> tuple[Any, Any, Config]:
    """The model, its tokenizer, and budgets that are too small for the script on that model.

    Raises:
        BadInput: the model cannot be loaded, or the document is too short or too long.
        Unsupported: a model whose KV cannot be kept.
    """
    channel.say("stage", text="loading the model")
    model, tokenizer = load(folder)
    positions = getattr(model.config, "max_position_embeddings", None)
    spare = script.num_spare_tokens
    num_tokens = check_num_tokens(script.document_name, script.document, tokenizer, positions, spare)
    return model, tokenizer, small_config(layout_of(model), num_tokens)


@contextmanager
def opened(channel: Channel, store: Path, config: Config) -> Iterator[TieredCache]:
    """The open store; says what recovery found."""
    kv = open_cache(store, config)
    try:
        channel.say("opened", config=asdict(config), recovery=asdict(kv.recovery), text=str(kv.recovery))
        yield kv
    finally:
        kv.close()


def chat(channel: Channel, job: Mapping[str, Any]) -> None:
    """Play the script to its end and say every piece of it; at last all tokens of each session."""
    script = Script.from_json(job["script"])
    model, tokenizer, config = prepare(channel, Path(job["model"]), script)
    with opened(channel, Path(job["store"]), config) as kv:
        chats = chat_model(kv, model, tokenizer, job["salt"])
        limits = answer_limits(model, tokenizer, script.num_answer_tokens)
        for turn in script.turns():
            with chats.session(turn.session, system=script.document) as session:
                take_turn(channel, session, turn, limits)
            say_stats(channel, kv)
        for name in script.questions:
            with chats.session(name) as session:
                channel.say("conversation", session=name, tokens=[int(token) for token in session.tokens])
        kv.flush()
        say_stats(channel, kv)


def chat_model(kv: TieredCache, model: Any, tokenizer: Any, salt: str) -> ChatModel:
    """Conversations in the tokenizer's own template, or else as questions and answers."""
    template = None if tokenizer.chat_template else PLAIN_TEMPLATE
    return ChatModel(kv, model, tokenizer, template=template, salt=salt)


def answer_limits(model: Any, tokenizer: Any, num_tokens: int) -> dict[str, Any]:
    """Where an answer ends: after `num_tokens`, where the model ends it, or in our plain template with its line."""
    limits: dict[str, Any] = {"max_new_tokens": num_tokens, "do_sample": False}
    if not tokenizer.chat_template:
        newlines = [tokenizer(text, add_special_tokens=False)["input_ids"][-1] for text in ("\n", "\n\n")]
        own = model.generation_config.eos_token_id
        limits["eos_token_id"] = [
            *(own if isinstance(own, list) else [own] if own is not None else []),
            *newlines,
        ]
    return limits


def take_turn(channel: Channel, session: ChatSession, turn: Turn, limits: Mapping[str, Any]) -> None:
    """Stream the answer to one question, unless the session has it already."""
    if sum(message["role"] == "assistant" for message in session.messages) > turn.index:
        return
    channel.say("turn", **asdict(turn), again=session.interrupted)
    if session.interrupted:
        answer = session.resume_answer(**limits)
    else:
        answer = session.send(turn.question, **limits)
    for piece in answer:
        channel.say("piece", text=piece)
    channel.say("answer", **spent(session))


def say_stats(channel: Channel, kv: TieredCache) -> None:
    stats = kv.stats()
    channel.say("stats", tiers=[asdict(tier) for tier in stats.tiers], disk_nbytes=stats.disk_nbytes)


def spent(session: ChatSession) -> dict[str, Any]:
    """What the last answer's prompt cost: the numbers of `last_explain` that the demo shows."""
    explain = session.last_explain
    assert explain is not None, "asked before any prompt"
    return {
        "prompt_tokens": explain.prompt_tokens,
        "reused_tokens": explain.reused_tokens,
        "by_tier": dict(explain.by_tier),
        "ttft_s": explain.ttft_s,
    }


if __name__ == "__main__":
    serve(chat)
