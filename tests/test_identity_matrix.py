"""P2 through the whole cache: what changes the meaning of KV is a clean miss that names the field."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from core_helpers import MIXED, SIZE, group_of, kv_of, load_checked, memory_only_disk, opened, prompt, store

from tieredkv import TOKENS, BlockLayout, Identity, LayerGroup, Reason, TensorSpec

BASE = Identity(
    weights="11" * 32,
    dtypes={"kv": "int32"},
    config={"rope_scaling": {"rope_type": "linear", "factor": 1.0}, "num_layers": 3},
    adapters={},
    framework={"layer": "DynamicLayer"},
    tp=(0, 1),
    salt="",
)


def halves(kind: str) -> BlockLayout:
    """As `MIXED`, its tensors of another dtype with the same item size."""
    groups = tuple(
        LayerGroup(g.kind, tuple(dataclasses.replace(t, dtype=kind) for t in g.tensors), g.window)
        for g in MIXED.groups
    )
    return BlockLayout(SIZE, groups)


CASES: dict[str, tuple[dict[str, Any], BlockLayout, str]] = {
    "weights": ({"weights": "12" * 32}, MIXED, "weights"),
    "dtype": ({"dtypes": {"kv": "float32"}}, MIXED, "dtypes.kv"),
    "dtype of the tensors": ({}, halves("float32"), "layout.groups"),
    "rope scaling": (
        {"config": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "num_layers": 3}},
        MIXED,
        "config.rope_scaling.factor",
    ),
    "a field that we do not know": ({"config": {**BASE.config, "new": 1}}, MIXED, "config.new"),
    "window": (
        {},
        BlockLayout(SIZE, (MIXED.groups[0], group_of("window", [2], window=56))),
        "layout.groups",
    ),
    "adapter": ({"adapters": {"style": "aa"}}, MIXED, "adapters.style"),
    "tenant": ({"salt": "tenant"}, MIXED, "salt"),
    "tensor parallel": ({"tp": (0, 2)}, MIXED, "tp"),
    "rank": ({"tp": (1, 2)}, MIXED, "tp"),
    "framework": ({"framework": {"layer": "StaticLayer"}}, MIXED, "framework.layer"),
    "order of tensors": (
        {},
        BlockLayout(
            SIZE,
            (
                LayerGroup("full", tuple(reversed(MIXED.groups[0].tensors))),
                MIXED.groups[1],
            ),
        ),
        "layout.groups",
    ),
}


@pytest.mark.parametrize(("change", "layout", "field"), CASES.values(), ids=CASES)
def test_each_field_alone_is_a_miss_that_names_it(
    tmp_path: Path, change: dict[str, Any], layout: BlockLayout, field: str
) -> None:
    """B12, B13, B15, B16, B17, B22: in every tier, and after a restart."""
    tokens = prompt(1)
    with opened(tmp_path) as kv:
        mine = kv.namespace(BASE, MIXED)
        assert store(mine, tokens).wait(60)
        for _ in ("memory", "disk"):
            other = kv.namespace(dataclasses.replace(BASE, **change), layout)
            found = other.lookup(tokens)
            assert (found.num_tokens, found.reason) == (0, Reason.IDENTITY)
            names = found.detail.split(", ")
            assert field in names and all(n.startswith(field.split(".")[0]) for n in names)
            with other.load(tokens) as prefix:
                assert prefix.num_tokens == 0 and prefix.reason is Reason.IDENTITY
            memory_only_disk(kv)
    with opened(tmp_path) as kv:
        other = kv.namespace(dataclasses.replace(BASE, **change), layout)
        assert other.lookup(tokens).reason is Reason.IDENTITY
        assert load_checked(kv.namespace(BASE, MIXED), tokens) == (320, Reason.COMPLETE)
        if "float32" not in str(layout.describe()):
            store(other, tokens)
            assert load_checked(other, tokens)[0] == 320
        assert load_checked(kv.namespace(BASE, MIXED), tokens)[0] == 320
        kv.check()


def test_the_same_identity_built_anew_is_a_hit(tmp_path: Path) -> None:
    with opened(tmp_path) as kv:
        store(kv.namespace(BASE, MIXED), prompt(1)).wait(60)
    again = Identity(
        weights="11" * 32,
        dtypes={"kv": "int32"},
        config={"num_layers": 3, "rope_scaling": {"factor": 1.0, "rope_type": "linear"}},
        framework={"layer": "DynamicLayer"},
    )
    with opened(tmp_path) as kv:
        space = kv.namespace(again, BlockLayout.from_description(MIXED.describe()))
        assert load_checked(space, prompt(1)) == (320, Reason.COMPLETE)
        assert kv.stats().num_namespaces == 1


@pytest.mark.parametrize("size", [16, 32, 64])
def test_block_sizes_do_not_share(tmp_path: Path, size: int) -> None:
    layouts = {n: BlockLayout(n, MIXED.groups) for n in (16, 32, 64)}
    with opened(tmp_path, device_nbytes="1MiB") as kv:
        store(kv.namespace(BASE, layouts[16]), prompt(1))
        found = kv.namespace(BASE, layouts[size]).lookup(prompt(1))
        assert found.reason is (Reason.COMPLETE if size == 16 else Reason.IDENTITY)
        assert size == 16 or found.detail == "layout.block_size"


def test_names_of_any_length_and_script(tmp_path: Path) -> None:
    """B38: nothing of an identity becomes a file name."""
    identity = dataclasses.replace(BASE, salt="ü" * 4000, adapters={"名前/../" * 50: "aa"})
    with opened(tmp_path) as kv:
        space = kv.namespace(identity, MIXED)
        store(space, prompt(1)).wait(60)
        kv.session("sitzung/ü 名前 " * 30, space).commit(prompt(1), [])
    with opened(tmp_path) as kv:
        assert load_checked(kv.namespace(identity, MIXED), prompt(1))[0] == 320
        assert len(kv.sessions()) == 1
        assert b"\xc3\xbc" * 100 not in b"".join(p.read_bytes() for p in tmp_path.rglob("*") if p.is_file())


def test_two_models_side_by_side(tmp_path: Path) -> None:
    wide = BlockLayout(SIZE, (LayerGroup("full", (TensorSpec(0, "k", (2, TOKENS, 256), "int32"),)),))
    import torch

    with opened(tmp_path, device_nbytes="1MiB", host_nbytes="1MiB") as kv:
        small_space, wide_space = kv.namespace(BASE, MIXED), kv.namespace(BASE, wide)
        tokens = prompt(1)
        tensor = torch.arange(2 * len(tokens) * 256, dtype=torch.int32).view(2, len(tokens), 256)
        for _ in range(3):
            small_space.store(tokens, kv_of(small_space, tokens), anchors=[320])
            assert wide_space.store(tokens, {0: (tensor,)}).num_refused == 0
            assert load_checked(small_space, tokens)[0] == 320
            with wide_space.load(tokens) as prefix:
                assert torch.equal(prefix.gather(0, "k"), tensor[:, :320])
            memory_only_disk(kv)
        kv.check()
