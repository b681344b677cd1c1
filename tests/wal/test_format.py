"""Header pages and frames, as bytes."""

from __future__ import annotations

import dataclasses
import struct

import numpy as np
import pytest
import xxhash

from tieredkv.errors import CorruptFormat, NewerFormat
from tieredkv.wal import CheckpointRef, LogPosition, Run, SegmentHeader, segment_name
from tieredkv.wal import records as r
from tieredkv.wal.format import (
    FRAME_HEADER_NBYTES,
    HEADER_NBYTES,
    claimed_nbytes,
    decode_frame,
    decode_frames,
    decode_header,
    encode_frame,
    encode_header,
    frame_nbytes,
    parse_segment_name,
)

HEADER = SegmentHeader(
    number=7,
    first_lsn=100,
    durable_lsn=90,
    open_number=3,
    previous=LogPosition(6, 99, 0xDEAD),
    checkpoint=CheckpointRef(50, 4096, bytes(range(16))),
    segment_nbytes=1 << 20,
    salt=bytes(range(16, 32)),
)


def resealed(raw: bytes, **at: bytes) -> bytes:
    """`raw` with some bytes replaced (`b12=...`) and a checksum that fits again."""
    page = bytearray(raw)
    for place, new in at.items():
        start = int(place[1:])
        page[start : start + len(new)] = new
    page[4088:] = struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(page[:4088])))
    return bytes(page)


def test_a_header_comes_back() -> None:
    raw = encode_header(HEADER)
    assert len(raw) == HEADER_NBYTES
    found = decode_header(raw)
    assert dataclasses.replace(found, checksum=0) == HEADER
    assert found.checksum == struct.unpack("<Q", raw[4088:])[0]
    assert encode_header(found) == raw


def test_the_header_layout_is_fixed() -> None:
    raw = encode_header(HEADER)
    assert raw[:16] == b"tieredkv" + struct.pack("<II", 1, 3)
    assert raw[16:32] == HEADER.salt
    assert struct.unpack_from("<6Q", raw, 32) == (7, 100, 90, 6, 99, 0xDEAD)
    assert raw[80:120] == struct.pack("<QQ16sQ", 50, 4096, bytes(range(16)), 1 << 20)
    assert not any(raw[120:4088])


def test_every_flipped_bit_of_a_header_is_seen() -> None:
    raw = encode_header(HEADER)
    for at in range(HEADER_NBYTES):
        damaged = bytearray(raw)
        damaged[at] ^= 1 << (at % 8)
        with pytest.raises(CorruptFormat):
            decode_header(bytes(damaged))


def test_newer_is_believed_only_when_it_verifies() -> None:
    raw = encode_header(HEADER)
    with pytest.raises(NewerFormat, match="format 2"):
        decode_header(resealed(raw, b8=struct.pack("<I", 2)))
    unsealed = bytearray(raw)
    unsealed[8] = 2
    with pytest.raises(CorruptFormat):
        decode_header(bytes(unsealed))


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        bytes(HEADER_NBYTES),
        encode_header(HEADER)[:-1],
        resealed(encode_header(HEADER), b0=b"another!"),
        resealed(encode_header(HEADER), b112=struct.pack("<Q", 2**63)),
        resealed(encode_header(HEADER), b112=struct.pack("<Q", 100)),
    ],
)
def test_what_is_no_header_is_corrupt(raw: bytes) -> None:
    with pytest.raises(CorruptFormat):
        decode_header(raw)


def test_salts_are_random() -> None:
    fields = {f.name: getattr(HEADER, f.name) for f in dataclasses.fields(HEADER) if f.name != "salt"}
    one, other = SegmentHeader(**fields), SegmentHeader(**fields)
    assert one.salt != other.salt and len(one.salt) == 16


def test_names() -> None:
    assert segment_name(1) == "0000000001.wal" and parse_segment_name("0000000001.wal") == 1
    assert parse_segment_name(segment_name(10**11)) == 10**11
    for name in ("1.wal", "0000000001.wal.tmp", "x0000000001.wal", "0000000001.wa", "9" * 40 + ".wal"):
        assert parse_segment_name(name) is None


