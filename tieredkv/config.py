"""How a cache is opened: one frozen dataclass of plain values."""

from __future__ import annotations

import numbers
import operator
import threading
from dataclasses import dataclass, fields
from typing import Any

from .errors import BadConfig
from .units import parse_nbytes

_CHOICES: dict[str, tuple[Any, ...]] = {
    "spill": ("eager", "evict"),
    "durability": ("group", "flush", "none"),
    "disk": ("slab", "lmdb"),
    "disk_io": ("direct", "buffered", "mmap"),
    "on_unusable": ("raise", "memory"),
    "trace": (True, False),
    "strict": (True, False),
}
_MOST = {  # what a thread can wait
    "commit_interval_ms": threading.TIMEOUT_MAX * 1e3,
    "deadline_s": threading.TIMEOUT_MAX,
    "expire_days": threading.TIMEOUT_MAX // 86400,
}


@dataclass(frozen=True)
class Config:
    """What a user may choose; `"auto"` sizes are resolved from the machine at `open`.

    Attributes:
        device_nbytes: budget of the device tier: `"auto"` is half of what is free on the GPU, or with the
            CPU as device an eighth of free memory.
        host_nbytes: budget of the host tier; `"auto"` is a tenth of RAM.
        disk_nbytes: budget of the directory, log and checkpoints included; `"auto"` is the least of
            100 GiB and a quarter of what is free.
        block_size: tokens in a block, a power of two from 16 to 512.
        policy: who leaves a full tier: `"lru"` or `"arc"`.
        spill: `"eager"` copies blocks to disk as they complete, `"evict"` when they leave memory.
        durability: what a power cut can cost: `"group"` the last interval, `"flush"` what was not flushed,
            `"none"` all since the last clean close.
        commit_interval_ms: how often `"group"` syncs.
        deadline_s: the longest any call waits for the disk before going on without it.
        disk: `"slab"` files, or one `"lmdb"` payload file.
        disk_io: `"direct"` (O_DIRECT where the file system has it), `"buffered"`, which writes to the page cache
            and reads past it what it lacks, or `"mmap"`, which maps slabs for reading: faster warm reads, but a
            media error under a map kills the process (SIGBUS).
        log_keep_nbytes: how much log is kept for the replay tool beyond what recovery needs.
        trace: write the advisory trace of every move.
        strict: refuse to open a damaged store instead of reporting what was dropped.
        expire_days: sessions that were not used for so long go, unless they are pinned or have an expiry of
            their own; None keeps them.
        on_unusable: `"memory"` runs without the disk tier where `open` would raise.
        device: where the device tier lives, as torch writes it; `"auto"` is CUDA if there is one.
    """

    device_nbytes: int | str = "auto"
    host_nbytes: int | str = "auto"
    disk_nbytes: int | str = "auto"
    block_size: int = 32
    policy: str = "lru"
    spill: str = "eager"
    durability: str = "group"
    commit_interval_ms: float = 50.0
    deadline_s: float = 2.0
    disk: str = "slab"
    disk_io: str = "direct"
    log_keep_nbytes: int | str = "64MiB"
    trace: bool = False
    strict: bool = False
    expire_days: float | None = None
    on_unusable: str = "raise"
    device: str = "auto"

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise BadConfig(
                    f"{name}={getattr(self, name)!r}: choose one of {', '.join(map(repr, choices))}"
                )
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("_nbytes") and not (isinstance(value, str) and value == "auto"):
                parse_nbytes(value, field.name)
        if not isinstance(self.policy, str):
            raise BadConfig(f"policy={self.policy!r}: write the name of a policy, as 'lru'")
        for name, most in _MOST.items():
            self._check_time(name, most)
        object.__setattr__(self, "block_size", _block_size(self.block_size))

    def _check_time(self, name: str, most: float) -> None:
        value = getattr(self, name)
        if value is None and name == "expire_days":
            return
        is_number = isinstance(value, numbers.Real)
        if not (is_number and 0 < value <= most):  # so that nan is refused too
            keep = ", or None to keep sessions" if name == "expire_days" else ""
            raise BadConfig(f"{name}={value!r}: a number above 0 and at most {most:.0f}{keep}")


def _block_size(value: int) -> int:
    try:
        size = operator.index(value)
    except TypeError:
        size = 0
    if size < 16 or size > 512 or size & (size - 1):
        raise BadConfig(f"block_size={value!r}: a power of two from 16 to 512")
    return size
