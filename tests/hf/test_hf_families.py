"""Every family through a real store: restored states are those stored, and logits those of a cache never evicted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, MORE, POOLING, RECURRENT, prompt
from transformers import DynamicCache

from tieredkv.errors import BadInput
from tieredkv.hf import ChatModel, identity
from tieredkv.hf.probe import forward_arguments
from tieredkv.hf.restore import restore
from tieredkv.hf.rows import _together
from tieredkv.hf.states import read

NUM_PROMPT, NUM_NEW, NUM_TAIL = 82, 28, 9
ALL = FAMILIES | RECURRENT | POOLING | MORE


class Recorder:
    """The lengths of the forwards that a model ran, so that a stock cache can be driven by the same."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.lengths: list[int] = []
        self._hook = model.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.lengths.append(kwargs["input_ids"].shape[1])

    def close(self) -> None:
        self._hook.remove()


@pytest.fixture
def record() -> Iterator[Callable[[Any], Recorder]]:
    made: list[Recorder] = []

    def one(model: Any) -> Recorder:
        made.append(Recorder(model))
        return made[-1]

    yield one
    for recorder in made:
        recorder.close()


def never_evicted(model: Any, ids: torch.Tensor, lengths: Sequence[int]) -> Any:
    """A stock cache after forwards of these lengths over `ids`."""
    stock, start = DynamicCache(config=model.config), 0
    with torch.no_grad():
        for length in lengths:
            model(**forward_arguments(model, stock, ids[:, start : start + length], start))
            start += length
    return stock


def continued(model: Any, cache: Any, ids: torch.Tensor, start: int) -> torch.Tensor:
    """Logits of `ids` from `start` on behind `cache`: at once if the model can, else token by token."""
    facts = getattr(cache, "facts", None)
    at_once = facts is None or facts.continues
    with torch.no_grad():
        cuts = [slice(start, None)] if at_once else [slice(i, i + 1) for i in range(start, ids.shape[1])]
        logits = []
        for cut in cuts:
            arguments = forward_arguments(model, cache, ids[:, cut], cut.start)
            arguments.pop("logits_to_keep", None)
            logits.append(model(**arguments).logits)
    return torch.cat(logits, dim=1)


def same_states(ours: Any, stock: Any) -> None:
    for facts in ours.facts.layers:
        for state in facts.states:
            mine, theirs = (read(c.layers[facts.index], state.held) for c in (ours, stock))
            assert mine.dtype == theirs.dtype
            if state.kind == "window":
                length = min(mine.shape[2], theirs.shape[2])
                mine, theirs = mine[:, :, -length:], theirs[:, :, -length:]
            assert torch.equal(mine, theirs), f"layer {facts.index} {state.name}"


