"""Cache layers whose states grow in place, and that keep the window parts of wanted boundaries.

Stock layers copy all they hold for every decoded token. Here `keys` and `values` are views of buffers allocated
ahead; whatever replaces those attributes (crop, beam reorder, batch selection) is noticed by its storage and
taken up again at the next update.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from transformers.cache_utils import (
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from ..errors import BadInput, Unsupported

_STATE_NAMES = ("keys", "values")
_LEAST_SPARE, _MOST_SPARE = 64, 8192


class StateBuffer:
    """Allocated space `[B, H, capacity, D]` that one tensor of states lies in.

    The view given out last is known without a look at it: every decoded token asks for each layer.
    """

    def __init__(self, like: torch.Tensor, capacity: int) -> None:
        batch, heads, _, width = like.shape
        self.room = like.new_empty((batch, heads, capacity, width))
        self.capacity = capacity
        self._needs_inference_mode = self.room.is_inference()
        self._given: torch.Tensor | None = None
        self._given_start = 0

    def append(self, held: torch.Tensor, new: torch.Tensor) -> torch.Tensor | None:
        """`held` followed by `new` as one view, in place; None if `held` lies elsewhere or the end is reached."""
        start = self.start_of(held)
        num_held, num_new = held.shape[2], new.shape[2]
        if start is None or start + num_held + num_new > self.capacity:
            return None
        self.room.narrow(2, start + num_held, num_new).copy_(new)
        return self._give(start, num_held + num_new)

    def last(self, held: torch.Tensor, count: int) -> torch.Tensor | None:
        """The last `count` tokens of `held`, in place; None if it lies elsewhere."""
        start = self.start_of(held)
        return None if start is None else self._give(start + held.shape[2] - count, count)

    def load(self, held: torch.Tensor) -> torch.Tensor:
        """A copy of `held` at the front of the buffer, as a view."""
        front = self._give(0, held.shape[2])
        front.copy_(held.clone() if self.start_of(held) is not None else held)
        return front

    def fits(self, held: torch.Tensor, num_tokens: int) -> bool:
        """Whether states shaped and typed like `held` and `num_tokens` long can lie here."""
        same = held.shape[:2] == self.room.shape[:2] and held.device == self.room.device
        return same and self._is_writable() and num_tokens <= self.capacity

    def start_of(self, held: torch.Tensor) -> int | None:
        """The token at which `held` begins as a view of this buffer, or None if it is no such view."""
        if held is self._given:
            return self._given_start if self._is_writable() else None
        if held.untyped_storage().data_ptr() != self.room.untyped_storage().data_ptr():
            return None
        if held.stride() != self.room.stride() or not self.fits(held, held.shape[2]):
            return None
        return (held.storage_offset() - self.room.storage_offset()) // self.room.stride(2)

    def _give(self, start: int, count: int) -> torch.Tensor:
        self._given, self._given_start = self.room.narrow(2, start, count), start
        return self._given

    def _is_writable(self) -> bool:
        """Tensors made under inference mode may not be written outside it."""
        return not self._needs_inference_mode or torch.is_inference_mode_enabled()


class GrowingMixin:
    """What both layers share: buffers by state name, and how a state grows by new tokens."""

    keys: Any  # a tensor once initialised, as in the stock layers
    values: Any
    is_initialized: bool
    is_compileable = False

    def reserve(self, name: str, states: torch.Tensor, capacity: int) -> torch.Tensor:
        """A buffer of `capacity` tokens for `name`, like `states` `[B, H, *, D]`; returns all of its space."""
        buffer = StateBuffer(states, capacity)
        self._buffers()[name] = buffer
        return buffer.room

    def nbytes(self) -> int:
        """Bytes of all buffers; another thread may be running a forward meanwhile."""
        return sum(buffer.room.nbytes for buffer in list(self._buffers().values()))

    def reset(self) -> None:
        """Drop all states."""
        self.keys = self.values = None
        self.is_initialized = False
        self._buffers().clear()

    def num_rows(self) -> int:
        """Sequences held, 0 while empty."""
        return int(self.keys.shape[0]) if self.is_initialized and self.keys.numel() else 0

    def _buffers(self) -> dict[str, StateBuffer]:
        buffers: dict[str, StateBuffer] = self.__dict__.setdefault("buffers", {})
        return buffers

    def _held(self, name: str, new: torch.Tensor) -> torch.Tensor:
        """What is held of `name`, checked against what is to follow it."""
        if torch.is_grad_enabled() and new.requires_grad:
            raise Unsupported("a cache of tieredkv keeps no gradients: run the forward under torch.no_grad()")
        held: torch.Tensor = getattr(self, name)
        if held.numel() == 0:
            return new[:, :, :0]
        if held.dtype != new.dtype:
            raise BadInput(
                f"{name} of dtype {new.dtype} cannot follow {held.dtype}: the model's dtype changed"
            )
        return held


class FullLayer(GrowingMixin, DynamicLayer):  # type: ignore[misc]
    """All keys and values since the first token, `[B, H, S, D]`, growing in place.

    `num_expected` is the length to make room for, where it is known.
    """

    num_expected = 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append `[B, H, q, D]` and return everything, as views."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys = self._grown("keys", key_states)
        self.values = self._grown("values", value_states)
        return self.keys, self.values

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens."""
        removed = num_removed(tokens_to_remove)
        if removed and self.is_initialized:
            length = max(0, self.get_seq_length() - removed)
            self.keys, self.values = self.keys[:, :, :length], self.values[:, :, :length]

    def can_crop(self, removed: int) -> bool:
        return True

    def _grown(self, name: str, new: torch.Tensor) -> torch.Tensor:
        held = self._held(name, new)
        buffer = self._buffers().get(name)
        grown = buffer.append(held, new) if buffer else None
        if grown is None:
            length = held.shape[2] + new.shape[2]
            if buffer is None or not buffer.fits(new, length):
                self.reserve(
                    name, new, self.num_expected if self.num_expected >= length else spacious(length)
                )
                buffer = self._buffers()[name]
            grown = buffer.append(buffer.load(held), new)
            assert grown is not None, f"{length} tokens do not fit a buffer of {buffer.capacity}"
        return grown


