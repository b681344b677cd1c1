"""Public reports of wrong bytes and of another's KV: the same kinds of trouble, made here."""

from __future__ import annotations

import dataclasses
import hashlib
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from core_helpers import (
    IDENTITY,
    LAYOUTS,
    MIXED,
    SIZE,
    Gate,
    HookedFs,
    comes_true,
    load_checked,
    memory_only_disk,
    opened,
    prompt,
    quiet,
    store,
)

from tieredkv import TOKENS, BlockLayout, LayerGroup, Reason, TensorSpec
from tieredkv.audit.report import fsck
from tieredkv.block import identity
from tieredkv.block.hashing import chain
from tieredkv.outcomes import Tier

SLOT_NBYTES = 8192
"""A header and a part of `MIXED`, whose groups share one slab."""


def slow_slabs() -> tuple[Gate, HookedFs]:
    gate = Gate()
    fs = HookedFs(lambda op, path: gate.pass_through() if op == "pwritev" and "slabs" in path else None)
    return gate, fs


def test_a_block_is_on_disk_only_once_all_of_it_is(tmp_path: Path) -> None:
    """While its payload is being written it is read from memory, and nobody finds it on disk."""
    gate, fs = slow_slabs()
    with opened(tmp_path, fs=fs, device_nbytes="1MiB") as kv:
        space = kv.namespace(IDENTITY, MIXED)
        gate.shut()
        stored = store(space, prompt(0))
        assert comes_true(lambda: gate.num_waited > 0) and not stored.wait(0.05)
        assert space.lookup(prompt(0)).by_tier == {"device": 320} and fsck(tmp_path).num_parts == 0
        assert load_checked(space, prompt(0)) == (320, Reason.COMPLETE)
        gate.open()
        assert stored.wait(60)
        memory_only_disk(kv)
        assert load_checked(space, prompt(0)) == (320, Reason.COMPLETE)


@pytest.mark.parametrize("bad", [None, 0, 7, 19])
def test_a_pool_too_small_for_a_load_gives_no_byte_that_was_there_before(
    tmp_path: Path, bad: int | None
) -> None:
    """Room for five blocks of twenty, all of it poisoned; also with one part of them damaged."""
    with opened(tmp_path, device_nbytes="20KiB", host_nbytes=0) as kv:
        space = kv.namespace(IDENTITY, LAYOUTS["full"])
        assert store(space, prompt(0)).wait(60)
        memory_only_disk(kv)
        kv._memories[Tier.DEVICE].buffer.fill_(0xA5)
        if bad is not None:
            damage(kv, tmp_path, space, bad, 0)
        assert load_checked(space, prompt(0))[0] == (320 if bad is None else bad * SIZE)
        assert kv.stats().num_pins == 0 and not kv._table.uses.any()
        quiet(kv)
        kv.check()


def damage(kv: Any, path: Path, space: Any, block: int, group: int) -> None:
    """Change one byte of a part's payload on disk."""
    slot = int(kv._table.slot[Tier.DISK, group, kv._table.find(space.chain(prompt(0)))[block]])
    (slab,) = (path / "slabs").glob("*.slab")
    with open(slab, "r+b") as file:
        file.seek(slot * SLOT_NBYTES + 4096 + 9)
        file.write(b"\xa5\x5a\xa5\x5a")


@pytest.mark.parametrize(("block", "group"), [(19, 1), (18, 1), (19, 0), (3, 0)])
def test_a_block_that_lost_one_of_its_parts_is_not_used(tmp_path: Path, block: int, group: int) -> None:
    """Between lookup and load one part dies: what is left is a smaller boundary, or nothing."""
    with opened(tmp_path) as kv:
        space = kv.namespace(IDENTITY, MIXED)
        assert store(space, prompt(0), anchors=[160, 320]).wait(60)
        memory_only_disk(kv)
        assert space.lookup(prompt(0)).num_tokens == 320
        damage(kv, tmp_path, space, block, group)
        assert load_checked(space, prompt(0))[0] == (160 if block > 9 else 0)
        assert kv.stats().counters["corrupt_parts"] == 1
        quiet(kv)
        kv.check()


# ---- whose it is ---------------------------------------------------------------------------------


