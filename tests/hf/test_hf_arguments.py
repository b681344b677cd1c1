"""Arguments of `generate` that read or count the prompt, where a session could only give the end of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import llama, mamba, mamba2, prompt
from transformers import GenerationConfig
from transformers.generation.stopping_criteria import StoppingCriteria

from tieredkv.errors import BadInput
from tieredkv.hf import ChatModel
from tieredkv.hf.arguments import prompt_readers
from tieredkv.outcomes import Reason

DRAFTED = {"prompt_lookup_num_tokens": 3}
ONLY_THE_END: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "mamba": (mamba, {}), "mamba2": (mamba2, {}), "llama, drafted": (llama, DRAFTED),
}  # fmt: skip
"""What is given the ids behind its cache alone."""
NEW = {"max_new_tokens": 16}
TAIL = [20, 40, 21, 41] * 7 + [20, 40]


class _ThreeOfTheSame(StoppingCriteria):  # type: ignore[misc]
    """The third time that the whole sequence holds its last id."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return (input_ids == input_ids[:, -1:]).sum(-1) >= 3


READING: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.8, **NEW},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.8, **NEW},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1, **NEW},
    "max_length": {"max_length": 120},
    "min_length": {"min_length": 108, "eos_token_id": list(range(8, 264, 2)), **NEW},
    "bad_words_ids": {"bad_words_ids": [[*TAIL[-18:], b] for b in range(8, 260)], **NEW},
    "stopping_criteria": {"stopping_criteria": [_ThreeOfTheSame()], **NEW},
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": lambda _, ids: [len(ids)], **NEW},
}


def plain(model: Any, ids: Any, **options: Any) -> list[int]:
    """What generate without any cache of ours gives."""
    whole = torch.as_tensor(np.asarray(ids, dtype=np.int64)).reshape(1, -1)
    arguments = {"attention_mask": torch.ones_like(whole), "do_sample": False, **options}
    return list(model.generate(whole, **arguments)[0].tolist())


def going_on(session: Any) -> Any:
    """A second prompt, made of what the session holds, with much in it twice."""
    return np.concatenate([session.tokens, TAIL])


@pytest.mark.parametrize("kind", ONLY_THE_END)
@pytest.mark.parametrize("name", READING)
def test_what_reads_the_prompt_is_given_all_of_it(
    name: str, kind: str, open_kv: Callable[..., Any], tokenizer: Any
) -> None:
    make, drafting = ONLY_THE_END[kind]
    model, options = make(), {**READING[name], **drafting}
    with ChatModel(open_kv(), model, tokenizer).session("s") as session:
        session.generate(prompt(50), do_sample=False, **NEW)
        ids = going_on(session)
        got = session.generate(ids, do_sample=False, **options)
        assert got.ids.tolist() == session.tokens.tolist() == plain(model, ids, **options)
        explain = session.last_explain
        assert explain.reused_tokens == 0 and explain.reason == str(Reason.WANTED_WHOLE)
        assert f"an argument reads the whole prompt, {name}; " in str(explain)
        ids = np.concatenate([session.tokens, [30, 31]])
        got = session.generate(ids, do_sample=False, **NEW, **drafting)
        assert got.ids.tolist() == plain(model, ids, **NEW, **drafting)
        assert session.last_explain.reused_tokens == len(ids) - 3, "what was computed is gone on from"


