"""Copies between tensors in host memory, by numpy: any strides, every bit, other threads run meanwhile."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from ..units import MiB
from .workers import Workers

_CPU = torch.device("cpu")
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""A dtype of each size that numpy has too."""

_PIECE_NBYTES = 2 * MiB
"""So much of a shared copy at a time: the most that a caller waits for a helper whose core is taken away."""

_MAX_HELPERS = 3
"""Few cores are enough for all that memory gives."""

_JOIN_S = 1.0

Pair: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Where to, and what: of equal shapes and dtypes."""

_Arrays: TypeAlias = tuple[npt.NDArray[np.generic], npt.NDArray[np.generic]]


def copy_alone(pairs: Sequence[Pair]) -> None:
    """`to.copy_(what)` for each pair; between CPU tensors by this thread alone.

    torch would share a large copy out to its threads, and wait for the last of them: milliseconds, as soon as
    another program runs.
    """
    for pair in pairs:
        if _is_ours(pair):
            np.copyto(*_arrays(pair))
        else:
            pair[0].copy_(pair[1])


class Copier:
    """Shares large copies with helper threads, started when first needed.

    Whoever is free takes the next piece, the caller among them: helpers that get no core delay nobody.
    """

    def __init__(self) -> None:
        self._num_helpers = min(_MAX_HELPERS, _num_cores() - 1)
        self._helpers = Workers("tieredkv-copy", self._num_helpers)

    def copy(self, pairs: Sequence[Pair]) -> None:
        """As `copy_alone`, in any order; for what is small or not all in host memory it is that."""
        small = sum(to.nbytes for to, _ in pairs) < 2 * _PIECE_NBYTES
        if small or not self._num_helpers or not all(map(_is_ours, pairs)):
            copy_alone(pairs)
            return
        pieces = [piece for pair in pairs for piece in _pieces(_arrays(pair))]
        shared = _Shared(pieces)
        for _ in range(min(self._num_helpers, len(pieces) - 1)):
            self._helpers.submit(shared.help)
        shared.run()

    def close(self) -> None:
        """End the helpers; copies go on without."""
        self._helpers.close(_JOIN_S)


class _Shared:
    """One copy in pieces, each done by whoever takes it."""

    def __init__(self, pieces: Sequence[_Arrays]) -> None:
        self._left = list(pieces)[::-1]
        self._changed = threading.Condition()
        self._num_helping = 0
        self._error: Exception | None = None

    def help(self) -> None:
        """Copy pieces as long as there are any."""
        while (piece := self._take(helping=1)) is not None:
            error = None
            try:
                np.copyto(*piece)
            except Exception as raised:
                error = raised
            with self._changed:
                self._error = self._error or error
                self._num_helping -= 1
                self._changed.notify_all()

    def run(self) -> None:
        """Copy pieces as long as there are any, then wait for those that helpers took.

        Also after an interrupt: the memory is the caller's to give away as soon as this is over.
        """
        try:
            while (piece := self._take()) is not None:
                np.copyto(*piece)
        finally:
            with self._changed:
                self._left.clear()
                self._changed.wait_for(lambda: not self._num_helping)
        if self._error is not None:
            raise self._error

    def _take(self, helping: int = 0) -> _Arrays | None:
        with self._changed:
            if not self._left:
                return None
            self._num_helping += helping
            return self._left.pop()


def _num_cores() -> int:
    """That this process may use; macOS tells of all alone."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _is_ours(pair: Pair) -> bool:
    to, what = pair
    return to.device == what.device == _CPU and to.itemsize in _WORDS


def _arrays(pair: Pair) -> _Arrays:
    to, what = pair
    if to.shape != what.shape:
        raise ValueError(f"a copy of {tuple(what.shape)} into {tuple(to.shape)}")
    word = _WORDS[to.itemsize]
    return to.detach().view(word).numpy(), what.detach().view(word).numpy()


def _pieces(arrays: _Arrays) -> list[_Arrays]:
    """Runs of rows."""
    to, what = arrays
    if to.nbytes <= _PIECE_NBYTES:
        return [arrays]
    step = max(1, _PIECE_NBYTES * len(to) // to.nbytes)
    return [(to[at : at + step], what[at : at + step]) for at in range(0, len(to), step)]
