"""The cache that a session hands to `generate`: it knows which ids were really forwarded, and stores their blocks.

A cache layer never sees token ids. A pre-hook on the model's forward tells the cache the ids, positions and
mask of each forward before it runs; what cannot be told (embeddings, batches, foreign masks) ends what is
certain, and only certain tokens are ever stored. A block is stored when the next forward begins or at commit,
so after any crop or reorder, never by the forward that completed it.
"""

from __future__ import annotations

import inspect
import logging
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicIndexedLayer

from ..errors import BadInput, TieredKVError
from ..namespace import Namespace
from ..outcomes import Stored
from ..span import Span
from .forwards import Forwards
from .identity import ModelFacts
from .layers import (
    FullLayer,
    HybridLayer,
    HybridWindowLayer,
    IndexedLayer,
    RecurrentLayer,
    RecurrentMixin,
    WindowLayer,
    check_lengths,
    pooling_layer,
)
from .probe import LayerFacts, forward_parameters, inner_model
from .states import State, is_pooling, read
from .vision import RopeDeltas, disown

log = logging.getLogger("tieredkv.hf")

Tokens = npt.NDArray[np.int32]

_PLAIN_ARGUMENTS = frozenset(
    ["input_ids", "attention_mask", "position_ids", "cache_position", "labels", "logits_to_keep"]
)
_ZERO_ARGUMENTS = ("token_type_ids", "mm_token_type_ids")
_UNKNOWN = -1
_CACHE_NAMES = ("cache", "past_key_values", "cache_params")

_hooked: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
_hooking = threading.Lock()


@dataclass(frozen=True)
class Doubt:
    """From which token on the cache's content cannot be told by its ids, and why.

    `refused` when the caller made it so (foreign positions, a mask with holes) and `commit` must say so.
    """

    first_token: int
    why: str
    refused: bool = False


