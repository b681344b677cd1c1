"""Shared by the tests of the transformers side: a tokenizer without files, and open caches."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch  # noqa: E402
from tiny_models import byte_tokenizer  # noqa: E402

import tieredkv  # noqa: E402


@pytest.fixture
def small_kv(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Opens caches with blocks of 16 tokens; `small_kv(name)` again after closing is a restart."""
    opened = []

    def open_one(name: str = "store", **config: Any) -> Any:
        budgets = {"device_nbytes": "16MiB", "host_nbytes": "8MiB", "disk_nbytes": "256MiB", "block_size": 16}
        kv = tieredkv.open(tmp_path / name, tieredkv.Config(**{**budgets, "device": "cpu", **config}))
        opened.append(kv)
        return kv

    torch.manual_seed(0)
    yield open_one
    for kv in opened:
        kv.close()


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return byte_tokenizer()
