"""What a caller may hand to `generate` beside what the session gives itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ..block.hashing import as_tokens
from ..errors import BadInput
from .capture import Tokens

_OURS = {
    *("inputs", "input_ids", "inputs_embeds", "attention_mask", "position_ids", "streamer", "use_cache"),
    *("cache", "past_key_values"),
}
"""Arguments of `generate` that the session gives itself."""
_FANS = ("num_beams", "num_return_sequences")
_ASSISTED = ("assistant_model", "prompt_lookup_num_tokens")


def check_arguments(given: Mapping[str, Any], model: Any) -> None:
    """That a call gives nothing that the session gives itself, and wants no cache of another kind.

    Raises:
        BadInput: naming the argument, and the way out.
    """
    own = sorted(_OURS & given.keys())
    if own:
        raise BadInput(f"{', '.join(own)}: the session gives these itself; attach(ids) is for your own calls")
    num_beams = chosen("num_beams", given, model)
    if num_beams is not None and num_beams < 1:
        raise BadInput(f"num_beams={num_beams}: 1 is no beam search, more are that many beams")
    kind = chosen("cache_implementation", given, model)
    if kind not in (None, "dynamic", "dynamic_full"):
        raise BadInput(
            f"cache_implementation={kind!r}: a session's cache holds the KV as the model computed it; a static,"
            " quantized or offloaded cache is none whose blocks can be kept. Leave it out"
        )


def num_sequences(given: Mapping[str, Any], model: Any) -> int:
    """How many rows `generate` makes of one prompt: beams, or sequences that it returns."""
    return max(int(chosen(name, given, model) or 1) for name in _FANS)


def check_one_sequence(given: Mapping[str, Any], model: Any) -> None:
    """Raises BadInput where one call would give several answers."""
    if num_sequences(given, model) > 1:
        named = ", ".join(f"{n}={c}" for n in _FANS if (c := chosen(n, given, model) or 1) > 1)
        raise BadInput(f"{named}: an answer that streams is one sequence; use generate() for more")


def is_assisted(given: Mapping[str, Any], model: Any) -> bool:
    """Whether `generate` will draft tokens, by its arguments or its configurations."""
    return any(chosen(name, given, model) is not None for name in _ASSISTED)


def chosen(name: str, given: Mapping[str, Any], model: Any) -> Any:
    """What `generate` will take for `name`: an argument, even None, else its configuration's, else the model's."""
    if name in given:
        return given[name]
    configs = (given.get("generation_config"), getattr(model, "generation_config", None))
    values = (getattr(config, name, None) for config in configs)
    return next((value for value in values if value is not None), None)


def one_row(ids: Any) -> Tokens:
    """Ids `[n]` or `[1, n]`, as a tensor, array or list.

    Raises:
        BadInput: several rows, or no ids.
    """
    array = ids.detach().cpu().numpy() if isinstance(ids, torch.Tensor) else np.asarray(ids)
    if array.ndim == 2:
        if array.shape[0] != 1:
            raise BadInput(f"a session is one sequence, not {array.shape[0]} rows: choose one")
        array = array[0]
    return as_tokens(array)


def is_messages(prompt: Any) -> bool:
    """Whether a prompt is a list of messages rather than ids."""
    return isinstance(prompt, (list, tuple)) and bool(prompt) and isinstance(prompt[0], Mapping)