def layout_of(*shape: int, dtype: str = "float16") -> BlockLayout:
    return BlockLayout(SIZE, (LayerGroup("full", (TensorSpec(0, "k", shape, dtype),)),))


SAME_BYTES: dict[str, tuple[tuple[BlockLayout, dict[str, Any]], tuple[BlockLayout, dict[str, Any]]]] = {
    "heads first": ((layout_of(2, TOKENS, 8), {}), (layout_of(TOKENS, 2, 8), {})),
    "two bytes a number": (
        (layout_of(2, TOKENS, 8, dtype="bfloat16"), {}), (layout_of(2, TOKENS, 8), {})
    ),
    "half the heads": ((layout_of(2, TOKENS, 8), {"tp": (0, 1)}), (layout_of(2, TOKENS, 8), {"tp": (0, 2)})),
    "the other half": ((layout_of(2, TOKENS, 8), {"tp": (0, 2)}), (layout_of(2, TOKENS, 8), {"tp": (1, 2)})),
}  # fmt: skip


@pytest.mark.parametrize(("written", "read"), SAME_BYTES.values(), ids=SAME_BYTES)
def test_parts_of_equal_size_are_not_read_as_another_layouts(
    tmp_path: Path, written: tuple[BlockLayout, dict[str, Any]], read: tuple[BlockLayout, dict[str, Any]]
) -> None:
    with opened(tmp_path) as kv:
        layout, changes = written
        space = kv.namespace(dataclasses.replace(IDENTITY, **changes), layout)
        shape = [80 if n == TOKENS else n for n in layout.groups[0].tensors[0].shape]
        tensor = torch.ones(shape, dtype=layout.groups[0].tensors[0].torch_dtype)
        assert space.store(prompt(0, 80), {0: (tensor,)}).wait(60)
        assert space.lookup(prompt(0, 81)).num_tokens == 80
    with opened(tmp_path) as kv:
        layout, changes = read
        assert layout.part_nbytes == written[0].part_nbytes
        space = kv.namespace(dataclasses.replace(IDENTITY, **changes), layout)
        with space.load(prompt(0, 81)) as prefix:
            assert (prefix.num_tokens, prefix.reason) == (0, Reason.IDENTITY)


@pytest.mark.parametrize("field", ["weights", "adapters"])
def test_new_weights_under_an_old_name_find_nothing_also_not_what_is_on_its_way(
    tmp_path: Path, field: str
) -> None:
    """In every tier, in flight, and after a restart; what they left behind makes room."""
    old, new = (
        dataclasses.replace(IDENTITY, **{field: {"style": d * 32} if field == "adapters" else d * 32})
        for d in ("aa", "bb")
    )
    gate, fs = slow_slabs()
    changes = {
        "device_nbytes": "128KiB",
        "host_nbytes": "128KiB",
        "disk_nbytes": "8MiB",
        "log_keep_nbytes": 0,
        "deadline_s": 30.0,  # whoever makes room here waits for the disk, which others may keep busy for seconds
    }
    with opened(tmp_path, fs=fs, **changes) as kv:
        space = kv.namespace(old, MIXED)
        for seed in range(3):
            assert store(space, prompt(seed)).wait(60)
        gate.shut()
        store(space, prompt(3))
        other = kv.namespace(new, MIXED)
        assert [other.lookup(prompt(seed)).num_tokens for seed in range(4)] == [0] * 4
        assert other.lookup(prompt(3)).reason is Reason.IDENTITY
        gate.open()
        assert kv.flush(60).ok
        assert [load_checked(other, prompt(seed))[0] for seed in range(4)] == [0] * 4
    with opened(tmp_path, **changes) as kv:
        other = kv.namespace(new, MIXED)
        assert [load_checked(other, prompt(seed))[0] for seed in range(4)] == [0] * 4
        for seed in range(60):
            assert store(other, prompt(seed)).num_refused == 0
        assert kv.flush(60).ok
        assert load_checked(other, prompt(59))[0] == 320
        assert kv.namespace(old, MIXED).lookup(prompt(0)).num_tokens == 0, "it never makes room"


