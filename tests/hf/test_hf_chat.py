"""Conversations: the text of plain generate, whatever happens between the turns."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import FAMILIES, byte_tokenizer, gemma3, llama

from tieredkv.errors import BadInput, SessionError
from tieredkv.hf import ChatModel
from tieredkv.hf.stream import TextPieces
from tieredkv.hf.template import PLAIN_TEMPLATE, Template

SYSTEM = "You are a careful assistant who answers in few words and never guesses."
GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}


def say(session: Any, text: str, **options: Any) -> str:
    return "".join(session.send(text, **{**GREEDY, **options}))


def plain_answer(model: Any, session: Any) -> list[int]:
    """What generate without any cache of ours gives for the session's last prompt."""
    asked = next(turn.end for turn in reversed(session._record.turns) if turn.role == "user")
    ids = torch.tensor(session.tokens[None, :asked].astype(np.int64))
    return list(model.generate(ids, **GREEDY)[0].tolist())


@pytest.mark.parametrize("name", FAMILIES)
def test_every_turn_is_what_plain_generate_gives(
    name: str, open_kv: Callable[..., Any], tokenizer: Any
) -> None:
    model, kv = FAMILIES[name](), open_kv()
    with ChatModel(kv, model, tokenizer).session("s", system=SYSTEM) as session:
        for number, text in enumerate(["Is it raining?", "And in winter?"]):
            before = len(session.tokens)
            say(session, text)
            assert session.tokens.tolist() == plain_answer(model, session)
            assert session.last_explain.reused_tokens == (before - 1 if number else 0)
        kept = session.messages, session.tokens
    kv.close()
    with ChatModel(open_kv(), model, tokenizer).session("s", system="ignored: it has begun") as session:
        assert session.messages == kept[0] and np.array_equal(session.tokens, kept[1])
        say(session, "Why?")
        assert session.tokens.tolist() == plain_answer(model, session)
        explain = session.last_explain
        assert explain.reused_tokens == (len(kept[1]) - 1) // 16 * 16 and "disk" in explain.by_tier
        assert 0 < explain.restore_s < explain.ttft_s
        assert [m["role"] for m in session.messages] == ["system", *["user", "assistant"] * 3]


def test_a_shared_system_message_is_found_by_another_session(
    open_kv: Callable[..., Any], tokenizer: Any
) -> None:
    for name in ("llama", "gemma3", "gpt_oss"):
        chat = ChatModel(open_kv(name), FAMILIES[name](), tokenizer)
        with chat.session("one", system=SYSTEM) as session:
            say(session, "Is it raining?")
        with chat.session("two", system=SYSTEM) as session:
            say(session, "Does it snow?")
            shared = len(tokenizer(f"<s><|system|>{SYSTEM}<|end|>\n<|user|>")["input_ids"])
            assert session.last_explain.reused_tokens == shared // 16 * 16


def test_a_prefix_that_nobody_named_costs_one_more_prefill(
    open_kv: Callable[..., Any], tokenizer: Any
) -> None:
    """The second session captures the window parts where the first one's full parts end; the third uses them."""
    chat = ChatModel(open_kv(), gemma3(), tokenizer)
    document = "A long document that is part of the first question. " * 4
    reused = []
    for name, question in [
        ("one", "What is it about, and why?"),
        ("two", "Who wrote it?"),
        ("three", "Why so long?"),
    ]:
        with chat.session(name) as session:
            say(session, document + question)
            reused.append(session.last_explain.reused_tokens)
    assert reused[:2] == [0, 0]
    assert reused[2] == (2 + len(document)) // 16 * 16


def test_other_salts_share_nothing(open_kv: Callable[..., Any], tokenizer: Any) -> None:
    kv, model = open_kv(), llama()
    with ChatModel(kv, model, tokenizer, salt="a").session("s", system=SYSTEM) as session:
        say(session, "Is it raining?")
    with ChatModel(kv, model, tokenizer, salt="b").session("t", system=SYSTEM) as session:
        say(session, "Is it raining?")
        explain = session.last_explain
        assert (
            explain.reused_tokens == 0 and explain.reason == "identity differs" and "salt" in explain.detail
        )


