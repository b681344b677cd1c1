"""KV as a caller hands it to `store`: spans of consecutive tokens, and states at boundaries."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .block.layout import BlockLayout, TensorSpec
from .errors import BadInput


@dataclass(frozen=True)
class Span:
    """Tensors of one layer by name, in the layout's shape, without a batch axis: all that one group has of it.

    Tensors with a token axis hold consecutive tokens from `first_token` on. States are those after `first_token`
    tokens, which is a boundary then.
    """

    first_token: int
    tensors: Mapping[str, torch.Tensor]

    def end(self, spec: TensorSpec) -> int:
        """The token after the last that `spec`'s tensor covers; for a state, the boundary that it is at."""
        if spec.token_axis is None:
            return self.first_token
        return self.first_token + self.tensors[spec.name].shape[spec.token_axis] * spec.stride

    def blocks(self, spec: TensorSpec, block_size: int) -> slice:
        """The blocks whose share of `spec` is whole here."""
        if spec.token_axis is None:
            return slice(self.first_token // block_size - 1, self.first_token // block_size)
        # A row of many blocks is due at the last of them: the others have none to bring.
        end = self.end(spec) + max(0, spec.stride - block_size)
        return slice(-(-self.first_token // block_size), end // block_size)

    def check(self, spec: TensorSpec, num_tokens: int, block_size: int) -> None:
        """That `spec`'s tensor is there, formed as the layout says, within `num_tokens` tokens.

        Raises:
            BadInput: naming the layer, the tensor and what is wrong.
        """
        what = f"layer {spec.layer} {spec.name}"
        tensor = self.tensors.get(spec.name)
        if tensor is None:
            raise BadInput(f"layer {spec.layer}: no tensor {spec.name!r}")
        shape = tuple(
            spec.shape[axis] if axis == spec.token_axis else n for axis, n in enumerate(tensor.shape)
        )
        if shape != spec.shape or tensor.dtype != spec.torch_dtype:
            raise BadInput(
                f"{what}: {tuple(tensor.shape)} {tensor.dtype}, the layout says"
                f" {spec.shape} (-1: tokens) {spec.dtype}"
            )
        if self.first_token < 0 or self.end(spec) > num_tokens:
            raise BadInput(f"{what}: tokens {self.first_token} to {self.end(spec)} of {num_tokens}")
        unit = max(spec.stride, block_size if spec.token_axis is None else 1)
        if self.first_token % unit:
            raise BadInput(f"{what}: {self.first_token} is no multiple of {unit} tokens")


LayerKV = Mapping[int, Sequence[Span]] | Mapping[int, tuple[torch.Tensor, ...]]
GroupKV = Mapping[tuple[int, int], Sequence[Span]]
"""What a caller brought of each group and layer."""


def spans_by_group(layout: BlockLayout, kv: LayerKV, num_tokens: int, *, anchored: bool) -> GroupKV:
    """What belongs to each group and layer, checked against the layout.

    Args:
        anchored: whether a boundary needs window parts and states too, so that no layer may be missing.

    Raises:
        BadInput: a layer or tensor that is missing, or not as the layout says.
    """
    if not isinstance(kv, Mapping):
        raise BadInput(
            f"kv is of {type(kv)}: give a mapping from each layer's number to its tensors or Spans"
        )
    specs: dict[int, dict[int, list[TensorSpec]]] = {}
    for number, group in enumerate(layout.groups):
        for spec in group.tensors:
            specs.setdefault(spec.layer, {}).setdefault(number, []).append(spec)
    found: dict[tuple[int, int], Sequence[Span]] = {}
    for layer, by_group in specs.items():
        if layer not in kv and (anchored or layout.full_group in by_group):
            raise BadInput(f"kv has no layer {layer}: give its tensors, or () if it brings nothing new")
        given: Any = kv.get(layer, ())
        is_whole = _are_tensors(layer, given)
        if is_whole:
            given = _whole_spans(layer, by_group.values(), given, num_tokens)
        for number, mine in by_group.items():
            names = {spec.name for spec in mine}
            # With one group every span is its own, so that a misspelled name is an error and no silence.
            spans = [s for s in given if len(by_group) == 1 or names & s.tensors.keys()]
            found[number, layer] = spans
            for span in spans:
                for spec in mine:
                    span.check(spec, num_tokens, layout.block_size)
                    if is_whole:
                        _check_whole(span, spec, num_tokens, layout.block_size)
    return found


def _are_tensors(layer: int, given: Any) -> bool:
    """Whether a layer was given as its tensors; false for Spans, and for nothing."""
    if not isinstance(given, Sequence):  # a tensor is none
        raise BadInput(f"layer {layer}: one {type(given)}, not a sequence of torch tensors or Spans")
    kinds = {torch.Tensor if isinstance(item, torch.Tensor) else type(item) for item in given}
    if not (kinds <= {torch.Tensor} or all(issubclass(kind, Span) for kind in kinds)):
        names = " and ".join(sorted(kind.__name__ for kind in kinds))
        raise BadInput(
            f"layer {layer}: a sequence of {names}: either all are torch tensors, or all are Spans"
        )
    return torch.Tensor in kinds


def _check_whole(span: Span, spec: TensorSpec, num_tokens: int, block_size: int) -> None:
    """That a tensor given without a Span covers all blocks: what is short may as well lie elsewhere."""
    if span.blocks(spec, block_size).stop < num_tokens // block_size:
        raise BadInput(
            f"layer {spec.layer} {spec.name}: {span.end(spec)} tokens, and the whole blocks are"
            f" {num_tokens // block_size * block_size}: what covers less goes into a Span"
        )


def _whole_spans(
    layer: int, by_group: Iterable[Sequence[TensorSpec]], tensors: Sequence[torch.Tensor], num_tokens: int
) -> list[Span]:
    """A span over everything for each group; states are those at the end of the tokens."""
    groups = list(by_group)
    names = [spec.name for specs in groups for spec in specs]
    if len(tensors) != len(names):
        raise BadInput(f"layer {layer}: {len(tensors)} tensors, the layout has {len(names)}")
    by_name = dict(zip(names, tensors, strict=True))
    return [
        Span(
            0 if specs[0].token_axis is not None else num_tokens,
            {spec.name: by_name[spec.name] for spec in specs},
        )
        for specs in groups
    ]


def pieces(
    spec: TensorSpec, spans: Sequence[Span], first_block: int, num_blocks: int, block_size: int
) -> Iterator[tuple[int, torch.Tensor]]:
    """The blocks asked for as `(first block, [num_blocks, *block_shape])`, a piece from each span they cross."""
    axis, block, end = spec.token_axis, first_block, first_block + num_blocks
    while block < end:
        span = next(s for s in spans if (there := s.blocks(spec, block_size)).start <= block < there.stop)
        source, stop = span.tensors[spec.name], min(end, there.stop)
        if axis is None:
            yield block, source[None]
        elif spec.stride <= block_size:
            rows = block_size // spec.stride
            first = (block * block_size - span.first_token) // spec.stride
            piece = source.narrow(axis, first, (stop - block) * rows)
            yield block, piece.unflatten(axis, (stop - block, rows)).movedim(axis, 0)
        else:
            yield from _sparse_rows(spec, span, range(block, stop), block_size)
        block = stop


def _sparse_rows(
    spec: TensorSpec, span: Span, blocks: range, block_size: int
) -> Iterator[tuple[int, torch.Tensor]]:
    """Rows that stand for several blocks go with the last of them; the others carry zeros."""
    source, axis = span.tensors[spec.name], spec.token_axis
    assert axis is not None, "a state has no rows"
    for block in blocks:
        row, rest = divmod((block + 1) * block_size - span.first_token, spec.stride)
        due = source.narrow(axis, row - 1, 1) if not rest else source.new_zeros(spec.block_shape(block_size))
        yield block, due[None]
