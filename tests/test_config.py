"""What a Config refuses: each refusal names the field, the value and what is allowed, before anything is opened."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tieredkv
from tieredkv import Config
from tieredkv.errors import BadConfig
from tieredkv.machine import resolve
from tieredkv.units import parse_nbytes

_TIMES = ("commit_interval_ms", "deadline_s", "expire_days")
_SIZES = ("device_nbytes", "host_nbytes", "disk_nbytes", "log_keep_nbytes")


@pytest.mark.parametrize("field", _TIMES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e13, 0, -1, "5", [], 1j])
def test_a_time_is_a_finite_number_that_a_thread_can_wait(field: str, value: Any) -> None:
    with pytest.raises(BadConfig, match=rf"{field}=.*above 0.*at most"):
        Config(**{field: value})


def test_the_longest_times_are_taken() -> None:
    longest = threading.TIMEOUT_MAX
    config = Config(commit_interval_ms=longest * 1e3, deadline_s=longest, expire_days=longest // 86400)
    assert config.deadline_s == longest
    Config(commit_interval_ms=np.float32(50), deadline_s=np.int64(2), expire_days=None)  # type: ignore[arg-type]
    for field in ("commit_interval_ms", "deadline_s"):
        with pytest.raises(BadConfig, match=rf"{field}=None"):
            Config(**{field: None})  # type: ignore[arg-type]


@pytest.mark.parametrize("field", _SIZES)
@pytest.mark.parametrize(
    "value", [1.5e9, None, 10**30, "9" * 400, "1e9", "50%", "", "Auto", -1, np.int64(-1), [], b"1GiB"]
)
def test_a_size_that_is_none_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(BadConfig, match=rf"^{field}=.*byte size"):
        Config(**{field: value})


def test_sizes_are_read_exactly() -> None:
    assert parse_nbytes(np.int64(5)) == 5  # type: ignore[arg-type]
    assert parse_nbytes(str(sys.maxsize)) == parse_nbytes(sys.maxsize) == sys.maxsize
    assert parse_nbytes("1.5 MB") == 1_500_000
    assert parse_nbytes("2gib") == 2 << 30
    with pytest.raises(BadConfig, match=str(sys.maxsize)):
        parse_nbytes(sys.maxsize + 1)


@pytest.mark.parametrize("value", ["32", 32.0, None, 0, 24, 1024, -16, True])
def test_a_block_size_is_a_power_of_two(value: Any) -> None:
    with pytest.raises(BadConfig, match=r"block_size=.*power of two from 16 to 512"):
        Config(block_size=value)


def test_a_block_size_becomes_a_plain_int() -> None:
    assert type(Config(block_size=np.int64(64)).block_size) is int  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "field", ["policy", "spill", "durability", "disk", "disk_io", "on_unusable", "trace", "strict"]
)
@pytest.mark.parametrize("value", [[], None, 3])
def test_a_choice_is_one_of_those_there_are(field: str, value: Any) -> None:
    with pytest.raises(BadConfig, match=rf"{field}="):
        Config(**{field: value})


@pytest.mark.parametrize("value", [None, "meta", "foo", [], 1.5])
def test_a_device_that_holds_nothing_is_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(BadConfig, match=r"device="):
        tieredkv.open(tmp_path / "kv", Config(device=value))
    assert not (tmp_path / "kv").exists()


def test_a_device_is_taken_as_torch_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve(Config(device=torch.device("cpu")), str(tmp_path)).device.type == "cpu"  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    sized = dict.fromkeys(_SIZES, "1GiB")
    assert resolve(Config(device="cuda:0", **sized), str(tmp_path)).device.index == 0  # type: ignore[arg-type]
    with pytest.raises(BadConfig, match=r"device='cuda:99'.*1 CUDA"):
        resolve(Config(device="cuda:99", **sized), str(tmp_path))  # type: ignore[arg-type]


def test_open_wants_a_config(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match=r"config.*dict.*Config\(\*\*"):
        tieredkv.open(tmp_path / "kv", {"host_nbytes": 0})  # type: ignore[arg-type]
    assert not (tmp_path / "kv").exists()


@pytest.mark.parametrize("field", ["trace", "strict"])
def test_a_word_is_no_yes(field: str) -> None:
    with pytest.raises(BadConfig, match=rf"{field}='no'.*True, False"):
        Config(**{field: "no"})  # type: ignore[arg-type]
