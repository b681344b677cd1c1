"""What comes back from a closed store is what was stored, bit for bit, in every layer of every family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, prompt
from transformers import DynamicCache

from tieredkv.hf import ChatModel
from tieredkv.hf.identity import cache_argument

NUM_PROMPT, NUM_NEW, NUM_TAIL = 82, 28, 9


def remember(kv: Any, model: Any, tokenizer: Any) -> torch.Tensor:
    """All tokens `[1, n]` of a generate call that a session keeps."""
    with ChatModel(kv, model, tokenizer).session("s") as session:
        attached = session.attach(prompt(NUM_PROMPT))
        out = model.generate(**attached, max_new_tokens=NUM_NEW, do_sample=False)
        session.commit(out)
        assert session.tokens.tolist() == out[0].tolist()
    return out


def never_evicted(model: Any, ids: torch.Tensor, boundary: int) -> Any:
    """A stock cache of `ids` up to `boundary`, driven by forwards of the lengths that `remember` made."""
    stock = DynamicCache(config=model.config)
    for start, end in [(0, NUM_PROMPT), *((i, i + 1) for i in range(NUM_PROMPT, boundary))]:
        model(ids[:, start:end], **{cache_argument(model): stock})
    return stock


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_restart_gives_back_the_same_bits(
    name: str, dtype: torch.dtype, open_kv: Callable[..., Any], tokenizer: Any
) -> None:
    model = FAMILIES[name]().to(dtype)
    kv = open_kv()
    kept = remember(kv, model, tokenizer)
    kv.close()
    with ChatModel(open_kv(), model, tokenizer).session("s") as session, torch.no_grad():
        ids = torch.cat([kept, prompt(NUM_TAIL, seed=2)], dim=1)
        attached = session.attach(ids)
        ours = attached[cache_argument(model)]
        boundary = ours.get_seq_length()
        assert boundary == (NUM_PROMPT + NUM_NEW - 1) // 16 * 16
        assert (
            sum(session.last_explain.by_tier.values()) == boundary and "disk" in session.last_explain.by_tier
        )
        stock = never_evicted(model, ids, boundary)
        for facts in ours.facts.layers:
            for state in ("keys", "values"):
                mine, theirs = (getattr(c.layers[facts.index], state) for c in (ours, stock))
                length = min(mine.shape[2], theirs.shape[2])
                assert length >= min(boundary, facts.window - 1 if facts.window else boundary)
                assert torch.equal(mine[:, :, -length:], theirs[:, :, -length:]), (facts.index, state)
        cold = model(ids).logits[:, boundary:]
        mine, theirs = (
            model(ids[:, boundary:], **{cache_argument(model): cache}).logits for cache in (ours, stock)
        )
        assert torch.equal(mine, theirs)
        if dtype is torch.float32:
            assert (mine - cold).abs().max() <= 1e-4


@pytest.mark.parametrize("window", [8, 17, 18, 40, 200])
def test_every_boundary_that_was_wanted_can_be_restored(
    window: int, open_kv: Callable[..., Any], tokenizer: Any
) -> None:
    """Windows shorter than a block, exactly a block, over several, and longer than the prompt."""
    model = FAMILIES["gemma3"](window=window)
    chat = ChatModel(open_kv(), model, tokenizer)
    kept = remember_wanting(chat, model, [16, 48, 96])
    with torch.no_grad():
        for boundary in (16, 48, 96):
            with chat.session(f"to {boundary}") as session:
                ids = kept[:, : boundary + NUM_TAIL]
                attached = session.attach(ids)
                cache = attached[cache_argument(model)]
                assert cache.get_seq_length() == boundary
                logits = model(ids[:, boundary:], **{cache_argument(model): cache}).logits
                assert (logits - model(ids).logits[:, boundary:]).abs().max() <= 1e-4


def remember_wanting(chat: ChatModel, model: Any, boundaries: list[int]) -> torch.Tensor:
    with chat.session("s") as session:
        attached = session.attach(prompt(NUM_PROMPT))
        attached[cache_argument(model)].want(boundaries)
        out = model.generate(**attached, max_new_tokens=NUM_NEW, do_sample=False)
        session.commit(out)
    return out


def test_a_restore_leaves_room_so_that_the_next_forward_copies_nothing(
    open_kv: Callable[..., Any], tokenizer: Any
) -> None:
    model = FAMILIES["gemma3"]()
    chat = ChatModel(open_kv(), model, tokenizer)
    with chat.session("s") as session:
        ids = prompt(NUM_PROMPT)
        session.commit(model.generate(**session.attach(ids), max_new_tokens=NUM_NEW, do_sample=False))
        ids = torch.cat([torch.tensor(session.tokens[None].astype("int64")), prompt(30, seed=3)], dim=1)
    with chat.session("s") as session, torch.no_grad():
        attached = session.attach(ids)
        cache = attached[cache_argument(model)]
        before = {f.index: cache.layers[f.index].keys.data_ptr() for f in cache.facts.layers if not f.window}
        start = cache.get_seq_length()
        model(ids[:, start:], **{cache_argument(model): cache})
        assert before == {i: cache.layers[i].keys.data_ptr() for i in before}


def test_generation_modes_run_on_a_restored_cache(open_kv: Callable[..., Any], tokenizer: Any) -> None:
    """Beams and several rows start from a repeated prefix; what they add is not stored as certain."""
    model = FAMILIES["gemma3"]()
    chat = ChatModel(open_kv(), model, tokenizer)
    remember(chat._live.kv, model, tokenizer)
    ids = torch.cat([prompt(NUM_PROMPT), prompt(5, seed=4)], dim=1)
    want = model.generate(ids, max_new_tokens=9, num_beams=3, do_sample=False)
    with chat.session("t") as session:
        attached = session.attach(ids)
        cache = attached[cache_argument(model)]
        assert cache.get_seq_length() == 80
        cache.batch_repeat_interleave(3)
        got = model.generate(**attached, max_new_tokens=9, num_beams=3, do_sample=False)
        assert torch.equal(got, want)
        assert cache.num_certain == 80 and "rows" in cache.doubt.why
        session.commit(got)
        assert session.tokens.tolist() == got[0].tolist()
        again = session.attach(ids)
        assert again[cache_argument(model)].layers[0].keys.shape[0] == 1, "a repeated cache is not used again"