@pytest.mark.parametrize("kind", ONLY_THE_END)
def test_streamed_answers_and_a_restart(kind: str, open_kv: Callable[..., Any], tokenizer: Any) -> None:
    make, drafting = ONLY_THE_END[kind]
    model, kv = make(), open_kv()
    penalised = {"repetition_penalty": 1.8, **NEW, **drafting, "do_sample": False}

    def say(session: Any, text: str, **options: Any) -> None:
        "".join(session.send(text, **{"do_sample": False, **NEW, **drafting, **options}))
        asked = session._record.turns[-2].end
        assert session.tokens.tolist() == plain(
            model, session.tokens[:asked], **{**NEW, **drafting, **options}
        )

    with ChatModel(kv, model, tokenizer).session("s") as session:
        say(session, "hello there my friend of old")
        say(session, "hello there again my friend", **penalised)
        assert session.last_explain.reused_tokens == 0
        say(session, "and once more", stopping_criteria=[_ThreeOfTheSame()])
        assert session.last_explain.reused_tokens == 0, "a criterion of the caller's may read everything"
        say(session, "and once more")
        assert session.last_explain.reused_tokens > 0, "the session's own may not"
    kv.close()
    with ChatModel(open_kv(), model, tokenizer).session("s") as session:
        say(session, "hello there again my friend", **penalised)
        assert session.last_explain.reused_tokens == 0
    with ChatModel(open_kv("other"), model, tokenizer).session("s") as session:
        say(session, "the very first words", **penalised)


def test_blind_arguments_keep_the_cache(open_kv: Callable[..., Any], tokenizer: Any) -> None:
    """Each gives what plain generate gives, seed for seed, with only the end of the prompt."""
    model = mamba2()
    sampled: dict[str, Any] = {"do_sample": True}
    many = list(range(8, 264, 2))
    for options in (
        {"min_new_tokens": 6, "eos_token_id": many},
        {"exponential_decay_length_penalty": (2, 1.5), "eos_token_id": many[:4]},
        {"suppress_tokens": many[:90]},
        {"begin_suppress_tokens": many},
        {"renormalize_logits": True, "remove_invalid_values": True, "max_time": 1000.0},
        {**sampled, "temperature": 3.0, "top_k": 7},
        {**sampled, "top_k": 0, "top_p": 0.7, "typical_p": 0.9, "epsilon_cutoff": 3e-4, "eta_cutoff": 3e-4},
        {**sampled, "min_p": 0.05},
        {"return_dict_in_generate": True, "output_scores": True, "output_logits": True},
        {
            "repetition_penalty": 1.0,
            "no_repeat_ngram_size": 0,
            "stopping_criteria": [],
            "guidance_scale": None,
        },
        {"max_length": 20, "min_length": 0},
        {"num_beams": 3, "length_penalty": 0.5, "early_stopping": "never", "eos_token_id": many[:9]},
    ):
        with ChatModel(open_kv(), model, tokenizer).session(str(options)) as session:
            session.generate(prompt(50), do_sample=False, **NEW)
            ids = going_on(session)
            torch.manual_seed(5)
            got = session.generate(ids, **{"do_sample": False, "pad_token_id": 0, **NEW, **options}).sequences
            assert session.last_explain.reused_tokens >= 64, options
            torch.manual_seed(5)
            arguments: dict[str, Any] = {
                "pad_token_id": 0,
                **NEW,
                **options,
                "return_dict_in_generate": False,
            }
            assert got[0].tolist() == plain(model, ids, **arguments), options
        session._live.kv.close()


def test_configurations_are_asked_as_well(open_kv: Callable[..., Any], tokenizer: Any) -> None:
    model = mamba2()
    with ChatModel(open_kv(), model, tokenizer).session("s") as session:
        session.generate(prompt(50), do_sample=False, **NEW)
        ids = going_on(session)
        own = GenerationConfig(repetition_penalty=1.8, max_new_tokens=16, pad_token_id=0)
        got = session.generate(ids, generation_config=own)
        assert got.ids.tolist() == plain(model, ids, generation_config=own)
        assert session.last_explain.reused_tokens == 0
        model.generation_config.repetition_penalty = 1.5
        ids = going_on(session)
        assert session.generate(ids, **NEW).ids.tolist() == plain(model, ids, **NEW)
        assert session.last_explain.reused_tokens == 0
        ids = np.concatenate([session.tokens, [30, 31]])
        once: dict[str, Any] = {**NEW, "repetition_penalty": 1.0}
        assert session.generate(ids, **once).ids.tolist() == plain(model, ids, **once)
        assert session.last_explain.reused_tokens > 0, "the call itself turned it off"