class WindowLayer(GrowingMixin, DynamicSlidingWindowLayer):  # type: ignore[misc]
    """The last tokens of a sliding-window layer, and the window parts of wanted boundaries.

    Attention sees the window; `keys` and `values` hold `num_kept` tokens, so that a block boundary just passed
    still has its window parts at hand and a short rollback needs no recording.

    Args:
        sliding_window: W: a query sees itself and the W-1 tokens before it.
        num_kept: tokens to hold, at least W-1.
        num_needed: tokens before a boundary that its window parts cover.
    """

    def __init__(self, sliding_window: int, num_kept: int, num_needed: int, **kwargs: Any) -> None:
        super().__init__(sliding_window=sliding_window, **kwargs)
        assert num_kept >= max(sliding_window - 1, num_needed), (
            f"{num_kept} kept of a window of {sliding_window}"
        )
        self.num_kept = num_kept
        self.num_needed = num_needed
        self.wanted: set[int] = set()
        self.captured: dict[int, dict[str, torch.Tensor]] = {}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append `[B, H, q, D]` and return the window before it and itself."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        visible = min(self.cumulative_length, self.sliding_window - 1) + key_states.shape[2]
        self.keys = self._grown("keys", key_states)
        self.values = self._grown("values", value_states)
        self.cumulative_length += key_states.shape[2]
        hidden = self.keys.shape[2] - visible
        seen = self.keys.narrow(2, hidden, visible), self.values.narrow(2, hidden, visible)
        self._capture()
        if not self.record_past:
            self._trim()
        return seen

    def restored(self, num_tokens: int) -> None:
        """State that what `keys` and `values` were set to are the last of `num_tokens` tokens."""
        self.cumulative_length = num_tokens

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens, and end what `activate_past_recording` gathered.

        Raises:
            BadInput: the window before the new end is no longer held.
        """
        removed = num_removed(tokens_to_remove)
        if not self.is_initialized:
            return
        if not self.can_crop(removed):
            raise BadInput(f"cannot remove {removed} tokens: tokens before {self._first} are no longer held")
        length = max(0, self.keys.shape[2] - removed)
        self.keys, self.values = self.keys[:, :, :length], self.values[:, :, :length]
        self.cumulative_length = max(0, int(self.cumulative_length) - removed)
        self.captured = {b: parts for b, parts in self.captured.items() if b <= self.cumulative_length}
        self._trim()

    def can_crop(self, removed: int) -> bool:
        """Whether the window is still whole once the last `removed` tokens are gone."""
        end = max(0, self.cumulative_length - removed)
        return bool(self._first <= max(0, end - (self.sliding_window - 1)))

    def window_before(self, boundary: int) -> dict[str, torch.Tensor] | None:
        """Keys and values `[B, H, n, D]` of the tokens that `boundary` needs before it, or None if gone."""
        if boundary in self.captured:
            return self.captured[boundary]
        first = max(0, boundary - self.num_needed)
        if not self.is_initialized or first < self._first or boundary > self.cumulative_length:
            return None
        here = slice(first - self._first, boundary - self._first)
        return {name: getattr(self, name)[:, :, here] for name in _STATE_NAMES}

    def reset(self) -> None:
        super().reset()
        self.cumulative_length = 0
        self.captured.clear()

    @property
    def _first(self) -> int:
        """The first token that is held."""
        held = self.keys.shape[2] if self.is_initialized and self.keys.numel() else 0
        return int(self.cumulative_length) - held

    def _capture(self) -> None:
        for boundary in self.wanted - self.captured.keys():
            parts = self.window_before(boundary)
            if parts is not None:
                self.captured[boundary] = {name: states.clone() for name, states in parts.items()}

    def _trim(self) -> None:
        """Let go of what is older than `num_kept` tokens, and of the tensor of a long prefill with it."""
        if self.keys.shape[2] > self.num_kept:
            for name in _STATE_NAMES:
                held = getattr(self, name)
                buffer = self._buffers().get(name)
                kept = None if buffer is None else buffer.last(held, self.num_kept)
                if kept is None:
                    tail = held[:, :, -self.num_kept :]
                    kept = self._buffer_for(name, tail, 0).load(tail)
                setattr(self, name, kept)

    def _grown(self, name: str, new: torch.Tensor) -> torch.Tensor:
        held = self._held(name, new)
        buffer = self._buffers().get(name)
        grown = buffer.append(held, new) if buffer else None
        if grown is not None:
            return grown
        if held.shape[2] + new.shape[2] > self._most:
            return torch.cat([held, new], dim=2) if held.shape[2] else new
        buffer = self._buffer_for(name, held, new.shape[2])
        grown = buffer.append(buffer.load(held), new)
        assert grown is not None, f"{held.shape[2]} + {new.shape[2]} tokens do not fit {buffer.capacity}"
        return grown

    @property
    def _most(self) -> int:
        """The largest buffer: twice what is kept, so that a shift to its front is rare and never overlaps."""
        return 2 * self.num_kept + _LEAST_SPARE

    def _buffer_for(self, name: str, held: torch.Tensor, num_new: int) -> StateBuffer:
        """A buffer for `held` and `num_new` tokens: the present one if they fit, else a larger one."""
        length = held.shape[2] + num_new
        buffer = self._buffers().get(name)
        if buffer is None or not buffer.fits(held, length):
            self.reserve(name, held, min(self._most, spacious(length)))
        return self._buffers()[name]


class IndexedLayer(FullLayer, DynamicIndexedLayer):  # type: ignore[misc]
    """A full layer with the indexer keys of sparse attention beside it."""

    indexer_keys: Any  # [B, S, D] once there, as in the stock layer
    indexer_position_ids: Any = None  # [P, B, S], where the model and the release have them

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens, of the indexer too."""
        removed = num_removed(tokens_to_remove)
        super().crop(tokens_to_remove)
        if removed and self.indexer_keys is not None:
            self.indexer_keys = self.indexer_keys[:, : max(0, self.indexer_keys.shape[1] - removed)]
        if removed and self.indexer_position_ids is not None:
            length = max(0, self.indexer_position_ids.shape[-1] - removed)
            self.indexer_position_ids = self.indexer_position_ids[..., :length]

    def nbytes(self) -> int:
        extra = (self.indexer_keys, self.indexer_position_ids)
        return super().nbytes() + sum(int(states.nbytes) for states in extra if states is not None)


