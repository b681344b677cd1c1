"""A loaded prefix: pinned parts wherever they lie, and views or contiguous copies of any layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType

import torch

from .block.layout import BlockLayout
from .outcomes import Reason

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
    ) -> None:
        self.layout = layout
        self.num_tokens = num_tokens
        self.by_tier = dict(by_tier)
        self.reason = reason
        self.detail = detail
        self._segments = segments
        self._release: Callable[[], None] | None = release

    def __enter__(self) -> Prefix:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Unpin. Views are worthless afterwards. Closing twice is harmless."""
        release, self._release = self._release, None
        if release is not None:
            release()

    def first_token(self, layer: int) -> int:
        """Where this layer's tokens begin: 0, or the first that a window still sees."""
        need = self.layout.num_window_blocks[self.layout.group_of(layer)]
        if need == 0:
            return 0
        return max(0, self.num_tokens - need * self.layout.block_size)

    def views(self, layer: int) -> dict[str, list[torch.Tensor]]:
        """Views of each tensor of `layer`, one for each run of parts: `[num_blocks, *block_shape]`."""
        self._assert_open()
        group = self.layout.group_of(layer)
        views: dict[str, list[torch.Tensor]] = {}
        for _, parts in self._segments[group]:
            for (owner, name), view in self.layout.views(parts, group).items():
                if owner == layer:
                    views.setdefault(name, []).append(view)
        return views

    def gather(self, layer: int, name: str, out: torch.Tensor | None = None) -> torch.Tensor:
        """One tensor of one layer, contiguous over tokens from `first_token(layer)`.

        Args:
            out: where to put it: the spec's shape with the token axis at its end length.
        """
        if out is None:
            group = self.layout.group_of(layer)
            spec = next(t for t in self.layout.groups[group].tensors if (t.layer, t.name) == (layer, name))
            length = self.num_tokens - self.first_token(layer)
            shape = [length if n < 0 else n for n in spec.shape]
            device = self._segments[group][0][1].device if self._segments[group] else torch.device("cpu")
            out = torch.empty(shape, dtype=spec.torch_dtype, device=device)
        self.gather_into({(layer, name): out})
        return out

    def gather_into(self, outs: Mapping[tuple[int, str], torch.Tensor]) -> None:
        """Many tensors at once, each as in `gather`: one pass over the parts, one copy a run and tensor."""
        self._assert_open()
        size = self.layout.block_size
        for group, spans in enumerate(self._segments):
            wanted = [t for t in self.layout.groups[group].tensors if (t.layer, t.name) in outs]
            if not wanted:
                continue
            start = self.first_token(wanted[0].layer)
            for first_block, parts in spans:
                views = self.layout.views(parts, group)
                at, length = first_block * size - start, len(parts) * size
                for spec in wanted:
                    axis = spec.token_axis
                    assert axis is not None, "window and full parts count tokens"
                    target = outs[spec.layer, spec.name].narrow(axis, at, length)
                    blocks = target.unflatten(axis, (len(parts), size)).movedim(axis, 0)
                    blocks.copy_(views[spec.layer, spec.name])

    def _assert_open(self) -> None:
        assert self._release is not None, "this prefix was closed: its parts are no longer pinned"
