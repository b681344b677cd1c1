"""Speeds are learned from what was measured, noise and all; what is kept of them is believed or forgotten."""

from __future__ import annotations

import json
import os
import random
import struct
from pathlib import Path

import numpy as np
import pytest
import xxhash
from core_helpers import FULL, MIXED, SIZE

from tieredkv.errors import CorruptFormat
from tieredkv.speeds import (
    SPEEDS,
    Key,
    PrefillSpeed,
    RestoreSpeed,
    Sample,
    Speeds,
    decode,
    encode,
    is_worth,
    nbytes_by_tier,
    read_speeds,
    write_speeds,
)
from tieredkv.system import OsFs

KEY = Key("ab" * 32, "cpu, 2 threads")
FIXED, EACH, ATTENTION = 0.06, 0.0011, 6e-8


def true_s(start: int, num_tokens: int) -> float:
    return FIXED + EACH * num_tokens + ATTENTION * num_tokens * (start + num_tokens / 2)


def learned(rng: random.Random, lengths: list[int], slow_share: float = 0.15) -> PrefillSpeed:
    """A machine that is busy now and then: some forwards take four times as long."""
    speed = PrefillSpeed()
    speed.note([Sample(0, 33, 5.0)])  # a first forward, as slow as they are
    for n in lengths:
        noise = (1 + rng.random() * 0.1) * (4 if rng.random() < slow_share else 1)
        speed.note([Sample(0, n, true_s(0, n) * noise)])
    return speed


def test_a_forward_is_foretold_by_its_length_and_its_place() -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    speed = learned(rng, [33, 64, 128, 256, 512, 1024, 2048, 4096] * 3, slow_share=0.0)
    for start, num_tokens in [(0, 100), (0, 1000), (0, 4096), (2000, 500), (0, 8192)]:
        assert speed.seconds(start, num_tokens) == pytest.approx(true_s(start, num_tokens), rel=0.25)


def test_forwards_beside_a_busy_neighbour_move_nothing() -> None:
    speed = PrefillSpeed()
    for n in (64, 256, 1024, 4096):
        for times in (1, 1, 9):
            speed.note([Sample(0, n, true_s(0, n) * times)])
    for n in (64, 1000, 4096):
        assert speed.seconds(0, n) == pytest.approx(true_s(0, n), rel=0.02)


def test_the_first_forward_counts_only_while_there_is_no_other() -> None:
    speed = PrefillSpeed()
    assert speed.seconds(0, 100) is None
    speed.note([Sample(0, 100, 5.0)])
    assert speed.seconds(0, 100) == pytest.approx(5.0) and not speed.samples
    speed.note([Sample(0, 100, 0.1)])
    assert speed.seconds(0, 100) == pytest.approx(0.1)


def test_few_samples_and_far_longer_prompts_decide_nothing() -> None:
    speed = learned(random.Random(0), [100, 100])
    assert not speed.is_sure_of(100)
    speed.note([Sample(0, 100, true_s(0, 100))])
    assert speed.is_sure_of(200) and not speed.is_sure_of(201)
    for _ in range(50):  # many short turns do not push out what is known of long prompts
        speed.note([Sample(5000, 20, 0.1)])
    assert speed.is_sure_of(200)


def test_a_restore_is_foretold_by_its_bytes_and_a_disk_may_change() -> None:
    speed = RestoreSpeed()
    for nbytes in (1e6, 4e6, 2e7, 1e8, 3e6):
        speed.note(int(nbytes), 0.002 + nbytes / 1e9)
    assert speed.fixed_s == pytest.approx(0.002, rel=0.01) and speed.moving_s(5e7) == pytest.approx(
        0.05, rel=0.01
    )
    assert speed.is_sure_of(2e8) and not speed.is_sure_of(2.1e8)
    for nbytes in (2e7, 1e8, 3e6):
        speed.note(int(nbytes), 0.02 + nbytes / 1e8)
    assert speed.fixed_s + speed.moving_s(1e8) > 0.8, "three of the last five decide"
    speed.forget()
    assert not speed.is_sure_of(1)


def test_equal_sizes_are_taken_for_bandwidth() -> None:
    speed = RestoreSpeed((1_000_000, 0.01) for _ in range(4))
    assert speed.fixed_s == 0 and speed.moving_s(2_000_000) == pytest.approx(0.02)