class RecurrentMixin:
    """States that a forward changes in place: they are as they are after the last token, and cannot be cut.

    Only states of convolutions can go back, and only while `record_past` makes them keep what they were.
    """

    conv_states: dict[int, torch.Tensor | None]
    recurrent_states: dict[int, torch.Tensor | None]
    conv_kernel_size: dict[int, int | None]
    record_past: bool
    is_compileable = False

    def recurrent_tensors(self) -> list[torch.Tensor]:
        """Every state that is held."""
        held = [*self.conv_states.values(), *self.recurrent_states.values()]
        return [state for state in held if state is not None]

    def can_unwind(self, removed: int) -> bool:
        """Whether the last `removed` tokens can be taken back."""
        if not removed:
            return True
        widths = [
            state.shape[-1] - (self.conv_kernel_size[i] or 0)
            for i, state in self.conv_states.items()
            if state is not None
        ]
        recurs = any(state is not None for state in self.recurrent_states.values())
        return self.record_past and not recurs and all(width >= removed for width in widths)

    def unwind(self, removed: int) -> None:
        """Take back the last `removed` tokens, and end what `record_past` gathered.

        Raises:
            BadInput: a state cannot go back.
        """
        if not self.can_unwind(removed):
            raise BadInput(f"cannot remove {removed} tokens: a recurrent state cannot go back")
        if self.record_past:
            for i, state in self.conv_states.items():
                if state is not None:
                    kept = state[..., : state.shape[-1] - removed]
                    self.conv_states[i] = kept[..., -(self.conv_kernel_size[i] or 0) :].clone()

    def make_writable(self) -> None:
        """Copies of states made under inference mode, which may not be written outside it."""
        for states in (self.conv_states, self.recurrent_states):
            for i, state in states.items():
                if state is not None and state.is_inference() and not torch.is_inference_mode_enabled():
                    states[i] = state.clone()

    def repeat_states(self, repeats: int) -> None:
        for states in (self.conv_states, self.recurrent_states):
            for i, state in states.items():
                states[i] = None if state is None else state.repeat_interleave(repeats, dim=0)

    def select_states(self, indices: torch.Tensor) -> None:
        for states in (self.conv_states, self.recurrent_states):
            for i, state in states.items():
                states[i] = None if state is None else state[indices]


