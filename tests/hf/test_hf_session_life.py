"""What a chat application does with sessions: resume, fork, roll back, prefetch, move, ask what it cost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import FAMILIES, byte_tokenizer, gemma3, llama, prompt

import tieredkv
from tieredkv.errors import BadInput, SessionError
from tieredkv.hf import ChatModel

SYSTEM = "You are a careful assistant who answers in few words and never guesses."
GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}


def say(session: Any, text: str, **options: Any) -> str:
    return "".join(session.send(text, **{**GREEDY, **options}))


def plain_answer(model: Any, session: Any) -> list[int]:
    asked = next(turn.end for turn in reversed(session._record.turns) if turn.role == "user")
    ids = torch.tensor(session.tokens[None, :asked].astype(np.int64))
    found: list[int] = model.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY)[0].tolist()
    return found


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


# Resume


def test_a_whole_prompt_finds_the_session_that_it_goes_on_from(
    open_kv: Callable[..., Any], tokenizer: Any
) -> None:
    kv, model = open_kv(), llama()
    chat = ChatModel(kv, model, tokenizer)
    with chat.session("long", system=SYSTEM) as session:
        for text in ("Is it raining?", "And in winter?"):
            say(session, text)
        messages, tokens = list(session.messages), session.tokens
    with chat.session("short", system=SYSTEM) as session:
        say(session, "Is it raining?")
    kv.close()
    chat = ChatModel(open_kv(), model, tokenizer)
    with chat.resume([*messages, user("Why?")]) as session:
        assert session.name == "long"
        session.generate([*messages, user("Why?")], **GREEDY)
        assert session.tokens[: len(tokens)].tolist() == tokens.tolist(), "answers keep the ids they had"
        assert session.last_explain.reused_tokens >= (len(tokens) - 1) // 16 * 16
        # It is open: another caller with the same history gets a session of its own, with the same blocks.
        with chat.resume([*messages, user("Why not?")], name="second") as second:
            assert second.name == "second" and second.tokens[: len(tokens)].tolist() == tokens.tolist()
            second.generate([*messages, user("Why not?")], **GREEDY)
            assert second.last_explain.reused_tokens >= (len(tokens) - 1) // 16 * 16
    edited = [*messages[:3], user("And in summer?")]
    with chat.resume(edited) as session:
        assert session.name not in ("long", "short", "second") and 0 < len(session.tokens) < len(tokens)
        session.generate(edited, **GREEDY)
        assert session.tokens.tolist() == plain_answer(model, session)
        assert session.last_explain.reused_tokens > 0 and session.last_explain.divergence is None
    with chat.resume([user("Something else")]) as session:
        assert not session.messages
    with pytest.raises(SessionError, match="exists"):
        chat.resume(edited, name="long")


def test_ids_find_the_session_that_they_go_on_from(open_kv: Callable[..., Any], tokenizer: Any) -> None:
    chat = ChatModel(open_kv(), llama(), tokenizer)
    for name, length in (("a", 40), ("b", 60)):
        with chat.session(name) as session:
            session.generate(prompt(length), **GREEDY)
            tokens = session.tokens
    following = np.concatenate([tokens, prompt(5, seed=3).numpy()[0]])
    with chat.resume(following) as session:
        assert session.name == "b"
    with chat.resume(torch.tensor(following[None, :50].astype(np.int64))) as session:
        assert session.name not in "ab" and session.tokens.tolist() == tokens[:50].tolist()
    with chat.resume(prompt(30, seed=8)) as session:
        assert not len(session.tokens)


# Fork and rollback


def test_a_fork_reads_nothing_and_copies_nothing(open_kv: Callable[..., Any], tokenizer: Any) -> None:
    chat = ChatModel(open_kv(), llama(max_position_embeddings=4096), tokenizer)
    with chat.session("s", system=SYSTEM * 20) as session:
        for number in range(6):
            say(session, f"Question {number}?")
        before, took = chat._live.kv.stats(), []
        decode, chat._template.decode = chat._template.decode, None  # type: ignore[method-assign, assignment]
        for number in range(9):
            began = time.thread_time()
            fork = session.fork(f"fork {number}")
            took.append(time.thread_time() - began)
            assert fork.messages == session.messages and np.shares_memory(fork.tokens, session.tokens)
        chat._template.decode = decode  # type: ignore[method-assign]
        after = chat._live.kv.stats()
        assert after.num_blocks == before.num_blocks and after.working_nbytes == before.working_nbytes
        assert sorted(took)[4] < 0.02, f"seconds: {took}"  # for any machine; the figure is a benchmark's
        say(fork, "Instead?")
        say(session, "Go on?")
        assert fork.messages[:-2] == session.messages[:-2] and fork.messages != session.messages


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_rollback_to_a_token_a_message_or_a_turn(
    name: str, open_kv: Callable[..., Any], tokenizer: Any
) -> None:
    kv, model = open_kv(), FAMILIES[name]()
    chat = ChatModel(kv, model, tokenizer)
    with chat.session("s", system=SYSTEM) as session:
        for text in ("One?", "Two?", "Three?"):
            say(session, text)
        turns = session._record.turns
        assert session.rollback(num_messages=5) <= 16 and len(session.messages) == 5
        session.rollback(num_messages=4)
        assert session.interrupted and len(session.tokens) == turns[3].end
        "".join(session.resume_answer(**GREEDY))
        session.rollback(turns=2)
        system_end = len(session.tokens)
        assert [m["role"] for m in session.messages] == ["system"] and system_end == turns[0].end
        assert session._record.anchors == (system_end // 16 * 16,), "the shared prefix stays an anchor"
        for bad in ({"num_messages": 9}, {"num_messages": -1}, {"turns": 1, "num_messages": 1}):
            with pytest.raises(BadInput):
                session.rollback(**bad)
    kv.close()
    chat = ChatModel(open_kv(), model, tokenizer)
    with chat.session("s") as session:
        say(session, "Four?")
        assert session.last_explain.reused_tokens == system_end // 16 * 16
        assert session.tokens.tolist() == plain_answer(model, session)
        session.rollback(num_tokens=0)
        assert not len(session.tokens)


# Prefetch


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_prefetch_while_the_user_types(name: str, open_kv: Callable[..., Any], tokenizer: Any) -> None:
    kv, model = open_kv(), FAMILIES[name]()
    with ChatModel(kv, model, tokenizer).session("s", system=SYSTEM * 4) as session:
        say(session, "Is it raining?")
        held = (len(session.tokens) - 1) // 16 * 16
    kv.close()
    kv = open_kv()
    with ChatModel(kv, model, tokenizer).session("s") as session:
        coming = session.prefetch()
        assert session.prefetch() is coming
        assert coming.wait(60) and coming.done and coming.num_tokens == held and kv.stats().num_pins == 0
        assert kv.stats().tiers[0].num_parts > 0 and kv.stats().working_nbytes > 0
        say(session, "And in winter?")
        assert session.last_explain.by_tier == {"session": held}
        assert session.tokens.tolist() == plain_answer(model, session)
        again = session.prefetch()
        assert again.wait(60) and again.num_tokens == 0, "its own memory reaches further"
        say(session, "Why?")
        assert session.tokens.tolist() == plain_answer(model, session)


def test_a_prefetch_that_is_cancelled_leaves_nothing(open_kv: Callable[..., Any], tokenizer: Any) -> None:
    kv, model = open_kv(), llama()
    with ChatModel(kv, model, tokenizer).session("s", system=SYSTEM * 4) as session:
        say(session, "Is it raining?")
    kv.close()
    kv = open_kv()
    with ChatModel(kv, model, tokenizer).session("s") as session:
        coming = session.prefetch()
        coming.cancel(wait=True)
        assert coming.done and coming.cancelled and coming.num_tokens == 0 and kv.stats().num_pins == 0
        assert session.prefetch() is not coming
        session.delete()
    assert kv.sessions() == () and kv.stats().num_blocks == 0 and kv.stats().num_pins == 0


# Another model, another tenant


def test_a_conversation_goes_on_with_weights_that_changed_meanwhile(
    open_kv: Callable[..., Any], tokenizer: Any
) -> None:
    kv, model = open_kv(), llama()
    with ChatModel(kv, model, tokenizer).session("s", system=SYSTEM) as session:
        say(session, "Is it raining?")
        kept = session.messages
    kv.close()
    with torch.no_grad():
        model.lm_head.weight.mul_(1.01)
    with ChatModel(open_kv(), model, tokenizer).session("s") as session:
        assert session.messages == kept
        say(session, "And in winter?")
        assert session.last_explain.reused_tokens == 0 and session.messages[:3] == kept
        assert session.tokens.tolist() == plain_answer(model, session)


def test_the_name_of_another_tenant_is_refused(open_kv: Callable[..., Any], tokenizer: Any) -> None:
    kv, model = open_kv(), llama()
    with ChatModel(kv, model, tokenizer, salt="one").session("s") as session:
        say(session, "Is it raining?")
        kept = session.messages
    with pytest.raises(SessionError, match="'s' is not of this salt"):
        ChatModel(kv, model, tokenizer, salt="two").session("s")
    with ChatModel(kv, model, tokenizer, salt="one").session("s") as session:
        assert session.messages == kept


# Move


def test_a_session_goes_to_another_store_as_one_file(
    tmp_path: Path, open_kv: Callable[..., Any], tokenizer: Any
) -> None:
    model = gemma3()
    with ChatModel(open_kv("one"), model, tokenizer).session("s", system=SYSTEM) as session:
        say(session, "Is it raining?")
        session.export(tmp_path / "s.tkv")
        kept = session.messages, session.tokens.tolist()
    chat = ChatModel(open_kv("two"), model, tokenizer)
    with chat.import_(tmp_path / "s.tkv") as session:
        assert (session.messages, session.tokens.tolist()) == kept
        say(session, "And in winter?")
        assert session.last_explain.reused_tokens == (len(kept[1]) - 1) // 16 * 16
        assert session.tokens.tolist() == plain_answer(model, session)
    with pytest.raises(BadInput, match="weights"):
        ChatModel(open_kv("three"), gemma3(window=8, num_hidden_layers=4).half(), tokenizer).import_(
            tmp_path / "s.tkv"
        )


# What it cost


def test_explain_says_what_was_saved_and_where_it_diverged(
    open_kv: Callable[..., Any], tokenizer: Any
) -> None:
    kv, model = open_kv(), llama()
    chat = ChatModel(kv, model, tokenizer)
    with chat.session("s", system=SYSTEM) as session:
        assert session.explain().skipped_s is None, "nothing was measured yet"
        say(session, "Is it raining?")
        say(session, "And in winter?")
        explain = session.last_explain
        assert 0 < explain.skipped_s < 60 and "of prefill skipped" in str(explain)
        said = list(session.messages)
        said[2] = {"role": "assistant", "content": "Never."}
        session.generate([*said[:3], user("Sure?")], **GREEDY)
        text = str(session.last_explain)
        assert "in message 2" in text and "the message was edited" in text and "diverged at token" in text
    kv.close()
    with ChatModel(open_kv(), model, tokenizer).session("s") as session:
        found = session.explain()
        assert found.by_tier == {"disk": found.reused_tokens} and found.reused_tokens > 0


def test_a_template_that_rewrites_old_answers_is_named_as_the_cause(open_kv: Callable[..., Any]) -> None:
    template = (
        "<s>{% for m in messages %}<|{{ m['role'] }}|>"
        "{{ m['content'] if loop.last or m['role'] != 'assistant' else m['content'][:3] }}"
        "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    chat = ChatModel(open_kv(), llama(), byte_tokenizer(), template=template)
    with chat.session("s") as session:
        say(session, "One?")
        say(session, "Two?")
        where = session.last_explain.divergence
        assert where.message == 1 and "template" in where.cause and "<|end|>" in where.given


# A turn is durable when it ends

CHILD = """
import sys
sys.path.insert(0, {here!r})
import tieredkv
from tieredkv.hf import ChatModel
from tiny_models import byte_tokenizer, gemma3
budgets = dict(device_nbytes="16MiB", host_nbytes="8MiB", disk_nbytes="256MiB", block_size=16, device="cpu")
kv = tieredkv.open({store!r}, tieredkv.Config(**budgets))
session = ChatModel(kv, gemma3(), byte_tokenizer()).session("s", system={system!r})
for text in ("Is it raining?", "And in winter?"):
    "".join(session.send(text, max_new_tokens=12, do_sample=False))
    print(session.tokens.tolist(), flush=True)
