"""Rows that end one by one: what is committed of each is what that row alone would have got."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import llama, mamba2, mistral, prompt
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteria,
    StopStringCriteria,
)

from tieredkv.errors import BadInput
from tieredkv.hf import ChatModel

LENGTHS = (40, 63)
GREEDY: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False}


class _EndsAt(StoppingCriteria):  # type: ignore[misc]
    def __init__(self, *ids: int) -> None:
        self.ids = torch.tensor(ids)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.isin(input_ids[:, -1], self.ids)


def answers_alone(chat: ChatModel, **options: Any) -> list[list[int]]:
    found = []
    for number, length in enumerate(LENGTHS):
        with chat.session(f"alone {number}") as session:
            found.append(session.generate(prompt(length, seed=number), **GREEDY, **options).ids.tolist())
            session.delete()
    return found


def answers_together(chat: ChatModel, **options: Any) -> list[list[int]]:
    sessions = [chat.session(f"row {number}") for number in range(len(LENGTHS))]
    rows = [(s, prompt(length, seed=n)) for n, (s, length) in enumerate(zip(sessions, LENGTHS, strict=True))]
    got = chat.generate(rows, **GREEDY, **options)
    for session, row in zip(sessions, got, strict=True):
        assert session.tokens.tolist() == row.ids.tolist()
        session.delete()
    return [row.ids.tolist() for row in got]


@pytest.mark.parametrize("make", [llama, mistral])
@pytest.mark.parametrize("eos", [None, 2, "a row's"])
@pytest.mark.parametrize(
    "by", ["criterion", "eos criterion", "strings", "string criterion", "both", "config"]
)
def test_a_row_is_cut_where_it_ended(
    by: str, eos: Any, make: Callable[..., Any], open_kv: Callable[..., Any], tokenizer: Any
) -> None:
    model = make()
    chat = ChatModel(open_kv(), model, tokenizer)
    free = [ids[length:] for ids, length in zip(answers_alone(chat), LENGTHS, strict=True)]
    model.generation_config.eos_token_id = free[1][2] if eos == "a row's" else eos
    model.generation_config.pad_token_id = 0
    stops = (free[0][3], free[1][5])
    strings = [tokenizer.decode(stop) for stop in stops if 40 <= stop < 134] or [tokenizer.decode(stops[0])]
    options: dict[str, dict[str, Any]] = {
        "criterion": {"stopping_criteria": [_EndsAt(*stops)]},
        "eos criterion": {"stopping_criteria": [EosTokenCriteria(list(stops)), _EndsAt(7)]},
        "strings": {"stop_strings": strings, "tokenizer": tokenizer},
        "string criterion": {"stopping_criteria": [StopStringCriteria(tokenizer, strings)]},
        "both": {"stopping_criteria": [_EndsAt(stops[0])], "stop_strings": strings, "tokenizer": tokenizer},
        "config": {"tokenizer": tokenizer},
    }
    if by == "config":
        model.generation_config.stop_strings = strings
    alone = answers_alone(chat, **options[by])
    assert answers_together(chat, **options[by]) == alone
    assert min(len(ids) - length for ids, length in zip(alone, LENGTHS, strict=True)) < 16, "none ended early"


def test_what_ends_all_rows_at_once_is_left_as_it_is(open_kv: Callable[..., Any], tokenizer: Any) -> None:
    """Also among beams; its type takes the place of what generate would make itself."""
    chat = ChatModel(open_kv(), llama(), tokenizer)
    with chat.session("a") as one, chat.session("b") as other:
        criteria = [MaxLengthCriteria(50), MaxTimeCriteria(1000.0), _EndsAt(7)]
        for options in ({"stopping_criteria": criteria}, {"stopping_criteria": criteria[:2], "num_beams": 2}):
            rows = chat.generate([(one, prompt(40)), (other, prompt(20))], **GREEDY, **options)
            assert [len(row.ids) for row in rows] == [50, 30]


def test_of_several_sequences_the_first_is_cut_where_it_ended(
    open_kv: Callable[..., Any], tokenizer: Any
) -> None:
    for model in (llama(), mamba2()):
        with ChatModel(open_kv(), model, tokenizer).session("s") as session:
            sampled: dict[str, Any] = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 30}
            torch.manual_seed(1)
            free = session.generate(prompt(40), **sampled).sequences
            stop = int(free[0, 44])
            torch.manual_seed(1)
            got = session.generate(prompt(40), **sampled, stopping_criteria=[_EndsAt(stop)])
            first = 41 + int((free[0, 40:] == stop).nonzero()[0])
            assert got.ids.tolist() == free[0, :first].tolist() == session.tokens.tolist()
        session._live.kv.close()


def test_several_sequences_of_several_rows(open_kv: Callable[..., Any], tokenizer: Any) -> None:
    """Sampled ones differ, so each row has its own end; an id that ends no text by the call's own None cuts none."""
    model = llama()
    model.generation_config.pad_token_id = 0
    chat = ChatModel(open_kv(), model, tokenizer)
    with chat.session("a") as one, chat.session("b") as other:
        rows = [(one, prompt(40, seed=0)), (other, prompt(63, seed=1))]
        sampled: dict[str, Any] = {"do_sample": True, "num_return_sequences": 2, "max_new_tokens": 16}
        torch.manual_seed(1)
        free = [
            row.ids[length:].tolist()
            for row, length in zip(chat.generate(rows, **sampled), LENGTHS, strict=True)
        ]
        stops = free[0][3], free[1][6]
        model.generation_config.eos_token_id = free[0][2]
        torch.manual_seed(1)
        got = chat.generate(rows, **sampled, eos_token_id=None, stopping_criteria=[_EndsAt(*stops)])
        for row, length, text in zip(got, LENGTHS, free, strict=True):
            first = next(at for at, token in enumerate(text) if token in stops)
            assert row.ids[length:].tolist() == text[: first + 1]


