"""How conversations end and who gets their names: deleted, closed, refused, or handed to somebody else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
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


def ids_in(path: Path, ids: Any) -> bool:
    """Whether any file holds these ids, as slot headers do."""
    raw = np.asarray(ids, dtype="<i4").tobytes()
    return any(raw in file.read_bytes() for file in path.rglob("*") if file.is_file())


@pytest.mark.parametrize("way", ["while it streams", "after it failed"])
def test_a_delete_takes_what_a_turn_that_broke_off_had_stored(
    way: str, open_kv: Callable[..., Any], tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv, model = open_kv(), llama()
    chat = ChatModel(kv, model, tokenizer)
    session = chat.session("s")
    if way == "while it streams":
        answer = session.send("Tell me of the sea", max_new_tokens=200, do_sample=False)
        for _ in range(40):
            next(answer)
    else:
        forward, num_calls = model.forward, 0

        def fail_later(*given: Any, **named: Any) -> Any:
            nonlocal num_calls
            num_calls += 1
            if num_calls > 60:
                raise RuntimeError("made to fail")
            return forward(*given, **named)

        monkeypatch.setattr(model, "forward", fail_later)
        with pytest.raises(RuntimeError, match="made to fail"):
            list(session.send("Tell me of the sea", max_new_tokens=200, do_sample=False))
        monkeypatch.undo()
        list(session.resume_answer(**GREEDY))
    asked = session.tokens[:16].tolist()
    assert kv.flush(60).ok and kv.stats().num_blocks > 0
    session.delete()
    assert kv.stats().num_blocks == 0
    assert not ids_in(Path(kv.path), asked)


def test_an_interrupt_while_the_answer_starts_leaves_nothing_running(
    open_kv: Callable[..., Any], tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`Thread.start` waits for the thread to come up, and that is where a signal finds it."""
    model = llama()
    with ChatModel(open_kv(), model, tokenizer).session("s") as session:
        say(session, "One?")
        start = threading.Thread.start

        def interrupted(thread: threading.Thread) -> None:
            start(thread)
            if thread.name == "tieredkv-generate":
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", interrupted)
            with pytest.raises(KeyboardInterrupt):
                session.send("Two?", max_new_tokens=200)
        assert session.interrupted
        text = "".join(session.resume_answer(**GREEDY))
        prompt = torch.from_numpy(session.tokens.astype(np.int64))[None]
        end = session._record.turns[-2].end
        cold = model.generate(prompt[:, :end], attention_mask=torch.ones_like(prompt[:, :end]), **GREEDY)
        assert cold[0].tolist() == prompt[0].tolist() and session.messages[-1]["content"] == text


def test_an_answer_whose_end_was_interrupted_is_over(open_kv: Callable[..., Any], tokenizer: Any) -> None:
    with ChatModel(open_kv(), llama(), tokenizer).session("s") as session:
        answer = session.send("One?", **GREEDY)

        def interrupt(_generation: Any) -> None:
            raise KeyboardInterrupt

        answer._on_end = interrupt
        with pytest.raises(KeyboardInterrupt):
            list(answer)
        session.rollback(turns=1)
        say(session, "Two?")


def test_a_refused_commit_leaves_the_conversation_readable(
    open_kv: Callable[..., Any], tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv, model = open_kv(), llama()

    def full(*_given: Any) -> None:
        raise SessionError("the log did not take it: no space left on device")

    with ChatModel(kv, model, tokenizer).session("s") as session:
        for text in ("One?", "Two?"):
            say(session, text)
        said = session.messages
        with monkeypatch.context() as patch:
            patch.setattr(kv._sessions, "_log", full)
            with pytest.raises(SessionError):
                session.generate([{"role": "user", "content": "Another, longer beginning"}], **GREEDY)
        assert session.messages == said
        say(session, "Three?")
        said = session.messages
    kv.close()
    with ChatModel(open_kv(), model, tokenizer).session("s") as session:
        assert session.messages == said and len(said) == 6
        say(session, "Four?")


def test_a_rollback_into_the_first_message_is_a_conversation_without_any(
    open_kv: Callable[..., Any], tokenizer: Any
) -> None:
    kv, model = open_kv(), llama()
    with ChatModel(kv, model, tokenizer).session("s") as session:
        say(session, "Hello, my friend")
        session.rollback(num_tokens=6)
        assert session.messages == ()
    kv.close()
    with ChatModel(open_kv(), model, tokenizer).session("s") as session:
        assert len(session.tokens) == 6
        say(session, "Again")
        assert len(session.messages) == 2


def test_a_config_that_wants_no_cache_is_as_any_other(open_kv: Callable[..., Any], tokenizer: Any) -> None:
    model = llama()
    model.config.use_cache = model.generation_config.use_cache = False
    with ChatModel(open_kv(), model, tokenizer).session("s") as session:
        assert say(session, "One?")
        assert say(session, "Two?") and session.last_explain.reused_tokens > 0
