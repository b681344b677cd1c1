from __future__ import annotations

import random

import numpy as np
import pytest
import xxhash

from tieredkv.errors import CorruptFormat
from tieredkv.tier.base import Verdict
from tieredkv.tier.slab_format import (
    MAX_TOKENS,
    SLOT_HEADER_NBYTES,
    SlotHeader,
    checksums_of,
    decode,
    encode_into,
    expected_of,
    judge,
    matches,
    new_headers,
    parse_slab_name,
    seal,
    slab_name,
    valid,
)


def header(**changes: object) -> SlotHeader:
    fields: dict[str, object] = {
        "namespace": bytes(range(32)),
        "digest": bytes(range(32, 64)),
        "parent": bytes(32),
        "group": 3,
        "depth": 70_000,
        "flags": 1,
        "tokens": tuple(range(-2, 30)),
        "payload_nbytes": 1 << 40,
        "checksum": (1 << 64) - 1,
        "put_seq": 1 << 63,
    }
    return SlotHeader(**{**fields, **changes})  # type: ignore[arg-type]


def encoded(**changes: object) -> bytearray:
    buffer = bytearray(SLOT_HEADER_NBYTES + 8)
    encode_into(buffer, header(**changes))
    return buffer


@pytest.mark.parametrize("tokens", [(), (7,), tuple(range(MAX_TOKENS))])
def test_a_header_comes_back_whole(tokens: tuple[int, ...]) -> None:
    assert decode(encoded(tokens=tokens)) == header(tokens=tokens)


def test_the_bytes_of_version_1_never_change() -> None:
    buffer = encoded()
    assert bytes(buffer[:16]) == b"tieredkv slot\r\n\x1a"
    assert buffer[16:64].hex() == (
        "0100000000002000030100007011010000000000000100000000000000000080ffffffffffffffff0000000000000000"
    )
    assert xxhash.xxh3_64_hexdigest(bytes(buffer[:SLOT_HEADER_NBYTES])) == "807c180993b2b9ec"


def test_any_flipped_bit_is_seen() -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    chance = random.Random(seed)
    buffer = encoded()
    for byte in range(SLOT_HEADER_NBYTES):
        flip = 1 << chance.randrange(8)
        buffer[byte] ^= flip
        with pytest.raises(CorruptFormat):
            decode(buffer)
        buffer[byte] ^= flip
    assert decode(buffer) == header()


def test_foreign_newer_and_damaged_headers_are_told_apart() -> None:
    with pytest.raises(CorruptFormat, match="not a slot header"):
        decode(bytes(SLOT_HEADER_NBYTES))
    with pytest.raises(CorruptFormat, match="4096 bytes, here are 12"):
        decode(b"tieredkv slo")
    headers = new_headers(1)
    headers["version"] = 9
    seal(headers)
    with pytest.raises(CorruptFormat, match="version 9"):
        decode(headers.tobytes())
    headers["version"] = 8
    with pytest.raises(CorruptFormat, match="damaged"):
        decode(headers.tobytes())


def test_the_batch_form_agrees_with_the_single_form() -> None:
    headers = new_headers(6)
    headers["digest"] = np.arange(6)[:, None]
    headers["put_seq"] = np.arange(6)
    seal(headers)
    headers["tokens"][1, 500] ^= 1
    headers["magic"][2, 0] ^= 1
    headers["header_checksum"][3] ^= 1
    headers["num_tokens"][4] = MAX_TOKENS + 1
    seal(headers[4:5])
    assert valid(headers).tolist() == [True, False, False, False, False, True]
    assert decode(headers[5].tobytes()).digest == bytes([5]) * 32
    assert valid(new_headers(0)).tolist() == [] and headers.ctypes.data % SLOT_HEADER_NBYTES == 0


def test_a_match_needs_every_field() -> None:
    headers = new_headers(5)
    expected = expected_of(headers)
    expected["namespace"][1, 31] = 1
    expected["digest"][2, 0] = 1
    expected["group"][3] = 1
    expected["put_seq"][4] = 1
    assert matches(headers, expected).tolist() == [True, False, False, False, False]


def test_checksums_are_compared_to_the_last_bit() -> None:
    payloads = [bytes([n]) * 64 for n in range(40)]  # some checksums above 2**63, some below
    headers = new_headers(40)
    headers["checksum"] = checksums_of(payloads)
    headers["payload_nbytes"] = 64
    seal(headers)
    assert headers["checksum"].tolist() == [xxhash.xxh3_64_intdigest(payload) for payload in payloads]
    expected = expected_of(headers)
    assert judge(headers, expected, checksums_of(payloads), 64) == [Verdict.OK] * 40
    expected["checksum"] ^= np.uint64(1)
    assert judge(headers, expected, checksums_of(payloads), 64) == [Verdict.CORRUPT] * 40
    headers["header_checksum"] ^= np.uint64(1)
    assert not valid(headers).any()


def test_slab_names() -> None:
    assert slab_name(2097152, 0) == "2097152-000.slab" and slab_name(4096, 1234) == "4096-1234.slab"
    for name in ("2097152-000.slab", "4096-1234.slab"):
        place = parse_slab_name(name)
        assert place is not None and slab_name(*place) == name
    for name in (
        "4096-00.slab",
        "04096-000.slab",
        "4096-0001.slab",
        "4096-000.slab.tmp",
        "x-000.slab",
        "LOCK",
    ):
        assert parse_slab_name(name) is None
