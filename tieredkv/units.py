"""Byte sizes as people write them, and the alignment that direct I/O needs."""

from __future__ import annotations

import re

from .errors import BadConfig

KiB = 1 << 10
MiB = 1 << 20
GiB = 1 << 30

PAGE_NBYTES = 4096
"""Alignment of every part in memory and on disk: what `O_DIRECT` asks for."""

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?b?)\s*", re.IGNORECASE)
_FACTORS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": KiB,
    "mi": MiB,
    "gi": GiB,
    "ti": GiB << 10,
}


def parse_nbytes(value: int | str) -> int:
    """`"2GiB"`, `"1.5 MB"` or a plain int, in bytes.

    Raises:
        BadConfig: not a size, or negative.
    """
    if isinstance(value, int):
        if value < 0:
            raise BadConfig(f"a size cannot be negative: {value}")
        return value
    match = _SIZE.fullmatch(value)
    unit = match.group(2).lower().removesuffix("b") if match else None
    if match is None or unit not in _FACTORS:
        raise BadConfig(f"not a byte size: {value!r} (write for example 2GiB, 512MiB or a plain number)")
    return int(float(match.group(1)) * _FACTORS[unit])


def format_nbytes(nbytes: int) -> str:
    """The size in the largest binary unit that keeps it at or above one."""
    for factor, unit in ((GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB")):
        if abs(nbytes) >= factor:
            return f"{nbytes / factor:.1f} {unit}"
    return f"{nbytes} B"


def align_up(nbytes: int, to: int = PAGE_NBYTES) -> int:
    """The least multiple of `to` that is at least `nbytes`."""
    return -(-nbytes // to) * to
