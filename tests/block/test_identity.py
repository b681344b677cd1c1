"""Identity: a canonical encoding that is fixed for ever, and no two different identities with one digest."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from dataclasses import replace
from typing import Any

import pytest
from core_helpers import FULL, IDENTITY, MIXED, group_of
from hypothesis import given
from hypothesis import strategies as st

from tieredkv import BlockLayout, Identity
from tieredkv.block.identity import differences, encode

BASE = Identity(
    weights="00ff",
    dtypes={"kv": "bfloat16"},
    config={"rope_scaling": {"factor": 2.0, "rope_type": "linear"}, "heads": 4, "bias": None, "tied": True},
    adapters={"style": "abcd"},
    framework={"layer": "DynamicLayer", "shape": [1, 4, -1, 64]},
    tp=(0, 1),
    salt="tenant",
)


def test_golden_encoding() -> None:
    value = {"b": [1, -2, 2.5, None, True, False], "a": {"": b"\x00"}, "ü": "ü"}
    assert encode(value).hex() == (
        "4d7800000000000000530100000000000000614d13000000000000005300000000000000004201000000000000000053"
        "0100000000000000624c2900000000000000490100000000000000314902000000000000002d32440800000000000000"
        "00000000000004404e5446530200000000000000c3bc530200000000000000c3bc"
    )


def test_golden_digest() -> None:
    assert BASE.digest(MIXED).hex() == "736207052cadb364bd669523426d85c79f96d47b5acc3d7c8fe1488ee3c5e20c"


def test_fields_cannot_run_into_each_other() -> None:
    unequal = [
        None, False, True, 0, 1, 1.0, "1", b"1", "", b"", [], {}, [[]], [""], {"": ""}, ["ab"], ["a", "b"],
        [["a"], "b"], [["a", "b"]], {"a": "b"}, [["a", "b"], []], {"ab": ""}, {"a": None}, "a", "ab", -1, "None",
    ]  # fmt: skip
    assert len({encode(value) for value in unequal}) == len(unequal)


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


def typed(value: Any) -> str:
    """Tells apart what == does not: 1, 1.0 and True, 0.0 and -0.0."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{k!r}:{typed(v)}" for k, v in sorted(value.items())) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(typed, value)) + "]"
    return f"{type(value).__name__}:{value!r}"


@given(plain, plain)
def test_encodings_are_equal_only_for_equal_values(one: Any, other: Any) -> None:
    assert (encode(one) == encode(other)) == (typed(one) == typed(other))


@given(st.dictionaries(st.text(max_size=3), plain, max_size=6))
def test_the_order_of_a_mapping_does_not_count(value: dict[str, Any]) -> None:
    assert encode(OrderedDict(reversed(list(value.items())))) == encode(value)


CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"weights": "00fe"}, "weights"),
    ({"dtypes": {"kv": "float16"}}, "dtypes.kv"),
    (
        {"config": {**BASE.config, "rope_scaling": {"factor": 4.0, "rope_type": "linear"}}},
        "config.rope_scaling.factor",
    ),
    ({"config": {**BASE.config, "unknown_to_us": 1}}, "config.unknown_to_us"),
    ({"config": {k: v for k, v in BASE.config.items() if k != "bias"}}, "config.bias"),
    ({"adapters": {}}, "adapters"),
    ({"adapters": {"style": "abce"}}, "adapters.style"),
    ({"framework": {**BASE.framework, "shape": [1, 4, 64, -1]}}, "framework.shape"),
    ({"tp": (0, 2)}, "tp"),
    ({"tp": (1, 1)}, "tp"),
    ({"salt": "other"}, "salt"),
    ({"salt": ""}, "salt"),
    ({"door": "keys"}, "door"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "name"), CHANGES)
def test_each_field_alone_changes_the_digest_and_is_named(change: dict[str, Any], name: str) -> None:
    changed = replace(BASE, **change)
    assert changed.digest(MIXED) != BASE.digest(MIXED)
    found = differences(BASE.fingerprint(), changed.fingerprint())
    assert found and all(n == name or n.startswith(f"{name}.") for n in found), found


def test_the_layout_counts_whole() -> None:
    layouts = [
        MIXED, FULL,
        BlockLayout(32, MIXED.groups),
        BlockLayout(16, (MIXED.groups[0], group_of("window", [2], window=41))),
        BlockLayout(16, MIXED.groups[::-1]),
        BlockLayout(16, (group_of("full", [0, 1]), group_of("window", [2], window=40, width=16))),
    ]  # fmt: skip
    assert len({BASE.digest(layout) for layout in layouts}) == len(layouts)


def test_the_salt_is_never_written_down() -> None:
    told = json.dumps(BASE.fingerprint()) + repr(BASE)
    assert "tenant" not in told
    assert hashlib.sha256(b"tkvsalt1tenant").hexdigest() in told


def test_sets_and_tuples_are_plain_values() -> None:
    one = Identity("aa", config={"ids": {3, 1, 2}, "pair": (1, 2)})
    other = Identity("aa", config={"ids": [1, 2, 3], "pair": [1, 2]})
    assert one.digest(FULL) == other.digest(FULL)


def test_what_is_not_plain_is_refused() -> None:
    with pytest.raises(TypeError):
        encode(object())
    with pytest.raises(TypeError):
        Identity("aa", config={"model": object()}).digest(FULL)


def test_equal_identities_are_equal_everywhere() -> None:
    assert IDENTITY.digest(FULL) == Identity(weights="ab" * 32).digest(
        BlockLayout.from_description(json.loads(json.dumps(FULL.describe())))
    )
