"""Where each of several rows ended: `generate` goes on until all have, and fills the others up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from .arguments import chosen

_OF_ALL = (MaxLengthCriteria, MaxTimeCriteria)
"""These end all rows at once."""
_BY_TYPE = (*_OF_ALL, EosTokenCriteria, StopStringCriteria)
"""Criteria of exactly these types take the place of those that `generate` makes itself."""


class RowEnds(StoppingCriteria):  # type: ignore[misc]
    """Asks the criteria that end single rows, and takes down when each row first ended by one of them."""

    def __init__(self, criteria: Sequence[Any]) -> None:
        self._criteria = StoppingCriteriaList(criteria)
        self._lengths: torch.Tensor | None = None

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        done: torch.Tensor = self._criteria(input_ids, scores, **kwargs)
        if self._lengths is None:
            self._lengths = torch.zeros(len(done), dtype=torch.long, device=done.device)
        # Kept on the device: asking for a number here would make every token wait.
        self._lengths = torch.where(done & (self._lengths == 0), input_ids.shape[1], self._lengths)
        return done

    def of(self, row: int, num_given: int) -> int | None:
        """How many tokens behind the `num_given` ids that `generate` was given belong to a row; None: all."""
        length = 0 if self._lengths is None else int(self._lengths[row])
        return length - num_given if length else None


def row_enders(given: Mapping[str, Any], model: Any) -> list[str]:
    """The arguments that end one row and not the others, beside the ids that end a text."""
    named = {"stopping_criteria": _single(given), "stop_strings": chosen("stop_strings", given, model)}
    return [name for name, value in named.items() if value]


def record_ends(given: Mapping[str, Any], model: Any) -> tuple[dict[str, Any], RowEnds]:
    """Arguments that do the same as `given` to each row, and what will tell where each ended."""
    if not row_enders(given, model):
        return dict(given), RowEnds([])
    criteria, recorded = _single(given), dict(given)
    strings, tokenizer = chosen("stop_strings", given, model), given.get("tokenizer")
    if strings and tokenizer is not None and all(type(c) is not StopStringCriteria for c in criteria):
        criteria.append(StopStringCriteria(tokenizer, strings))
        recorded["stop_strings"] = None  # asked by us, not twice
    ends = RowEnds(criteria)
    kept = [c for c in given.get("stopping_criteria") or () if type(c) in _BY_TYPE]
    return {**recorded, "stopping_criteria": StoppingCriteriaList([*kept, ends])}, ends


def stop_ids(given: Mapping[str, Any], model: Any) -> list[int]:
    """The ids that end an answer; what follows them in a row is padding."""
    if any(type(c) is EosTokenCriteria for c in _single(given)):
        return []  # it took the place of these ids
    value = chosen("eos_token_id", given, model)
    return [] if value is None else [value] if isinstance(value, int) else list(value)


def _single(given: Mapping[str, Any]) -> list[Any]:
    """The caller's criteria that may end one row before the others."""
    return [c for c in given.get("stopping_criteria") or () if type(c) not in _OF_ALL]
