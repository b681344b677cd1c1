"""Many conversations under budgets too small for them: always the text of plain generate, across restarts."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import FAMILIES, llama

from tieredkv.hf import ChatModel

SYSTEM = "You are a careful assistant who answers in few words and never guesses at all."
GREEDY: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False}
QUESTIONS = [
    "Is it raining?",
    "And in winter, when the days are short?",
    "Why?",
    "Tell me about the sea and the moon.",
]


def plain(model: Any, session: Any) -> list[int]:
    asked = next(turn.end for turn in reversed(session._record.turns) if turn.role == "user")
    ids = torch.tensor(session.tokens[None, :asked].astype(np.int64))
    return list(model.generate(ids, **GREEDY)[0].tolist())


@pytest.mark.parametrize(("name", "policy"), [("llama", "lru"), ("gemma3", "arc"), ("mistral", "lru")])
def test_text_is_right_whatever_was_evicted(
    name: str, policy: str, open_kv: Callable[..., Any], tokenizer: Any
) -> None:
    model, rng = FAMILIES[name](), random.Random(f"{name} {policy}")
    reused = 0
    for _ in range(2):
        kv = open_kv(policy=policy, device_nbytes=160 * 1024, host_nbytes=96 * 1024, disk_nbytes="64MiB")
        chat = ChatModel(kv, model, tokenizer)
        for _ in range(6):
            with chat.session(f"session {rng.randrange(3)}", system=SYSTEM) as session:
                if session.messages[1:] and rng.random() < 0.3:
                    session.rollback(turns=1)
                "".join(session.send(rng.choice(QUESTIONS), **GREEDY))
                assert session.tokens.tolist() == plain(model, session)
                reused += session.last_explain.reused_tokens
                if rng.random() < 0.5:
                    "".join(session.send(rng.choice(QUESTIONS), **GREEDY))
                    assert session.tokens.tolist() == plain(model, session)
                    "".join(session.regenerate(**GREEDY))
                    assert session.tokens.tolist() == plain(model, session)
            kv.check()
        stats = kv.stats()
        kv.close()
    assert reused > 0
    assert sum(tier.num_evictions for tier in stats.tiers[:2]) > 0, "the budgets were not small"


def test_answers_stream_side_by_side(open_kv: Callable[..., Any], tokenizer: Any) -> None:
    model = llama()
    chat = ChatModel(open_kv(), model, tokenizer)
    with ExitStack() as stack:
        sessions = [stack.enter_context(chat.session(f"s{i}", system=SYSTEM)) for i in range(3)]
        answers = [s.send(q, **GREEDY) for s, q in zip(sessions, QUESTIONS, strict=False)]
        said = ["" for _ in answers]
        while pieces := [next(answer, None) for answer in answers]:
            if not any(piece is not None for piece in pieces):
                break
            said = [text + (piece or "") for text, piece in zip(said, pieces, strict=True)]
        for session, text in zip(sessions, said, strict=True):
            assert session.tokens.tolist() == plain(model, session)
            assert session.messages[-1]["content"] == text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_restart_on_the_gpu(name: str, open_kv: Callable[..., Any], tokenizer: Any) -> None:
    model = FAMILIES[name]().to("cuda", torch.bfloat16)
    states = []
    for name_again in ("first", "second"):
        kv = open_kv(device="cuda")
        with ChatModel(kv, model, tokenizer).session("s", system=SYSTEM) as session:
            if name_again == "first":
                "".join(session.send(QUESTIONS[3], **GREEDY))
                "".join(session.send(QUESTIONS[1], **GREEDY))
            ids = np.append(session.tokens, np.int32(9))
            cache = next(v for v in session.attach(ids).values() if hasattr(v, "layers"))
            end = (len(ids) - 2) // 16 * 16
            cache.crop(end - cache.num_tokens)
            states.append([getattr(x, n).cpu() for x in cache.holding_layers() for n in ("keys", "values")])
        kv.close()
    for one, other in zip(*states, strict=True):
        length = min(one.shape[2], other.shape[2])
        assert length and torch.equal(one[:, :, -length:], other[:, :, -length:])