def test_beams_that_may_end_apart_are_refused(open_kv: Callable[..., Any], tokenizer: Any) -> None:
    chat = ChatModel(open_kv(), llama(), tokenizer)
    with chat.session("s") as session:
        for options, named in [
            ({"stopping_criteria": [_EndsAt(7)]}, "stopping_criteria: "),
            ({"stop_strings": ["x"], "tokenizer": tokenizer}, "stop_strings: "),
        ]:
            for ask in (
                lambda **given: session.generate(prompt(20), **given),
                lambda **given: chat.generate([(session, prompt(20))], **given),
            ):
                with pytest.raises(BadInput, match=f"{named}.*or num_beams"):
                    ask(num_beams=2, **GREEDY, **options)
        assert not len(session.tokens)


def test_drafts_are_not_for_rows(open_kv: Callable[..., Any], tokenizer: Any) -> None:
    """A padded cache of rows that generate drafts over gave other text, without a word."""
    chat = ChatModel(open_kv(), llama(), tokenizer)
    with chat.session("s") as session:
        with pytest.raises(BadInput, match="prompt_lookup_num_tokens: drafts go with one sequence"):
            chat.generate([(session, prompt(20))], **GREEDY, prompt_lookup_num_tokens=3)
        assert not len(session.tokens)


@pytest.mark.parametrize(
    "counting", [{"no_repeat_ngram_size": 2}, {"max_length": 90}, {"min_length": 70, "max_new_tokens": 16}]
)
def test_what_counts_a_prompt_is_refused_where_padding_would_count(
    counting: dict[str, Any], open_kv: Callable[..., Any], tokenizer: Any
) -> None:
    chat = ChatModel(open_kv(), llama(), tokenizer)
    a, b = chat.session("a"), chat.session("b")
    with pytest.raises(BadInput, match="of different length"):
        chat.generate([(a, prompt(40)), (b, prompt(63))], do_sample=False, **counting)
    assert not len(a.tokens) and not len(b.tokens)
    chat.generate([(a, prompt(40)), (b, prompt(40, seed=2))], do_sample=False, **counting)