def test_a_model_that_changes_between_turns_is_a_clean_miss(
    open_kv: Callable[..., Any], tokenizer: Any
) -> None:
    model = llama()
    with ChatModel(open_kv(), model, tokenizer).session("s", system=SYSTEM) as session:
        say(session, "Is it raining?")
        with torch.no_grad():
            model.model.layers[0].self_attn.k_proj.weight.mul_(1.5)
        say(session, "And now?")
        assert session.tokens.tolist() == plain_answer(model, session)
        assert session.last_explain.reused_tokens == 0 and len(session.messages) == 5


# Interruptions


class Broken(RuntimeError):
    pass


def break_after(model: Any, num_forwards: int) -> Any:
    count = iter(range(10**6))

    def hook(*_: Any) -> None:
        if next(count) == num_forwards:
            raise Broken("the power went out")

    return model.model.layers[-1].register_forward_pre_hook(hook)


def test_an_exception_reaches_the_reader_and_the_turn_can_be_made_again(
    open_kv: Callable[..., Any], tokenizer: Any
) -> None:
    model, kv = gemma3(), open_kv()
    chat = ChatModel(kv, model, tokenizer)
    with chat.session("s", system=SYSTEM) as session:
        handle = break_after(model, 4)
        with pytest.raises(Broken):
            say(session, "Is it raining?")
        handle.remove()
        assert session.interrupted
        with pytest.raises(BadInput, match="no answer"):
            session.send("Hello?")
    kv.close()
    with ChatModel(open_kv(), model, tokenizer).session("s") as session:
        assert session.interrupted and session.messages[-1] == {"role": "user", "content": "Is it raining?"}
        answer = "".join(session.resume_answer(**GREEDY))
        assert session.tokens.tolist() == plain_answer(model, session)
        assert session.messages[-1] == {"role": "assistant", "content": answer} and not session.interrupted
        assert session.last_explain.reused_tokens > 64, "blocks of the broken turn serve it again"
        with pytest.raises(BadInput, match="waits for an answer"):
            session.resume_answer()


CHILD = """
import sys, time
sys.path.insert(0, {here!r})
import tieredkv
from tieredkv.hf import ChatModel
from tiny_models import byte_tokenizer, gemma3
budgets = dict(device_nbytes="16MiB", host_nbytes="8MiB", disk_nbytes="256MiB", block_size=16, device="cpu")
kv = tieredkv.open({store!r}, tieredkv.Config(**budgets))
session = ChatModel(kv, gemma3(), byte_tokenizer()).session("s", system={system!r})
"".join(session.send("Is it raining?", max_new_tokens=12, do_sample=False))
for _ in session.send("And in winter?", max_new_tokens=600, do_sample=False):
    print("piece", flush=True)
"""


def test_sigkill_in_an_answer_loses_that_answer_only(
    tmp_path: Path, open_kv: Callable[..., Any], tokenizer: Any
) -> None:
    here = str(Path(__file__).parent)
    code = CHILD.format(here=here, store=str(tmp_path / "store"), system=SYSTEM)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment)
    assert child.stdout is not None
    for _ in range(3):
        assert child.stdout.readline() == b"piece\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    model = gemma3()
    with ChatModel(open_kv(), model, tokenizer).session("s") as session:
        assert session.interrupted and len(session.messages) == 4
        "".join(session.regenerate(**GREEDY))
        assert session.tokens.tolist() == plain_answer(model, session)
        assert session.last_explain.reused_tokens > 96


def test_closing_an_answer_early_keeps_what_was_generated(
    open_kv: Callable[..., Any], tokenizer: Any
) -> None:
    model = llama()
    chat = ChatModel(open_kv(), model, tokenizer)
    with chat.session("s", system=SYSTEM) as session:
        answer = session.send("Is it raining?", max_new_tokens=800, do_sample=False)
        next(answer)
        with pytest.raises(SessionError, match="answering"):
            session.send("Wait")
        answer.close()
        answer.close()
        assert not session.interrupted and len(session.messages) == 3
        assert len(session.tokens) < 800
        asked = session._record.turns[-2].end
        said = torch.tensor(session.tokens[None].astype(np.int64))
        limits = {"max_new_tokens": said.shape[1] - asked, "do_sample": False}
        assert torch.equal(model.generate(said[:, :asked], **limits), said)
        say(session, "Go on")
        assert session.tokens.tolist() == plain_answer(model, session)
        for _ in session.send("And?", max_new_tokens=800, do_sample=False):
            break
        assert len(session.messages) == 7, "letting go of the answer ended the turn"
        unread = session.send("Last", max_new_tokens=800, do_sample=False)
    assert list(unread) == []
    with chat.session("s") as session:
        assert not session.interrupted and len(session.messages) == 9