RUNS = (Run(r.SESSION, (b"hello", b"")), Run(r.PUT, np.zeros(2, r.PUT_DTYPE)))


def test_a_frame_comes_back_and_every_flipped_bit_of_it_is_seen() -> None:
    raw, checksum = encode_frame(HEADER, 0xBEEF, 100, 99, RUNS)
    assert len(raw) == frame_nbytes(RUNS) and len(raw) % 8 == 0
    frame = decode_frame(HEADER, memoryview(raw + b"more"))
    assert frame is not None and frame[:5] == (checksum, 0xBEEF, 100, 99, 4)
    assert (frame.last_lsn, frame.nbytes) == (103, len(raw)) and frame.body == raw[FRAME_HEADER_NBYTES:]
    for bit in range(len(raw) * 8):
        damaged = bytearray(raw)
        damaged[bit // 8] ^= 1 << (bit % 8)
        assert decode_frame(HEADER, memoryview(damaged)) is None, f"bit {bit}"


def test_a_frame_of_another_salt_is_none_of_ours() -> None:
    raw, _ = encode_frame(HEADER, 0, 100, 99, RUNS)
    for salt in (bytes(8) + HEADER.salt[8:], HEADER.salt[:8] + bytes(8)):
        assert decode_frame(dataclasses.replace(HEADER, salt=salt), memoryview(raw)) is None


def test_a_length_beyond_what_is_there_is_refused_before_it_is_used() -> None:
    raw, _ = encode_frame(HEADER, 0, 100, 99, RUNS)
    assert claimed_nbytes(HEADER, memoryview(raw)[:48]) == len(raw)
    assert decode_frame(HEADER, memoryview(raw)[:-1]) is None
    assert (
        decode_frame(HEADER, memoryview(raw)[:47]) is None
        and claimed_nbytes(HEADER, memoryview(raw)[:47]) == 0
    )
    for nbytes in (2**32 - 8, 2**31, len(raw) + 1):
        struct.pack_into("<I", raw, 40, nbytes)
        assert decode_frame(HEADER, memoryview(raw)) is None
    raw[8] ^= 1
    assert claimed_nbytes(HEADER, memoryview(raw)) == 0


def test_an_empty_frame_carries_the_durable_lsn_alone() -> None:
    raw, _ = encode_frame(HEADER, 0, 105, 104, ())
    assert len(raw) == FRAME_HEADER_NBYTES
    frame = decode_frame(HEADER, memoryview(raw))
    assert frame is not None and (frame.num_records, frame.last_lsn, frame.durable_lsn) == (0, 104, 104)


def test_frames_are_read_up_to_the_first_that_does_not_continue_the_chain() -> None:
    """One cut short, one of another chain and one that skips an LSN end the list; what is before them counts."""
    records = np.zeros(3, r.PUT_DTYPE)
    first, one = encode_frame(HEADER, 7, 100, 90, [Run(r.PUT, records)])
    second, two = encode_frame(HEADER, one, 103, 102, [])
    third, three = encode_frame(HEADER, two, 103, 102, [Run(r.PUT, records[:1])])
    foreign, _ = encode_frame(HEADER, three + 1, 104, 102, [Run(r.PUT, records[:1])])
    skipping, _ = encode_frame(HEADER, three, 105, 102, [Run(r.PUT, records[:1])])
    for behind in (b"", foreign, skipping, third[:-8], bytes(4096)):
        raw = memoryview(bytes(first + second + third + behind))
        found = decode_frames(HEADER, raw, 7, 100)
        assert [frame.checksum for frame in found] == [one, two, three], bytes(behind[:16])
        assert [frame.num_records for frame in found] == [3, 0, 1]
    assert decode_frames(HEADER, raw, 8, 100) == [] == decode_frames(HEADER, raw, 7, 99)
