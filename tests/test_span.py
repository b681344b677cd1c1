"""What `store` is handed: anything that is no KV of these tokens is refused by name, and nothing changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from core_helpers import HYBRID, IDENTITY, MIXED, SIZE, kv_of, load_checked, opened, prompt, store

from tieredkv import Span
from tieredkv.errors import BadInput


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda _kv: None, r"kv is of .*NoneType"),
        (lambda kv: list(kv.values()), r"kv is of .*list"),
        (lambda _kv: {}, r"kv has no layer 0"),
        (lambda kv: {0: kv[0], 2: kv[2]}, r"kv has no layer 1"),
        (lambda kv: {0: kv[0], 1: kv[1]}, r"kv has no layer 2"),
        (lambda kv: kv | {0: None}, r"layer 0: .*NoneType"),
        (lambda kv: kv | {0: kv[0][0]}, r"layer 0: .*Tensor"),
        (lambda kv: kv | {0: torch.stack(kv[0])}, r"layer 0: .*Tensor"),
        (lambda kv: kv | {0: iter(kv[0])}, r"layer 0: .*iterator"),
        (lambda kv: kv | {0: Span(0, dict(zip("kv", kv[0], strict=True)))}, r"layer 0: .*Span"),
        (lambda kv: kv | {0: tuple(t.numpy() for t in kv[0])}, r"layer 0: .*ndarray"),
        (lambda kv: kv | {0: (kv[0][0], kv[0][1].numpy())}, r"layer 0: .*ndarray"),
        (lambda kv: kv | {0: (kv[0][0], None)}, r"layer 0: .*NoneType"),
        (lambda kv: kv | {0: (Span(0, {}), kv[0][1])}, r"layer 0: .*Tensor.*Span"),
        (lambda kv: kv | {0: (kv[0][0], kv[0][1][:, : 19 * SIZE])}, r"layer 0 v: 304 .*320"),
        (lambda kv: kv | {2: tuple(t[:, :20] for t in kv[2])}, r"layer 2 k: 20 .*320"),
        (lambda kv: kv | {1: tuple(t[:, :0] for t in kv[1])}, r"layer 1 k: 0 .*320"),
    ],
)
def test_what_is_no_kv_is_refused_by_name(
    tmp_path: Path, spoil: Callable[[dict[int, Any]], Any], says: str
) -> None:
    tokens = prompt(3)
    with opened(tmp_path) as kv:
        space = kv.namespace(IDENTITY, MIXED)
        with pytest.raises(BadInput, match=says):
            space.store(tokens, spoil(kv_of(space, tokens)), anchors=[320])
        assert kv.stats().num_blocks == 0
        kv.check()


def test_what_no_block_and_no_anchor_needs_may_be_left_out(tmp_path: Path) -> None:
    tokens = prompt(3)
    with opened(tmp_path) as kv:
        space = kv.namespace(IDENTITY, MIXED)
        whole = kv_of(space, tokens)
        assert len(tokens) > 320  # the tokens after the last whole block are never stored
        cut = {layer: [t[:, :320] for t in tensors] for layer, tensors in whole.items()}
        assert space.store(tokens, {0: cut[0], 1: cut[1]}).num_refused == 0
        assert space.store(tokens, {0: [], 1: (), 2: cut[2]}, anchors=[320]).num_refused == 0
        assert load_checked(space, tokens)[0] == 320
        hybrid = kv.namespace(IDENTITY, HYBRID)
        assert hybrid.store(tokens, {0: cut[0], 1: [Span(0, {"k": cut[1][0], "v": cut[1][1]})]}).num_new == 20


@pytest.mark.parametrize("anchors", [None, 16, [16.0], ["16"], "16", [None], [[16]]])
def test_anchors_are_token_counts(tmp_path: Path, anchors: Any) -> None:
    tokens = prompt(3)
    with opened(tmp_path) as kv:
        space = kv.namespace(IDENTITY, MIXED)
        with pytest.raises(BadInput, match=r"anchors=.*\[16\]"):
            space.store(tokens, kv_of(space, tokens), anchors=anchors)
        assert kv.stats().num_blocks == 0


def test_anchors_of_any_integers_are_taken(tmp_path: Path) -> None:
    tokens = prompt(3)
    with opened(tmp_path) as kv:
        space = kv.namespace(IDENTITY, MIXED)
        space.store(tokens, kv_of(space, tokens), anchors=(n for n in np.array([64, 320])))  # type: ignore[arg-type]
        assert load_checked(space, tokens[:65])[0] == 64
        assert load_checked(space, tokens)[0] == 320


@pytest.mark.parametrize("spill", ["eager", "evict"])
def test_whoever_waits_may_leave_out_for_how_long(tmp_path: Path, spill: str) -> None:
    with opened(tmp_path, spill=spill) as kv:
        stored = store(kv.namespace(IDENTITY, MIXED), prompt(3))
        assert stored.num_new == 20 and stored.wait() and stored.wait(timeout_s=60)
        assert kv.stats().tiers[2].num_blocks == 20