def test_arguments_that_the_session_gives_itself_are_refused_before_anything_is_kept(
    open_kv: Callable[..., Any], tokenizer: Any
) -> None:
    with ChatModel(open_kv(), llama(), tokenizer).session("s") as session:
        for options, why in [({"past_key_values": 1}, "past_key_values"), ({"num_beams": 2}, "num_beams=2")]:
            with pytest.raises(BadInput, match=why):
                session.send("Hello", **options)
        with pytest.raises(ValueError, match="nonsense"):
            say(session, "Hello", nonsense=3)
        assert session.interrupted
        "".join(session.resume_answer(**GREEDY))


def test_a_session_is_open_once(open_kv: Callable[..., Any], tokenizer: Any) -> None:
    chat = ChatModel(open_kv(), llama(), tokenizer)
    with chat.session("s"), pytest.raises(SessionError, match="open"):
        chat.session("s")
    chat.session("s").close()


# Going back


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_regenerate_rollback_and_fork(name: str, open_kv: Callable[..., Any], tokenizer: Any) -> None:
    model = FAMILIES[name]()
    chat = ChatModel(open_kv(), model, tokenizer)
    with chat.session("s", system=SYSTEM) as session:
        for text in ("One?", "Two?", "Three?"):
            say(session, text)
        three = session.tokens.tolist()
        "".join(session.regenerate(**GREEDY))
        assert session.tokens.tolist() == three and len(session.messages) == 7
        with session.fork("other") as other:
            assert other.messages == session.messages
            assert other.rollback(turns=2) <= 16
            say(other, "Instead?")
            assert other.tokens.tolist() == plain_answer(model, other)
            assert other.last_explain.reused_tokens > 0
        assert session.tokens.tolist() == three
        assert session.rollback(turns=1) <= 16 and len(session.messages) == 5
        say(session, "Three?")
        assert session.tokens.tolist() == three
        middle = (session._record.turns[3].end + session._record.turns[4].end) // 2
        session.rollback(num_tokens=middle)
        assert session.interrupted, "half an answer is none"
        "".join(session.resume_answer(**GREEDY))
        assert session.tokens.tolist() == plain_answer(model, session)
        session.rollback(turns=2)
        assert session.messages == ({"role": "system", "content": SYSTEM},)
        assert len(session.tokens) == len(tokenizer(f"<s><|system|>{SYSTEM}<|end|>\n<|user|>")["input_ids"])
        say(session, "One?")
        for bad in ({"turns": 2}, {"turns": 0}, {"num_tokens": 10**6}, {}, {"turns": 1, "num_tokens": 3}):
            with pytest.raises(BadInput):
                session.rollback(**bad)


def test_pin_expire_delete(open_kv: Callable[..., Any], tokenizer: Any) -> None:
    kv = open_kv()
    chat = ChatModel(kv, llama(), tokenizer)
    with chat.session("s", system=SYSTEM) as session:
        say(session, "One?")
        session.pin()
        session.unpin()
        session.expire(days=3)
        assert session.explain().prompt_tokens > 0
        session.delete()
    with chat.session("s") as session:
        assert session.messages == () and not session.interrupted
        assert session.explain().reused_tokens == 0
        with pytest.raises(BadInput, match="nothing was asked"):
            session.regenerate()


def test_assisted_answers(open_kv: Callable[..., Any], tokenizer: Any) -> None:
    model = gemma3()
    with ChatModel(open_kv(), model, tokenizer).session("s", system=SYSTEM) as session:
        for options in (
            {"prompt_lookup_num_tokens": 3},
            {"prompt_lookup_num_tokens": 3},
            {"assistant_model": gemma3()},
            {},
        ):
            say(session, "Tell me that once more.", **options)
            assert session.tokens.tolist() == plain_answer(model, session)


def test_ids_without_messages_go_on_with_attach(open_kv: Callable[..., Any], tokenizer: Any) -> None:
    model, kv = llama(), open_kv()
    chat = ChatModel(kv, model, tokenizer)
    with chat.session("s", system=SYSTEM) as session:
        say(session, "One?")
        ids = torch.tensor(session.tokens[None].astype(np.int64))
        out = model.generate(**session.attach(ids), **GREEDY, return_dict_in_generate=True)
        assert session.last_explain.by_tier == {"session": len(ids[0]) - 1}
        session.commit(out)
        assert session.tokens.tolist() == out.sequences[0].tolist() and session.messages == ()
        with pytest.raises(BadInput, match="attach and commit"):
            session.send("Two?")
        with pytest.raises(BadInput, match="has begun"):
            session.system("late")


