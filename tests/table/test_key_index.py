"""The hash index against a dict, with keys as short as tests can make them."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tieredkv.table import key_index
from tieredkv.table.key_index import KeyIndex, as_slice, key_words


def digests_of(numbers: list[int], spread: int) -> np.ndarray:
    """Digests whose keys crowd together when `spread` is small."""
    raw = np.zeros((len(numbers), 32), dtype=np.uint8)
    for at, number in enumerate(numbers):
        raw[at, :8] = np.frombuffer((number % spread).to_bytes(8, "little"), dtype=np.uint8)
        raw[at, 8:16] = np.frombuffer(number.to_bytes(8, "little"), dtype=np.uint8)
    return raw


class Model:
    """An index beside the dict that it should be."""

    def __init__(self, spread: int) -> None:
        self.index = KeyIndex()
        self.spread = spread
        self.column = np.zeros((4096, 32), dtype=np.uint8)
        self.keys = self.column.view("<u8")
        self.rows: dict[int, int] = {}
        self.free = list(range(4096))

    def insert(self, numbers: list[int]) -> None:
        fresh = [n for n in dict.fromkeys(numbers) if n not in self.rows][: len(self.free)]
        rows = np.array([self.free.pop() for _ in fresh], dtype=np.int32)
        self.column[rows] = digests_of(fresh, self.spread)
        self.index.insert(rows, self.keys)
        self.rows.update(zip(fresh, rows.tolist(), strict=True))

    def remove(self, numbers: list[int]) -> None:
        gone = [n for n in dict.fromkeys(numbers) if n in self.rows]
        rows = np.array([self.rows.pop(n) for n in gone], dtype=np.int32)
        self.index.remove(rows, self.keys)
        self.free.extend(rows.tolist())

    def check(self, numbers: list[int]) -> None:
        digests = digests_of(numbers, self.spread)
        expected = [self.rows.get(n, -1) for n in numbers]
        assert self.index.find(key_words(digests), self.keys).tolist() == expected
        assert len(self.index) == len(self.rows)


@pytest.mark.parametrize("spread", [1, 7, 1 << 40])
@settings(max_examples=30)
@given(steps=st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 300), max_size=40)), max_size=25))
def test_it_is_a_dict(spread: int, steps: list[tuple[bool, list[int]]]) -> None:
    model = Model(spread)
    for insert, numbers in steps:
        (model.insert if insert else model.remove)(numbers)
        model.check(list(range(0, 301, 3)))


def test_it_stays_right_and_small_through_many_changes() -> None:
    rng = random.Random(3)
    model = Model(1 << 40)
    for _ in range(200):
        model.insert([rng.randrange(6000) for _ in range(100)])
        model.remove([rng.randrange(6000) for _ in range(140)])
    model.check(list(range(6000)))
    assert model.index.nbytes <= 4 * 4 * 4096, "tombstones pile up"


def test_masked_keys_find_the_first_of_their_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_index, "KEY_MASKS", (np.uint64(0xFF), np.uint64(0)))
    model = Model(1 << 40)
    model.insert([5])
    found = model.index.find(key_words(digests_of([5, 5 + 256, 6], 1 << 40)), model.keys)
    assert found[0] == found[1] == model.rows[5] and found[2] == -1


@given(st.lists(st.integers(0, 9), max_size=6))
@settings(max_examples=200, deadline=None)
def test_rows_as_a_slice_are_the_same_rows(numbers: list[int]) -> None:
    rows = np.array(numbers, dtype=np.int32)
    at = as_slice(rows)
    assert np.array_equal(np.arange(10)[at], numbers)
    assert isinstance(at, slice) == (
        numbers != [] and numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    )
