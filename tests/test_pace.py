"""Spills give way to forwards, and to nobody else."""

from __future__ import annotations

import threading
import time

import pytest

from tieredkv.pace import Pace


def rested_s(pace: Pace, worked_s: float) -> float:
    began = time.monotonic()
    pace.rest(worked_s)
    return time.monotonic() - began


def test_rest_is_a_multiple_of_the_work_while_a_forward_runs() -> None:
    pace = Pace()
    assert rested_s(pace, 10.0) < 0.1
    pace.forward_begins()
    assert rested_s(pace, 0.02) >= 0.17
    assert rested_s(pace, 10.0) >= 0.2, "a slow disk is no reason to rest for ever"
    pace.forward_ends()
    assert rested_s(pace, 10.0) < 0.1


@pytest.mark.parametrize("how", ["ends", "hurry"])
def test_rest_ends_when_the_forward_ends_or_somebody_waits(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tieredkv.pace._MAX_REST_S", 60.0)
    pace = Pace()
    pace.forward_begins()
    resting = threading.Thread(target=pace.rest, args=(10.0,))
    resting.start()
    if how == "ends":
        pace.forward_ends()
        resting.join(20)
    else:
        with pace.hurry():
            resting.join(20)
            assert rested_s(pace, 10.0) < 1.0
        assert not resting.is_alive()
    assert not resting.is_alive()


def test_a_forward_that_failed_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tieredkv.pace._MAX_FORWARD_S", 0.05)
    pace = Pace()
    pace.forward_begins()
    time.sleep(0.06)
    assert rested_s(pace, 10.0) < 0.1