def say(session: Any, model: Any, ids: torch.Tensor, num_new: int = NUM_NEW) -> torch.Tensor:
    """All ids `[1, n]` of a turn that the session keeps."""
    attached = session.attach(ids)
    session.commit(model.generate(**attached, max_new_tokens=num_new, do_sample=False))
    return torch.tensor(session.tokens[None].astype("int64"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", RECURRENT | POOLING | MORE)
def test_a_restart_gives_back_the_same_bits(
    name: str, dtype: torch.dtype, open_kv: Callable[..., Any], tokenizer: Any, record: Any
) -> None:
    model = ALL[name]().to(dtype)
    kv = open_kv()
    recorder = record(model)
    with ChatModel(kv, model, tokenizer).session("s") as session:
        recorder.lengths.clear()
        kept = say(session, model, prompt(NUM_PROMPT))
    lengths = list(recorder.lengths)
    assert sum(lengths) == kept.shape[1] - 1
    kv.close()
    chat = ChatModel(open_kv(), model, tokenizer)
    ids = torch.cat([kept, prompt(NUM_TAIL, seed=2)], dim=1)
    boundary = (kept.shape[1] - 1) // 16 * 16
    cache = chat._live.new_cache()
    got = restore(chat._live.space, cache, ids[0].numpy().astype("int32"))
    assert got.num_tokens == boundary and got.by_tier == {"disk": boundary}
    stock = never_evicted(model, ids, cut(lengths, boundary))
    same_states(cache, stock)
    stock.facts = cache.facts
    assert torch.equal(continued(model, cache, ids, boundary), continued(model, stock, ids, boundary))


def cut(lengths: Sequence[int], end: int) -> list[int]:
    """The forwards up to token `end`, which one of them reached exactly."""
    found: list[int] = []
    for length in lengths:
        if sum(found) == end:
            return found
        found.append(length)
    assert sum(found) == end, f"no forward ended at {end}: {list(lengths)}"
    return found


@pytest.mark.parametrize("num_tokens", [64, 71, 90])
def test_rows_of_a_model_that_pools_tokens_go_on_as_one_row_does(
    num_tokens: int, open_kv: Callable[..., Any], tokenizer: Any
) -> None:
    model, ids = ALL["deepseek_v4"](), prompt(120)
    live = ChatModel(open_kv(), model, tokenizer)._live
    one = live.new_cache()
    with torch.no_grad():
        model(**forward_arguments(model, one, ids[:, :num_tokens], 0))
        rows = _together(live, [one], 3)
        for at in range(num_tokens, num_tokens + 12):
            new = ids[:, at : at + 1]
            mine = model(**forward_arguments(model, rows, new.repeat(3, 1), at)).logits
            theirs = model(**forward_arguments(model, one, new, at)).logits
            assert (mine - theirs).abs().max() < 1e-4
    other = live.new_cache()
    with torch.no_grad():
        model(**forward_arguments(model, other, ids[:, :30], 0))
    with pytest.raises(BadInput, match="pools tokens"):
        _together(live, [one, other], 1)


def ids_of(session: Any) -> torch.Tensor:
    return torch.tensor(session.tokens[None].astype("int64"))


@pytest.mark.parametrize("name", ["mamba2", "jamba", "qwen3_next", "lfm2", "falcon_h1", "deepseek_v4"])
def test_forks_rollbacks_and_edits_start_from_the_nearest_state(
    name: str, open_kv: Callable[..., Any], tokenizer: Any
) -> None:
    model = ALL[name]()
    chat = ChatModel(open_kv(), model, tokenizer)
    with chat.session("s") as session:
        kept = say(session, model, prompt(NUM_PROMPT))
        kept = say(session, model, torch.cat([kept, prompt(30, seed=3)], dim=1), num_new=12)
        with session.fork("t") as fork:
            longer = torch.cat([kept, prompt(5, seed=4)], dim=1)
            got = say(fork, model, longer, num_new=6)
            assert fork.last_explain.reused_tokens == (kept.shape[1] - 1) // 16 * 16
            assert torch.equal(got, model.generate(longer, max_new_tokens=6, do_sample=False))
        # Answers ended at 110 and 152, the last prompt at 140: the states at the boundaries before them are kept.
        for end, boundary in [(151, 144), (144, 144), (141, 128), (120, 96), (96, 96), (79, 0)]:
            with session.fork(f"to {end}") as fork:
                assert fork.rollback(num_tokens=end) == end - boundary
                edited = torch.cat([kept[:, :end], prompt(9, seed=end)], dim=1)
                got = say(fork, model, edited, num_new=4)
                assert fork.last_explain.reused_tokens == boundary
                assert torch.equal(got, model.generate(edited, max_new_tokens=4, do_sample=False))


def test_a_forward_that_fails_half_way_leaves_nothing_that_goes_on(
    open_kv: Callable[..., Any], tokenizer: Any
) -> None:
    model = ALL["mamba2"]()
    chat = ChatModel(open_kv(), model, tokenizer)
    with chat.session("s") as session, torch.no_grad():
        kept = say(session, model, prompt(NUM_PROMPT))
        ids = torch.cat([kept, prompt(3, seed=5)], dim=1)
        attached = session.attach(ids)
        cache = attached[chat._live.cache_name]
        broken = model.backbone.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model.generate(**attached, max_new_tokens=2, do_sample=False)
        broken.remove()
        assert not cache.is_sound()
        with pytest.raises(BadInput, match="half way"):
            model(**forward_arguments(model, cache, ids[:, -1:], ids.shape[1] - 1))
        got = model.generate(**session.attach(ids), max_new_tokens=2, do_sample=False)
        skipped = session._memory._num_skipped
        assert torch.equal(got, model.generate(ids, max_new_tokens=2, do_sample=False)[:, skipped:])


def test_offsets_that_another_conversation_left_on_the_model_do_not_count(
    open_kv: Callable[..., Any], tokenizer: Any
) -> None:
    model = ALL["qwen2_5_vl"]()
    chat = ChatModel(open_kv(), model, tokenizer)
    with chat.session("s") as session:
        kept = say(session, model, prompt(NUM_PROMPT))
    ids = torch.cat([kept, prompt(4, seed=6)], dim=1)
    want = model.generate(ids, max_new_tokens=6, do_sample=False)
    model.model.rope_deltas = torch.tensor([[7]])
    with chat.session("s") as session:
        got = say(session, model, ids, num_new=6)
        assert session.last_explain.reused_tokens == 96 and torch.equal(got, want)
        pictured = ids.clone()
        pictured[0, -2] = 5  # stands for an image
        attached = session.attach(pictured)
        model.generate(**attached, max_new_tokens=2, do_sample=False)
        cache = attached[chat._live.cache_name]
        assert "image" in cache.doubt.why and cache.num_certain <= ids.shape[1] - 2


@pytest.mark.parametrize("name", ["mamba2", "qwen3_next"])
def test_where_chats_part_a_state_is_kept_for_the_third(
    name: str, open_kv: Callable[..., Any], tokenizer: Any
) -> None:
    model = ALL[name]()
    chat = ChatModel(open_kv(), model, tokenizer)
    shared = prompt(70)
    for number, reused in enumerate([0, 0, 64]):
        with chat.session(f"chat {number}") as session:
            ids = torch.cat([shared, prompt(40, seed=10 + number)], dim=1)
            got = say(session, model, ids, num_new=4)
            assert session.last_explain.reused_tokens == reused
            assert torch.equal(got, model.generate(ids, max_new_tokens=4, do_sample=False))


@pytest.mark.parametrize("name", ["mamba2", "bamba", "lfm2"])
def test_within_a_long_prompt_a_state_is_kept_every_so_often(
    name: str, open_kv: Callable[..., Any], tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "_LEAST_INTERVAL", 64)
    model = ALL[name]()
    chat = ChatModel(open_kv(), model, tokenizer)
    every = chat._live.facts.interval
    assert every >= 64
    ids = prompt(3 * every + 40)
    with chat.session("long") as session:
        say(session, model, ids, num_new=4)
    for end in (2 * every + 7, every + 3, every - 1):
        edited = torch.cat([ids[:, :end], prompt(9, seed=end)], dim=1)
        with chat.session(f"to {end}") as session:
            got = say(session, model, edited, num_new=4)
            assert session.last_explain.reused_tokens == end // every * every
            assert torch.equal(got, model.generate(edited, max_new_tokens=4, do_sample=False))
