"""The block table: registration, chains, puts and drops, against plain models; and with keys of 8 bits."""

from __future__ import annotations

import random

import numpy as np
import pytest
from core_helpers import prompt

from tieredkv.block.hashing import chain
from tieredkv.outcomes import Tier
from tieredkv.table import key_index
from tieredkv.table.block_table import BlockTable
from tieredkv.wal.records import DROP, DROP_DTYPE, PUT, PUT_DTYPE, Run

ROOT = b"\7" * 32


def chain_of(seed: int, num_blocks: int = 6, head: np.ndarray | None = None) -> np.ndarray:
    tokens = prompt(seed, 16 * num_blocks)
    if head is not None:
        tokens = np.concatenate((head, tokens))
    return chain(ROOT, tokens, 16)


def puts(digests: np.ndarray, slots: list[int], seqs: list[int], group: int = 0, parents: bool = True) -> Run:
    records = np.zeros(len(slots), dtype=PUT_DTYPE)
    records["digest"] = digests
    if parents:
        records["parent"][1:] = digests[:-1]
    records["namespace"], records["slot"], records["put_seq"] = 1, slots, seqs
    records["group"], records["checksum"] = group, np.array(seqs, dtype=np.uint64) * 7
    return Run(PUT, records)


def drops(digests: np.ndarray, slots: list[int], seqs: list[int], group: int = 0) -> Run:
    records = np.zeros(len(slots), dtype=DROP_DTYPE)
    records["digest"], records["slot"], records["put_seq"], records["group"] = digests, slots, seqs, group
    return Run(DROP, records)


def test_a_chain_that_holds_nothing_goes_up_to_what_something_hangs_on() -> None:
    table = BlockTable()
    rows = table.register(1, chain_of(1))
    others = table.register(1, np.concatenate((chain_of(1)[:2], chain_of(2)[:3])))
    table.slot[Tier.DEVICE, 0, others[-1]] = 1
    assert sorted(table.free_if_empty(rows[-1:]).tolist()) == sorted(rows[2:].tolist())
    table.check()
    assert set(table.children(int(rows[1]))) == {int(others[2])} and len(table) == 5
    table.slot[Tier.DEVICE, 0, others[-1]] = -1
    table.uses[others[3]] = 1
    assert table.free_if_empty(others[-1:]).tolist() == [int(others[-1])]
    table.uses[others[3]] = 0
    assert sorted(table.free_if_empty(others[3:4]).tolist()) == sorted(others[:4].tolist())
    table.check()
    assert len(table) == 0 and (table.find(chain_of(1)) < 0).all()


def test_a_chain_is_found_linked_and_freed() -> None:
    table = BlockTable()
    one = chain_of(1)
    rows = table.register(1, one)
    table.check()
    assert (table.find(one) == rows).all() and len(table) == 6
    assert table.parent[rows].tolist() == [-1, *rows[:-1].tolist()]
    assert (table.register(1, one) == rows).all()
    assert [*table.ancestors(int(rows[5]), 3)] == rows[:2:-1].tolist()
    branch = np.concatenate((one[:3], chain_of(2)[:3]))
    others = table.register(1, branch)
    assert others[:3].tolist() == rows[:3].tolist()
    assert set(table.children(int(rows[2]))) == {int(rows[3]), int(others[3])}
    table.free_rows(rows[3:4])
    table.check()
    assert table.parent[rows[4]] == -1 and set(table.children(int(rows[2]))) == {int(others[3])}
    assert table.was_here(one[3].tobytes()) and not table.was_here(one[4].tobytes())
    table.forget_gone()
    assert not table.was_here(one[3].tobytes())
    again = table.register(1, one)
    assert (table.parent[again[1:]] == again[:-1]).all(), (
        "an orphan finds its parent when its chain comes again"
    )
    table.check()


def test_what_holds_a_row() -> None:
    table = BlockTable()
    rows = table.register(1, chain_of(1))
    table.pins[rows[0]] = table.moving[rows[1]] = table.uses[rows[2]] = 1
    table.slot[Tier.HOST, 0, rows[3]] = 7
    assert sorted(table.free_if_empty(rows).tolist()) == sorted(rows[4:].tolist())
    assert [table.is_held(int(row)) for row in rows[:4]] == [True, True, False, False]
    table.check()


def test_growing_keeps_everything() -> None:
    table = BlockTable(num_groups=2)
    chains = [chain_of(seed, 50) for seed in range(100)]
    rows = [table.register(1, digests) for digests in chains]
    table.slot[Tier.DISK, 1, rows[3]] = np.arange(50)
    table.ensure_groups(4)
    for digests, found in zip(chains, rows, strict=True):
        assert (table.find(digests) == found).all()
    assert table.slot.shape[1] == 4 and (table.slot[Tier.DISK, 1, rows[3]] == np.arange(50)).all()
    assert (table.slot[:, 2:] == -1).all()
    table.check()


