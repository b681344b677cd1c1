"""Copies shared with helper threads: the same bytes as alone, whatever the shapes and whoever does them."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from tieredkv.tier import copier as copier_module
from tieredkv.tier.copier import Copier, Pair, copy_alone
from tieredkv.units import KiB, MiB


@pytest.fixture
def copier(monkeypatch: pytest.MonkeyPatch) -> Copier:
    """With two helpers, whatever cores there are, and small pieces."""
    monkeypatch.setattr(copier_module, "_PIECE_NBYTES", 64 * KiB)
    monkeypatch.setattr(copier_module.os, "sched_getaffinity", lambda _pid: {0, 1, 2})
    return Copier()


def pairs_of(seed: int) -> list[Pair]:
    """Whole and strided, small and large, a single row, none at all, and two dtypes."""
    draw = torch.Generator().manual_seed(seed)
    pairs = []
    for shape, dtype in (
        ((40, 4, 4096), torch.int32), ((7,), torch.int32), ((1, 300_000), torch.uint8), ((0, 9), torch.uint8),
        ((3, 70_000), torch.bfloat16),
    ):  # fmt: skip
        what = torch.randint(0, 100, shape, generator=draw).to(dtype)
        pairs.append((torch.zeros(shape, dtype=dtype), what))
    wide = torch.zeros(40, 4096, 4, dtype=torch.int32)
    pairs.append((wide.transpose(1, 2), pairs[0][1] + 1))
    return pairs


@pytest.mark.parametrize("seed", range(4))
def test_a_shared_copy_is_the_copy(copier: Copier, seed: int) -> None:
    for _ in range(20):
        pairs = pairs_of(seed)
        copier.copy(pairs)
        assert all(torch.equal(to, what) for to, what in pairs)
    copier.close()


def test_many_callers_share_the_helpers(copier: Copier) -> None:
    wrong: list[int] = []

    def copy(seed: int) -> None:
        for _ in range(10):
            pairs = pairs_of(seed)
            copier.copy(pairs)
            wrong.extend(seed for to, what in pairs if not torch.equal(to, what))

    callers = [threading.Thread(target=copy, args=(seed,)) for seed in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert not wrong and not any(caller.is_alive() for caller in callers)
    copier.close()


def test_helpers_that_get_no_core_delay_nobody(copier: Copier) -> None:
    held, begun = threading.Event(), threading.Semaphore(0)

    def hold() -> None:
        begun.release()
        held.wait(60)

    for _ in range(2):
        copier._helpers.submit(hold)
        begun.acquire(timeout=60)
    pairs = pairs_of(1)
    copier.copy(pairs)
    assert all(torch.equal(to, what) for to, what in pairs)
    held.set()
    copier.close()


def test_an_interrupted_copy_is_over_for_its_helpers_too(
    copier: Copier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a helper would write into memory that the caller has given to somebody else."""
    caller, copy = threading.current_thread(), np.copyto
    begun, raised, never = threading.Event(), threading.Event(), threading.Event()
    running: list[int] = []

    def slow(to: np.ndarray, what: np.ndarray) -> None:
        if threading.current_thread() is caller:
            assert begun.wait(60)
            raised.set()
            raise KeyboardInterrupt
        running.append(1)
        begun.set()
        raised.wait(60)
        never.wait(0.2)  # a piece takes its time
        copy(to, what)
        running.pop()

    monkeypatch.setattr(copier_module.np, "copyto", slow)
    with pytest.raises(KeyboardInterrupt):
        copier.copy(pairs_of(1))
    assert begun.is_set() and not running
    copier.close()


def test_what_a_helper_meets_is_told_to_the_caller(copier: Copier, monkeypatch: pytest.MonkeyPatch) -> None:
    caller, copy, met = threading.current_thread(), np.copyto, threading.Event()

    def failing(to: np.ndarray, what: np.ndarray) -> None:
        if threading.current_thread() is not caller:
            met.set()
            raise MemoryError("no memory for a buffer")
        assert met.wait(60)
        copy(to, what)

    monkeypatch.setattr(copier_module.np, "copyto", failing)
    with pytest.raises(MemoryError, match="for a buffer"):
        copier.copy(pairs_of(1))
    copier.close()


def test_a_closed_copier_still_copies_and_has_no_threads(copier: Copier) -> None:
    copier.copy(pairs_of(2))
    copier.close()
    assert not any(thread.name.startswith("tieredkv-copy") for thread in threading.enumerate())
    pairs = pairs_of(3)
    copier.copy(pairs)
    assert all(torch.equal(to, what) for to, what in pairs)


def test_shapes_that_differ_are_refused(copier: Copier) -> None:
    for copy in (copier.copy, copy_alone):
        with pytest.raises(ValueError, match="a copy of"):
            copy([(torch.zeros(3, MiB), torch.ones(3, MiB + 1))])
    copier.close()