def test_of_a_restore_from_two_tiers_the_slower_takes_what_the_faster_does_not() -> None:
    speeds = Speeds()
    for _ in range(3):
        speeds.note_restore({"device": 1e6}, 0.001)
        speeds.note_restore({"device": 1e6, "disk": 2e6}, 0.021)
    assert speeds.restore_s({"disk": 2e6}) == pytest.approx(0.02)
    assert speeds.restore_s({"device": 1e6, "disk": 1e6}) == pytest.approx(0.011)
    assert speeds.restore_s({"host": 1}) is None


def test_bytes_are_those_that_a_restore_reads() -> None:
    assert nbytes_by_tier(FULL, {"disk": 4 * SIZE}) == {"disk": 4 * FULL.part_nbytes[0]}
    full, window = MIXED.part_nbytes  # 40 tokens are seen: the last three blocks
    assert nbytes_by_tier(MIXED, {"disk": 10 * SIZE}) == {"disk": 10 * full + 3 * window}
    halves = nbytes_by_tier(MIXED, {"device": 5 * SIZE, "disk": 5 * SIZE})
    assert halves["device"] == halves["disk"] == (10 * full + 3 * window) / 2
    assert nbytes_by_tier(FULL, {}) == {}


def test_computing_must_be_clearly_sooner() -> None:
    assert is_worth(0.02, 0.1) and not is_worth(0.009, 0.1) and not is_worth(0.004, 0.005)


# The file


def some() -> Speeds:
    speeds = Speeds(learned(random.Random(1), [33, 500, 2000, 70]), num_passed_by=5)
    for nbytes in (1e6, 2e6, 5e6):
        speeds.note_restore({"disk": nbytes}, nbytes / 1e9)
    return speeds


def test_what_is_kept_foretells_the_same(tmp_path: Path) -> None:
    fs, store = OsFs(), str(tmp_path)
    assert read_speeds(fs, store) == {}
    write_speeds(fs, store, encode({KEY: some()}))
    write_speeds(fs, store, encode({KEY: some()}))
    assert os.stat(tmp_path / SPEEDS).st_mode & 0o777 == 0o600 and os.listdir(tmp_path) == [SPEEDS]
    (key, known), want = *read_speeds(fs, store).items(), some()
    assert key == KEY and known.num_passed_by == 5
    assert known.prefill.seconds(10, 400) == pytest.approx(want.prefill.seconds(10, 400))
    assert known.restore_s({"disk": 3e6}) == pytest.approx(want.restore_s({"disk": 3e6}))


def test_only_the_last_few_are_kept() -> None:
    known = decode(encode({Key(f"{n:064x}", "cpu"): some() for n in range(50)}))
    assert len(encode(known)) < 32 << 10 and f"{49:064x}" in {key.namespace for key in known}


def test_any_flipped_byte_and_any_cut_is_noticed() -> None:
    raw = encode({KEY: some()})
    for at in range(len(raw)):
        bad = bytearray(raw)
        bad[at] ^= 0x10
        for damaged in (bytes(bad), raw[:at]):
            with pytest.raises(CorruptFormat):
                decode(damaged)


@pytest.mark.parametrize(
    "rows",
    [
        5, [5], [["a", "b", {}]], [["a", "b", {"prefill": [[0, 0, 1]], "restores": {}, "passed_by": 0}]],
        [["a", "b", {"prefill": [[0, 5, -1]], "restores": {}, "passed_by": 0}]],
        [["a", "b", {"prefill": [[0, 5, 1e999]], "restores": {}, "passed_by": 0}]],
        [["a", "b", {"prefill": [], "restores": {"disk": [[1, 2, 3]]}, "passed_by": 0}]],
        [["a", "b", {"prefill": [], "restores": {"disk": [["x", 3]]}, "passed_by": 0}]],
        [["a", "b", {"prefill": [], "restores": [], "passed_by": 0}]],
        [["a", "b", {"prefill": [[]], "restores": {}, "passed_by": 0}]],
    ],
)  # fmt: skip
def test_a_body_that_makes_no_sense_is_damage_too(rows: object) -> None:
    body = json.dumps(rows).encode()
    good = encode({})
    raw = good[:12] + struct.pack("<I", len(body)) + xxhash.xxh3_128_digest(body) + body
    with pytest.raises(CorruptFormat):
        decode(raw)


def test_the_share_of_each_term_is_never_negative() -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    speed = PrefillSpeed()
    for _ in range(40):  # nothing that any machine would do
        speed.note(
            [Sample(int(rng.integers(0, 9999)), int(rng.integers(2, 9999)), float(rng.random() + 1e-5))]
        )
        assert (
            (speed.seconds(0, 10) or 0.0)
            <= (speed.seconds(0, 100) or 0.0)
            <= (speed.seconds(500, 5000) or 0.0)
        )
