"""The operations: each a function that really does it and judges what came of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..fake_devices import spread
from ..family import Family
from ..scene import Scene
from ..verdict import Finding
from . import generating, resuming, returning, running

Run = Callable[[Scene], Finding]
Options = Callable[[Any, Family], dict[str, Any]]


@dataclass(frozen=True)
class Operation:
    """One column of the table.

    Attributes:
        run: does it and judges; what it raises is judged by whoever called it.
        options: what `generate` is given for it, for a model of a family: so transformers can be asked
            whether it supports the operation with a cache of its own.
        prepare: what is done to the model first.
        past_window: whether prompts are to run past the window of real weights too.
    """

    name: str
    run: Run
    options: Options = lambda model, family: {}
    prepare: Callable[[Any], None] = lambda model: None
    past_window: bool = False


def _given(options: Mapping[str, Any]) -> Options:
    return lambda model, family: dict(options)


def _attention(name: str) -> Operation:
    def prepare(model: Any) -> None:
        running.use_attention(model, name)

    return Operation(name, running.with_attention(name), prepare=prepare)


def _dtype(name: str, dtype: torch.dtype) -> Operation:
    return Operation(name, running.with_dtype(dtype), prepare=lambda model: model.to(dtype))


OPERATIONS = (
    Operation("resume in process", resuming.in_process),
    Operation("resume after restart", resuming.after_restart, past_window=True),
    Operation("resume from host", resuming.from_host),
    Operation("resume from disk", resuming.from_disk),
    Operation("fork", resuming.fork),
    Operation("rollback at a block boundary", returning.rollback_to_boundary),
    Operation("rollback inside a block", returning.rollback_inside_block),
    Operation("rollback past the window", returning.rollback_past_window, past_window=True),
    Operation("rollback to zero", returning.rollback_to_zero),
    Operation("edited message", returning.edited_message),
    Operation("exact-prompt regenerate", returning.same_prompt_again),
    Operation("shorter prompt than cached", returning.shorter_prompt),
    Operation("two prefixes in one batch", generating.two_prefixes),
    Operation("beams", generating.beams, _given(generating.BEAMS)),
    Operation("num_return_sequences", generating.return_sequences, _given(generating.SEQUENCES)),
    Operation("prompt-lookup decoding", generating.prompt_lookup, _given(generating.LOOKUP)),
    Operation("draft-model decoding", generating.draft_model, generating.drafting),
    Operation("chunked prefill", generating.chunked_prefill, _given(generating.CHUNKS)),
    Operation("layers on two devices", running.on_two_devices, prepare=spread),
    _attention("sdpa"),
    _attention("eager"),
    _attention("flex_attention"),
    _dtype("bf16", torch.bfloat16),
    _dtype("fp32", torch.float32),
)
