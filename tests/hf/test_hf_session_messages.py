"""What a conversation takes as a message, whose turn it then is, and what it says to anything else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import llama

from tieredkv.errors import BadInput
from tieredkv.hf import ChatModel

GREEDY: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}


def message(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


USER = message("user", "How warm is it?")


@pytest.mark.parametrize(
    "last",
    [message("tool", "21 degrees"), message("system", "Answer briefly."), message("developer", "Now.")],
)
def test_an_answer_may_follow_any_message_but_an_answer(
    last: dict[str, str], open_kv: Callable[..., Any], tokenizer: Any
) -> None:
    model = llama()
    chat = ChatModel(open_kv(), model, tokenizer)
    asked = [USER, message("assistant", "I look."), last]
    with chat.session("s") as session:
        answer = session.generate(asked, **GREEDY)
        ids = torch.from_numpy(
            answer.ids[: len(answer.ids) - GREEDY["max_new_tokens"]][None].astype(np.int64)
        )
        assert answer.ids.tolist() == model.generate(ids, **GREEDY)[0].tolist()
        assert list(session.messages) == [*asked, message("assistant", answer.text)]
        assert not session.interrupted
        "".join(session.send("And tomorrow?", **GREEDY))
        assert len(session.messages) == 6
        session.rollback(num_messages=4)
        assert "".join(session.regenerate(**GREEDY)) == answer.text
        session.rollback(num_messages=3)
        assert session.interrupted and "".join(session.resume_answer(**GREEDY)) == answer.text
        assert list(session.messages) == [*asked, message("assistant", answer.text)]


def test_a_system_message_alone_may_be_answered_and_asks_for_nothing(
    open_kv: Callable[..., Any], tokenizer: Any
) -> None:
    with ChatModel(open_kv(), llama(), tokenizer).session("s") as session:
        session.generate([message("system", "Greet the user.")], **GREEDY)
        assert [m["role"] for m in session.messages] == ["system", "assistant"]
        session.rollback(num_messages=1)
        assert not session.interrupted
        with pytest.raises(BadInput, match="nothing was asked"):
            session.regenerate(**GREEDY)


@pytest.mark.parametrize(
    ("messages", "names"),
    [
        ([USER, 5], "message 1 has no role and content: int"),
        ([message("user", "x"), {"role": "user"}], "message 1 has no role and content: it has role"),
        ([{"content": "x"}], "message 0"),
        ([message("user", None)], "its content is a NoneType"),
        ([message("user", [{"type": "text", "text": "hi"}])], "its content is a list"),
        ([message(7, "x")], "its role is a int"),
        ([message("assistant", "") | {"tool_calls": [1]}, USER], "message 0: .* not tool_calls"),
        ([USER, message("assistant", "x")], "nothing to answer"),
    ],
)
def test_what_is_no_message_is_refused_by_name(
    messages: list[Any], names: str, open_kv: Callable[..., Any], tokenizer: Any
) -> None:
    chat = ChatModel(open_kv(), llama(), tokenizer)
    with chat.session("s") as session:
        with pytest.raises(BadInput, match=names):
            session.generate(messages, **GREEDY)
        assert session.messages == () and not len(session.tokens)
    if "answer" not in names and isinstance(messages[0], dict):
        with pytest.raises(BadInput, match=names):
            chat.resume(messages)
        assert not chat._live.kv.sessions()


def test_what_is_no_text_is_not_said(open_kv: Callable[..., Any], tokenizer: Any) -> None:
    with ChatModel(open_kv(), llama(), tokenizer).session("s") as session:
        for text in (None, 5, ["x"], b"x"):
            with pytest.raises(BadInput, match="not text"):
                session.send(text, **GREEDY)
            with pytest.raises(BadInput, match="not text"):
                session.system(text)
        assert session.messages == ()


def test_ids_that_the_caller_writes_to_again_are_what_was_asked(
    open_kv: Callable[..., Any], tokenizer: Any
) -> None:
    model, ids = llama(), np.arange(40, dtype=np.int32)
    with ChatModel(open_kv(), model, tokenizer).session("s") as session:
        given = ids.copy()
        arguments = session.attach(given)
        given[:] = 1
        session.commit(model.generate(**arguments, **GREEDY))
        assert session.tokens[:40].tolist() == ids.tolist()