def test_puts_and_drops() -> None:
    table = BlockTable()
    digests = chain_of(1)
    named = table.apply(10, puts(digests, [0, 1, 2, 3, 4, 5], [100, 101, 102, 103, 104, 105]))
    assert (named == table.find(digests)).all()
    assert table.slot[Tier.DISK, 0, named].tolist() == [0, 1, 2, 3, 4, 5]
    assert table.lsn[0, named].tolist() == [10, 11, 12, 13, 14, 15]
    assert table.checksum[0, named].tolist() == [s * 7 for s in range(100, 106)]
    gone = table.apply(16, drops(digests[5:], [5], [105]))
    assert gone.tolist() == [named[5]] and table.slot[Tier.DISK, 0, named[5]] == -1
    assert table.apply(17, drops(digests[5:], [5], [105])).tolist() == [-1], "dropped twice"
    assert table.apply(18, drops(digests[4:5], [4], [99])).tolist() == [-1], "another put"
    assert table.apply(18, drops(digests[4:5], [4], [104], group=3)).tolist() == [-1], "a group unknown here"
    assert table.slot[Tier.DISK, 0, named[4]] == 4
    table.check()


def test_replay_gives_what_live_use_gave() -> None:
    """The same records, with free rows reused in between, give the same durable state."""
    rng = random.Random(11)
    live, replayed = BlockTable(), BlockTable()
    replayed.replaying = True
    lsn, seq, next_slot = 1, 1, 0
    held: dict[int, list[tuple[int, int]]] = {}
    chains = {seed: chain_of(seed, rng.randrange(1, 7)) for seed in range(40)}
    for _ in range(400):
        seed = rng.randrange(40)
        digests = chains[seed]
        if seed in held:
            count = rng.randrange(1, len(held[seed]) + 1)
            tail = held[seed][-count:]
            run = drops(
                digests[len(held[seed]) - count : len(held[seed])], *map(list, zip(*tail, strict=True))
            )
            held[seed] = held[seed][:-count]
            if not held[seed]:
                del held[seed]
        else:
            number = rng.randrange(1, 4)  # after a purge the same identity may have another
            live.register(number, digests)
            places = [(next_slot + n, seq + n) for n in range(len(digests))]
            run = puts(digests, *map(list, zip(*places, strict=True)))
            run.records["namespace"] = number
            next_slot, seq = next_slot + len(digests), seq + len(digests)
            held[seed] = places
        rows = live.apply(lsn, run)
        live.free_if_empty(rows[rows >= 0])
        replayed.apply(lsn, run)
        lsn += len(run)
    replayed.settle()
    replayed.check()
    live.check()
    assert durable(live) == durable(replayed)
    restored = BlockTable()
    restored.restore(live.snapshot())
    restored.settle()
    restored.check()
    assert durable(restored) == durable(live)
    assert {
        (c, live.digest[live.parent[r]].tobytes()) for c, r in on_disk(live).items() if live.parent[r] >= 0
    } == {
        (c, restored.digest[restored.parent[r]].tobytes())
        for c, r in on_disk(restored).items()
        if restored.parent[r] >= 0
    }


def on_disk(table: BlockTable) -> dict[bytes, int]:
    rows = table.live_rows()
    rows = rows[(table.slot[Tier.DISK][:, rows] >= 0).any(axis=0)]
    return {table.digest[row].tobytes(): row for row in rows.tolist()}


def durable(table: BlockTable) -> dict[bytes, tuple[int, int, int, int, int]]:
    return {
        digest: (
            int(table.namespace[r]),
            int(table.slot[Tier.DISK, 0, r]),
            int(table.put_seq[0, r]),
            int(table.checksum[0, r]),
            int(table.lsn[0, r]),
        )
        for digest, r in on_disk(table).items()
    }


@pytest.fixture
def short_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_index, "KEY_MASKS", (np.uint64(0xFF), np.uint64(0)))


@pytest.mark.usefixtures("short_keys")
def test_a_taken_key_refuses_the_block_and_all_after_it() -> None:
    table = BlockTable()
    rng = random.Random(2)
    refused = 0
    for seed in range(400):
        digests = chain_of(seed, 8)
        rows = table.register(1, digests)
        known = rows[rows >= 0]
        assert (rows[len(known) :] == -1).all(), "refused in the middle only"
        assert (table.digest[known] == digests[: len(known)]).all()
        assert (table.find(digests) == rows).all() or (table.find(digests)[: len(known)] == known).all()
        refused += len(digests) - len(known)
        if rng.random() < 0.5:
            table.free_rows(known)
        table.check()
    assert refused > 1000


@pytest.mark.usefixtures("short_keys")
def test_two_blocks_of_one_chain_with_one_key() -> None:
    table = BlockTable()
    digests = chain_of(1, 3).copy()
    digests[2, 0] = digests[0, 0]
    rows = table.register(1, digests)
    assert rows[2] == -1 and (rows[:2] >= 0).all()
    table.check()


@pytest.mark.usefixtures("short_keys")
def test_a_put_whose_key_is_taken_names_nothing() -> None:
    """The log may hold it from before; whoever is there keeps the key."""
    table = BlockTable()
    digests = chain_of(1, 2).copy()
    digests[1, 0] = digests[0, 0]
    table.apply(1, puts(digests[:1], [0], [1]))
    assert table.apply(2, puts(digests[1:], [1], [2], parents=False)).tolist() == [-1]
    assert table.find(digests)[1] == -1
    table.check()
