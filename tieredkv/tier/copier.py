"""Copies between tensors in host memory, by numpy: any strides, every bit, other threads run meanwhile."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from itertools import count
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
        self._num_helpers = min(_MAX_HELPERS, len(os.sched_getaffinity(0)) - 1)
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
    """One copy in pieces, each done by whoever takes its number."""

    def __init__(self, pieces: Sequence[_Arrays]) -> None:
        self._pieces = list(pieces)
        self._numbers = count()
        self._helped = threading.Semaphore(0)

    def help(self) -> None:
        """Copy pieces as long as there are any."""
        while (piece := self._take()) is not None:
            np.copyto(*piece)
            self._helped.release()

    def run(self) -> None:
        """Copy pieces as long as there are any, then wait for those that helpers took."""
        others = len(self._pieces)
        while (piece := self._take()) is not None:
            np.copyto(*piece)
            others -= 1
        for _ in range(others):
            self._helped.acquire()
        self._pieces.clear()  # a helper that comes late must not keep the memory

    def _take(self) -> _Arrays | None:
        number = next(self._numbers)
        return self._pieces[number] if number < len(self._pieces) else None


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
