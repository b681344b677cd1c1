"""Every family through a real store: restored states are those stored, and logits those of a cache never evicted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, MORE, POOLING, RECURRENT, prompt
from transformers import DynamicCache

from tieredkv.errors import BadInput
from tieredkv.hf import ChatModel
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
