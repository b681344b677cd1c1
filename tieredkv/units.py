"""Byte sizes as people write them, what counts as a whole number, and the alignment that direct I/O needs."""

from __future__ import annotations

import operator
import re
import sys
from decimal import Decimal

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


def is_whole(value: object) -> bool:
    """Whether it is an int, or one of numpy's; a truth value is none."""
    return hasattr(value, "__index__") and not isinstance(value, bool)


def parse_nbytes(value: int | str, field: str = "size") -> int:
    """`"2GiB"`, `"1.5 MB"` or a plain int, in bytes.

    Raises:
        BadConfig: not a size, negative, or more than the machine counts; the message names `field`.
    """
    nbytes = _read_nbytes(value)
    if nbytes is None or not 0 <= nbytes <= sys.maxsize:
        raise BadConfig(
            f"{field}={_short(value)} is no byte size from 0 to {sys.maxsize}: write for example 2GiB, 512MiB or a"
            " plain whole number"
        )
    return nbytes


def _read_nbytes(value: object) -> int | None:
    if not isinstance(value, str):
        try:
            return operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            return None
    match = _SIZE.fullmatch(value)
    unit = match.group(2).lower().removesuffix("b") if match else None
    if match is None or unit not in _FACTORS:
        return None
    return int(Decimal(match.group(1)) * _FACTORS[unit])  # a float would round what is above 2**53


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"


def format_nbytes(nbytes: int) -> str:
    """The size in the largest binary unit that keeps it at or above one."""
    for factor, unit in ((GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB")):
        if abs(nbytes) >= factor:
            return f"{nbytes / factor:.1f} {unit}"
    return f"{nbytes} B"


def align_up(nbytes: int, to: int = PAGE_NBYTES) -> int:
    """The least multiple of `to` that is at least `nbytes`."""
    return -(-nbytes // to) * to