class CapturingCache(Cache):  # type: ignore[misc]
    """A `transformers.Cache` for one sequence of one model, whose blocks go to `space`.

    Args:
        model: the live model; the forward pre-hook is registered on it once.
        facts: what `read_model` said of it.
        space: the namespace of that identity, or None to capture without storing.

    Attributes:
        new_ids_only: the next call is given only the ids behind the cache, with a mask over all.
        forwards: how long they took, as long as it is certain what they computed.
    """

    def __init__(self, model: torch.nn.Module, facts: ModelFacts, space: Namespace | None = None) -> None:
        inner = inner_model(model)
        layers = DynamicCache(config=inner.config).layers
        for layer in facts.layers:
            layers[layer.index] = _new_layer(layer, facts, layers[layer.index])
        super().__init__(layers=layers)
        self.facts = facts
        self.space = space
        self.doubt: Doubt | None = None
        self.stored: list[Stored] = []
        self.trouble: str = ""
        self._model = weakref.ref(inner)
        self._record: Tokens = np.empty(0, dtype=np.int32)
        self._wanted: set[int] = set()
        self._named: set[int] = set()
        self._states: dict[int, dict[int, dict[str, torch.Tensor]]] = {}  # boundary, layer, name
        self._num_stored = 0
        self._num_offered = 0
        self._num_running = 0  # tokens of a forward that has begun and not ended
        self._expected: Tokens = np.empty(0, dtype=np.int32)
        self.new_ids_only = False
        self.forwards = Forwards({layer.device for layer in facts.layers})
        self._generating: bool | None = None
        self._deltas = RopeDeltas(inner)
        for window_layer in self.window_layers():
            window_layer.wanted = self._wanted
        watch(inner)

    def __deepcopy__(self, memo: dict[int, Any]) -> CapturingCache:
        raise BadInput("a tieredkv cache is not copied: attach the same ids again, blocks are shared")

    # What the session asks

    @property
    def num_tokens(self) -> int:
        """Tokens forwarded into the cache, or restored."""
        return len(self._record)

    @property
    def tokens(self) -> Tokens:
        """The ids whose KV is certain, from position 0."""
        return self._record[: self.num_certain]

    @property
    def num_certain(self) -> int:
        return len(self._record) if self.doubt is None else min(len(self._record), self.doubt.first_token)

    def holding_layers(self) -> list[Any]:
        return [self.layers[layer.index] for layer in self.facts.layers]

    def window_layers(self) -> list[WindowLayer]:
        return [layer for layer in self.holding_layers() if isinstance(layer, WindowLayer)]

    def recurrent_layers(self) -> list[Any]:
        return [layer for layer in self.holding_layers() if isinstance(layer, RecurrentMixin)]

    @property
    def counts_tokens(self) -> bool:
        """Whether any layer has attention; `generate` cannot tell how far other caches reach."""
        return any(not isinstance(layer, RecurrentLayer) for layer in self.holding_layers())

    def nbytes(self) -> int:
        """Bytes this cache holds: the session's working buffer. Any thread may ask, also during a forward."""
        boundaries = list(self._states.values())
        kept = sum(t.nbytes for at in boundaries for states in at.values() for t in states.values())
        return int(kept + sum(layer.nbytes() for layer in self.holding_layers()))

    def want(self, boundaries: Iterable[int]) -> None:
        """Keep the window parts of these boundaries when a forward crosses them, their states when one ends there."""
        self._wanted.update(b for b in boundaries if b > 0)

    @property
    def wanted(self) -> list[int]:
        """The boundaries to be kept, ascending."""
        return sorted(self._wanted)

    def forget_wanted(self) -> None:
        """Stop keeping parts of all boundaries wanted before."""
        self._wanted.clear()
        self._states = dict(list(self._states.items())[-1:])
        for layer in self.window_layers():
            layer.captured.clear()

    def expect(self, ids: Tokens, num_new: int = 0) -> None:
        """Announce the prompt of one `generate` call: what it forwards must agree with `ids`.

        Args:
            num_new: how many tokens the call may generate, if that is known: layers make room for them.
        """
        for layer in self.holding_layers():
            if isinstance(layer, FullLayer):
                layer.num_expected = len(ids) + num_new if num_new else 0
        self._expected = ids
        self.new_ids_only = False
        self._generating = False
        for layer in self.holding_layers():
            layer.crop(0)  # assisted decoding leaves layers that record
            layer.record_past = False
        self._deltas.install()

    def restored(self, tokens: Tokens) -> None:
        """State that the layers were filled with the KV of `tokens`."""
        self._record = tokens.copy()
        self._num_stored = self._num_offered = len(tokens)
        self._named.add(len(tokens))
        self.check()

    def can_crop(self, num_tokens: int) -> bool:
        """Whether the cache can be cut back to `num_tokens`."""
        removed = self.num_tokens - num_tokens
        return removed >= 0 and all(layer.can_crop(removed) for layer in self.holding_layers())

    def is_sound(self) -> bool:
        """Whether the cache holds one row, and all layers reach as far: not so after a forward that failed."""
        layers = self.holding_layers()
        lengths = check_lengths(layers)
        if len(lengths) > 1 or self._broke_off() or any(layer.num_rows() > 1 for layer in layers):
            return False
        self._settle()
        return True

    def agree(self, tokens: Tokens) -> None:
        """That `tokens` are what was forwarded, but for the last one, which never is.

        Raises:
            BadInput: an id that disagrees, or was never forwarded; foreign positions or masks.
        """
        self._settle()
        known = self.tokens[: len(tokens)]
        wrong = np.flatnonzero(known != tokens[: len(known)])
        if wrong.size:
            at = int(wrong[0])
            raise BadInput(f"id {at} is not the one that was forwarded")
        if self.doubt is not None and self.doubt.refused:
            raise BadInput(f"from token {self.doubt.first_token} on: {self.doubt.why}")
        if self.doubt is None and len(tokens) > self.num_tokens + 1:
            raise BadInput(
                f"id {self.num_tokens} was never forwarded: {len(tokens)} ids, {self.num_tokens} in the cache"
            )

    def check(self) -> None:
        """Every layer holds exactly what the record says."""
        lengths = check_lengths(self.holding_layers())
        assert lengths <= {self.num_tokens} or not self.num_tokens, (
            f"layers at {lengths}, {self.num_tokens} ids"
        )

    # What transformers calls

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `Cache.update`; states that no announced forward accounts for end what is certain."""
        layer = self.layers[layer_idx]
        length = layer.get_seq_length() + key_states.shape[2]
        if length != len(self._record):
            self._doubt(layer.get_seq_length(), "states arrived that no forward of the model announced")
            if length > len(self._record):
                self._append(np.full(length - len(self._record), _UNKNOWN, dtype=np.int32))
        states: tuple[torch.Tensor, torch.Tensor] = layer.update(key_states, value_states, *args, **kwargs)
        return states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """As `Cache.get_seq_length`; where no layer counts tokens, those of the forwards that ended."""
        if self.counts_tokens:
            return int(super().get_seq_length(layer_idx))
        return self.num_tokens - self._num_running

    def get_conv_state(self, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        """As `Cache.get_conv_state`; a model changes in place what it is given, so watched as `update`."""
        self._watch_states()
        state: torch.Tensor | None = super().get_conv_state(*args, **kwargs)
        return state

    def update_conv_state(self, conv_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As `Cache.update_conv_state`, watched as `update`."""
        self._watch_states()
        states: torch.Tensor = super().update_conv_state(conv_states, *args, **kwargs)
        return states

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """As `Cache.update_recurrent_state`, watched as `update`."""
        self._watch_states()
        states: torch.Tensor = super().update_recurrent_state(recurrent_states, *args, **kwargs)
        return states

    def has_previous_state(self, *args: Any, **kwargs: Any) -> bool:
        """As `Cache.has_previous_state`; a model asks before it changes states in place."""
        self._watch_states()
        return bool(super().has_previous_state(*args, **kwargs))

    def _watch_states(self) -> None:
        if not self._num_running:
            self._doubt(self.num_tokens, "states changed in a forward that was not announced", refused=True)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens, from all layers or none.

        Raises:
            BadInput: a window layer no longer holds what is needed at the new end, or a state cannot go back.
        """
        num_left = max(0, self.num_tokens + int(tokens_to_remove))
        if int(tokens_to_remove) < 0 and not self.can_crop(num_left):
            raise BadInput(
                f"cannot go back from {self.num_tokens} to {num_left} tokens: the window or state there is gone"
            )
        super().crop(tokens_to_remove)
        self._cut(num_left)

    def reset(self) -> None:
        """Drop all states and what was known of them."""
        for layer in self.holding_layers():
            layer.reset()
        self._cut(0)

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def _is_user_defined(self) -> bool:
        return True

    @_is_user_defined.setter
    def _is_user_defined(self, value: bool) -> None:
        """`generate` marks the cache it was given: the one sign that a call begins."""
        if self._generating:
            raise BadInput("this cache already served a generate call: attach the ids again for another")
        if self._generating is not None:
            self._generating = True

    # What the pre-hook tells

    def begin_forward(self, model: torch.nn.Module, arguments: dict[str, Any]) -> dict[str, Any]:
        """Take note of a forward that is about to run; returns the arguments it shall run with.

        Raises:
            BadInput: the forward would give wrong text: ids that are not those announced, positions that do
                not continue the cache, another model.
        """
        if self._model() is not model:
            raise BadInput(f"this cache belongs to another model than this {type(model).__name__}")
        self._settle()
        self.store_blocks()
        for layer in self.recurrent_layers():
            layer.make_writable()
        self._deltas.ensure()
        ids = arguments.get("input_ids")
        length = (ids if ids is not None else arguments["inputs_embeds"]).shape[1]
        doubt = self._doubt_of(arguments, ids, length)
        arguments = self._with_positions(model, self._with_right_mask(arguments, length), length)
        self._num_running = length
        self.forwards.begins(self.num_tokens, length if doubt is None and self.doubt is None else 0)
        if self.space is not None:
            self.space.pace.forward_begins()
        if doubt is not None:
            self._doubt(self.num_tokens, doubt)
            self._append(np.full(length, _UNKNOWN, dtype=np.int32))
            return arguments
        row = arguments["input_ids"][0].detach().cpu().numpy().astype(np.int32)
        self._check_expected(row)
        if self.doubt is None:
            self._check_positions(arguments.get("position_ids"), length)
        self._append(row)
        return arguments

    def end_forward(self) -> None:
        """Take note that the forward which was begun ran to its end."""
        self.forwards.ends()
        if self.space is not None:
            self.space.pace.forward_ends()
        self._num_running = 0
        self._deltas.keep()

    def store_blocks(self, anchors: Sequence[int] = (), again: bool = False) -> Stored | None:
        """Store the whole blocks that are certain, with the window parts of wanted boundaries and `anchors`.

        Never raises for the cache's own troubles: they are kept in `trouble`.

        Args:
            again: also offer blocks that were refused before.
        """
        if self.space is None:
            return None
        block_size = self.facts.layout.block_size
        self._keep_states()
        end = self.num_certain // block_size * block_size
        named = [b for b in sorted(self._wanted | set(anchors)) if b <= end and b not in self._named]
        named = [b for b in named if self._has_all_of(b)]
        if not named and not self.counts_tokens:
            return None  # states without an anchor are nothing that could be stored
        if not named and end <= (self._num_stored if again else self._num_offered):
            return None
        self._num_offered = max(end, self._num_offered)
        try:
            stored = self.space.store(self._record[:end], self._spans(end, named), anchors=named)
        except TieredKVError as error:
            self._note(str(error))
            return None
        if stored.num_refused:
            self._note(f"{stored.num_refused} blocks were refused: {stored.reason}")
        else:
            self._num_stored = max(end, self._num_stored)
            self._named.update(named)
            self._states = {b: states for b, states in self._states.items() if b not in self._named}
        self.stored.append(stored)
        return stored

    def _keep_states(self) -> None:
        """Copy the recurrent states if the cache stands at a boundary: the next forward changes them in place.

        Kept are those of wanted boundaries, of every so many tokens, and the last, where a turn may end.
        """
        at, layers = self.num_tokens, [x for x in self.facts.layers if x.of_kind("recurrent")]
        if (
            not layers
            or not at
            or at % self.facts.layout.block_size
            or at in self._named | self._states.keys()
        ):
            return
        if self.doubt is not None or self._broke_off():
            return
        if at % self.facts.interval == 0:
            self._wanted.add(at)
        self._states = {b: states for b, states in self._states.items() if b in self._wanted}
        self._states[at] = {
            layer.index: {
                state.name: _one_row(self.layers[layer.index], state.held).clone()
                for state in layer.of_kind("recurrent")
            }
            for layer in layers
        }

    def _has_all_of(self, boundary: int) -> bool:
        """Whether the window parts and states of a boundary are at hand."""
        if self.facts.interval and boundary not in self._states:
            return False
        return all(layer.window_before(boundary) is not None for layer in self.window_layers())

    def _broke_off(self) -> bool:
        """Whether a forward failed before its end: what it did to recurrent states cannot be told."""
        return bool(self._num_running and self.facts.interval)

    def take_stored(self) -> list[Stored]:
        """What was stored since this was last asked."""
        taken, self.stored = self.stored, []
        return taken

    def _note(self, trouble: str) -> None:
        if not self.trouble:
            log.warning("blocks are not kept: %s", trouble)
        self.trouble = trouble

    def _spans(self, end: int, anchors: Sequence[int]) -> Mapping[int, Sequence[Span]]:
        """Full layers from the first token on: blocks that are still there cost nothing, lost ones come back."""
        spans: dict[int, list[Span]] = {}
        for facts in self.facts.layers:
            layer, mine = self.layers[facts.index], spans.setdefault(facts.index, [])
            full = {}
            for state in facts.of_kind("full"):
                axis = next(axis for axis, n in enumerate(state.shape) if n < 0)
                full[state.name] = _one_row(layer, state.held).narrow(axis, 0, end // state.held.stride)
            if full:
                mine.append(Span(0, full))
            for boundary in anchors:
                if isinstance(layer, WindowLayer):
                    mine.append(_window_span(layer, boundary))
                if facts.of_kind("recurrent"):
                    mine.append(Span(boundary, self._states[boundary][facts.index]))
        return spans

    def _settle(self) -> None:
        """Bring the record in line with layers that were cropped one by one or left half updated."""
        lengths = check_lengths(self.holding_layers())
        if len(lengths) > 1 or self._broke_off():
            where = f" and left layers at {sorted(lengths)} tokens" if len(lengths) > 1 else ""
            raise BadInput(f"a forward failed half way{where}: attach again")
        if lengths and min(lengths) < self.num_tokens:
            self._cut(min(lengths))

    def _doubt_of(self, arguments: Mapping[str, Any], ids: Any, length: int) -> str | None:
        """Why the ids of this forward cannot account for what it will leave in the cache, or None."""
        if ids is None or arguments.get("inputs_embeds") is not None:
            return "inputs_embeds were forwarded, whose ids are not known"
        if ids.shape[0] != 1:
            return f"a batch of {ids.shape[0]} rows was forwarded"
        if any(layer.num_rows() > 1 for layer in self.holding_layers()):
            return "the cache was repeated for several rows"
        limit = self.facts.position_limit
        if limit is not None and self.num_tokens + length > limit:
            return f"beyond position {limit} this model's keys depend on the length of the prompt"
        if self.facts.media_ids and any(bool((ids == media).any()) for media in self.facts.media_ids):
            return "some ids stand for an image, a video or a sound, which they do not tell"
        foreign = [name for name, value in arguments.items() if _is_foreign(name, value)]
        return f"the forward was also given {', '.join(sorted(foreign))}" if foreign else None

    def _with_right_mask(self, arguments: dict[str, Any], length: int) -> dict[str, Any]:
        """Check a mask; assisted decoding cuts one over everything to the ids it was given, and hides nothing."""
        mask = arguments.get("attention_mask")
        if mask is None:
            return arguments
        if not isinstance(mask, torch.Tensor) or mask.ndim != 2:
            self._doubt(self.num_tokens, "a mask of another form than [batch, tokens]", refused=True)
            return arguments
        hides = not bool(mask.all())
        if hides:
            self._doubt(self.num_tokens, "the attention mask has holes", refused=True)
        if not self.counts_tokens and not hides:
            return {
                **arguments,
                "attention_mask": None,
            }  # some multiply their input by it, whatever its length
        expected = self.num_tokens + length
        if mask.shape[1] == expected or mask.shape[0] != 1:
            return arguments
        if self.new_ids_only and not hides:
            return {**arguments, "attention_mask": None}
        raise BadInput(
            f"a mask over {mask.shape[1]} tokens came with {length} ids behind a cache of {self.num_tokens}:"
            " the ids are not what was attached"
        )

    def _with_positions(
        self, model: torch.nn.Module, arguments: dict[str, Any], length: int
    ) -> dict[str, Any]:
        """Positions for a hybrid model's bare forward: some number them from 0 again where they are missing."""
        given = arguments.get("position_ids") is not None or "position_ids" not in forward_parameters(model)
        if given or not self.facts.interval or arguments.get("input_ids") is None:
            return arguments
        positions = torch.arange(
            self.num_tokens, self.num_tokens + length, device=arguments["input_ids"].device
        )
        return {**arguments, "position_ids": positions[None]}

    def _check_positions(self, positions: torch.Tensor | None, length: int) -> None:
        if positions is None:
            return
        expected = torch.arange(self.num_tokens, self.num_tokens + length, device=positions.device)
        if positions.shape[-1] != length or not bool((positions == expected).all()):
            first = positions.flatten()[0].item() if positions.numel() else None
            raise BadInput(
                f"positions from {first} do not continue a cache of {self.num_tokens} tokens: pass full ids (or,"
                " for assisted decoding, attach(ids, assisted=True)) and let generate number them"
            )

    def _check_expected(self, row: Tokens) -> None:
        expected = self._expected[self.num_tokens : self.num_tokens + len(row)]
        wrong = np.flatnonzero(row[: len(expected)] != expected)
        if wrong.size:
            at = self.num_tokens + int(wrong[0])
            raise BadInput(f"id {at} is not the one that was attached: pass the attached ids")

    def _doubt(self, first_token: int, why: str, refused: bool = False) -> None:
        if self.doubt is None or first_token < self.doubt.first_token:
            self.doubt = Doubt(first_token, why, refused)

    def _append(self, row: Tokens) -> None:
        self._record = np.concatenate([self._record, row])

    def _cut(self, num_tokens: int) -> None:
        self._record = self._record[:num_tokens]
        self._num_stored = min(self._num_stored, num_tokens)
        self._num_offered = min(self._num_offered, num_tokens)
        self._named = {b for b in self._named if b <= num_tokens}
        self._states = {b: states for b, states in self._states.items() if b <= num_tokens}
        if self.doubt is not None and num_tokens <= self.doubt.first_token:
            self.doubt = None


