"""Shared by the tests of the core: small layouts, KV that tells whose it is, checks over a whole cache.

Every block's bytes are a function of its digest, layer, tensor and group, so a byte from anywhere else shows.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from tieredkv import TOKENS, BlockLayout, Config, Identity, LayerGroup, Span, TensorSpec
from tieredkv.block.anchors import restorable
from tieredkv.cache import TieredCache, open_cache
from tieredkv.outcomes import Tier
from tieredkv.plan import held
from tieredkv.system import File, OsFs

SIZE = 16
IDENTITY = Identity(weights="ab" * 32)


def group_of(kind: str, layers: Sequence[int], window: int = 0, width: int = 8) -> LayerGroup:
    specs = [TensorSpec(layer, name, (1, TOKENS, width), "int32") for layer in layers for name in ("k", "v")]
    return LayerGroup(kind, tuple(specs), window)


FULL = BlockLayout(SIZE, (group_of("full", [0, 1]),))
MIXED = BlockLayout(SIZE, (group_of("full", [0, 1]), group_of("window", [2], window=40)))
UNEVEN = BlockLayout(SIZE, (group_of("full", [0], width=128), group_of("window", [1], window=40)))
TWO_WINDOWS = BlockLayout(
    SIZE, (group_of("full", [0]), group_of("window", [1], window=17), group_of("window", [2], window=60))
)
WINDOW_ONLY = BlockLayout(SIZE, (group_of("window", [0], window=40),))
STATES = LayerGroup(
    "recurrent", (TensorSpec(1, "conv", (1, 3, 8), "int32"), TensorSpec(2, "state", (1, SIZE, 64), "int32"))
)
HYBRID = BlockLayout(SIZE, (group_of("full", [0, 1]), STATES))
RECURRENT = BlockLayout(SIZE, (STATES,))
POOLS = LayerGroup(  # rows for 4 tokens, and for the tokens of four blocks
    "full", (TensorSpec(0, "k", (1, -4, 8), "int32"), TensorSpec(0, "v", (1, -4 * SIZE, 8), "int32"))
)
POOLED = BlockLayout(SIZE, (POOLS, group_of("window", [1], window=40), STATES))
LAYOUTS = {
    "full": FULL, "mixed": MIXED, "uneven": UNEVEN, "two": TWO_WINDOWS, "window": WINDOW_ONLY,
    "hybrid": HYBRID, "recurrent": RECURRENT, "pooled": POOLED,
}  # fmt: skip


def prompt(seed: int, num_tokens: int = 20 * SIZE + 5) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50_000, num_tokens).astype(np.int32)


def block_values(digests: np.ndarray, layer: int, name: str, width: int) -> np.ndarray:
    """int32 `[num_blocks, 1, SIZE, width]` that only these blocks have."""
    words = np.ascontiguousarray(digests).view("<u4").astype(np.uint64)
    cell = np.arange(SIZE * width, dtype=np.uint64).reshape(SIZE, width)
    salt = np.uint64(layer * 7919 + (104_729 if name == "v" else 0))
    mixed = words[:, cell.astype(np.int64) % 8] * (cell * np.uint64(2) + np.uint64(1)) + salt
    return (mixed & np.uint64(0xFFFFFFFF)).astype(np.uint32).view(np.int32)[:, None]


def values_of(digests: np.ndarray, spec: TensorSpec) -> torch.Tensor:
    """What `spec` holds over whole blocks, `[1, rows, width]`; a state is that at the end of the last block."""
    width = spec.shape[-1]
    values = block_values(digests, spec.layer, spec.name, width)[:, :, :, :width]
    if spec.token_axis is None:
        return torch.from_numpy(np.resize(values[-1], spec.shape).copy())
    if spec.stride <= SIZE:
        values = values[:, :, : SIZE // spec.stride]
    else:
        values = values[spec.stride // SIZE - 1 :: spec.stride // SIZE, :, :1]
    return torch.from_numpy(values.reshape(1, -1, width).copy())


def kv_of(space: Any, tokens: np.ndarray) -> dict[int, Any]:
    """Every layer's tensors over `tokens`, as a model would hand them over: as spans where it has states."""
    digests = space.chain(tokens)
    kv: dict[int, list[Any]] = {}
    with_spans = {
        s.layer for g in space.layout.groups for s in g.tensors if s.stride > 1 or s.token_axis is None
    }
    for group in space.layout.groups:
        for layer in dict.fromkeys(spec.layer for spec in group.tensors):
            specs = [spec for spec in group.tensors if spec.layer == layer]
            given = kv.setdefault(layer, [])
            if group.kind == "recurrent":
                for end in range(1, len(digests) + 1):
                    given.append(Span(end * SIZE, {s.name: values_of(digests[:end], s) for s in specs}))
            elif layer in with_spans:
                given.append(Span(0, {spec.name: values_of(digests, spec) for spec in specs}))
            else:
                rest = len(tokens) - len(digests) * SIZE
                given += [
                    torch.nn.functional.pad(values_of(digests, spec), (0, 0, 0, rest)) for spec in specs
                ]
    return {layer: tuple(tensors) for layer, tensors in kv.items()}


def store(space: Any, tokens: np.ndarray, anchors: Sequence[int] | None = None) -> Any:
    """Store the whole blocks of `tokens`, anchored at their end unless told otherwise."""
    end = len(tokens) // SIZE * SIZE
    return space.store(tokens, kv_of(space, tokens), anchors=[end] if anchors is None else anchors)


