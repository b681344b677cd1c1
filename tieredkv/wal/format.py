"""The bytes of a log segment, and nothing that reads or writes files.

A segment is a file of fixed size: a header page, frames one after the other, zeros to the end.

    header, 4096 bytes                                   frame, a multiple of 8 bytes
    0     magic "tieredkv"                               0    checksum u64
    8     version u4                                     8    marker: bytes 8 to 16 of the segment's salt
    12    open number u4                                 16   previous u64: checksum of the frame before,
    16    salt, 16 random bytes                                of the header for the first frame
    32    segment number u8                              24   first LSN u64
    40    first LSN u8                                   32   durable LSN u64
    48    durable LSN u8                                 40   body nbytes u4
    56    previous segment's number u8, 0 for none       44   num_records u4
    64    cut LSN u8: its last record that counts        48   body: runs (see `records`)
    72    chain u8: checksum of the frame at the cut
    80    checkpoint LSN u8, its file's nbytes u8, its file's xxh3_128, 16 bytes
    112   segment nbytes u8, then zeros
    4088  checksum u8: xxh3_64 of all before it; at this place in every version

A frame's checksum is xxh3_64, seeded with the salt's first 8 bytes, of all that follows it in the frame.
So each frame vouches for itself, the salt keeps frames of an earlier life of the same disk blocks out, and
`previous` links the frames to a chain that nothing can be taken from or put into.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import xxhash

from ..errors import CorruptFormat, NewerFormat
from ..units import KiB, MiB
from .records import PackedRun, Run, encode_runs, runs_nbytes, split_runs

VERSION = 1
_MAX_VERSION = 0xFFFF
HEADER_NBYTES = 4 * KiB
MAX_SEGMENT_NBYTES = 64 * MiB
_MAX_LSN = 1 << 62
_MAX_CHECKPOINT_NBYTES = 1 << 46
_MAX_OPEN_NUMBER = 1 << 31

_MAGIC = b"tieredkv"
_HEADER = struct.Struct("<8sII16sQQQQQQQQ16sQ")
_CHECKSUM = struct.Struct("<Q")
_CHECKSUM_AT = HEADER_NBYTES - _CHECKSUM.size
_FRAME = struct.Struct("<Q8sQQQII")
FRAME_HEADER_NBYTES = _FRAME.size
FRAME_ALIGN = 8
FRAME_MARKER_AT = 8

_NAME = re.compile(r"(\d{10,15})\.wal")


@dataclass(frozen=True)
class CheckpointRef:
    """What vouches for a checkpoint's file: its LSN, length and xxh3_128. LSN 0: the empty table, no file."""

    lsn: int = 0
    nbytes: int = 0
    xxh3_128: bytes = bytes(16)


class LogPosition(NamedTuple):
    """A place in the log: a segment, the last LSN that counts there, and the checksum of the frame it ends.

    The next segment's header holds it, so that segments form one chain.
    """

    number: int
    lsn: int
    chain: int


BEFORE_THE_LOG = LogPosition(0, 0, 0)


@dataclass(frozen=True)
class SegmentHeader:
    """What a segment says of itself. `previous.lsn` is the cut: durable before this header was written."""

    number: int
    first_lsn: int
    durable_lsn: int
    open_number: int
    previous: LogPosition
    checkpoint: CheckpointRef
    segment_nbytes: int
    salt: bytes = field(default_factory=lambda: os.urandom(16), repr=False)
    checksum: int = 0

    @property
    def is_plausible(self) -> bool:
        """Whether a store can have reached these numbers; what comes after them fits its fields."""
        lsns = (self.first_lsn, self.durable_lsn, self.previous.lsn, self.checkpoint.lsn)
        nbytes = self.checkpoint.nbytes
        return (
            max(lsns) <= _MAX_LSN
            and self.open_number <= _MAX_OPEN_NUMBER
            and nbytes <= _MAX_CHECKPOINT_NBYTES
        )

    @cached_property
    def seed(self) -> int:
        return int.from_bytes(self.salt[:8], "little")

    @cached_property
    def marker(self) -> bytes:
        return self.salt[8:]


class Frame(NamedTuple):
    """A frame that verified; `body` is a view of the bytes it was read from."""

    checksum: int
    previous: int
    first_lsn: int
    durable_lsn: int
    num_records: int
    body: memoryview

    @property
    def last_lsn(self) -> int:
        return self.first_lsn + self.num_records - 1

    @property
    def nbytes(self) -> int:
        return FRAME_HEADER_NBYTES + len(self.body)

    def runs(self) -> list[PackedRun]:
        """Its runs; raises CorruptFormat where they are not what the header counts."""
        return split_runs(self.body, self.num_records)


def segment_name(number: int) -> str:
    return f"{number:010d}.wal"


def parse_segment_name(name: str) -> int | None:
    """The number in a segment's file name, None for any other name."""
    match = _NAME.fullmatch(name)
    return int(match.group(1)) if match else None


