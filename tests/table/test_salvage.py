"""Salvage: with the log and every checkpoint gone, every block whose slot verifies is back, purged ones are not."""

from __future__ import annotations

import dataclasses
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
import numpy as np
from core_helpers import IDENTITY, MIXED, SIZE, group_of, load_checked, opened, prompt, store

from tieredkv import BlockLayout
from tieredkv.audit.report import fsck, read
from tieredkv.audit.rescue import rescue
from tieredkv.errors import BadInput
from tieredkv.tier.slab_format import SLOT_HEADER_NBYTES

OTHER = dataclasses.replace(IDENTITY, weights="cd" * 32)


def test_everything_but_what_was_purged_comes_back(tmp_path: Path) -> None:
    path, out = tmp_path / "store", tmp_path / "out"
    with opened(path) as kv:
        space, other = kv.namespace(IDENTITY, MIXED), kv.namespace(OTHER, MIXED)
        for seed in range(6):
            assert store(space, prompt(seed)).wait(60)
            assert store(other, prompt(seed)).wait(60)
        kv.purge(other)
    num_parts = fsck(path).num_parts
    shutil.rmtree(path / "wal")
    for checkpoint in path.glob("table-*"):
        checkpoint.unlink()
    found = rescue(path, out)
    assert (found.num_parts, found.num_namespaces, found.exit_code) == (num_parts, 1, 2)
    assert fsck(out).exit_code == 0 and fsck(out).num_parts == num_parts
    with opened(out) as kv:
        space = kv.namespace(IDENTITY, MIXED)
        for seed in range(6):
            assert load_checked(space, prompt(seed))[0] == 320
        assert store(space, prompt(77)).wait(60)
        kv.check()
        assert kv.namespace(OTHER, MIXED).lookup(prompt(0)).num_tokens == 0


def test_a_damaged_part_stays_behind(tmp_path: Path) -> None:
    path, out = tmp_path / "store", tmp_path / "out"
    with opened(path) as kv:
        assert store(kv.namespace(IDENTITY, MIXED), prompt(1)).wait(60)
    slab = max((path / "slabs").iterdir(), key=lambda file: file.stat().st_size)
    with open(slab, "r+b") as file:
        file.seek(4096 + 100)
        file.write(b"\xff\xfe\xfd")
    num_parts = fsck(path).num_parts
    found = rescue(path, out)
    assert found.not_rescued == {"corrupt": 1} and found.num_parts == num_parts - 1
    assert fsck(out).exit_code == 0
    with pytest.raises(BadInput):
        rescue(path, out)


TINY = BlockLayout(SIZE, (group_of("full", [0], width=1),))
NUM_PROMPTS, NUM_BLOCKS = 25, 400
BUDGETS = {"device_nbytes": "64MiB", "host_nbytes": "4MiB", "disk_nbytes": "512MiB"}


@pytest.mark.parametrize("disk", ["slab", "lmdb"])
def test_ten_thousand_blocks_without_a_log(tmp_path: Path, disk: str) -> None:
    """With wal/ and every checkpoint gone, every block whose slot header verifies is back, and no purged one."""
    path, out = tmp_path / "store", tmp_path / "out"
    prompts = [prompt(seed, NUM_BLOCKS * SIZE) for seed in range(NUM_PROMPTS)]
    with opened(path, disk=disk, **BUDGETS) as kv:
        space, purged = kv.namespace(IDENTITY, TINY), kv.namespace(OTHER, TINY)
        for seed, tokens in enumerate(prompts):
            if seed == (
                12 if disk == "slab" else 0
            ):  # a purge drops all there is in the one payload file of LMDB
                for other in range(3):
                    assert store(purged, prompt(900 + other, NUM_BLOCKS * SIZE)).wait(60)
                kv.purge(purged)
            assert store(space, tokens).wait(60)
        assert kv.flush(60).ok
        digests = {d.tobytes() for tokens in prompts for d in space.chain(tokens)}
        gone = {
            d.tobytes() for other in range(3) for d in purged.chain(prompt(900 + other, NUM_BLOCKS * SIZE))
        }
    assert len(digests) == 10_000 and not digests & gone
    assert fsck(path).num_parts == 10_000, "not everything was spilled"
    shutil.rmtree(path / "wal")
    for checkpoint in path.glob("table-*"):
        checkpoint.unlink()
    lost = _damage_headers(path, every=997) if disk == "slab" else set()
    told: list[tuple[int, int]] = []
    found = rescue(path, out, lambda done, total: told.append((done, total)))
    assert (found.num_blocks, found.num_namespaces) == (10_000 - len(lost), 1)
    assert told[-1][0] == told[-1][1] >= found.num_parts and told == sorted(told), found.not_rescued
    table = read(out).state.table
    assert {d.tobytes() for d in table.digest[table.live_rows()]} == digests - lost
    assert fsck(out).exit_code == 0
    with opened(out, disk=disk, **BUDGETS) as kv:
        space = kv.namespace(IDENTITY, TINY)
        for tokens in prompts[::6]:
            chain = [d.tobytes() in lost for d in space.chain(tokens)]
            whole = chain.index(True) if True in chain else NUM_BLOCKS - 1  # one token is left to compute
            assert load_checked(space, tokens)[0] >= min(whole, NUM_BLOCKS - 1) * SIZE
        assert kv.namespace(OTHER, TINY).lookup(prompt(900, NUM_BLOCKS * SIZE)).num_tokens == 0


def _damage_headers(path: Path, every: int) -> set[bytes]:
    """Turn a bit in the header of each so many live slots; returns whose headers those are."""
    slab = max((path / "slabs").iterdir(), key=lambda file: file.stat().st_size)
    stride = int(slab.name.partition("-")[0]) + SLOT_HEADER_NBYTES
    raw = np.fromfile(slab, np.uint8)
    slots = raw[: len(raw) // stride * stride].reshape(-1, stride)
    live = np.flatnonzero(slots[:, 0])[::every]
    reading = read(path)
    table = reading.state.table
    rows = table.live_rows()
    by_slot = {int(table.slot[2, 0, row]): table.digest[row].tobytes() for row in rows.tolist()}
    slots[live, 200] ^= 1
    slots.reshape(-1).tofile(slab)
    return {by_slot[slot] for slot in live.tolist()}