def assert_right(space: Any, tokens: np.ndarray, prefix: Any) -> None:
    """Every byte of a loaded prefix is the one that was stored for exactly these tokens."""
    digests = space.chain(tokens[: prefix.num_tokens])
    for group in space.layout.groups if prefix.num_tokens else ():
        for spec in group.tensors:
            want = values_of(digests, spec)
            if spec.token_axis is not None:
                want = want[:, prefix.first_token(spec.layer, spec.name) // spec.stride :]
            got = prefix.gather(spec.layer, spec.name)
            assert torch.equal(got, want), f"layer {spec.layer} {spec.name}: wrong bytes"


def load_checked(space: Any, tokens: np.ndarray, timeout_s: float | None = None) -> tuple[int, Any]:
    """How many tokens came back, all of them right, and why not more."""
    with space.load(tokens, timeout_s) as prefix:
        assert_right(space, tokens, prefix)
        return prefix.num_tokens, prefix.reason


def comes_true(condition: Callable[[], bool], timeout_s: float = 60.0) -> bool:
    """Whether the condition held at any look in time; it is not looked at again, for it may pass."""
    until = time.monotonic() + timeout_s
    while not (is_true := condition()) and time.monotonic() < until:
        time.sleep(0.005)
    return is_true


def settled(kv: TieredCache, tokens: np.ndarray, timeout_s: float = 60.0) -> bool:
    """Store `tokens` again and again until they are taken whole, committed and flushed."""
    space = kv.namespace(IDENTITY, MIXED)
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        stored = store(space, tokens)
        if not stored.num_refused and stored.wait(1) and kv.flush(2).ok:
            return True
        time.sleep(0.05)
    return False


def small(**changes: Any) -> Config:
    base: dict[str, Any] = {
        "device_nbytes": "256KiB", "host_nbytes": "256KiB", "disk_nbytes": "32MiB", "block_size": SIZE,
        "deadline_s": 30.0,
    }  # fmt: skip
    return Config(**(base | changes))


@contextlib.contextmanager
def opened(path: Any, fs: Any = None, clock: Any = None, **changes: Any) -> Iterator[TieredCache]:
    """A small cache, closed at the end whatever happens."""
    cache = open_cache(path, small(**changes), fs=fs, clock=clock)
    try:
        yield cache
    finally:
        cache.close(10)


def memory_only_disk(cache: TieredCache) -> None:
    """Let go of everything in memory, so that the next load must come from the disk."""
    assert cache.flush(60).ok
    with cache._lock:
        for tier in (Tier.DEVICE, Tier.HOST):
            resident = cache._residents.get(tier)
            if resident is None:
                continue
            rows = cache._table.live_rows()
            resident.leave(resident.parts_of(rows[~held(cache._table, rows)]), evicted=False)


def directory_nbytes(path: Any) -> int:
    """What the files of a directory really take from the disk."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512
    return total


def quiet(cache: TieredCache, timeout_s: float = 60.0) -> None:
    """Wait until nothing moves."""
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        if cache._spiller is not None:
            cache._spiller.drain(until)
        with cache._lock:
            if not cache._table.moving.any():
                return
        time.sleep(0.005)
    raise AssertionError("parts still move")


def assert_nothing_stranded(cache: TieredCache) -> None:
    """P11: over all tiers together no full part lies beyond the last restorable boundary of its chain."""
    with cache._lock:
        table = cache._table
        useful: set[int] = set()
        rows = table.live_rows().tolist()
        for row in rows:
            chain = [*table.ancestors(row, 1 << 20)][::-1]
            layout = cache._layout_of(row)
            present = table.present(np.array(chain, dtype=np.int32), len(layout.groups))
            if restorable(layout, present)[-1]:
                useful.update(chain)
        for row in rows:
            full = cache._layout_of(row).full_group
            if full is not None and (table.slot[:, full, row] >= 0).any():
                assert row in useful, f"row {row}: a full part that no restorable boundary needs"


class HookedFile:
    """A file whose every call is announced to a hook first, which may raise or wait."""

    def __init__(self, file: File, path: str, hook: Callable[[str, str], None]) -> None:
        self._file, self._path, self._hook = file, path, hook

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._file, name)
        if name == "close" or not callable(value):
            return value

        def call(*args: Any, **named: Any) -> Any:
            self._hook(name, self._path)
            return value(*args, **named)

        return call


class HookedFs(OsFs):
    """The real file system, with `hook(operation, path)` before each call that could fail."""

    def __init__(self, hook: Callable[[str, str], None] | None = None) -> None:
        self.hook = hook or (lambda _operation, _path: None)

    def open_file(self, path: str, **options: Any) -> Any:
        self.hook("create" if options.get("create") else "open", path)
        return HookedFile(super().open_file(path, **options), path, lambda op, where: self.hook(op, where))

    def sync_dir(self, path: str) -> None:
        self.hook("sync_dir", path)
        super().sync_dir(path)

    def unlink(self, path: str) -> None:
        self.hook("unlink", path)
        super().unlink(path)

    def rename(self, old: str, new: str) -> None:
        self.hook("rename", old)
        super().rename(old, new)

    def lock(self, path: str) -> Any:
        self.hook("lock", path)
        return super().lock(path)

    def make_dir(self, path: str) -> None:
        if not os.path.isdir(path):
            self.hook("make_dir", path)
        super().make_dir(path)


class Gate:
    """A place where threads wait while it is shut."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self.num_waited = 0

    def shut(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    def pass_through(self) -> None:
        if not self._open.is_set():
            self.num_waited += 1
            assert self._open.wait(60), "a gate stayed shut"