def watch(model: torch.nn.Module) -> None:
    """Register the forward pre-hook on `model`, once for its life."""
    with _hooking:  # told twice of every forward, a cache would count it twice
        if model not in _hooked:
            model.register_forward_pre_hook(_before_forward, with_kwargs=True)
            model.register_forward_hook(_after_forward, with_kwargs=True)
            _hooked.add(model)


def _before_forward(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Tell our cache of a forward; a forward with any other cache is none of our business."""
    names = list(inspect.signature(type(model).forward).parameters)[1 : 1 + len(args)] if args else []
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    cache = _cache_in(arguments)
    if cache is None:
        disown(model)
        return None
    return (), cache.begin_forward(model, arguments)


def _after_forward(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object
) -> None:
    """Not called for a forward that raised."""
    cache = _cache_in(kwargs)
    if cache is not None:
        cache.end_forward()


def _cache_in(arguments: Mapping[str, Any]) -> CapturingCache | None:
    found = next((c for name in _CACHE_NAMES if (c := arguments.get(name)) is not None), None)
    return found if isinstance(found, CapturingCache) else None


def _is_foreign(name: str, value: Any) -> bool:
    """Whether an argument could change KV in a way that the ids do not tell."""
    if name in _PLAIN_ARGUMENTS or value is None or isinstance(value, (bool, int, str, Cache)):
        return False
    if isinstance(value, Mapping) and not value:
        return False
    if name in _ZERO_ARGUMENTS and isinstance(value, torch.Tensor):
        return bool(value.any())
    return True


def _new_layer(layer: LayerFacts, facts: ModelFacts, stock: Any) -> Any:
    """Our layer in the place of a stock one."""
    recurs = len(layer.of_kind("recurrent"))
    if is_pooling(stock):
        return pooling_layer(stock)
    if layer.window:
        size, layout = facts.layout.block_size, facts.layout
        needed = layout.num_window_blocks[layout.group_of(layer.index, "keys")] * size
        windows = {"sliding_window": layer.window, "num_kept": needed + size, "num_needed": needed}
        return (
            HybridWindowLayer(**windows, number_of_states=stock.number_of_states)
            if recurs
            else WindowLayer(**windows)
        )
    if layer.of_kind("full"):
        if recurs:
            return HybridLayer(number_of_states=stock.number_of_states)
        return IndexedLayer() if isinstance(stock, DynamicIndexedLayer) else FullLayer()
    return RecurrentLayer(number_of_states=stock.number_of_states)


def _one_row(layer: Any, state: State) -> torch.Tensor:
    held = read(layer, state)
    assert held is not None, f"a layer lost {state.name}, which its model leaves there"
    return held.select(state.batch_axis, 0)


def _window_span(layer: WindowLayer, boundary: int) -> Span:
    parts = layer.window_before(boundary)
    assert parts is not None, f"the window before {boundary} is gone"
    first = boundary - parts["keys"].shape[2]
    return Span(first, {name: states[0] for name, states in parts.items()})
