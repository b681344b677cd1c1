"""Runs to bytes and back."""

from __future__ import annotations

import random
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tieredkv.errors import CorruptFormat
from tieredkv.wal import records as r
from tieredkv.wal.records import Run, decode_runs, encode_runs, join_runs, merge_runs, runs_nbytes, split_runs

columns = st.builds(
    lambda kind, raw: Run(
        kind, np.frombuffer((raw * 96)[: len(raw) * r.DTYPES[kind].itemsize], r.DTYPES[kind])
    ),
    st.sampled_from([r.PUT, r.DROP]),
    st.binary(max_size=20),
)
blobs = st.builds(
    lambda kind, raw: Run(kind, tuple(raw)), st.integers(16, 255), st.lists(st.binary(max_size=40))
)


def encode(runs: list[Run]) -> bytearray:
    raw = bytearray(runs_nbytes(runs))
    encode_runs(runs, memoryview(raw))
    return raw


def same(one: Run, other: Run) -> bool:
    if isinstance(one.records, tuple) or isinstance(other.records, tuple):
        return one.kind == other.kind and one.records == other.records
    return one.kind == other.kind and one.records.tobytes() == other.records.tobytes()


@given(st.lists(columns | blobs, max_size=6))
def test_what_was_encoded_is_decoded(runs: list[Run]) -> None:
    raw = encode(runs)
    assert len(raw) % 8 == 0
    decoded = decode_runs(memoryview(raw), sum(map(len, runs)))
    assert len(decoded) == len(runs) and all(map(same, decoded, runs))


def test_record_sizes_are_part_of_the_format() -> None:
    assert {kind: dtype.itemsize for kind, dtype in r.DTYPES.items()} == {r.PUT: 96, r.DROP: 48}
    assert [r.PUT_DTYPE.fields[name][1] for name in r.PUT_DTYPE.names] == [
        0,
        32,
        64,
        68,
        72,
        73,
        74,
        76,
        80,
        88,
    ]  # type: ignore[index, union-attr]
    golden = encode([Run(r.SESSION_END, (b"ab",)), Run(r.DROP, np.frombuffer(b"\1" * 48, r.DROP_DTYPE))])
    assert golden.hex() == (
        "12000000 01000000 0600000000000000 020000006162000002000000 01000000 3000000000000000" + "01" * 48
    ).replace(" ", "")


def test_strided_and_foreign_endian_columns_are_packed_or_refused() -> None:
    rows = np.zeros(10, r.PUT_DTYPE)
    rows["put_seq"] = range(10)
    (run,) = decode_runs(memoryview(encode([Run(r.PUT, rows[::3])])), 4)
    assert run.records["put_seq"].tolist() == [0, 3, 6, 9]  # type: ignore[call-overload]
    with pytest.raises(AssertionError):
        encode([Run(r.PUT, rows.astype(r.PUT_DTYPE.newbyteorder(">")))])
    with pytest.raises(AssertionError):
        encode([Run(r.PUT, (b"blob",))])


def test_runs_of_one_kind_join() -> None:
    parts = [Run(r.DROP, np.full(n, n, np.uint8).repeat(48).view(r.DROP_DTYPE)) for n in (1, 2, 3)]
    packed = [run for part in parts for run in split_runs(memoryview(encode([part])), len(part))]
    joined = join_runs(packed)
    assert len(joined) == 6 and joined.records.tobytes() == b"".join(p.records.tobytes() for p in parts)  # type: ignore[union-attr]
    assert len(joined.after(4)) == 2 and joined.after(0) is joined


def test_runs_of_one_kind_merge_whatever_their_strides() -> None:
    rows = np.zeros(10, r.PUT_DTYPE)
    rows["put_seq"] = range(10)
    merged = merge_runs([Run(r.PUT, rows[5:7]), Run(r.PUT, rows[::4]), Run(r.PUT, rows[:0])])
    assert merged.records["put_seq"].tolist() == [5, 6, 0, 4, 8]  # type: ignore[call-overload]
    alone = Run(r.PUT, rows[2:])
    assert merge_runs([alone]) is alone
    blobs = merge_runs([Run(r.CLOCK, (b"a",)), Run(r.CLOCK, (b"", b"b"))])
    assert blobs.records == (b"a", b"", b"b")


def frame(kind: int, count: int, nbytes: int, body: bytes) -> memoryview:
    return memoryview(struct.pack("<B3xIQ", kind, count, nbytes) + body)


@pytest.mark.parametrize(
    "body",
    [
        memoryview(b"\x01"),
        frame(0, 0, 0, b""),
        frame(4, 0, 0, b""),
        frame(15, 0, 0, b""),
        frame(r.PUT, 2, 96, bytes(96)),
        frame(r.PUT, 1, 96, bytes(95)),
        frame(r.PUT, 2**32 - 1, 2**64 - 1, bytes(8)),
        frame(r.SESSION, 2**32 - 1, 8, bytes(8)),
        frame(r.SESSION, 1, 8, struct.pack("<I", 5) + bytes(4)),
        frame(r.SESSION, 1, 8, struct.pack("<I", 2**32 - 1) + bytes(4)),
        frame(r.SESSION, 1, 8, struct.pack("<I", 3) + bytes(4)),
        frame(r.SESSION, 0, 8, bytes(8)),
        frame(r.SESSION, 2, 8, struct.pack("<I", 2) + bytes(4)),
    ],
)
def test_absurd_lengths_and_kinds_are_corrupt(body: memoryview) -> None:
    with pytest.raises(CorruptFormat):
        decode_runs(body, int.from_bytes(body[4:8], "little"))


def test_a_frame_that_counts_otherwise_is_corrupt() -> None:
    raw = memoryview(encode([Run(r.SESSION, (b"a", b"b"))]))
    for count in (0, 1, 3):
        with pytest.raises(CorruptFormat):
            decode_runs(raw, count)


def test_random_bytes_never_do_worse_than_corrupt() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    valid = bytes(encode([Run(r.SESSION, (b"abc", b"")), Run(r.PUT, np.zeros(2, r.PUT_DTYPE))]))
    for _ in range(3000):
        raw = bytearray(valid)
        for _ in range(rng.randrange(1, 4)):
            raw[rng.randrange(len(raw))] = rng.randrange(256)
        try:
            decode_runs(memoryview(raw[: rng.randrange(len(raw) + 1)]), 4)
        except CorruptFormat:
            continue