# Templates and text


def test_a_template_that_rewrites_answers_says_where(open_kv: Callable[..., Any]) -> None:
    template = (
        "<s>{% for m in messages %}<|{{ m['role'] }}|>"
        "{{ m['content'] if loop.last or m['role'] != 'assistant' else '' }}"
        "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    model = llama()
    with ChatModel(open_kv(), model, byte_tokenizer(), template=template).session(
        "s", system=SYSTEM
    ) as session:
        say(session, "One?")
        asked = session._record.turns[-2].end
        say(session, "Two?")
        assert session.last_explain.diverged_at == asked
        assert session.last_explain.reused_tokens == asked, "the session's own memory serves up to there"
        assert session.tokens.tolist() == plain_answer(model, session)
        say(session, "Three?")
        assert len(session.messages) == 7 and session.tokens.tolist() == plain_answer(model, session)


def test_a_tokenizer_without_template_gets_the_plain_one(
    open_kv: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="tieredkv.hf"):
        chat = ChatModel(open_kv(), llama(), byte_tokenizer(None))
    assert chat.template_source == "built-in" and "built-in" in caplog.text
    with chat.session("s", system=SYSTEM) as session:
        say(session, "One?")
        say(session, "Two?")
        text = byte_tokenizer().decode(
            session.tokens[: session._record.turns[-2].end], skip_special_tokens=False
        )
        assert text.startswith(f"<s>System: {SYSTEM}\n\nUser: One?\n\nAssistant:")
        assert text.endswith("\n\nUser: Two?\n\nAssistant:")


def test_old_answers_keep_their_ids_even_if_their_text_reads_otherwise() -> None:
    template = Template(byte_tokenizer())
    tokens = template.encode("<s><|user|>a<|end|>\n<|assistant|>  spaced <|end|>")
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "not what the ids say"},
        {"role": "user", "content": "b"},
    ]
    prompt = template.prompt(messages, tokens, [3, len(tokens)])
    assert template.decode(prompt.ids, keep_special=True) == (
        "<s><|user|>a<|end|>\n<|assistant|>  spaced <|end|>\n<|user|>b<|end|>\n<|assistant|>"
    )
    assert prompt.ids[: len(tokens)].tolist() == tokens.tolist()


def test_another_tokenizer_reads_no_messages(open_kv: Callable[..., Any], tokenizer: Any) -> None:
    kv, model = open_kv(), llama()
    with ChatModel(kv, model, tokenizer).session("s", system=SYSTEM) as session:
        say(session, "One?")

    class Shifted:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        def decode(self, ids: Any, **options: Any) -> str:
            return str(self.inner.decode([i + 1 for i in ids], **options))

    with ChatModel(kv, model, Shifted(tokenizer)).session("s") as session:
        assert session.messages == () and len(session.tokens)
        with pytest.raises(BadInput, match="tokenizer changed"):
            session.send("Two?")


def test_a_template_that_refuses_is_told(open_kv: Callable[..., Any], tokenizer: Any) -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    with (
        ChatModel(open_kv(), llama(), tokenizer, template=template).session("s") as session,
        pytest.raises(BadInput, match="roles must alternate"),
    ):
        session.send("One?")


def test_pieces_never_hold_half_a_character() -> None:
    template = Template(byte_tokenizer(), PLAIN_TEMPLATE)
    text = "naïve – 日本語 👩‍🚀 done"
    ids = template.encode(text).tolist()
    pieces = TextPieces(lambda some: template.decode(np.array(some, dtype=np.int32)))
    given = [pieces.push([i]) for i in ids]
    assert "".join(given) + pieces.finish() == text
    assert not any("\ufffd" in piece for piece in given)


def test_broken_text_is_not_held_back_for_ever() -> None:
    template = Template(byte_tokenizer(), PLAIN_TEMPLATE)
    half = template.encode("é").tolist()[:1]
    pieces = TextPieces(lambda some: template.decode(np.array(some, dtype=np.int32)))
    assert pieces.push(half) == "" and pieces.finish() == "\ufffd"
    pieces = TextPieces(lambda some: template.decode(np.array(some, dtype=np.int32)))
    assert any(pieces.push(half) for _ in range(9))