class RecurrentLayer(RecurrentMixin, LinearAttentionLayer):  # type: ignore[misc]
    """A layer that holds recurrent states and nothing else."""

    def can_crop(self, removed: int) -> bool:
        return self.can_unwind(removed)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens.

        Raises:
            BadInput: a state cannot go back.
        """
        self.unwind(num_removed(tokens_to_remove))

    def num_rows(self) -> int:
        """Sequences held, 0 while empty."""
        return next((state.shape[0] for state in self.recurrent_tensors()), 0)

    def nbytes(self) -> int:
        return sum(state.nbytes for state in self.recurrent_tensors())

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.repeat_states(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.select_states(indices)


class _HybridMixin(RecurrentMixin):
    """A layer with attention and recurrent states: whatever is done to the one is done to the other."""

    def can_crop(self, removed: int) -> bool:
        return bool(super().can_crop(removed)) and self.can_unwind(removed)  # type: ignore[misc]

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens.

        Raises:
            BadInput: a state cannot go back, or the window at the new end is gone.
        """
        self.unwind(num_removed(tokens_to_remove))
        super().crop(tokens_to_remove)  # type: ignore[misc]

    def nbytes(self) -> int:
        attention: int = super().nbytes()  # type: ignore[misc]
        return attention + sum(state.nbytes for state in self.recurrent_tensors())

    def reset(self) -> None:
        LinearAttentionLayer.reset(self)
        super().reset()  # type: ignore[misc]

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.repeat_states(repeats)
        super().batch_repeat_interleave(repeats)  # type: ignore[misc]

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.select_states(indices)
        super().batch_select_indices(indices)  # type: ignore[misc]


