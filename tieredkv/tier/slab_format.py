"""The bytes of a slot on disk: a 4096-byte header, then the payload. Pure; no I/O.

    0    magic "tieredkv slot\\r\\n\\x1a"   16
    16   version                        u4
    20   codec (0: the payload is raw)  u2
    22   num_tokens                     u2   token ids of the block that the header holds
    24   group                          u1   layer group
    25   flags                          u1
    26   zero                           2
    28   depth                          u4   blocks before this one in its chain; 0 where nobody counted
    32   payload_nbytes                 u8
    40   put_seq                        u8
    48   checksum                       u8   xxh3-64 of the payload
    56   zero                           8
    64   namespace                      32   digest
    96   digest                         32
    128  parent                         32   zeros at the head of a chain
    160  zero                           864
    1024 tokens                         i4 * 512
    3072 zero                           1016
    4088 header_checksum                u8   xxh3-64 of all before it; at this place in every version
    4096 payload

All numbers are little endian. A slab is a file of such slots, named after the payload's size.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from ..errors import CorruptFormat
from ..units import PAGE_NBYTES
from .base import EXPECTED_DTYPE as EXPECTED_DTYPE
from .base import Verdict

SLOT_HEADER_NBYTES = PAGE_NBYTES
VERSION = 1
MAX_TOKENS = 512
MAGIC = b"tieredkv slot\r\n\x1a"

HEADER_DTYPE = np.dtype(
    {
        "names": [
            "magic",
            "version",
            "codec",
            "num_tokens",
            "group",
            "flags",
            "depth",
            "payload_nbytes",
            "put_seq",
            "checksum",
            "namespace",
            "digest",
            "parent",
            "tokens",
            "header_checksum",
        ],
        "formats": [
            ("u1", 16),
            "<u4",
            "<u2",
            "<u2",
            "u1",
            "u1",
            "<u4",
            "<u8",
            "<u8",
            "<u8",
            ("u1", 32),
            ("u1", 32),
            ("u1", 32),
            ("<i4", MAX_TOKENS),
            "<u8",
        ],
        "offsets": [0, 16, 20, 22, 24, 25, 28, 32, 40, 48, 64, 96, 128, 1024, 4088],
        "itemsize": SLOT_HEADER_NBYTES,
    }
)

Headers = npt.NDArray[Any]
"""`HEADER_DTYPE[n]`."""

Buffer = bytes | bytearray | memoryview

_DIGESTS = ("namespace", "digest", "parent")
_NUMBERS = ("group", "depth", "flags", "payload_nbytes", "checksum", "put_seq", "codec")
_MAGIC_ARRAY = np.frombuffer(MAGIC, np.uint8)
_FORMAT = np.frombuffer(MAGIC + VERSION.to_bytes(4, "little"), "V20")
_AS_BYTES = np.dtype(
    {
        "names": ["format", "who"],
        "formats": ["V20", "V64"],
        "offsets": [0, 64],
        "itemsize": SLOT_HEADER_NBYTES,
    }
)
"""A header's magic and version, and its namespace and digest, as bytes to be compared at once."""
_WHO = np.dtype({"names": ["who"], "formats": ["V64"], "offsets": [0], "itemsize": EXPECTED_DTYPE.itemsize})
"""Namespace and digest of an `EXPECTED_DTYPE`."""
_SLAB_NAME = re.compile(r"([1-9]\d*)-(\d{3,})\.slab")


@dataclass(frozen=True)
class SlotHeader:
    """What a slot says about itself. Digests are 32 bytes; `parent` is zeros at the head of a chain."""

    namespace: bytes
    digest: bytes
    parent: bytes
    group: int
    depth: int
    flags: int
    tokens: tuple[int, ...] = field(repr=False)
    payload_nbytes: int
    checksum: int
    put_seq: int
    codec: int = 0


def encode_into(buffer: memoryview | bytearray, header: SlotHeader) -> None:
    """Write one header, sealed, to the first 4096 bytes of `buffer`."""
    assert len(header.tokens) <= MAX_TOKENS, f"{len(header.tokens)} tokens, at most {MAX_TOKENS} fit"
    row = new_headers(1)
    for name in _NUMBERS:
        row[name] = getattr(header, name)
    for name in _DIGESTS:
        row[name] = np.frombuffer(getattr(header, name), np.uint8)
    row["num_tokens"] = len(header.tokens)
    row["tokens"][0, : len(header.tokens)] = header.tokens
    seal(row)
    buffer[:SLOT_HEADER_NBYTES] = row.tobytes()


