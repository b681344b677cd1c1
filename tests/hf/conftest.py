"""Shared by the tests of the transformers side: open caches, and a tokenizer without files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_models import byte_tokenizer

import tieredkv
from tieredkv import speeds

transformers.logging.set_verbosity_error()


@pytest.fixture(autouse=True, scope="package")
def _one_thread() -> Iterator[None]:
    """Models this small only wait for one another's threads, above all on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def always_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test finds is not to depend on how busy the machine is; the gate's own tests let it choose."""
    monkeypatch.setattr(speeds, "_LEAST_GAIN_S", 3600.0)


@pytest.fixture
def open_kv(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Opens caches with blocks of 16 tokens; the same name again, after closing, is a restart."""
    opened = []

    def open_one(name: str = "store", **config: Any) -> Any:
        budgets = {"device_nbytes": "16MiB", "host_nbytes": "8MiB", "disk_nbytes": "256MiB"}
        values = {**budgets, "block_size": 16, "device": "cpu", **config}
        opened.append(tieredkv.open(tmp_path / name, tieredkv.Config(**values)))
        return opened[-1]

    yield open_one
    for kv in opened:
        kv.check()
        kv.close()


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return byte_tokenizer()
