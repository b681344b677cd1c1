"""The reference: transformers' own cache, never evicted, driven by forward calls."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicSlidingWindowLayer

from .family import ATTENTION, Family
from .forwards import CACHE_NAMES, Forward
from .states import TIME_AXIS, States, states_of


class CannotGoBack(Exception):
    """The stock cache has no state of that length: no call ended there, and it cannot be cut."""


class NoCache(Exception):
    """A model whose state no cache of transformers can hold."""


def cache_name(model: Any) -> str:
    """What its forward calls the cache it takes.

    Raises:
        NoCache: it takes none.
    """
    names = inspect.signature(type(model).forward).parameters
    for name in CACHE_NAMES:
        if name in names:
            return name
    raise NoCache(f"{type(model).__name__} takes no KV cache in its forward")


class Stock:
    """One sequence, or one batch of equally long ones, in a stock cache."""

    def __init__(self, model: Any, family: Family) -> None:
        self.model = model
        self.num_tokens = 0
        self._arguments = inspect.signature(type(model).forward).parameters
        self._croppable = family.kind == ATTENTION
        self._step = family.step
        self._recorded = False
        self._snapshots: dict[int, Any] = {}
        self._pasts: dict[int, list[dict[str, torch.Tensor]]] = {}
        self.cache = self.new_cache()

    def forward(self, ids: torch.Tensor, num_asked: int = 0) -> torch.Tensor:
        """Forward `[rows, q]` ids and return the logits, as a user would who drives the model by hand."""
        end = self.num_tokens + ids.shape[1]
        given = {
            "input_ids": ids,
            "attention_mask": torch.ones(ids.shape[0], end, dtype=torch.long, device=ids.device),
            "position_ids": torch.arange(self.num_tokens, end, device=ids.device)[None],
            "logits_to_keep": num_asked,
            cache_name(self.model): self.cache,
        }
        if not any(hasattr(layer, "get_seq_length") for layer in self.cache.layers):
            del given["attention_mask"]
        with torch.no_grad():
            output = self.model(
                **{name: value for name, value in given.items() if name in self._arguments}, use_cache=True
            )
        self.num_tokens = end
        if not self._croppable:
            self._snapshots[end] = copy.deepcopy(self.cache)
        logits: torch.Tensor = output.logits
        return logits

    def forward_in_steps(self, ids: torch.Tensor, num_asked: int = 0) -> list[Forward]:
        """As one call, or in the steps that the family needs behind a cache."""
        size = self._step if self._step and self.num_tokens else ids.shape[1]
        done = []
        for part in ids.split(size, dim=1):
            start = self.num_tokens
            done.append(Forward(start, part, self.forward(part, num_asked), num_asked))
        return done

    def back_to(self, num_tokens: int) -> None:
        """Forget all behind `num_tokens`.

        Raises:
            CannotGoBack: a recurrent state, of which no copy was made at that length.
        """
        if num_tokens == self.num_tokens:
            return
        if num_tokens == 0:
            self.cache = self.new_cache()
        elif self._croppable:
            self._cut(num_tokens)
        elif num_tokens in self._snapshots:
            self.cache = copy.deepcopy(self._snapshots[num_tokens])
        elif self._recorded:
            self.cache.crop(num_tokens - self.num_tokens)
            self._recorded = False
        else:
            raise CannotGoBack(f"no call ended at {num_tokens} tokens")
        self.num_tokens = num_tokens
        self._snapshots = {at: cache for at, cache in self._snapshots.items() if at <= num_tokens}

    def new_cache(self) -> Any:
        """Empty; what its windows let go is remembered here, so that they can go back in every release."""
        cache: Any = DynamicCache(config=self.model.config)
        for index, layer in enumerate(cache.layers):
            if isinstance(layer, DynamicSlidingWindowLayer) and self._croppable:
                self._pasts[index] = []
                layer.update = _remembering(layer.update, self._pasts[index])
        return cache

    def _cut(self, num_tokens: int) -> None:
        """Windows become those before `num_tokens`; all other layers are cropped."""
        for index, layer in enumerate(self.cache.layers):
            past = self._pasts.get(index)
            if past is None:
                layer.crop(num_tokens - self.num_tokens)
                continue
            for name in ("keys", "values"):
                states = torch.cat([part[name] for part in past], dim=2)[:, :, :num_tokens]
                setattr(layer, name, states[:, :, max(0, num_tokens - layer.sliding_window + 1) :])
                past[0][name] = states
            del past[1:]
            layer.cumulative_length = num_tokens

    def play(self, forwards: Sequence[Forward]) -> list[torch.Tensor]:
        """The same calls again; a call that begins before the end first goes back to its beginning."""
        given = []
        for forward, following in zip_longest(forwards, forwards[1:]):
            self.back_to(forward.start)
            if following is not None and following.start < forward.end:
                self._record_past()
            given.append(self.forward(forward.ids, forward.num_asked))
        return given

    def _record_past(self) -> None:
        """Drafts follow, of which some will be taken back: states that can be, as convolutions', are told."""
        held = {name.partition(".")[0] for _, name in self.states()}
        if not self._croppable and "conv_states" in held and "recurrent_states" not in held:
            self.cache.activate_past_recording()
            self._recorded = True

    def states(self) -> States:
        return states_of(self.cache)


def together(stocks: Sequence[Stock], num_each: int) -> Any:
    """One cache of all, each in so many rows; the shorter ones are padded on the left."""
    longest = max(stock.num_tokens for stock in stocks)
    cache = stocks[0].new_cache()
    for index, layer in enumerate(cache.layers):
        parts = [vars(stock.cache.layers[index]) for stock in stocks]
        for name, first in parts[0].items():
            values = [part[name] for part in parts]
            if isinstance(first, torch.Tensor) and first.ndim > 2:
                setattr(layer, name, _stacked(values, num_each, TIME_AXIS.get(name)))
            elif isinstance(first, dict) and any(isinstance(v, torch.Tensor) for v in first.values()):
                setattr(layer, name, {k: _stacked([v[k] for v in values], num_each, None) for k in first})
            elif name == "cumulative_length":
                layer.cumulative_length = longest
            elif name != "update":
                setattr(layer, name, first)
    return cache


def _remembering(update: Callable[..., Any], past: list[dict[str, torch.Tensor]]) -> Callable[..., Any]:
    def remember(keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        past.append({"keys": keys.clone(), "values": values.clone()})
        return update(keys, values, *args, **kwargs)

    return remember


def _stacked(values: Sequence[Any], num_each: int, axis: int | None) -> Any:
    if not isinstance(values[0], torch.Tensor):
        return values[0]
    if axis is not None:
        length = max(value.shape[axis] for value in values)
        before = [[0, 0] * (value.ndim - 1 - axis) + [length - value.shape[axis], 0] for value in values]
        values = [torch.nn.functional.pad(v, pad) for v, pad in zip(values, before, strict=True)]
    return torch.cat(list(values)).repeat_interleave(num_each, dim=0)
