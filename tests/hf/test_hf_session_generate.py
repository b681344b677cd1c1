"""Whole prompts answered at once: ids or messages, beams, several sessions in one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny_models import FAMILIES, RECURRENT, byte_tokenizer, llama, prompt
from transformers import GenerationConfig

from tieredkv.errors import BadInput
from tieredkv.hf import ChatModel

ALL = {**FAMILIES, **RECURRENT}
GREEDY: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False}
SYSTEM = {
    "role": "system",
    "content": "You are a careful assistant who answers in few words and never guesses.",
}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def plain(model: Any, ids: Any, **options: Any) -> list[list[int]]:
    """What generate without any cache of ours gives; it would take a padding id for padding, were no mask given."""
    whole = torch.as_tensor(np.asarray(ids, dtype=np.int64)).reshape(1, -1)
    arguments = {**GREEDY, "attention_mask": torch.ones_like(whole), **options}
    found: list[list[int]] = model.generate(whole, **arguments).tolist()
    return found


def stock_rows(model: Any, prompts: list[torch.Tensor], **options: Any) -> list[list[list[int]]]:
    """What one call over all rows, padded on the left, gives with a stock cache: routed experts see the batch."""
    longest = max(ids.shape[1] for ids in prompts)
    pads = [longest - ids.shape[1] for ids in prompts]
    rows = torch.cat([F.pad(ids, (pad, 0)) for ids, pad in zip(prompts, pads, strict=True)])
    mask = torch.cat([F.pad(torch.ones_like(ids), (pad, 0)) for ids, pad in zip(prompts, pads, strict=True)])
    out = model.generate(rows, attention_mask=mask, **{**GREEDY, **options})
    return [part[:, pad:].tolist() for part, pad in zip(out.chunk(len(prompts)), pads, strict=True)]


@pytest.mark.parametrize("name", FAMILIES)
def test_ids_are_answered_as_plain_generate_does(
    name: str, open_kv: Callable[..., Any], tokenizer: Any
) -> None:
    model = ALL[name]()
    with ChatModel(open_kv(), model, tokenizer).session("s") as session:
        ids = prompt(70)
        for number in range(3):
            got = session.generate(ids, **GREEDY)
            assert [got.ids.tolist()] == plain(model, ids) == got.sequences.tolist()
            assert session.tokens.tolist() == got.ids.tolist()
            assert got.text == tokenizer.decode(got.ids[ids.shape[-1] :].tolist(), skip_special_tokens=True)
            assert session.last_explain.reused_tokens == (len(ids[0]) - 6 if number else 0)
            ids = torch.cat([torch.tensor(got.ids.astype(np.int64))[None], prompt(5, seed=number)], dim=1)


def test_messages_are_answered_and_history_that_was_edited_is_found(
    open_kv: Callable[..., Any], tokenizer: Any
) -> None:
    model = llama()
    with ChatModel(open_kv(), model, tokenizer).session("s") as session:
        said: list[dict[str, str]] = [SYSTEM]
        for text in ("Is it raining?", "And in winter?", "Why?"):
            said.append(user(text))
            got = session.generate(said, **GREEDY)
            asked = session._record.turns[-2].end
            assert [got.ids.tolist()] == plain(model, got.ids[:asked])
            said.append({"role": "assistant", "content": got.text})
            assert session.messages == tuple(said)
            assert session.last_explain.divergence is None
        ends = [turn.end for turn in session._record.turns]
        edited = [*said[:3], user("And in summer?")]
        session.generate(edited, **GREEDY)
        where = session.last_explain.divergence
        assert (where.message, where.cause) == (3, "the message was edited")
        assert ends[2] < where.token < ends[3] and where.held.startswith("w") and where.given.startswith("s")
        assert session.last_explain.reused_tokens == where.token, (
            "the session's own memory serves up to there"
        )
        assert len(session.messages) == 5
        again = session.generate(edited, **GREEDY)
        assert again.ids.tolist() == session.tokens.tolist() and len(session.messages) == 5
        session.generate([SYSTEM, user("Is it raining?")], **GREEDY)
        assert len(session.messages) == 3 and session.last_explain.divergence.cause == "the prompt is shorter"


@pytest.mark.parametrize("name", ALL)
def test_beams_and_several_sequences(name: str, open_kv: Callable[..., Any], tokenizer: Any) -> None:
    model = ALL[name]()
    with ChatModel(open_kv(), model, tokenizer).session("s") as session:
        ids = prompt(60)
        session.generate(ids, **GREEDY)
        longer = torch.cat([torch.tensor(session.tokens[None].astype(np.int64)), prompt(7, seed=5)], dim=1)
        for options in (
            {"num_beams": 3},
            {"num_beams": 3, "num_return_sequences": 2},
            {"do_sample": True, "num_return_sequences": 3, "temperature": 0.7},
        ):
            torch.manual_seed(3)
            got = session.generate(longer, **{**GREEDY, **options})
            torch.manual_seed(3)
            assert got.sequences.tolist() == plain(model, longer, **options)
            assert session.tokens.tolist() == got.ids.tolist() == got.sequences[0].tolist()
            assert session.last_explain.reused_tokens >= 66
        following = torch.cat([torch.tensor(session.tokens[None].astype(np.int64)), prompt(4, seed=6)], dim=1)
        assert [session.generate(following, **GREEDY).ids.tolist()] == plain(model, following)


def test_numbers_of_sequences_are_taken_from_configurations(
    open_kv: Callable[..., Any], tokenizer: Any
) -> None:
    model, ids = llama(), prompt(40)
    beams = GenerationConfig(num_return_sequences=2, num_beams=3, max_new_tokens=5, pad_token_id=0)
    with ChatModel(open_kv(), model, tokenizer).session("s") as session:
        got = session.generate(ids, generation_config=beams)
        assert got.sequences.tolist() == plain(model, ids, generation_config=beams, max_new_tokens=5)
        model.generation_config.num_beams = model.generation_config.num_return_sequences = 2
        got = session.generate(ids, **GREEDY)
        assert got.sequences.tolist() == plain(model, ids) and len(got.sequences) == 2


@pytest.mark.parametrize("name", ALL)
def test_rows_of_different_length_in_one_call(name: str, open_kv: Callable[..., Any], tokenizer: Any) -> None:
    """Also one that is restored from the disk, one in memory, and one that is new."""
    model, kv = ALL[name](), open_kv()
    with ChatModel(kv, model, tokenizer).session("stored") as session:
        session.generate(prompt(90, seed=1), **GREEDY)
    kv.close()
    chat = ChatModel(open_kv(), model, tokenizer)
    sessions = [chat.session(name) for name in ("stored", "held", "new")]
    sessions[1].generate(prompt(33, seed=2), **GREEDY)
    prompts = [torch.cat([torch.tensor(s.tokens[None].astype(np.int64)), prompt(5 + i, seed=i)], dim=1)
               for i, s in enumerate(sessions[:2])] + [prompt(12, seed=9)]  # fmt: skip
    got = chat.generate(list(zip(sessions, prompts, strict=True)), **GREEDY)
    for session, ids, row in zip(sessions, prompts, got, strict=True):
        assert [row.ids.tolist()] == plain(model, ids) and session.tokens.tolist() == row.ids.tolist()
    assert "disk" in sessions[0].last_explain.by_tier and "session" in sessions[1].last_explain.by_tier
    again = [torch.cat([torch.tensor(s.tokens[None].astype(np.int64)), prompt(3)], dim=1) for s in sessions]
    beams: dict[str, Any] = {"num_beams": 2, "num_return_sequences": 2}
    fanned = chat.generate(list(zip(sessions, again, strict=True)), **GREEDY, **beams)
    assert [row.sequences.tolist() for row in fanned] == stock_rows(model, again, **beams)
    for session in sessions:
        session.close()


def test_rows_that_end_early_are_cut_where_they_end(open_kv: Callable[..., Any]) -> None:
    tokenizer = byte_tokenizer()
    chat = ChatModel(open_kv(), model := llama(), tokenizer)
    with chat.session("a") as one, chat.session("b") as other:
        ids = [prompt(40, seed=1), prompt(25, seed=2)]
        free = [plain(model, row)[0][row.shape[1] :] for row in ids]
        ends = free[0][3]
        got = chat.generate([(one, ids[0]), (other, ids[1])], **GREEDY, eos_token_id=ends, pad_token_id=0)
        for row, text, session in zip(got, free, (one, other), strict=True):
            stop = text.index(ends) + 1 if ends in text else len(text)
            assert (
                row.ids[len(row.ids) - stop :].tolist() == text[:stop]
                and session.tokens.tolist() == row.ids.tolist()
            )


def test_messages_in_a_batch(open_kv: Callable[..., Any], tokenizer: Any) -> None:
    chat = ChatModel(open_kv(), llama(), tokenizer)
    with chat.session("a", system=SYSTEM["content"]) as one, chat.session("b") as other:
        "".join(one.send("Is it raining?", **GREEDY))
        rows = [(one, [*one.messages, user("Why?")]), (other, [user("Who are you, and since when?")])]
        got = chat.generate(rows, **GREEDY)
        assert [one.messages[-1]["content"], other.messages[-1]["content"]] == [row.text for row in got]
        assert len(one.messages) == 5 and not one.interrupted and not other.interrupted
        "".join(one.send("Go on", **GREEDY))


def test_what_cannot_be_one_batch_is_refused(open_kv: Callable[..., Any], tokenizer: Any) -> None:
    kv = open_kv()
    chat, stranger = ChatModel(kv, llama(), tokenizer), ChatModel(kv, llama(num_hidden_layers=2), tokenizer)
    with chat.session("a") as one, stranger.session("b") as other:
        ids = prompt(20)
        for rows, why in [
            ([(one, ids), (other, ids)], "row 1: session 'b' belongs to another ChatModel"),
            ([(one, ids), (one, ids)], "row 1: session 'a' is in the batch already"),
            ([], "no rows"),
            ([(one, prompt(1)), (one, ids)], "already"),
        ]:
            with pytest.raises(BadInput, match=why):
                chat.generate(rows, **GREEDY)
        assert not len(one.tokens) and not len(other.tokens)
