"""A loaded prefix: what it is asked for and cannot give is refused, in words that say what it has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from core_helpers import HYBRID, IDENTITY, MIXED, POOLED, assert_right, opened, prompt, store

from tieredkv.errors import BadInput, Closed
from tieredkv.prefix import Prefix


def test_gather_fills_a_tensor_of_the_callers_own(tmp_path: Path) -> None:
    tokens = prompt(3)
    with opened(tmp_path) as kv:
        space = kv.namespace(IDENTITY, POOLED)
        store(space, tokens)
        with space.load(tokens) as prefix:
            assert prefix.num_tokens == 320
            for group in POOLED.groups:
                for spec in group.tensors:
                    apart = torch.full((2, *prefix.shape_of(spec.layer, spec.name)), -1, dtype=torch.int32)
                    prefix.gather(spec.layer, spec.name, apart[0])
                    assert torch.equal(apart[0], prefix.gather(spec.layer, spec.name))
                    assert (apart[1] == -1).all()
            assert_right(space, tokens, prefix)


@pytest.mark.parametrize(
    ("out", "says"),
    [
        (torch.zeros(1, 320, 8, dtype=torch.float32), "torch.float32"),  # int32 bits would pass for floats
        (torch.zeros(1, 320, 8, dtype=torch.int64), "torch.int64"),
        (torch.zeros(1, 336, 8, dtype=torch.int32), r"\(1, 336, 8\)"),  # its tail would stay unset
        (torch.zeros(1, 304, 8, dtype=torch.int32), r"\(1, 304, 8\)"),
        (torch.zeros(2, 320, 8, dtype=torch.int32), r"\(2, 320, 8\)"),
        (torch.zeros(320, 8, dtype=torch.int32), r"\(320, 8\)"),
        (torch.zeros(1, 320, 8, dtype=torch.int32).numpy(), "ndarray"),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused_and_left_alone(tmp_path: Path, out: Any, says: str) -> None:
    tokens = prompt(3)
    with opened(tmp_path) as kv:
        space = kv.namespace(IDENTITY, MIXED)
        store(space, tokens)
        with space.load(tokens) as prefix:
            good = torch.zeros(1, 320, 8, dtype=torch.int32)
            with pytest.raises(BadInput, match=rf"layer 0 k: out is .*{says}.*\(1, 320, 8\) torch.int32"):
                prefix.gather(0, "k", out)
            with pytest.raises(BadInput, match=says):
                prefix.gather_into({(1, "k"): good, (0, "k"): out})
            assert not out.any() and not good.any()


def test_no_state_is_gathered_before_the_first_boundary(tmp_path: Path) -> None:
    tokens = prompt(3)
    with opened(tmp_path) as kv, kv.namespace(IDENTITY, HYBRID).load(tokens) as prefix:
        assert prefix.num_tokens == 0
        out = torch.ones(prefix.shape_of(1, "conv"), dtype=torch.int32)
        for gathers in (
            lambda: prefix.gather(1, "conv"),
            lambda: prefix.gather(1, "conv", out),
            lambda: prefix.gather_into({(1, "conv"): out}),
        ):
            with pytest.raises(BadInput, match=r"layer 1 conv: .*0 tokens.*num_tokens"):
                gathers()
        assert prefix.gather(0, "k").shape == (1, 0, 8)


@pytest.mark.parametrize(
    ("reads", "says"),
    [
        (lambda p: p.gather(99, "k"), r"no layer 99.*0, 1, 2"),
        (lambda p: p.gather(0, "keys"), r"layer 0 has no 'keys'.*k, v"),
        (lambda p: p.gather_into({(0, "q"): torch.zeros(1)}), r"layer 0 has no 'q'.*k, v"),
        (lambda p: p.first_token(99, "k"), r"no layer 99"),
        (lambda p: p.shape_of(0, "keys"), r"layer 0 has no 'keys'"),
        (lambda p: p.views(99), r"no layer 99.*0, 1, 2"),
        (lambda p: p.segments(7), r"group 7.*0 to 1"),
        (lambda p: p.segments(-1), r"group -1.*0 to 1"),
    ],
)
def test_what_the_layout_does_not_have_is_named_beside_what_it_has(
    tmp_path: Path, reads: Callable[[Prefix], Any], says: str
) -> None:
    tokens = prompt(3)
    with opened(tmp_path) as kv:
        space = kv.namespace(IDENTITY, MIXED)
        store(space, tokens)
        with space.load(tokens) as prefix, pytest.raises(BadInput, match=says):
            reads(prefix)


def test_a_closed_prefix_gives_nothing(tmp_path: Path) -> None:
    tokens = prompt(3)
    with opened(tmp_path) as kv:
        space = kv.namespace(IDENTITY, MIXED)
        store(space, tokens)
        with space.load(tokens) as prefix:
            out = prefix.gather(0, "k")
        reads: list[Callable[[], Any]] = [
            lambda: prefix.gather(0, "k"),
            lambda: prefix.gather(0, "k", out),
            lambda: prefix.gather_into({(0, "k"): out}),
            lambda: prefix.views(0),
            lambda: prefix.segments(0),
        ]
        for read in reads:  # not an assert, which `python -O` would leave out
            with pytest.raises(Closed, match="prefix was closed"):
                read()