def test_a_later_meaning_of_the_bytes_finds_nothing_of_the_former(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as kv:
        assert store(kv.namespace(IDENTITY, MIXED), prompt(0)).wait(60)
    with monkeypatch.context() as patch, opened(tmp_path) as kv:
        patch.setattr(identity, "FORMAT_VERSION", identity.FORMAT_VERSION + 1)
        space = kv.namespace(IDENTITY, MIXED)
        assert load_checked(space, prompt(0))[0] == 0
        assert store(space, prompt(0)).wait(60) and load_checked(space, prompt(0))[0] == 320
    with opened(tmp_path) as kv:
        assert load_checked(kv.namespace(IDENTITY, MIXED), prompt(0))[0] == 320
        assert kv.stats().num_namespaces == 2


def test_seventy_thousand_images_in_one_prompt_share_no_digest() -> None:
    """More than sixteen bits could tell apart."""
    root, tokens = IDENTITY.digest(MIXED), prompt(0, SIZE)
    images = (hashlib.sha256(n.to_bytes(4, "little")).digest() for n in range(70_000))
    digests = {chain(root, tokens, SIZE, {0: image}).tobytes() for image in images}
    assert len(digests | {chain(root, tokens, SIZE).tobytes()}) == 70_001


# ---- how much ------------------------------------------------------------------------------------


def test_a_block_of_which_a_part_is_shared_is_not_matched(tmp_path: Path) -> None:
    with opened(tmp_path, device_nbytes="1MiB") as kv:
        space = kv.namespace(IDENTITY, LAYOUTS["full"])
        store(space, prompt(0, 5 * SIZE))
        for shared in range(1, SIZE):
            tokens = np.concatenate((prompt(0, 4 * SIZE + shared), prompt(1, 2 * SIZE)))
            tokens[4 * SIZE + shared] = 50_001  # no prompt has it
            assert load_checked(space, tokens)[0] == 4 * SIZE


@pytest.mark.parametrize("layout", LAYOUTS)
def test_counts_are_counts(tmp_path: Path, layout: str) -> None:
    """Never below zero or above what was asked, and the tiers add up, also when memory holds more than the disk."""
    seed = random.randrange(1 << 20)
    print("seed", seed)
    rng = random.Random(seed)
    with opened(tmp_path, device_nbytes="256KiB", host_nbytes="128KiB", disk_nbytes="12MiB") as kv:
        space = kv.namespace(IDENTITY, LAYOUTS[layout])
        for _ in range(40):
            tokens = np.concatenate((prompt(rng.randrange(4), rng.randrange(17) * SIZE), prompt(9, 40)))
            found = space.lookup(tokens)
            assert 0 <= found.num_tokens < len(tokens) and found.num_full_tokens >= 0
            assert sum(found.by_tier.values()) == found.num_tokens
            assert all(count > 0 for count in found.by_tier.values())
            loaded, _ = load_checked(space, tokens)
            assert loaded <= found.num_tokens
            stored = store(space, tokens)
            assert min(stored.num_new, stored.num_present, stored.num_refused) >= 0
            assert stored.num_new + stored.num_present + stored.num_refused == len(tokens) // SIZE


def test_the_tokens_that_a_chat_reports_as_reused_are_not_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "hf")
    from tiny_models import byte_tokenizer, gemma3

    from tieredkv.hf import ChatModel

    budgets = {"device_nbytes": "8MiB", "host_nbytes": "4MiB", "disk_nbytes": "64MiB"}
    for life in range(2):
        with opened(tmp_path, **budgets) as kv:
            model = gemma3()
            computed: list[int] = []
            count: Callable[..., None] = lambda _m, _a, kwargs, seen=computed: seen.append(  # noqa: E731
                kwargs["input_ids"].shape[1]
            )
            with ChatModel(kv, model, byte_tokenizer()).session(
                "s", system="Few words, please, and true ones."
            ) as s:
                model.register_forward_pre_hook(count, with_kwargs=True)
                list(s.send("Is it raining in the mountains today?", max_new_tokens=3, do_sample=False))
                explain = s.last_explain
                assert explain is not None and explain.prompt_tokens == explain.reused_tokens + computed[0]
                assert bool(explain.reused_tokens) == bool(life) and computed[1:] == [1] * (len(computed) - 1)
