"""How conversations end and who gets their names: deleted, closed, refused, or handed to somebody else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import llama

from tieredkv.errors import BadInput, SessionError
from tieredkv.hf import ChatModel

SYSTEM = "You are a careful assistant who answers in few words and never guesses."
SECRET = "My secret is that I hid the treasure below the old oak tree behind the house."
GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}


def say(session: Any, text: str) -> str:
    return "".join(session.send(text, **GREEDY))


@pytest.mark.parametrize("way", ["rolled back", "system shared", "model changed"])
def test_a_delete_takes_what_was_said_before(way: str, open_kv: Callable[..., Any], tokenizer: Any) -> None:
    kv, model = open_kv(), llama()
    chat, system = ChatModel(kv, model, tokenizer), SYSTEM if way == "system shared" else None
    with chat.session("other", system=system) as other:
        say(other, "Something else entirely")
        kept = other.tokens
    session = chat.session("s", system=system)
    say(session, SECRET)
    secret, space = session.tokens, chat._live.space
    shared = int(np.argmax(secret[: len(kept)] != kept[: len(secret)])) if system else 0
    kv.flush()
    if way == "model changed":
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight.mul_(1.01)
    else:
        session.rollback(turns=1)
    say(session, "How is the weather in the north?")
    assert space.lookup(np.append(secret, 0)).num_tokens > shared, "the cache still has it"
    session.delete()
    assert space.lookup(np.append(secret, 0)).num_full_tokens == shared // 16 * 16
    kv.close()
    kv = open_kv()
    space = ChatModel(kv, llama(), tokenizer)._live.space
    assert space.lookup(np.append(secret, 0)).num_full_tokens == shared // 16 * 16
    assert space.lookup(np.append(kept, 0)).num_tokens == len(kept) // 16 * 16
    assert [row.name for row in kv.sessions()] == ["other"]


@pytest.mark.parametrize("way", ["delete", "close"])
def test_nothing_is_asked_of_a_conversation_that_ended(
    way: str, open_kv: Callable[..., Any], tokenizer: Any
) -> None:
    session = ChatModel(open_kv(), llama(), tokenizer).session("s", system=SYSTEM)
    say(session, "One?")
    ids = session.tokens.tolist()
    getattr(session, way)()
    for call in (
        lambda: session.attach(ids),
        lambda: session.generate(ids, **GREEDY),
        lambda: session.send("Two?"),
        lambda: session.regenerate(),
        lambda: session.rollback(turns=1),
        session.prefetch,
        lambda: session.fork("other"),
    ):
        with pytest.raises(SessionError, match="is closed"):
            call()


@pytest.mark.parametrize("bad", [0, -1, 1.5, "12"])
def test_an_answer_of_no_length_is_refused_before_anything_is_said(
    bad: Any, open_kv: Callable[..., Any], tokenizer: Any
) -> None:
    with ChatModel(open_kv(), llama(), tokenizer).session("s") as session:
        say(session, "One?")
        said = session.tokens.tolist()
        for call in (
            lambda: session.send("Two?", max_new_tokens=bad),
            lambda: session.regenerate(max_new_tokens=bad),
            lambda: session.generate(said, max_new_tokens=bad),
        ):
            with pytest.raises(BadInput, match="max_new_tokens"):
                call()
            assert session.tokens.tolist() == said and not session.interrupted
        say(session, "Two?")


def test_wishes_outlive_a_change_of_the_model(open_kv: Callable[..., Any], tokenizer: Any) -> None:
    kv, model = open_kv(), llama()
    with ChatModel(kv, model, tokenizer).session("s") as session:
        say(session, "One?")
        session.pin()
        session.prioritise("high")
        session.expire(days=2)
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight.mul_(1.01)
        say(session, "Two?")
        assert session.pinned and session.priority == "high" and len(session.messages) == 4
    kv.close()
    row = open_kv().sessions()[0]
    assert row.pinned and row.priority == 1 and row.expires_at > 0


def test_a_delete_does_not_mind_how_the_answer_ended(
    open_kv: Callable[..., Any], tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv, model = open_kv(), llama()
    chat = ChatModel(kv, model, tokenizer)
    session = chat.session("fails")
    with monkeypatch.context() as patch:
        patch.setattr(model, "generate", lambda **_: (_ for _ in ()).throw(RuntimeError("the model failed")))
        answer = session.send("Hello?", **GREEDY)
        session.delete()
    assert list(answer) == []
    session = chat.session("streams")
    answer = session.send("Hello?", max_new_tokens=10_000)
    session.delete()
    assert list(answer) == [] and kv.sessions() == ()
    session.close()
    assert not kv.is_session_open("fails") and not kv.is_session_open("streams")


def test_a_delete_that_is_refused_leaves_a_conversation_that_goes_on(
    open_kv: Callable[..., Any], tokenizer: Any
) -> None:
    kv = open_kv(deadline_s=2.0)
    chat = ChatModel(kv, llama(), tokenizer)
    with chat.session("s") as session:
        say(session, SECRET)
        with chat._live.space.load(np.append(session.tokens, 0)) as prefix:
            assert prefix.num_tokens
            with pytest.raises(SessionError, match="in use"):
                session.delete()
        say(session, "Are you there?")
        assert len(session.messages) == 4


def test_a_new_name_is_new(open_kv: Callable[..., Any], tokenizer: Any) -> None:
    kv = open_kv()
    chat = ChatModel(kv, llama(), tokenizer)
    with chat.session("alice") as alice:
        say(alice, SECRET)
        tokens = alice.tokens
    for prompt in ([{"role": "user", "content": "Something else"}], np.arange(60)):
        with pytest.raises(SessionError, match="'alice' exists"):
            chat.resume(prompt, name="alice")
    with chat.session("alice") as alice:
        assert alice.tokens.tolist() == tokens.tolist()
    with chat.session("emptied") as session:
        say(session, "x")
        session.rollback(num_tokens=0)
    with chat.resume([{"role": "user", "content": "Unrelated"}], name="mine") as session:
        assert session.name == "mine", "a session without a token shares nothing"


def test_a_system_message_is_for_what_is_new(open_kv: Callable[..., Any], tokenizer: Any) -> None:
    chat = ChatModel(open_kv(), llama(), tokenizer)
    with chat.session("s", system=SYSTEM) as session:
        say(session, "x")
        session.rollback(num_tokens=5)
    with chat.session("s", system="Another.") as session:
        assert len(session.tokens) == 5


def test_what_cannot_be_opened_leaves_its_name(
    open_kv: Callable[..., Any], tokenizer: Any, tmp_path: Any
) -> None:
    kv = open_kv()
    chat = ChatModel(kv, llama(), tokenizer)
    with pytest.raises(BadInput, match="not text"):
        chat.session("s", system=5)  # type: ignore[arg-type]
    for name in (42, None, b"x", "\ud800"):
        with pytest.raises(BadInput, match="name"):
            chat.session(name)  # type: ignore[arg-type]
    with chat.session("s") as session:
        say(session, "x")
        with pytest.raises(BadInput, match="name"):
            session.fork(42)  # type: ignore[arg-type]
        session.export(tmp_path / "file")
    with pytest.raises(BadInput, match="name"):
        chat.import_(tmp_path / "file", name=42)  # type: ignore[arg-type]
    assert [row.name for row in kv.sessions()] == ["s"]
