"""Where the bytes of a block lie: no overlap, no surprise, the same after a round trip."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from core_helpers import LAYOUTS, SIZE, group_of

from tieredkv import TOKENS, BlockLayout, LayerGroup, TensorSpec
from tieredkv.errors import BadConfig

ODD = BlockLayout(
    16,
    (
        LayerGroup(
            "full",
            (
                TensorSpec(0, "k", (3, TOKENS, 5), "bfloat16"),
                TensorSpec(0, "v", (TOKENS, 7), "float32"),
                TensorSpec(4, "k", (2, TOKENS, 1), "uint8"),
                TensorSpec(4, "v", (2, 3, TOKENS), "float64"),
            ),
        ),
    ),
)


@pytest.mark.parametrize("layout", [*LAYOUTS.values(), ODD])
def test_tensors_lie_apart_aligned_and_inside_the_part(layout: BlockLayout) -> None:
    for number, group in enumerate(layout.groups):
        end = 0
        for spec, start in zip(group.tensors, layout.offsets[number], strict=True):
            assert start >= end and start % 64 == 0
            end = start + spec.nbytes(layout.block_size)
        assert end <= layout.part_nbytes[number] and layout.part_nbytes[number] % 4096 == 0
        assert layout.part_nbytes[number] - end < 4096
    assert layout.block_nbytes == sum(layout.part_nbytes)


@pytest.mark.parametrize("layout", [*LAYOUTS.values(), ODD])
def test_views_write_through_and_hold_each_tensor_once(layout: BlockLayout) -> None:
    for number, group in enumerate(layout.groups):
        parts = torch.zeros(3, layout.part_nbytes[number], dtype=torch.uint8)
        views = layout.views(parts, number)
        for at, view in enumerate(views.values(), start=1):
            view.copy_(torch.full(view.shape, at).to(view.dtype))
        for at, (key, view) in enumerate(views.items(), start=1):
            spec = next(s for s in group.tensors if (s.layer, s.name) == key)
            assert view.shape == (3, *spec.block_shape(layout.block_size)) and view.dtype == spec.torch_dtype
            assert (view == torch.full(view.shape, at).to(view.dtype)).all(), f"{key} was overwritten"


@pytest.mark.parametrize("layout", [*LAYOUTS.values(), ODD])
def test_a_layout_survives_its_description(layout: BlockLayout) -> None:
    again = BlockLayout.from_description(json.loads(json.dumps(layout.describe())))
    assert again == layout and again.offsets == layout.offsets


def test_layers_find_their_group() -> None:
    layout = LAYOUTS["two"]
    assert [layout.group_of(layer, "k") for layer in (0, 1, 2)] == [0, 1, 2]
    with pytest.raises(KeyError):
        layout.group_of(3, "k")


@pytest.mark.parametrize("size", [0, 8, 15, 24, 1024, -16])
def test_block_sizes_that_are_refused(size: int) -> None:
    with pytest.raises(BadConfig):
        BlockLayout(size, LAYOUTS["full"].groups)


@pytest.mark.parametrize(
    ("layer", "name", "shape"),
    [
        (-1, "k", (1, TOKENS, 8)), ("0", "k", (1, TOKENS, 8)), (1.0, "k", (1, TOKENS, 8)), (0, 5, (1, TOKENS, 8)),
        (0, "k", (1.5, TOKENS, 8)), (0, "k", [1, TOKENS, 8]), (0, "k", (True, TOKENS, 8)), (0, "k", "1"),
    ],
)  # fmt: skip
def test_numbers_and_names_of_tensors_that_are_refused(layer: Any, name: Any, shape: Any) -> None:
    """A shape that no store can read back would be found when it is opened the next time."""
    with pytest.raises(BadConfig):
        TensorSpec(layer, name, shape, "float32")


def test_groups_that_are_refused() -> None:
    spec = TensorSpec(0, "k", (1, TOKENS, 8), "int32")
    for kind, window in [
        ("full", 3), ("window", 0), ("window", -1), ("sliding", 4), ("window", 4.5), ("window", 1 << 31),
    ]:  # fmt: skip
        with pytest.raises(BadConfig):
            LayerGroup(kind, (spec,), window)
    with pytest.raises(BadConfig):
        LayerGroup("full", ())
    with pytest.raises(BadConfig, match="recurrent group"):
        LayerGroup("recurrent", (spec,))
    with pytest.raises(BadConfig, match="full group"):
        LayerGroup("full", (TensorSpec(0, "state", (4, 4), "float32"),))
    with pytest.raises(BadConfig):
        BlockLayout(SIZE, ())
    with pytest.raises(BadConfig):
        BlockLayout(SIZE, (group_of("full", [0]), group_of("full", [1])))


@pytest.mark.parametrize(
    ("shape", "dtype"), [((TOKENS, TOKENS), "int32"), ((0, TOKENS), "int32"), ((TOKENS,), "q8")]
)
def test_tensors_that_are_refused(shape: tuple[int, ...], dtype: str) -> None:
    with pytest.raises(BadConfig):
        TensorSpec(0, "k", shape, dtype)


def test_a_tensor_is_named_once() -> None:
    """Of two with one name, only the last would be stored."""
    k, other = TensorSpec(3, "k", (1, TOKENS, 8), "int32"), TensorSpec(3, "k", (2, TOKENS, 8), "float32")
    with pytest.raises(BadConfig, match=r"layer 3 'k'.*twice"):
        BlockLayout(SIZE, (LayerGroup("full", (k, other)),))
    with pytest.raises(BadConfig, match=r"layer 3 'k'.*twice"):
        BlockLayout(SIZE, (LayerGroup("full", (k,)), LayerGroup("window", (other,), window=40)))
    BlockLayout(
        SIZE, (LayerGroup("full", (k,)), LayerGroup("window", (replace(other, name="v"),), window=40))
    )