def encode_header(header: SegmentHeader) -> bytes:
    """The header page; `header.checksum` is computed, not read."""
    raw = bytearray(HEADER_NBYTES)
    previous, checkpoint = header.previous, header.checkpoint
    _HEADER.pack_into(
        raw, 0, _MAGIC, VERSION, header.open_number, header.salt,
        header.number, header.first_lsn, header.durable_lsn,
        previous.number, previous.lsn, previous.chain,
        checkpoint.lsn, checkpoint.nbytes, checkpoint.xxh3_128, header.segment_nbytes,
    )  # fmt: skip
    _CHECKSUM.pack_into(raw, _CHECKSUM_AT, xxhash.xxh3_64_intdigest(raw[:_CHECKSUM_AT]))
    return bytes(raw)


def decode_header(raw: bytes) -> SegmentHeader:
    """Read a header page.

    Raises:
        CorruptFormat: cut short, no log segment, or its checksum differs.
        NewerFormat: whole and ours, of a later version.
    """
    if len(raw) < HEADER_NBYTES or raw[: len(_MAGIC)] != _MAGIC:
        raise CorruptFormat("no log segment header here")
    (checksum,) = _CHECKSUM.unpack_from(raw, _CHECKSUM_AT)
    if checksum != xxhash.xxh3_64_intdigest(raw[:_CHECKSUM_AT]):
        raise CorruptFormat("the segment header's checksum differs")
    (_, version, open_number, salt, number, first_lsn, durable_lsn, previous_number, cut_lsn, chain,
     checkpoint_lsn, checkpoint_nbytes, xxh3_128, segment_nbytes) = _HEADER.unpack_from(raw)  # fmt: skip
    if version > _MAX_VERSION:  # a slot's header, whose magic begins like ours
        raise CorruptFormat("no log segment header here")
    if version > VERSION:
        raise NewerFormat(f"written in log format {version}; this tieredkv knows formats up to {VERSION}")
    if not HEADER_NBYTES <= segment_nbytes <= MAX_SEGMENT_NBYTES:
        raise CorruptFormat(f"a segment of {segment_nbytes} bytes cannot be")
    return SegmentHeader(
        number, first_lsn, durable_lsn, open_number, LogPosition(previous_number, cut_lsn, chain),
        CheckpointRef(checkpoint_lsn, checkpoint_nbytes, xxh3_128), segment_nbytes, salt, checksum,
    )  # fmt: skip


def frame_nbytes(runs: Sequence[Run]) -> int:
    """Bytes that a frame of `runs` takes in a segment."""
    return FRAME_HEADER_NBYTES + runs_nbytes(runs)


def encode_frame(
    header: SegmentHeader, previous: int, first_lsn: int, durable_lsn: int, runs: Sequence[Run]
) -> tuple[bytearray, int]:
    """One frame of the segment with `header`, and its checksum, which is the next frame's `previous`."""
    raw = bytearray(frame_nbytes(runs))
    view = memoryview(raw)
    encode_runs(runs, view[FRAME_HEADER_NBYTES:])
    body_nbytes, num_records = len(raw) - FRAME_HEADER_NBYTES, sum(map(len, runs))
    _FRAME.pack_into(raw, 0, 0, header.marker, previous, first_lsn, durable_lsn, body_nbytes, num_records)
    checksum = xxhash.xxh3_64_intdigest(view[_CHECKSUM.size :], header.seed)
    _CHECKSUM.pack_into(raw, 0, checksum)
    return raw, checksum


def decode_frame(header: SegmentHeader, raw: memoryview, at: int = 0) -> Frame | None:
    """The frame that lies in `raw` at byte `at`, None if no whole one is there that verifies."""
    body_at = at + FRAME_HEADER_NBYTES
    if len(raw) < body_at:
        return None
    checksum, marker, previous, first_lsn, durable_lsn, nbytes, num_records = _FRAME.unpack_from(raw, at)
    end = body_at + nbytes
    if marker != header.marker or end > len(raw) or nbytes % FRAME_ALIGN:
        return None
    if xxhash.xxh3_64_intdigest(raw[at + _CHECKSUM.size : end], header.seed) != checksum:
        return None
    return Frame(checksum, previous, first_lsn, durable_lsn, num_records, raw[body_at:end])


def decode_frames(header: SegmentHeader, raw: memoryview, previous: int, first_lsn: int) -> list[Frame]:
    """All frames at the beginning of `raw` that verify and continue the chain: after `previous`, with `first_lsn`."""
    frames: list[Frame] = []
    at = 0
    while frame := decode_frame(header, raw, at):
        if frame.previous != previous or frame.first_lsn != first_lsn:
            break
        frames.append(frame)
        previous, first_lsn = frame.checksum, first_lsn + frame.num_records
        at += FRAME_HEADER_NBYTES + len(frame.body)
    return frames


def claimed_nbytes(header: SegmentHeader, raw: memoryview) -> int:
    """How long the frame that `raw` begins with says it is, 0 if there is none; nothing is verified."""
    if len(raw) < FRAME_HEADER_NBYTES:
        return 0
    _, marker, _, _, _, nbytes, _ = _FRAME.unpack_from(raw)
    return FRAME_HEADER_NBYTES + int(nbytes) if marker == header.marker else 0
