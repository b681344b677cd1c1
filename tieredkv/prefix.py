"""A loaded prefix: pinned parts wherever they lie, and views or contiguous copies of any layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType

import torch

from .block.layout import BlockLayout, TensorSpec
from .errors import BadInput, Closed
from .outcomes import Reason
from .tier.copier import Pair

Segment = tuple[int, torch.Tensor]
"""First block, and the parts of consecutive blocks as uint8 `[n, part_nbytes]`."""


class Prefix:
    """Everything that a restore at `num_tokens` needs; valid and pinned until closed. Use it with `with`.

    Attributes:
        num_tokens: tokens restored, a multiple of the block size; 0 when nothing is.
        by_tier: tokens by the name of the tier they were read from.
        reason, detail: why it is not more.
    """

    def __init__(
        self,
        layout: BlockLayout,
        num_tokens: int,
        segments: Sequence[Sequence[Segment]],
        by_tier: Mapping[str, int],
        reason: Reason,
        detail: str,
        release: Callable[[], None],
        copy: Callable[[Sequence[Pair]], None],
    ) -> None:
        self.layout = layout
        self.num_tokens = num_tokens
        self.by_tier = dict(by_tier)
        self.reason = reason
        self.detail = detail
        self._segments = segments
        self._release: Callable[[], None] | None = release
        self._copy = copy

    def __enter__(self) -> Prefix:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Unpin. Views are worthless afterwards. Closing twice is harmless."""
        if self._release is not None:
            self._release()
            self._release = None

    def segments(self, group: int) -> Sequence[Segment]:
        """The parts of one group as they lie, run by run."""
        self._check_open()
        if group not in range(len(self._segments)):
            raise BadInput(f"group {group!r}: the layout has groups 0 to {len(self._segments) - 1}")
        return self._segments[group]

    def first_token(self, layer: int, name: str) -> int:
        """Where this tensor's tokens begin: 0, or the first that a window still sees."""
        self._spec(layer, name)
        return self._first_token(self.layout.group_of(layer, name))

    def _first_token(self, group: int) -> int:
        need = self.layout.num_window_blocks[group]
        return max(0, self.num_tokens - need * self.layout.block_size) if need else 0

    def shape_of(self, layer: int, name: str) -> tuple[int, ...]:
        """The shape that `gather` gives, known without a copy."""
        return self._spec(layer, name).shape_of(self.num_tokens - self.first_token(layer, name))

    def views(self, layer: int) -> dict[str, list[torch.Tensor]]:
        """Views of each tensor of `layer`, one for each run of parts: `[num_blocks, *block_shape]`."""
        self._check_open()
        self._check_layer(layer)
        views: dict[str, list[torch.Tensor]] = {}
        for group, segments in enumerate(self._segments):
            for _, parts in segments:
                for (owner, name), view in self.layout.views(parts, group).items():
                    if owner == layer:
                        views.setdefault(name, []).append(view)
        return views

    def gather(self, layer: int, name: str, out: torch.Tensor | None = None) -> torch.Tensor:
        """One tensor of one layer, contiguous over tokens from `first_token(layer, name)`, or its state at the end.

        Args:
            out: where to put it: a tensor of `shape_of(layer, name)` and the layout's dtype, on any device.

        Raises:
            BadInput: the layout has no such tensor, `out` is not like it, or a state of a prefix of 0 tokens.
            Closed: this prefix was closed.
        """
        self._check_open()
        if out is None:
            dtype = self._spec(layer, name).torch_dtype
            segments = self._segments[self.layout.group_of(layer, name)]
            device = segments[0][1].device if segments else torch.device("cpu")
            out = torch.empty(self.shape_of(layer, name), dtype=dtype, device=device)
        self.gather_into({(layer, name): out})
        return out

    def gather_into(self, outs: Mapping[tuple[int, str], torch.Tensor]) -> None:
        """Many tensors at once, each as in `gather`: one pass over the parts, one copy a run and tensor."""
        self._check_open()
        for (layer, name), out in outs.items():
            self._check_out(layer, name, out)
        pairs: list[Pair] = []
        for group, segments in enumerate(self._segments):
            wanted = [t for t in self.layout.groups[group].tensors if (t.layer, t.name) in outs]
            if not wanted:
                continue
            start = self._first_token(group) // self.layout.block_size
            for first_block, parts in segments:
                views, is_last = self.layout.views(parts, group), parts is segments[-1][1]
                for spec in wanted:
                    if spec.token_axis is None and not is_last:
                        continue  # a state is that of the last block, and copies have no order
                    out, view = outs[spec.layer, spec.name], views[spec.layer, spec.name]
                    pairs += self._placed(spec, view, first_block - start, out)
        self._copy(pairs)

    def _placed(self, spec: TensorSpec, view: torch.Tensor, at: int, out: torch.Tensor) -> Iterator[Pair]:
        """Where blocks `[n, *block_shape]`, the first of them the `at`-th of the whole, belong in `out`."""
        axis, size, count = spec.token_axis, self.layout.block_size, len(view)
        if axis is None:
            yield out, view[-1]
        elif spec.stride <= size:
            rows = size // spec.stride
            target = out.narrow(axis, at * rows, count * rows)
            yield target.unflatten(axis, (count, rows)).movedim(axis, 0), view
        else:  # a row of many blocks lies in the last of them
            every = spec.stride // size
            due = view[-(at + 1) % every :: every]
            if len(due):
                yield out.narrow(axis, at // every, len(due)).movedim(axis, 0), due.squeeze(axis + 1)

    def _check_open(self) -> None:
        if self._release is None:
            raise Closed("this prefix was closed: its parts are no longer pinned; load it again")

    def _check_layer(self, layer: int) -> None:
        if layer not in self.layout.names_by_layer:
            layers = ", ".join(map(str, sorted(self.layout.names_by_layer)))
            raise BadInput(f"no layer {layer!r}: the layout has layers {layers}")

    def _spec(self, layer: int, name: str) -> TensorSpec:
        self._check_layer(layer)
        names = self.layout.names_by_layer[layer]
        if name not in names:
            raise BadInput(f"layer {layer} has no {name!r}: it has {', '.join(names)}")
        return self.layout.spec_of(layer, name)

    def _check_out(self, layer: int, name: str, out: torch.Tensor) -> None:
        spec = self._spec(layer, name)
        if spec.token_axis is None and not self.num_tokens:
            raise BadInput(
                f"layer {layer} {name}: a prefix of 0 tokens has no state; look at num_tokens first"
            )
        shape = self.shape_of(layer, name)
        if not isinstance(out, torch.Tensor):
            raise BadInput(
                f"layer {layer} {name}: out is of {type(out)}, not a tensor {shape} {spec.torch_dtype}"
            )
        if out.shape != shape or out.dtype != spec.torch_dtype:
            raise BadInput(
                f"layer {layer} {name}: out is {tuple(out.shape)} {out.dtype}, and must be {shape}"
                f" {spec.torch_dtype}; leave it out to get a new one"
            )
