"""Layers that grow in place against the stock ones: the same bits, whatever is done to them."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, prompt
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from tieredkv.errors import BadInput, Unsupported
from tieredkv.hf.capture import CapturingCache
from tieredkv.hf.identity import cache_argument, read_model
from tieredkv.hf.layers import FullLayer, WindowLayer


def states(num_tokens: int, batch: int = 1) -> torch.Tensor:
    return torch.randn(batch, 2, num_tokens, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FAMILIES)
def test_forwards_give_the_bits_of_a_stock_cache(name: str, dtype: torch.dtype) -> None:
    model = FAMILIES[name]().to(dtype)
    ours = CapturingCache(model, read_model(model, 16))
    stock = DynamicCache(config=model.config)
    ids = prompt(180)
    steps = [0, 70, 71, 72, 90, *range(91, 110), 179, 180]  # prefill, decode, chunks
    with torch.no_grad():
        for start, end in pairwise(steps):
            keyword = cache_argument(model)
            one, other = (model(ids[:, start:end], **{keyword: c}).logits for c in (ours, stock))
            assert torch.equal(one, other), f"tokens {start} to {end}"
    ours.check()


def same(one: Any, other: Any) -> bool:
    return torch.equal(one.keys, other.keys) and torch.equal(one.values, other.values)


@pytest.mark.parametrize("seed", range(6))
def test_a_full_layer_survives_what_replaces_its_states(seed: int) -> None:
    rng = random.Random(seed)
    ours, stock = FullLayer(), DynamicLayer()
    batch = 1
    for _ in range(60):
        action = rng.choice(["grow", "grow", "step", "crop", "reorder", "repeat", "select"])
        if action in ("grow", "step"):
            num_new = 1 if action == "step" else rng.randrange(1, 90)
            keys, values = states(num_new, batch), states(num_new, batch)
            for one, other in zip(ours.update(keys, values), stock.update(keys, values), strict=True):
                assert torch.equal(one, other)
        elif stock.get_seq_length() == 0:
            continue
        elif action == "crop":
            removed = -rng.randrange(0, stock.get_seq_length())
            ours.crop(removed), stock.crop(removed)
        elif action == "reorder":
            index = torch.tensor([rng.randrange(batch) for _ in range(batch)])
            ours.reorder_cache(index), stock.reorder_cache(index)
        elif action == "repeat" and batch < 4:
            ours.batch_repeat_interleave(2), stock.batch_repeat_interleave(2)
            batch *= 2
        elif action == "select" and batch > 1:
            index = torch.arange(batch // 2)
            ours.batch_select_indices(index), stock.batch_select_indices(index)
            batch //= 2
        assert same(ours, stock) and ours.get_seq_length() == stock.get_seq_length()
        assert ours.get_mask_sizes(7) == stock.get_mask_sizes(7)


def test_a_full_layer_does_not_copy_itself_for_a_token() -> None:
    layer = FullLayer()
    layer.update(states(100), states(100))
    before = layer.keys.data_ptr()
    for _ in range(40):
        layer.update(states(1), states(1))
    assert layer.keys.data_ptr() == before


@pytest.mark.parametrize("window", [1, 2, 8, 17, 40])
@pytest.mark.parametrize("seed", range(3))
def test_a_window_layer_shows_what_a_stock_one_shows(window: int, seed: int) -> None:
    rng = random.Random(seed)
    needed = -(-(window - 1) // 16) * 16
    ours = WindowLayer(window, num_kept=needed + 16, num_needed=needed)
    keys_so_far, values_so_far = states(0), states(0)
    ours.wanted |= {32, 64, 96, 160, 320}
    for _ in range(60):
        num_new = rng.choice([1, 1, 1, 5, 16, 50])
        recording = rng.random() < 0.2
        if recording:
            ours.activate_past_recording()
        keys, values = states(num_new), states(num_new)
        before = keys_so_far.shape[2]
        keys_so_far = torch.cat([keys_so_far, keys], 2)
        values_so_far = torch.cat([values_so_far, values], 2)
        length, offset = ours.get_mask_sizes(num_new)
        seen = ours.update(keys, values)
        assert offset == max(0, before - window + 1) and length == seen[0].shape[2]
        assert torch.equal(seen[0], keys_so_far[:, :, offset:])
        assert torch.equal(seen[1], values_so_far[:, :, offset:])
        if recording:
            removed = rng.randrange(0, num_new + 1)
            ours.crop(torch.tensor(-removed))
            ours.record_past = False
            keys_so_far = keys_so_far[:, :, : keys_so_far.shape[2] - removed]
            values_so_far = values_so_far[:, :, : keys_so_far.shape[2]]
        assert ours.get_seq_length() == keys_so_far.shape[2]
        for boundary in sorted(ours.wanted):
            parts = ours.window_before(boundary)
            if parts is not None and boundary <= keys_so_far.shape[2]:
                first = max(0, boundary - needed)
                assert torch.equal(parts["keys"], keys_so_far[:, :, first:boundary])
                assert torch.equal(parts["values"], values_so_far[:, :, first:boundary])
    assert {b for b in ours.wanted if b <= keys_so_far.shape[2]} == set(ours.captured)
    assert ours.nbytes() <= 2 * 2 * 4 * 4 * (2 * (needed + 16) + 64), "more than two windows are held"


def test_stock_and_own_window_layers_agree_under_beams() -> None:
    ours, stock = WindowLayer(8, 32, 16), DynamicSlidingWindowLayer(8)
    for num_new, index in [(20, [0, 0, 1]), (1, [2, 1, 0]), (1, [0, 2, 2])]:
        if num_new == 20:
            first = states(num_new)
            for layer in (ours, stock):
                layer.update(first, first)
                layer.batch_repeat_interleave(3)
            continue
        new = states(num_new, 3)
        for layer in (ours, stock):
            layer.reorder_cache(torch.tensor(index))
        for one, other in zip(ours.update(new, new), stock.update(new, new), strict=True):
            assert torch.equal(one, other)


def test_a_window_layer_goes_back_as_far_as_it_holds_and_no_farther() -> None:
    layer = WindowLayer(17, num_kept=32, num_needed=16)
    layer.update(states(100), states(100))
    assert layer.can_crop(16) and not layer.can_crop(17)
    layer.crop(-16)
    with pytest.raises(BadInput, match="no longer held"):
        layer.crop(-1)
    with pytest.raises(BadInput, match="minus the number"):
        layer.crop(5)


def test_states_made_under_inference_mode_can_be_followed_outside() -> None:
    for layer in (FullLayer(), WindowLayer(8, 32, 16)):
        with torch.inference_mode():
            layer.update(states(40), states(40))
            layer.update(states(1), states(1))
        keys, _ = layer.update(states(1), states(1))
        assert keys.shape[2] in (8, 42) and layer.get_seq_length() == 42


def test_gradients_and_another_dtype_are_refused() -> None:
    layer = FullLayer()
    with pytest.raises(Unsupported, match="no_grad"):
        layer.update(states(3).requires_grad_(), states(3))
    layer.update(states(3), states(3))
    with pytest.raises(BadInput, match="dtype"):
        layer.update(states(1).bfloat16(), states(1).bfloat16())


def test_reset_empties() -> None:
    for layer in (FullLayer(), WindowLayer(8, 32, 16)):
        layer.update(states(40), states(40))
        layer.reset()
        assert layer.get_seq_length() == 0 and layer.nbytes() == 0
        layer.update(states(3), states(3))
        assert layer.get_seq_length() == 3