for _ in session.send("Why?", max_new_tokens=600, do_sample=False):
    print("piece", flush=True)
"""


def test_after_a_kill_in_the_next_turn_a_turn_is_there_tokens_and_blocks(
    tmp_path: Path, open_kv: Callable[..., Any], tokenizer: Any
) -> None:
    code = CHILD.format(here=str(Path(__file__).parent), store=str(tmp_path / "store"), system=SYSTEM)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment)
    assert child.stdout is not None
    lines = [child.stdout.readline() for _ in range(3)]
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert lines[2] == b"piece\n"
    said = [int(number) for number in lines[1].decode().strip("[]\n").split(",")]
    kv, model = open_kv(), gemma3()
    assert not kv.recovery.damage
    with ChatModel(kv, model, tokenizer).session("s") as session:
        assert session.interrupted and session.tokens[: len(said)].tolist() == said
        whole = (len(said) - 1) // 16 * 16
        hit = session._record.space.lookup(np.append(said, 1))
        assert hit.num_tokens == whole and hit.by_tier == {"disk": whole}
        session.rollback(turns=1)
        assert session.tokens.tolist() == said == plain_answer(model, session)
        say(session, "Why not?")
        assert session.last_explain.reused_tokens == whole and session.tokens.tolist() == plain_answer(
            model, session
        )


# Ten turns in a vocabulary of the real size

GEMMA = Path.home() / ".cache" / "tieredkv" / "models" / "gemma-3-270m-fp32"


@pytest.mark.parametrize("template", [None, "plain"])
@pytest.mark.skipif(
    not (GEMMA / "tokenizer.json").exists(), reason="no local copy of Gemma: run tieredkv demo"
)
def test_ten_turns_never_diverge(template: str | None, open_kv: Callable[..., Any]) -> None:
    """Random weights say anything at all, so an answer's text reads back as other ids most of the time."""
    from transformers import AutoTokenizer

    from tieredkv.hf.template import PLAIN_TEMPLATE

    tokenizer = AutoTokenizer.from_pretrained(GEMMA)
    model = gemma3(vocab_size=len(tokenizer), hidden_size=16, head_dim=8, num_hidden_layers=2,
                   layer_types=["sliding_attention", "full_attention"], max_position_embeddings=2048)  # fmt: skip
    chosen = PLAIN_TEMPLATE if template else None
    with ChatModel(open_kv(), model, tokenizer, template=chosen).session("s", system=SYSTEM) as session:
        for number in range(10):
            before = session.tokens.tolist()
            torch.manual_seed(number)
            say(session, f"Question {number}: what is  it?\n", do_sample=True, max_new_tokens=9)
            assert session.tokens[: len(before)].tolist() == before, f"turn {number} rewrote what was said"
            explain = session.last_explain
            assert explain.divergence is None and explain.reused_tokens == max(0, len(before) - 1)
        assert len(session.messages) == 21


