"""How near spill and restore come to the hardware: every ratio against raw transfers of the same run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from tieredkv.units import KiB, MiB, format_nbytes

from . import transfer
from .figures import Figure, at_least, at_most, unmeasured
from .progress import Progress
from .scratch import tidied, try_job
from .sheet import Sheet

SIZES = {
    transfer.Size(8 * MiB, 48): (0.93, 0.97),
    transfer.Size(2 * MiB, 192): (0.90, 0.97),
    transfer.Size(512 * KiB, 512): (0.85, 0.92),
    transfer.Size(64 * KiB, 2048): (0.70, 0.75),
}
"""Part size and parts a chain: what spill and cold restore must reach."""

MIN_WARM = {"buffered": 0.45, "mmap": 0.60}
MAX_BOOKKEEPING_US = 4.0
MAX_WRITTEN_RATIO = 1.03
_WARM_SIZE = transfer.Size(2 * MiB, 128)
_NUM_BOOKED = 2048


def measure(root: Path, progress: Progress, runs: int, quick: bool = False) -> Iterator[Figure | Sheet]:
    """Each figure as it is known; `root` is an empty directory with room for a few GiB.

    `quick` leaves out all part sizes but 2 MiB, and reading through a map.
    """
    beside: dict[transfer.Size, list[Figure]] = {}
    for size, (least_spill, least_restore) in SIZES.items():
        if quick and size.part_nbytes != 2 * MiB:
            yield from left_out(size, least_spill, least_restore)
            continue
        beside[size] = list(disk_figures(root, progress, size, least_spill, least_restore, runs))
        yield from beside[size]
    yield beside_raw(beside)
    for disk_io, least in MIN_WARM.items():
        name = f"warm_restore_{disk_io}_over_memcpy_ratio"
        if quick and disk_io == "mmap":
            yield unmeasured(name, f">= {least:g}", "--quick leaves it out")
            continue
        progress.say(f"warm restore, disk_io={disk_io}")
        with tidied(root / "warm") as path:
            found = try_job(transfer.warm, path=path, rounds=runs, disk_io=disk_io, **vars(_WARM_SIZE))
        yield ratio_figure(name, found, _WARM_SIZE.nbytes, least, "memcpy")
    yield bookkeeping_figure(root, progress, runs)


def disk_figures(
    root: Path, progress: Progress, size: transfer.Size, least_spill: float, least_restore: float, runs: int
) -> Iterator[Figure]:
    name = _name(size)
    progress.say(f"spill and cold restore, parts of {format_nbytes(size.part_nbytes)}")
    with tidied(root / "store") as store, tidied(root / "raw") as raw:
        common = {"path": store, "raw_path": raw, "rounds": runs, "disk_io": "direct", **vars(size)}
        spilled, restored = try_job(transfer.spill, **common), try_job(transfer.restore, **common)
    yield ratio_figure(f"spill_{name}_over_raw_ratio", spilled, size.nbytes, least_spill, "raw O_DIRECT")
    yield ratio_figure(
        f"cold_restore_{name}_over_raw_ratio", restored, size.nbytes, least_restore, "raw O_DIRECT"
    )
    if size.part_nbytes == 2 * MiB and isinstance(spilled, dict):
        yield at_most(
            f"written_per_payload_{name}_ratio", spilled["written_ratio"], MAX_WRITTEN_RATIO,
            "bytes that reached the disk during flush, log included, no checkpoint",
        )  # fmt: skip


def left_out(size: transfer.Size, least_spill: float, least_restore: float) -> Iterator[Figure]:
    for way, least in (("spill", least_spill), ("cold_restore", least_restore)):
        name = f"{way}_{_name(size)}_over_raw_ratio"
        yield unmeasured(name, f">= {least:g}", "--quick measures parts of 2 MiB alone")


def _name(size: transfer.Size) -> str:
    return format_nbytes(size.part_nbytes).replace(".0 ", "").lower()


def beside_raw(found: Mapping[transfer.Size, Sequence[Figure]]) -> Sheet:
    """GB/s by part size, from the first two figures of each."""
    rows = [
        (
            format_nbytes(size.part_nbytes),
            *(figure.more.get(key) for figure in figures[:2] for key in ("ours_gb_s", "limit_gb_s")),
        )
        for size, figures in found.items()
    ]
    return Sheet(
        "Spill and restore beside raw transfers",
        "Durable spill (checksummed, logged, synced at the end) and cold, verified restore through the public API,"
        " each beside the same bytes written and read with O_DIRECT at the best queue depth, rounds in turn. Both"
        " sides write into space that was preallocated and not written before.",
        ("GB/s", "spill", "raw write", "cold restore", "raw read"), tuple(rows), draw="bars",
    )  # fmt: skip


def ratio_figure(name: str, found: Mapping[str, Any] | str, nbytes: int, least: float, limit: str) -> Figure:
    """Our speed over the limit's, each round against the mean of the limit just before and just after."""
    if isinstance(found, str):
        return unmeasured(name, f">= {least:g}", found)
    rounds = list(zip(found["ours_s"], found["before_s"], found["after_s"], strict=True))
    ratios = [(before + after) / 2 / ours for ours, before, after in rounds]
    spread = median(abs(before / after - 1) for _, before, after in rounds)
    ours, raw = (nbytes / median(found[key]) / 1e9 for key in ("ours_s", "before_s"))
    depth = f" at depth {found['depth']}" if "depth" in found else ""
    touch = (
        f"; {nbytes / found['first_touch_s'] / 1e9:.2f} into untouched memory"
        if "first_touch_s" in found
        else ""
    )
    return at_least(
        name, median(ratios), least, spread,
        f"{ours:.2f} GB/s, {limit}{depth} {raw:.2f} GB/s{touch}; {len(rounds)} rounds of {format_nbytes(nbytes)},"
        f" raw against raw {spread:.0%}",
        ratios=[round(r, 3) for r in ratios], ours_gb_s=round(ours, 3), limit_gb_s=round(raw, 3),
    )  # fmt: skip


def bookkeeping_figure(root: Path, progress: Progress, runs: int) -> Figure:
    progress.say("bookkeeping of a store")
    name = "store_bookkeeping_us_a_block"
    with tidied(root / "booked") as path:
        found = try_job(transfer.bookkeeping, path=path, rounds=runs, num_blocks=_NUM_BOOKED)
    if isinstance(found, str):
        return unmeasured(name, f"<= {MAX_BOOKKEEPING_US:g}", found)
    each = [
        (s - c) / found["num_blocks"] * 1e6 for s, c in zip(found["store_s"], found["copy_s"], strict=True)
    ]
    copy_us = median(found["copy_s"]) / found["num_blocks"] * 1e6
    if median(each) <= 0:
        return unmeasured(
            name, f"<= {MAX_BOOKKEEPING_US:g}", f"the copy alone took longer, {copy_us:.1f} us: noise"
        )
    return at_most(
        name, median(each), MAX_BOOKKEEPING_US,
        f"chains of {found['num_blocks']} new blocks, hashing included; the copy of 4 KiB itself {copy_us:.2f} us",
        runs=[round(e, 3) for e in each],
    )  # fmt: skip
