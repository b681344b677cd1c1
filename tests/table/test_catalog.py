"""Namespaces and sessions as records: delta upon delta gives the tokens that were said."""

from __future__ import annotations

import random

import numpy as np
import pytest
from core_helpers import IDENTITY, MIXED

from tieredkv.errors import CorruptFormat
from tieredkv.table.catalog import Catalog, NamespaceRow, SessionRow, Turn, to_record
from tieredkv.wal.records import CLOCK, NAMESPACE, REMOVAL, REMOVED, SESSION, SESSION_END, Run


def namespace(number: int = 1) -> NamespaceRow:
    return NamespaceRow(number, bytes([number]) * 32, IDENTITY.fingerprint(), MIXED)


def tokens(*ids: int) -> np.ndarray:
    return np.array(ids, dtype=np.int32)


def same(one: SessionRow, other: SessionRow) -> bool:
    return one.tokens.tolist() == other.tokens.tolist() and one.encode() == other.encode()


def test_a_namespace_row_comes_back() -> None:
    catalog = Catalog()
    catalog.apply(Run(NAMESPACE, (namespace().encode(),)))
    row = catalog.namespaces[1]
    assert (row.digest, row.layout, dict(row.fingerprint)) == (bytes([1]) * 32, MIXED, IDENTITY.fingerprint())
    assert catalog.by_digest(bytes([1]) * 32) is row and catalog.by_digest(b"") is None


def test_random_edits_arrive_whole_and_small() -> None:
    rng = random.Random(5)
    catalog, row = Catalog(), SessionRow("a/1", 1, tokens())
    for number in range(200):
        keep = rng.randrange(len(row.tokens) + 1) if rng.random() < 0.3 else len(row.tokens)
        said = [rng.randrange(1 << 31) for _ in range(rng.randrange(20))]
        after = SessionRow(
            "a/1", 1, np.concatenate((row.tokens[:keep], tokens(*said))), (Turn("user", keep),), (16,),
            {"n": number, "ü": [1, None]}, number % 2 == 0, float(number),
        )  # fmt: skip
        known = catalog.sessions.get("a/1")
        record = after.encode(known)
        catalog.apply(Run(SESSION, (record,)))
        assert same(catalog.sessions["a/1"], after) and catalog.sessions["a/1"] == catalog.sessions["a/1"]
        assert len(record) < 300 + 4 * 20, "a delta carries what is new"
        row = after
    copy = Catalog()
    copy.restore(catalog.snapshot())
    assert same(copy.sessions["a/1"], row)


def test_another_namespace_under_a_name_starts_anew() -> None:
    catalog = Catalog()
    catalog.apply(Run(SESSION, (SessionRow("a", 1, tokens(1, 2, 3)).encode(),)))
    known = catalog.sessions["a"]
    catalog.apply(Run(SESSION, (SessionRow("a", 2, tokens(1, 2)).encode(known),)))
    assert catalog.sessions["a"].tokens.tolist() == [1, 2] and catalog.sessions["a"].namespace == 2


def test_a_delta_to_tokens_that_are_not_there_is_corrupt() -> None:
    before = SessionRow("a", 1, tokens(1, 2, 3))
    record = SessionRow("a", 1, tokens(1, 2, 3, 4)).encode(before)
    with pytest.raises(CorruptFormat):
        Catalog().apply(Run(SESSION, (record,)))


def test_removals_and_ends() -> None:
    catalog = Catalog()
    catalog.apply(Run(NAMESPACE, (namespace(1).encode(), namespace(2).encode())))
    rows = tuple(
        SessionRow(name, number, tokens(7)).encode() for name, number in [("a", 1), ("b", 1), ("c", 2)]
    )
    catalog.apply(Run(SESSION, rows))
    catalog.apply(Run(SESSION_END, (to_record({"name": "b"}), to_record({"name": "nobody"}))))
    assert sorted(catalog.sessions) == ["a", "c"]
    catalog.apply(Run(REMOVAL, (to_record({"namespace": 1}),)))
    assert sorted(catalog.sessions) == ["c"] and sorted(catalog.namespaces) == [2]
    copy = Catalog()
    copy.restore(catalog.snapshot())
    assert copy.removals == [{"namespace": 1}], "an unfinished removal survives a checkpoint"
    copy.apply(Run(REMOVED, (to_record({}),)))
    assert copy.removals == []
    copy.apply(Run(REMOVAL, (to_record({"sessions": ["c", "nobody"]}),)))
    assert not copy.sessions


def test_the_clock_never_goes_back() -> None:
    catalog = Catalog()
    for seconds in (5.0, 3.0):
        catalog.apply(Run(CLOCK, (to_record({"clock_s": seconds, "wall_s": 1.0}),)))
    assert catalog.clock_s == 5.0


def test_a_fork_is_a_small_record_that_shares_the_tokens() -> None:
    said = np.arange(16_384, dtype=np.int32)
    turns = tuple(Turn("user", end) for end in range(100, 10_000, 100))
    one = SessionRow("one", 1, said, turns, (16,), {"k": list(range(500))}, True, 2, 5.0, 9.0)
    catalog = Catalog()
    catalog.apply(Run(SESSION, (one.encode(),)))
    fork = SessionRow("two", 1, said, turns, (16,), one.meta, False, 2, 0.0, 10.0)
    record = fork.encode(catalog.sessions["one"])
    assert len(record) < 200
    catalog.apply(Run(SESSION, (record,)))
    assert same(catalog.sessions["two"], fork) and same(catalog.sessions["one"], one)
    assert np.shares_memory(catalog.sessions["two"].tokens, catalog.sessions["one"].tokens)
    for missing in ("one", "two"):
        with pytest.raises(CorruptFormat):
            Catalog().apply(Run(SESSION, (SessionRow(missing, 1, said).encode(one),)))