# Bad input


def test_a_session_refuses_what_it_cannot_be_sure_of(open_kv: Callable[..., Any], tokenizer: Any) -> None:
    model = llama()
    with ChatModel(open_kv(), model, tokenizer).session("s") as session:
        ids = prompt(40)
        given = session.attach(ids)
        out = model.generate(**given, **GREEDY)
        with pytest.raises(BadInput, match="already served"):
            model.generate(**given, **GREEDY)
        for wrong, why in [
            (out[:, :30], "30 ids are fewer than the 40"),
            (torch.cat([out, out[:, :3]], dim=1), "never forwarded"),
            (torch.cat([out[:, :20] + 1, out[:, 20:]], dim=1) % 264, "was forwarded"),
            (torch.cat([out, out]), "2 rows"),
        ]:
            with pytest.raises(BadInput, match=why):
                session.commit(wrong)
        session.commit(out)
        kept = session.tokens.tolist()
        with pytest.raises(BadInput, match="attach first"):
            session.commit(out)
        given = session.attach(torch.cat([out, prompt(5, seed=2)], dim=1))
        given["attention_mask"][0, 7] = 0
        holed = model.generate(**given, **GREEDY)
        with pytest.raises(BadInput, match="holes"):
            session.commit(holed)
        assert session.tokens.tolist() == kept
        shorter = session.generate(ids[:, :25], **GREEDY)
        assert session.last_explain.divergence.cause == "the prompt is shorter"
        assert shorter.ids.tolist() == model.generate(ids[:, :25], **GREEDY)[0].tolist()
        for kind in ("static", "quantized", "offloaded"):
            with pytest.raises(BadInput, match=f"cache_implementation='{kind}'"):
                session.generate(ids, cache_implementation=kind, **GREEDY)
            with pytest.raises(BadInput, match=f"cache_implementation='{kind}'"):
                session.send("Hello", generation_config=config_of(cache_implementation=kind))
        with pytest.raises(BadInput, match="past_key_values"):
            session.generate(ids, past_key_values=object())
        with pytest.raises(BadInput, match="nothing to answer"):
            session.generate([user("One?"), {"role": "assistant", "content": "Two"}])
        with pytest.raises(BadInput, match="no ids"):
            session.generate([])