def decode(buffer: Buffer) -> SlotHeader:
    """The header in the first 4096 bytes of `buffer`.

    Raises:
        CorruptFormat: not a slot header of ours, one of another version, or a damaged one; it says which.
    """
    if len(buffer) < SLOT_HEADER_NBYTES:
        raise CorruptFormat(f"a slot header is {SLOT_HEADER_NBYTES} bytes, here are {len(buffer)}")
    row = np.frombuffer(buffer, HEADER_DTYPE, count=1)
    if row["magic"].tobytes() != MAGIC:
        raise CorruptFormat(f"not a slot header: it begins with {row['magic'].tobytes()!r}")
    found, stored = int(_checksums(row)[0]), int(row["header_checksum"][0])
    if found != stored:
        raise CorruptFormat(f"damaged slot header: checksum {found:016x}, it says {stored:016x}")
    if row["version"][0] != VERSION:
        raise CorruptFormat(f"slot header of version {row['version'][0]}, this is version {VERSION}")
    if row["num_tokens"][0] > MAX_TOKENS:
        raise CorruptFormat(f"damaged slot header: {row['num_tokens'][0]} tokens, at most {MAX_TOKENS} fit")
    fields: dict[str, Any] = {name: row[name].tobytes() for name in _DIGESTS}
    fields |= {name: int(row[name][0]) for name in _NUMBERS}
    return SlotHeader(**fields, tokens=tuple(row["tokens"][0, : row["num_tokens"][0]].tolist()))


def new_headers(count: int) -> Headers:
    """`HEADER_DTYPE[count]`, page-aligned, zero but for magic and version."""
    headers: Headers = aligned_bytes(count * SLOT_HEADER_NBYTES).view(HEADER_DTYPE)
    stamp(headers, 0)
    return headers


def stamp(headers: Headers, part_nbytes: int) -> None:
    """Say that these are headers of ours for payloads of this size; `seal` comes last."""
    headers["magic"] = _MAGIC_ARRAY
    headers["version"] = VERSION
    headers["payload_nbytes"] = part_nbytes


def seal(headers: Headers) -> None:
    """Set the header checksums; nothing may change after it."""
    headers["header_checksum"] = _checksums(headers)


def valid(headers: Headers) -> npt.NDArray[np.bool_]:
    """Which of these are undamaged slot headers of this version."""
    good: npt.NDArray[np.bool_] = headers.view(_AS_BYTES)["format"] == _FORMAT
    good &= headers["num_tokens"] <= MAX_TOKENS
    numbers = np.flatnonzero(good).tolist()
    if numbers:
        good[numbers] = headers["header_checksum"][numbers] == _checksums(headers, numbers)
    return good


def matches(headers: Headers, expected: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Which headers name the same put as `expected` (`EXPECTED_DTYPE`): namespace, digest, group, put_seq."""
    same: npt.NDArray[np.bool_] = headers.view(_AS_BYTES)["who"] == expected.view(_WHO)["who"]
    same &= (headers["put_seq"] == expected["put_seq"]) & (headers["group"] == expected["group"])
    return same


def judge(
    headers: Headers, expected: npt.NDArray[Any], checksums: npt.ArrayLike, part_nbytes: int
) -> list[Verdict]:
    """What slots that were read hold, against what they should; `checksums` are those of the payloads as read.

    The one place where bytes become a hit.
    """
    sound = valid(headers)
    ours = sound & matches(headers, expected)
    whole = ours & (headers["payload_nbytes"] == part_nbytes) & (headers["codec"] == 0)
    whole &= np.asarray(checksums, np.uint64) == expected["checksum"]
    return [
        Verdict.OK if good else Verdict.OTHER if other else Verdict.CORRUPT
        for good, other in zip(whole.tolist(), (sound & ~ours).tolist(), strict=True)
    ]


def expected_of(headers: Headers) -> npt.NDArray[Any]:
    """What a read of these slots should expect."""
    expected = np.zeros(len(headers), EXPECTED_DTYPE)
    for name in EXPECTED_DTYPE.names or ():
        expected[name] = headers[name]
    return expected


def checksums_of(buffers: Sequence[Buffer]) -> npt.NDArray[np.uint64]:
    """The xxh3-64 of each. The dtype is said: numpy would make floats of a list of such numbers."""
    digest = xxhash.xxh3_64_intdigest
    return np.array([digest(buffer) for buffer in buffers], np.uint64)


def aligned_bytes(nbytes: int) -> npt.NDArray[np.uint8]:
    """Zeroed memory of its own that begins at a multiple of 4096."""
    raw = np.zeros(nbytes + PAGE_NBYTES, np.uint8)
    start = -address_of(raw) % PAGE_NBYTES
    return raw[start : start + nbytes]


def address_of(array: npt.NDArray[Any]) -> int:
    """Where the first byte of the array lies."""
    return int(array.__array_interface__["data"][0])


def slab_name(part_nbytes: int, index: int) -> str:
    """The file name of slab `index` of the pool of parts of this size."""
    return f"{part_nbytes}-{index:03d}.slab"


def parse_slab_name(name: str) -> tuple[int, int] | None:
    """`(part_nbytes, index)` of a slab's file name; None for any other name."""
    match = _SLAB_NAME.fullmatch(name)
    if match is None or slab_name(int(match[1]), int(match[2])) != name:
        return None
    return int(match[1]), int(match[2])


def _checksums(headers: Headers, numbers: Sequence[int] | None = None) -> npt.NDArray[np.uint64]:
    body = np.ascontiguousarray(headers).view(np.uint8).data
    starts = (number * SLOT_HEADER_NBYTES for number in (range(len(headers)) if numbers is None else numbers))
    return checksums_of([body[start : start + SLOT_HEADER_NBYTES - 8] for start in starts])