def test_what_is_taken_to_read_the_prompt() -> None:
    model = llama(max_position_embeddings=130)
    for given, num_tokens, expected in [
        ({}, 110, []),
        ({}, 111, ["max_length"]),  # the default length ends where positions do
        ({"max_new_tokens": 30}, 111, []),
        ({"max_length": 20}, 10, ["max_length"]),
        ({"max_length": 20, "max_new_tokens": 5}, 10, []),
        ({"min_length": 20, "min_new_tokens": 5}, 10, []),
        ({"min_length": 20}, 10, ["min_length"]),
        ({"something_new": 1, "synced_gpus": False}, 10, ["something_new"]),
        ({"low_memory": False, "logits_processor": [], "stop_strings": None}, 10, []),
        ({"generation_config": GenerationConfig(chat_format="x", stop_strings="x")}, 10, ["stop_strings"]),
        ({"guidance_scale": 2.0, "assistant_ensemble_weight": 0.5}, 10,
         ["assistant_ensemble_weight", "guidance_scale"]),
    ]:  # fmt: skip
        assert prompt_readers(given, model, num_tokens) == expected, given
    model.generation_config.stop_strings = "x"
    assert prompt_readers({}, model, 10) == ["stop_strings"]
    assert prompt_readers({"stop_strings": None}, model, 10) == [], "None in the call turns it off"


def test_a_default_length_ends_where_positions_do(open_kv: Callable[..., Any], tokenizer: Any) -> None:
    model = llama(max_position_embeddings=130)
    with ChatModel(open_kv(), model, tokenizer).session("s") as session:
        session.generate(prompt(50), do_sample=False, **NEW)
        for length in (100, 120):
            ids = np.concatenate([going_on(session), prompt(30)[0].numpy()])[:length]
            got = session.generate(ids, do_sample=False, **DRAFTED)
            assert got.ids.tolist() == plain(model, ids, **DRAFTED)
            session.rollback(num_tokens=60)


@pytest.mark.parametrize("make", [mamba, mamba2])
def test_rows_of_a_cache_that_counts_no_tokens(
    make: Callable[..., Any], open_kv: Callable[..., Any], tokenizer: Any
) -> None:
    model = make()
    penalised: dict[str, Any] = {"repetition_penalty": 1.8, **NEW}
    chat = ChatModel(open_kv(), model, tokenizer)
    with chat.session("a") as one, chat.session("b") as other:
        one.generate(prompt(50), do_sample=False, **NEW)
        before, ids = one.tokens.tolist(), going_on(one)
        with pytest.raises(BadInput, match=r"repetition_penalty: .* one row at a time"):
            chat.generate([(one, ids), (other, prompt(12))], do_sample=False, **penalised)
        with pytest.raises(BadInput, match="repetition_penalty: "):
            chat.generate([(one, [{"role": "user", "content": "x"}]), (other, ids)], **penalised)
        assert one.tokens.tolist() == before and not len(other.tokens) and not one.interrupted
        got = chat.generate([(one, ids)], do_sample=False, **penalised)[0]
        assert got.ids.tolist() == one.tokens.tolist() == plain(model, ids, **penalised)
        assert one.last_explain.reused_tokens == 0
        ids = np.concatenate([one.tokens, [30, 31]])
        beams = {**penalised, "num_beams": 3}
        assert one.generate(ids, do_sample=False, **beams).ids.tolist() == plain(model, ids, **beams)
        ids = np.concatenate([one.tokens, [30, 31]])
        assert one.generate(ids, do_sample=False, **NEW).ids.tolist() == plain(model, ids, **NEW)


def test_numbers_of_beams_that_make_no_sense(open_kv: Callable[..., Any], tokenizer: Any) -> None:
    with ChatModel(open_kv(), llama(), tokenizer).session("s") as session:
        for number in (0, -1):
            with pytest.raises(BadInput, match=f"num_beams={number}: "):
                session.generate(prompt(20), num_beams=number)
        with pytest.raises(BadInput, match="num_beams=0: "):
            session.generate(prompt(20), generation_config=GenerationConfig(num_beams=0))
        assert not len(session.tokens)
