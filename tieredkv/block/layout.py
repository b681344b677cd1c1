"""How the bytes of a block lie: layer groups, and the tensors of each group in one contiguous part.

A part holds `block_size` tokens of every tensor of one group, tensor after tensor in declared order,
each aligned to 64 bytes, the whole padded to a page. So a part moves as one copy, and a layer's share of
many parts is one strided view of the pool.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from ..errors import BadConfig
from ..units import PAGE_NBYTES, align_up

TOKENS = -1
"""Stands for the token axis in a tensor's shape; -r for one with a row for every r tokens."""

UNKNOWN = "?"
"""Names the only tensor of a group of which nothing but its size is known."""

_TENSOR_ALIGN = 64
_STAND_IN_BLOCK = 16

DTYPES: Mapping[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        "float32",
        "float16",
        "bfloat16",
        "float64",
        "uint8",
        "int8",
        "int32",
        "int64",
        "float8_e4m3fn",
    )
}


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of one layer, for one block.

    `shape` has `TOKENS` where the token axis is, as `(8, TOKENS, 128)` for the keys of 8 heads; `-r` there for
    one row of every r tokens, at least one a block (with r beyond the block size, only the last block of r tokens
    has a row that counts). A tensor without a token axis is a state at the block's end boundary.
    """

    layer: int
    name: str
    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        if not (_is_int(self.layer) and self.layer >= 0 and isinstance(self.name, str)):
            raise BadConfig(
                f"a tensor has a layer from 0 on and a name, not {self.layer!r} and {self.name!r}"
            )
        if not isinstance(self.shape, tuple) or not all(map(_is_int, self.shape)):
            raise BadConfig(
                f"layer {self.layer} {self.name}: a shape is a tuple of whole numbers, not {self.shape!r}"
            )
        if self.dtype not in DTYPES:
            raise BadConfig(
                f"layer {self.layer} {self.name}: dtype {self.dtype!r} is not one of {sorted(DTYPES)}"
            )
        strides = [-n for n in self.shape if n < 0]
        if len(strides) > 1 or 0 in self.shape or any(n & (n - 1) for n in strides):
            raise BadConfig(f"layer {self.layer} {self.name}: bad shape {self.shape}")

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def token_axis(self) -> int | None:
        """Which axis counts tokens, or None for a state."""
        return next((axis for axis, n in enumerate(self.shape) if n < 0), None)

    @property
    def stride(self) -> int:
        """How many tokens a row of the token axis stands for; a power of two, so blocks and rows align."""
        return max(1, -min(self.shape, default=0))

    def block_shape(self, block_size: int) -> tuple[int, ...]:
        return tuple(max(1, block_size // -n) if n < 0 else n for n in self.shape)

    def shape_of(self, num_tokens: int) -> tuple[int, ...]:
        """The shape over `num_tokens` tokens from a multiple of the stride on: whole rows only."""
        return tuple(num_tokens // -n if n < 0 else n for n in self.shape)

    def nbytes(self, block_size: int) -> int:
        return math.prod(self.block_shape(block_size)) * self.torch_dtype.itemsize


@dataclass(frozen=True)
class LayerGroup:
    """Layers whose KV lives and dies together: `kind` is `full`, `window` or `recurrent`.

    `window` is W: a query sees itself and the W-1 tokens before it; 0 for the other kinds.
    """

    kind: str
    tensors: tuple[TensorSpec, ...]
    window: int = 0

    def __post_init__(self) -> None:
        if self.kind not in ("full", "window", "recurrent"):
            raise BadConfig(f"a layer group is full, window or recurrent, not {self.kind!r}")
        if not _is_int(self.window) or self.window >= 1 << 31 or (self.kind == "window") != (self.window > 0):
            raise BadConfig(f"a {self.kind} group cannot have window {self.window!r}")
        if not self.tensors:
            raise BadConfig(f"a {self.kind} group without tensors")
        for spec in self.tensors:
            if (spec.token_axis is None) != (self.kind == "recurrent"):
                raise BadConfig(f"layer {spec.layer} {spec.name}: shape {spec.shape} in a {self.kind} group")

    def num_window_blocks(self, block_size: int) -> int:
        """How many blocks before a boundary are needed there: ceil((W-1)/block_size), one for a state; 0: all.

        A window of one looks at no token before its own; it is given a block all the same, as the least there is.
        """
        if self.kind == "recurrent":
            return 1
        return max(1, -(-(self.window - 1) // block_size)) if self.window else 0


@dataclass(frozen=True)
class BlockLayout:
    """The groups of a block and where each tensor lies in its group's part."""

    block_size: int
    groups: tuple[LayerGroup, ...]

    def __post_init__(self) -> None:
        size = self.block_size
        if size < 16 or size > 512 or size & (size - 1):
            raise BadConfig(f"block_size is a power of two from 16 to 512, not {size}")
        if not self.groups:
            raise BadConfig("a layout needs at least one layer group")
        if sum(g.kind == "full" for g in self.groups) > 1:
            raise BadConfig("a layout has at most one full group")
        counts = Counter((spec.layer, spec.name) for group in self.groups for spec in group.tensors)
        for (layer, name), count in counts.items():
            if count > 1:  # whoever asks by layer and name would see only one of them
                raise BadConfig(
                    f"layer {layer} {name!r} is named twice: give each of its tensors its own name"
                )

    @cached_property
    def part_nbytes(self) -> tuple[int, ...]:
        """Bytes of each group's part in a slot, padded to a page."""
        return tuple(align_up(self._end(g), PAGE_NBYTES) for g in range(len(self.groups)))

    @cached_property
    def offsets(self) -> tuple[tuple[int, ...], ...]:
        """For each group, the byte offset of each of its tensors in the part."""
        return tuple(tuple(self._starts(group)) for group in self.groups)

    @cached_property
    def gaps(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """For each group, the byte ranges `(start, end)` of the part that no tensor covers."""
        found = []
        for group, starts, end in zip(self.groups, self.offsets, self.part_nbytes, strict=True):
            ends = [s + t.nbytes(self.block_size) for s, t in zip(starts, group.tensors, strict=True)]
            found.append(tuple(gap for gap in zip(ends, (*starts[1:], end), strict=True) if gap[0] < gap[1]))
        return tuple(found)

    @cached_property
    def block_nbytes(self) -> int:
        """Bytes of a block with all its parts."""
        return sum(self.part_nbytes)

    @cached_property
    def full_group(self) -> int | None:
        return next((i for i, g in enumerate(self.groups) if g.kind == "full"), None)

    @cached_property
    def num_window_blocks(self) -> tuple[int, ...]:
        """For each group, how many blocks before a boundary it needs there; 0 for a full group."""
        return tuple(g.num_window_blocks(self.block_size) for g in self.groups)

    def group_of(self, layer: int, name: str) -> int:
        """The group that holds this tensor of `layer`, whose tensors may lie in several.

        Raises:
            KeyError: no group holds it.
        """
        return self._group_by_tensor[layer, name]

    def spec_of(self, layer: int, name: str) -> TensorSpec:
        """Raises KeyError: no group holds it."""
        return self._spec_by_tensor[layer, name]

    @cached_property
    def names_by_layer(self) -> dict[int, tuple[str, ...]]:
        """The tensors of each layer, group after group."""
        names: dict[int, tuple[str, ...]] = {}
        for layer, name in self._spec_by_tensor:
            names[layer] = (*names.get(layer, ()), name)
        return names

    @cached_property
    def _spec_by_tensor(self) -> dict[tuple[int, str], TensorSpec]:
        return {(t.layer, t.name): t for g in self.groups for t in g.tensors}

    @cached_property
    def _group_by_tensor(self) -> dict[tuple[int, str], int]:
        return {(t.layer, t.name): i for i, g in enumerate(self.groups) for t in g.tensors}

    def views(self, parts: torch.Tensor, group: int) -> dict[tuple[int, str], torch.Tensor]:
        """Views of each tensor over `parts`, a uint8 tensor `[n, part_nbytes]` with a contiguous last axis.

        Returns `{(layer, name): tensor [n, *block_shape]}`; no copy is made.
        """
        views = {}
        for spec, start in zip(self.groups[group].tensors, self.offsets[group], strict=True):
            flat = parts[:, start : start + spec.nbytes(self.block_size)].view(spec.torch_dtype)
            views[spec.layer, spec.name] = flat.unflatten(1, spec.block_shape(self.block_size))
        return views

    def describe(self) -> dict[str, Any]:
        """The layout as plain values: what the identity hashes and what the log keeps."""
        return {
            "block_size": self.block_size,
            "groups": [
                {
                    "kind": g.kind,
                    "window": g.window,
                    "tensors": [[t.layer, t.name, list(t.shape), t.dtype] for t in g.tensors],
                }
                for g in self.groups
            ],
        }

    @classmethod
    def from_description(cls, description: Mapping[str, Any]) -> BlockLayout:
        """The inverse of `describe`."""
        groups = tuple(
            LayerGroup(
                kind=g["kind"],
                window=g["window"],
                tensors=tuple(TensorSpec(t[0], t[1], tuple(t[2]), t[3]) for t in g["tensors"]),
            )
            for g in description["groups"]
        )
        return cls(block_size=description["block_size"], groups=groups)

    @classmethod
    def stand_in(cls, part_nbytes: Sequence[int]) -> BlockLayout:
        """A layout of which only the part sizes are known: for blocks whose namespace nobody asked for yet."""
        groups = []
        for number, nbytes in enumerate(part_nbytes):
            spec = TensorSpec(number, UNKNOWN, (nbytes // _STAND_IN_BLOCK, TOKENS), "uint8")
            groups.append(LayerGroup("window" if number else "full", (spec,), window=2 if number else 0))
        return cls(_STAND_IN_BLOCK, tuple(groups))

    @property
    def is_stand_in(self) -> bool:
        return self.groups[0].tensors[0].name == UNKNOWN

    def _starts(self, group: LayerGroup) -> list[int]:
        starts, at = [], 0
        for spec in group.tensors:
            starts.append(at)
            at = align_up(at + spec.nbytes(self.block_size), _TENSOR_ALIGN)
        return starts

    def _end(self, group: int) -> int:
        last = self.groups[group].tensors[-1]
        return self.offsets[group][-1] + last.nbytes(self.block_size)
