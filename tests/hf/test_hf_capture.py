"""What is stored is what was forwarded, and only that; the quiet ways to wrong text are shut."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import FAMILIES, gemma3, llama, prompt

from tieredkv.errors import BadInput
from tieredkv.hf import ChatModel
from tieredkv.hf.identity import cache_argument

GREEDY = {"max_new_tokens": 6, "do_sample": False}


class Bench:
    """A model with a session that already holds 64 tokens of its prompt in the store."""

    def __init__(self, kv: Any, model: Any, tokenizer: Any) -> None:
        self.model = model
        self.chat = ChatModel(kv, model, tokenizer)
        self.keyword = cache_argument(model)
        self.ids = prompt(80)
        with self.chat.session("before") as session:
            attached = session.attach(self.ids[:, :70])
            session.commit(model.generate(**attached, **GREEDY))
        self.session = self.chat.session("s")

    def attach(self, ids: torch.Tensor, **options: Any) -> tuple[Any, dict[str, Any]]:
        """The cache alone, and all arguments."""
        attached = self.session.attach(ids, **options)
        return attached[self.keyword], attached

    def forward(self, cache: Any, ids: torch.Tensor, **more: Any) -> Any:
        with torch.no_grad():
            return self.model(input_ids=ids, **{self.keyword: cache}, **more)

    def stored(self, ids: torch.Tensor) -> int:
        """How many of `ids` a prompt that goes on from them would find in full parts."""
        tokens = np.append(ids[0].numpy(), 9)
        return int(self.chat._live.space.lookup(tokens).num_full_tokens)


@pytest.fixture(params=["llama", "gemma3"])
def bench(request: pytest.FixtureRequest, open_kv: Callable[..., Any], tokenizer: Any) -> Iterator[Bench]:
    bench = Bench(open_kv(), FAMILIES[request.param](), tokenizer)
    yield bench
    bench.session.close()


# What is stored, and when


def test_a_block_is_stored_when_the_next_forward_begins(bench: Bench) -> None:
    ids = prompt(60, seed=5)
    cache, _ = bench.attach(ids)
    bench.forward(cache, ids[:, :40])
    assert bench.stored(ids[:, :40]) == 0, "not by the forward that completed it"
    bench.forward(cache, ids[:, 40:41])
    assert bench.stored(ids[:, :40]) == 32


def test_tokens_that_were_cropped_away_are_not_stored(bench: Bench) -> None:
    ids = prompt(34, seed=6)
    other = torch.cat([ids[:, :30], prompt(20, seed=7)], dim=1)
    cache, _ = bench.attach(other)
    cache.expect(np.empty(0, dtype=np.int32))
    bench.forward(cache, ids)
    cache.crop(-4)
    bench.forward(cache, other[:, 30:49])
    bench.session._attached = other[0].numpy().astype(np.int32)
    bench.session.commit(other)
    assert bench.stored(other) == 48
    assert bench.stored(ids) == 16
    cache.check()


def test_layers_cropped_one_by_one_are_noticed(bench: Bench) -> None:
    ids = prompt(40, seed=8)
    cache, _ = bench.attach(ids)
    bench.forward(cache, ids[:, :36])
    for layer in cache.layers:
        layer.crop(-3)
    bench.forward(cache, ids[:, 33:40])
    assert cache.num_tokens == 40 and cache.tokens.tolist() == ids[0].tolist()


def test_states_without_a_forward_end_what_is_certain(bench: Bench) -> None:
    ids = prompt(50, seed=9)
    cache, _ = bench.attach(ids)
    bench.forward(cache, ids[:, :20])
    with torch.no_grad():
        bench.model.model(input_ids=ids[:, 20:40], **{bench.keyword: cache})  # past the hook
    bench.forward(cache, ids[:, 40:])
    assert cache.num_certain == 20 and "announced" in cache.doubt.why
    bench.session.commit(ids)
    assert bench.stored(ids) == 16


def test_embeddings_end_what_is_certain(bench: Bench) -> None:
    ids = prompt(50, seed=10)
    cache, _ = bench.attach(ids)
    bench.forward(cache, ids[:, :20])
    embeds = bench.model.get_input_embeddings()(ids[:, 20:40])
    with torch.no_grad():
        bench.model(inputs_embeds=embeds, **{bench.keyword: cache})
    assert cache.num_certain == 20 and "inputs_embeds" in cache.doubt.why


def test_whatever_else_a_forward_is_given_ends_what_is_certain(bench: Bench) -> None:
    ids = prompt(50, seed=11)
    cache, _ = bench.attach(ids)
    bench.forward(cache, ids[:, :20], token_type_ids=torch.zeros(1, 20, dtype=torch.long))
    assert cache.num_certain == 20
    doubt = cache._doubt_of({"input_ids": ids, "pixel_values": torch.zeros(1)}, ids, 50)
    assert doubt == "the forward was also given pixel_values"


def test_a_batch_is_not_stored(bench: Bench) -> None:
    ids = prompt(40, seed=12)
    cache, _ = bench.attach(ids)
    bench.forward(cache, ids.repeat(3, 1))
    assert cache.num_certain == 0
    with pytest.raises(BadInput, match="3 rows"):
        bench.session.commit(ids.repeat(3, 1))
    assert not cache.is_sound()


def test_a_mask_with_holes_is_refused_at_commit(bench: Bench) -> None:
    ids = prompt(40, seed=13)
    cache, _ = bench.attach(ids)
    bench.forward(cache, ids[:, :20])
    mask = torch.ones(1, 40, dtype=torch.long)
    mask[0, 3] = 0
    bench.forward(cache, ids[:, 20:], attention_mask=mask)
    with pytest.raises(BadInput, match=r"from token 20 on.*holes"):
        bench.session.commit(ids)
    assert bench.stored(ids) == 16


def test_positions_that_do_not_continue_the_cache_are_refused(bench: Bench) -> None:
    cache, _ = bench.attach(bench.ids)
    assert cache.get_seq_length() == 64
    for positions in (torch.arange(16), torch.arange(65, 81)):
        with pytest.raises(BadInput, match="do not continue"):
            bench.forward(cache, bench.ids[:, 64:], position_ids=positions[None])
    bench.forward(cache, bench.ids[:, 64:], position_ids=torch.arange(64, 80)[None])
    cache.check()


def test_nothing_is_certain_where_keys_depend_on_the_length(
    open_kv: Callable[..., Any], tokenizer: Any
) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = llama(rope_parameters=rope, max_position_embeddings=64)
    bench = Bench(open_kv(), model, tokenizer)
    ids = prompt(60, seed=14)
    cache, attached = bench.attach(ids)
    got = model.generate(**attached, **{**GREEDY, "max_new_tokens": 20})
    assert cache.num_certain == 64 and "position 64" in cache.doubt.why
    bench.session.commit(got)
    assert bench.stored(got) == 64
    bench.session.close()


# Section 1.3 of what is known of transformers: each way to wrong text without an error


def test_a_full_hit_leaves_a_token(bench: Bench) -> None:
    cache, attached = bench.attach(bench.ids[:, :64])
    assert cache.get_seq_length() == (0 if cache.window_layers() else 48), "64 is an anchor, 48 is none"
    got = bench.model.generate(**attached, **GREEDY)
    assert torch.equal(got, bench.model.generate(bench.ids[:, :64], **GREEDY))
    bench.session.commit(got)
    exact, _ = bench.attach(got)
    assert exact.get_seq_length() <= got.shape[1] - 1, "nor does the session's own memory cover it"


def test_a_cache_is_never_longer_than_the_ids(bench: Bench) -> None:
    got = bench.model.generate(**bench.attach(bench.ids)[1], **GREEDY)
    bench.session.commit(got)
    for num_tokens in (79, 50, 33, 1):
        cache, attached = bench.attach(bench.ids[:, :num_tokens])
        assert cache.get_seq_length() < num_tokens
        want = bench.model.generate(bench.ids[:, :num_tokens], **GREEDY)
        assert torch.equal(bench.model.generate(**attached, **GREEDY), want)


def test_an_edited_prompt_is_cut_at_the_edit(bench: Bench) -> None:
    got = bench.model.generate(**bench.attach(bench.ids)[1], **GREEDY)
    bench.session.commit(got)
    edited = got.clone()
    edited[0, 77] = 11
    cache, attached = bench.attach(edited)
    assert cache.get_seq_length() <= 77 and bench.session.last_explain.diverged_at == 77
    want = bench.model.generate(edited, **GREEDY)
    assert torch.equal(bench.model.generate(**attached, **GREEDY), want)


def test_shorter_ids_than_attached_are_refused(bench: Bench) -> None:
    cache, _ = bench.attach(bench.ids)
    assert cache.get_seq_length() == 64
    with pytest.raises(BadInput):
        bench.model.generate(bench.ids[:, :40], **{bench.keyword: cache}, **GREEDY)


def test_other_ids_than_attached_are_refused_by_index(bench: Bench) -> None:
    cache, _ = bench.attach(bench.ids)
    wrong = bench.ids.clone()
    wrong[0, 71] = 11
    with pytest.raises(BadInput, match="id 71 is not"):
        bench.model.generate(wrong, **{bench.keyword: cache}, **GREEDY)


def test_ids_that_differ_inside_the_prefix_are_refused_at_commit(bench: Bench) -> None:
    cache, _ = bench.attach(bench.ids)
    wrong = bench.ids.clone()
    wrong[0, 5] = 11
    got = bench.model.generate(wrong, **{bench.keyword: cache}, **GREEDY)
    with pytest.raises(BadInput, match="id 5 is not the one that was forwarded"):
        bench.session.commit(got)


def test_ids_that_were_never_forwarded_are_refused(bench: Bench) -> None:
    got = bench.model.generate(**bench.attach(bench.ids)[1], **GREEDY)
    with pytest.raises(BadInput, match="never forwarded"):
        bench.session.commit(torch.cat([got, got[:, :3]], dim=1))
    changed = got.clone()
    changed[0, 82] = 11
    with pytest.raises(BadInput, match="id 82 is not"):
        bench.session.commit(changed)
    bench.session.commit(got)


def test_a_cache_serves_one_call(bench: Bench) -> None:
    _, attached = bench.attach(bench.ids)
    bench.model.generate(**attached, **GREEDY)
    with pytest.raises(BadInput):
        bench.model.generate(**attached, **GREEDY)


def test_the_same_cache_twice_and_a_copy_are_refused(bench: Bench) -> None:
    import copy

    cache, attached = bench.attach(bench.ids)
    with pytest.raises(BadInput, match="not copied"):
        copy.deepcopy(cache)
    with pytest.raises(BadInput, match="another model"):
        other = type(bench.model)(bench.model.config).eval()
        bench.chat.session("other model").close()
        from tieredkv.hf.capture import watch

        watch(other)
        other.generate(**attached, **GREEDY)


def test_assisted_decoding_over_a_prefix(bench: Bench) -> None:
    ids = torch.cat([bench.ids[:, :70], bench.ids[:, :30]], dim=1)
    want = bench.model.generate(ids, **{**GREEDY, "max_new_tokens": 20})
    drafted = {**GREEDY, "max_new_tokens": 20, "prompt_lookup_num_tokens": 3}
    _, attached = bench.attach(ids)
    with pytest.raises(BadInput, match="attach"):
        bench.model.generate(**attached, **drafted)
    cache, attached = bench.attach(ids, assisted=True)
    assert cache.get_seq_length() == 64 and attached["input_ids"].shape[1] == 36
    got = bench.model.generate(**attached, **drafted)
    bench.session.commit(got)
    assert bench.session.tokens.tolist() == want[0].tolist()
    cache.check()
    _, attached = bench.attach(want)
    assert not any(getattr(layer, "record_past", False) for layer in cache.layers)
    assert torch.equal(bench.model.generate(**attached, **GREEDY), bench.model.generate(want, **GREEDY))


def test_a_draft_model_over_a_prefix(bench: Bench) -> None:
    draft = gemma3() if "Gemma" in type(bench.model).__name__ else llama()
    want = bench.model.generate(bench.ids, **{**GREEDY, "max_new_tokens": 20})
    _, attached = bench.attach(bench.ids, assisted=True)
    got = bench.model.generate(**attached, **{**GREEDY, "max_new_tokens": 20}, assistant_model=draft)
    bench.session.commit(got)
    assert bench.session.tokens.tolist() == want[0].tolist()


def test_a_forward_that_failed_half_way_is_not_used_again(bench: Bench) -> None:
    cache, attached = bench.attach(bench.ids)
    last = bench.model.model.layers[-1]
    handle = last.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        bench.model.generate(**attached, **GREEDY)
    handle.remove()
    assert not cache.is_sound()
    with pytest.raises(BadInput, match="half way"):
        bench.forward(cache, bench.ids[:, 64:])
    fresh, attached = bench.attach(bench.ids)
    assert fresh is not cache
    got = bench.model.generate(**attached, **GREEDY)
    assert torch.equal(got, bench.model.generate(bench.ids, **GREEDY))


def test_the_kv_of_a_closed_store_is_no_exception_in_generation(
    open_kv: Callable[..., Any], tokenizer: Any
) -> None:
    kv = open_kv()
    model = llama()
    session = ChatModel(kv, model, tokenizer).session("s")
    ids = prompt(80)
    attached = session.attach(ids)
    kv.close()
    got = model.generate(**attached, **GREEDY)
    assert torch.equal(got, model.generate(ids, **GREEDY))
    assert "closed" in attached[cache_argument(model)].trouble


def test_bad_ids_are_refused(bench: Bench) -> None:
    for ids, why in [
        ([], "nothing"),
        (prompt(4).repeat(2, 1), "2 rows"),
        ([1.5], "integers"),
        ([-3], "0 to"),
    ]:
        with pytest.raises(BadInput, match=why):
            bench.session.attach(ids)
    with pytest.raises(BadInput, match="attach first"):
        bench.session.commit(prompt(4))
