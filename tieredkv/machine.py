"""What `"auto"` means on this machine."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass

import torch

from .config import Config
from .errors import BadConfig, Unsupported
from .units import GiB, MiB, parse_nbytes

_DISK_CAP_NBYTES = 100 * GiB
_LEFT_FREE_NBYTES = 256 * MiB


@dataclass(frozen=True)
class Sizes:
    """The configuration's device and byte budgets, resolved."""

    device: torch.device
    device_nbytes: int
    host_nbytes: int
    disk_nbytes: int
    log_keep_nbytes: int


def resolve(config: Config, path: str) -> Sizes:
    """The device and byte budgets for a store at `path`.

    Raises:
        BadConfig: no Config, or a device that torch does not have.
        Unsupported: Windows.
    """
    if sys.platform == "win32":
        raise Unsupported("tieredkv runs on Linux and macOS; Windows has no O_DIRECT, flock or fork safety")
    if not isinstance(config, Config):
        raise BadConfig(
            f"config is a {type(config).__name__}, not a tieredkv.Config: a dict becomes one by Config(**it)"
        )
    device = _device(config.device)
    return Sizes(
        device=device,
        device_nbytes=_or(config.device_nbytes, lambda: _device_share(device)),
        host_nbytes=_or(config.host_nbytes, lambda: _ram_nbytes() // 10),
        disk_nbytes=_or(config.disk_nbytes, lambda: _disk_share(path)),
        log_keep_nbytes=parse_nbytes(config.log_keep_nbytes, "log_keep_nbytes"),
    )


def _or(value: int | str, auto: object) -> int:
    if value == "auto":
        assert callable(auto), "an automatic size is computed"
        return int(auto())
    return parse_nbytes(value)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise BadConfig(f"device={name!r}: write it as torch does, as 'cpu' or 'cuda:0'; {error}") from error
    if device.type == "meta":
        raise BadConfig("device='meta' holds no bytes: choose 'cpu', 'cuda' or 'auto'")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise BadConfig(f"device={name!r}: this torch sees {count} CUDA devices")
    return device


def _device_share(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free) // 2
    return _ram_nbytes() // 8


def _ram_nbytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _disk_share(path: str) -> int:
    """The least of 100 GiB and a quarter of what is free, with a floor always left free."""
    while not os.path.exists(path):
        path = os.path.dirname(os.path.abspath(path))
    free = shutil.disk_usage(path).free
    return max(0, min(_DISK_CAP_NBYTES, free // 4, free - _LEFT_FREE_NBYTES))