def test_a_static_cache_in_the_place_of_ours_is_noticed(open_kv: Callable[..., Any], tokenizer: Any) -> None:
    from transformers import StaticCache

    model = llama()
    with ChatModel(open_kv(), model, tokenizer).session("s") as session:
        given = session.attach(prompt(40))
        name = next(name for name in ("cache", "past_key_values") if name in given)
        given[name] = StaticCache(config=model.config, max_cache_len=64)
        out = model.generate(**given, **GREEDY)
        with pytest.raises(BadInput, match="never forwarded"):
            session.commit(out)
        assert not len(session.tokens)


def config_of(**values: Any) -> Any:
    from transformers import GenerationConfig

    return GenerationConfig(**values)


def test_wishes_are_durable(open_kv: Callable[..., Any], tokenizer: Any) -> None:
    kv, model = open_kv(), llama()
    with ChatModel(kv, model, tokenizer).session("s") as session:
        say(session, "One?")
        session.pin()
        session.prioritise("high")
        session.expire(days=2)
    kv.close()
    kv = open_kv()
    assert isinstance(kv, tieredkv.TieredCache)
    with ChatModel(kv, model, tokenizer).session("s") as session:
        assert session.pinned and session.priority == "high" and session._record._row.expires_at > 0
        session.unpin()
        session.prioritise("normal")
        session.expire(days=None)
        assert not session.pinned and session.priority == "normal"
