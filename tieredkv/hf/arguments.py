"""What a caller may hand to `generate` beside what the session gives itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from transformers.generation.configuration_utils import GenerationConfig

from ..block.hashing import as_tokens
from ..errors import BadInput
from ..units import is_whole
from .capture import Tokens

_OURS = {
    *("inputs", "input_ids", "inputs_embeds", "attention_mask", "position_ids", "streamer", "use_cache"),
    *("cache", "past_key_values"),
}
"""Arguments of `generate` that the session gives itself."""
_FANS = ("num_beams", "num_return_sequences")
_ASSISTED = ("assistant_model", "prompt_lookup_num_tokens")
_TOTALS = {"max_length": "max_new_tokens", "min_length": "min_new_tokens"}
"""Lengths of prompt and answer together, and what takes their place where it is chosen."""
_BLIND = frozenset(
    [
        *("max_new_tokens", "min_new_tokens", "max_time", "exponential_decay_length_penalty"),
        *("do_sample", "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff"),
        *("eta_cutoff", "renormalize_logits", "remove_invalid_values"),
        *("suppress_tokens", "begin_suppress_tokens", "eos_token_id", "pad_token_id", "bos_token_id"),
        *("num_beams", "early_stopping", "length_penalty", "num_return_sequences", "decoder_start_token_id"),
        *("return_dict_in_generate", "output_scores", "output_logits", "output_attentions"),
        *("output_hidden_states", "streamer", "synced_gpus", "tokenizer", "assistant_tokenizer"),
        *("use_cache", "cache_implementation", "cache_config", "max_cache_len"),
        *("compile_config", "disable_compile", "generation_config", "transformers_version"),
        *("assistant_model", "prompt_lookup_num_tokens", "max_matching_ngram_size", "num_assistant_tokens"),
        *("num_assistant_tokens_schedule", "assistant_confidence_threshold"),
        *("assistant_lookbehind", "target_lookbehind"),
    ]
)
"""Arguments that do the same whether `generate` is given a whole prompt or only its end.

They look at the scores alone, count from the first new token on, or choose drafts, which are verified. Whatever is
not here is taken to read the prompt: a release may bring arguments that nobody has looked at yet.
"""


def check_arguments(given: Mapping[str, Any], model: Any) -> None:
    """That a call gives nothing that the session gives itself, and wants no cache of another kind.

    Raises:
        BadInput: naming the argument, and the way out.
    """
    own = sorted(_OURS & given.keys())
    if own:
        raise BadInput(f"{', '.join(own)}: the session gives these itself; attach(ids) is for your own calls")
    num_new = given.get("max_new_tokens")
    if num_new is not None and not (is_whole(num_new) and num_new > 0):
        raise BadInput(f"max_new_tokens={num_new!r}: an answer has at least one token")
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


def prompt_readers(given: Mapping[str, Any], model: Any, num_tokens: int) -> list[str]:
    """The arguments by which `generate` reads or counts a prompt: over its end alone they give other text.

    Args:
        num_tokens: of the prompt.
    """
    defaults = GenerationConfig._get_default_generation_params()
    total = defaults.pop(
        "max_length"
    )  # as a default it counts new tokens; where somebody set it, all of them
    names = {name for name in (*given, *vars(GenerationConfig())) if not name.startswith("_")} - _BLIND
    replaced = {name for name, by in _TOTALS.items() if chosen(by, given, model) is not None}
    found = [n for n in sorted(names - replaced) if _is_set(chosen(n, given, model), defaults.get(n))]
    limit = getattr(model.config, "max_position_embeddings", None)
    is_long = limit is not None and num_tokens + total > limit  # the default then ends where positions do
    if is_long and all(chosen(name, given, model) is None for name in ("max_length", "max_new_tokens")):
        found.append("max_length")
    return found


def _is_set(value: Any, default: Any) -> bool:
    """Whether a value asks for anything: no flag that is off, no empty list, not the default."""
    if value is None or value is False or (isinstance(value, (list, tuple, dict)) and not value):
        return False
    return default is None or bool(value != default)


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
