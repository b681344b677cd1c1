"""The jobs of a race, one fresh process each: raw transfers, putting and warm reading, cold reading."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from ..child import Say
from ..machine import read_nbytes
from ..raw import RawFile, memcpy_s
from .contestant import Contestant, Load, drop_cached_pages

_NUM_WARMED = 4
"""Times the bytes of a race: as much as anybody leaves in the page cache from the first put to the last."""

MIN_READ = 0.7
"""A cold read takes at least this share of its bytes from the disk, or it was none."""


def fill(say: Say, contestant: str, path: str, **load: int) -> dict[str, Any]:
    """Put everything fresh, then over old blocks, then read it warm."""
    one = _make(contestant, path, Load(**load))
    warm_up(Path(path), _NUM_WARMED * Load(**load).nbytes)
    found: dict[str, Any] = {"fresh_s": one.fresh(), "over_s": one.over()}
    one.read()  # brings the pages in, where there are any
    found["warm_s"] = one.read()
    found["num_wrong"] = one.num_wrong()
    if not one.survives:
        drop_cached_pages(Path(path))
        found |= _cold(one, Load(**load))
    one.close()
    drop_cached_pages(Path(path))
    return found


def cold(say: Say, contestant: str, path: str, **load: int) -> dict[str, Any]:
    """Read what another process put; its pages are dropped here, before anything maps them."""
    drop_cached_pages(Path(path))
    one = _make(contestant, path, Load(**load))
    found = _cold(one, Load(**load))
    one.close()
    return found


def raw(say: Say, path: str, depth: int, **load: int) -> dict[str, Any]:
    """The same bytes with O_DIRECT, `depth` requests at a time; the best depth is sought if 0."""
    of = Load(**load)
    file = RawFile(path, of.nbytes, of.part_nbytes, 1 if depth else 1 + 4)
    depths = (depth, depth) if depth else (file.best_write_depth(1), file.best_read_depth(1))
    found = {"depth": depths[0], "fresh_s": file.write(0, depths[0])}
    found |= {"over_s": file.write(0, depths[0]), "cold_s": file.read(0, depths[1])}
    found["warm_s"] = min(memcpy_s(of.nbytes, 2))
    file.close()
    return found


def warm_up(directory: Path, nbytes: int) -> None:
    """Write as much through the page cache and remove it: the pages that a guest gets back are fast at once.

    Fresh pages of a virtual machine that idled are up to 13 times slower, and would decide who wins.
    """
    path, piece = directory / "warm_up", bytes(4 << 20)
    with path.open("wb", buffering=0) as file:
        for _ in range(-(-nbytes // len(piece))):
            file.write(piece)
    path.unlink()


def _cold(one: Contestant, load: Load) -> dict[str, Any]:
    before = read_nbytes()
    seconds = one.read()
    share = (read_nbytes() - before) / load.nbytes
    return {"cold_s": seconds, "cold_share": share, "num_wrong_cold": one.num_wrong()}


def _make(name: str, path: str, load: Load) -> Contestant:
    """`module.Class` of this package."""
    module, _, kind = name.rpartition(".")
    made: Contestant = getattr(importlib.import_module(f"{__package__}.{module}"), kind)(path, load)
    return made
