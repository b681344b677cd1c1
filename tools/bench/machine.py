"""What the numbers were measured on: a figure without its machine says nothing."""

from __future__ import annotations

import os
import platform
import shutil
from pathlib import Path

import torch

from tieredkv.units import GiB, format_nbytes


def describe(directory: Path) -> dict[str, str | int | float]:
    """Processor, memory, load, file system and versions, for a run whose files lie in `directory`."""
    return {
        "cpu": _cpu(),
        "num_cores": os.cpu_count() or 1,
        "ram": format_nbytes(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        "load": round(os.getloadavg()[0], 2),
        "file_system": file_system(directory),
        "disk_free_gib": shutil.disk_usage(directory).free // GiB,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }


def file_system(directory: Path) -> str:
    """Type and device of the mount that holds `directory`, as Linux tells it."""
    best, found = -1, "unknown"
    here = os.path.realpath(directory)
    try:
        mounts = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return found
    for line in mounts:
        device, point, kind = line.split()[:3]
        inside = here == point or here.startswith(point.rstrip("/") + "/")
        if inside and len(point) > best:
            best, found = len(point), f"{kind} ({device})"
    return found


def anonymous_nbytes() -> int:
    """Resident anonymous memory of this process (RssAnon).

    Raises:
        OSError: a system without /proc.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no RssAnon")


def written_nbytes() -> int:
    """What this process has caused to be written to disk, as Linux counts it.

    Raises:
        OSError: a system without /proc.
    """
    return _io("write_bytes")


def read_nbytes() -> int:
    """What this process has read from disk and not from the page cache, as `written_nbytes`."""
    return _io("read_bytes")


def _io(name: str) -> int:
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    raise OSError(f"/proc/self/io has no {name}")


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
