"""Jobs for a few threads: what is not done in time, and what closed workers never took."""

from __future__ import annotations

import threading
import time

import pytest

from tieredkv.tier.workers import Batch, Workers


def test_results_come_in_the_order_of_the_jobs() -> None:
    workers = Workers("test", 3)
    try:
        batch = Batch(workers, [lambda number=number: number for number in range(20)])
        assert batch.wait(60) == list(range(20)) and not batch.is_refused
    finally:
        workers.close(60)


def test_the_first_error_is_raised_once_all_are_over() -> None:
    def fail() -> int:
        raise OSError("broken")

    workers, over = Workers("test", 1), []
    try:
        with pytest.raises(OSError, match="broken"):
            Batch(workers, [fail, lambda: over.append(1)]).wait(60)
        assert over == [1]
    finally:
        workers.close(60)


def test_a_job_that_is_late_is_said_once_it_is_over_and_one_that_never_began_at_once() -> None:
    workers, go, late, told = Workers("test", 1), threading.Event(), [], threading.Event()

    def on_late(number: int) -> None:
        late.append(number)
        told.set()

    try:
        batch = Batch(workers, [lambda: go.wait(60), lambda: True], on_late)
        assert batch.wait(0.05) == [None, None] and late == [1]
        told.clear()
        go.set()
        assert told.wait(60) and late == [1, 0]
    finally:
        workers.close(60)


@pytest.mark.parametrize("were_started", [False, True])
def test_closed_workers_refuse_and_nobody_waits_for_what_they_did_not_take(were_started: bool) -> None:
    workers, late = Workers("test", 2), []
    if were_started:
        assert Batch(workers, [lambda: 1]).wait(60) == [1]
    workers.close(60)
    began = time.monotonic()
    batch = Batch(workers, [lambda: 1, lambda: 2], late.append)
    assert batch.wait(60) == [None, None] and batch.is_refused and late == [0, 1]
    assert time.monotonic() - began < 30