class HybridLayer(_HybridMixin, FullLayer, LinearAttentionAndFullAttentionLayer):  # type: ignore[misc]
    """Full attention and recurrent states in one layer."""


class HybridWindowLayer(_HybridMixin, WindowLayer, LinearAttentionAndSlidingWindowAttentionLayer):  # type: ignore[misc]
    """Sliding attention and recurrent states in one layer."""


class PoolingMixin(RecurrentMixin):
    """A layer that pools tokens into rows: what it holds is right at its end alone, so it cannot go back."""

    _layer_type = None  # a subclass that names one would take the place of the stock class in transformers
    is_croppable = False
    keys: Any

    def can_crop(self, removed: int) -> bool:
        return not removed

    def crop(self, tokens_to_remove: int) -> None:
        """Raises BadInput: any token is to be removed."""
        if num_removed(tokens_to_remove):
            raise BadInput(f"cannot remove {num_removed(tokens_to_remove)} tokens: they are pooled already")

    def recurrent_tensors(self) -> list[torch.Tensor]:
        dicts = [value for value in list(vars(self).values()) if isinstance(value, dict)]
        return [t for each in dicts for t in list(each.values()) if isinstance(t, torch.Tensor)]

    def make_writable(self) -> None:
        """Nothing is written in place."""

    def num_rows(self) -> int:
        """Sequences held, 0 while empty."""
        return int(self.keys.shape[0]) if self.keys is not None and self.keys.numel() else 0

    def nbytes(self) -> int:
        keys = self.keys
        return (0 if keys is None else int(keys.nbytes)) + sum(
            state.nbytes for state in self.recurrent_tensors()
        )


def pooling_layer(stock: Any) -> Any:
    """Our layer in the place of a stock one that pools tokens: its class is known only once its model is imported."""
    kind = type(f"Capturing{type(stock).__name__}", (PoolingMixin, type(stock)), {"_layer_type": None})
    layer: Any = object.__new__(kind)
    vars(layer).update(vars(stock))
    return layer


def spacious(num_tokens: int) -> int:
    """How large a buffer for `num_tokens` is made where nobody knows how many will follow."""
    return num_tokens + min(max(_LEAST_SPARE, num_tokens // 2), _MOST_SPARE)


def num_removed(tokens_to_remove: Any) -> int:
    """How many tokens a `crop` takes away; transformers passes it negative, at times as a tensor.

    Raises:
        BadInput: positive, which once meant a length and is refused by transformers too.
    """
    if int(tokens_to_remove) > 0:
        raise BadInput(f"crop takes minus the number of tokens to remove, not {int(tokens_to_remove)}")
    return -int(tokens_to_remove)


def check_lengths(layers: Iterable[Any]) -> set[int]:
    """The lengths, in tokens, that layers with attention reached; more than one after a forward that failed."""
    return {int(layer.get_seq_length()) for layer in layers if not isinstance(layer, RecurrentLayer)}
