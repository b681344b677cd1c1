"""Who leaves through the whole cache: tails first, hits count everywhere, nothing stranded, short keys never lie."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from core_helpers import (
    IDENTITY,
    LAYOUTS,
    MIXED,
    SIZE,
    assert_nothing_stranded,
    assert_right,
    group_of,
    load_checked,
    memory_only_disk,
    opened,
    prompt,
    quiet,
    store,
)

from tieredkv import BlockLayout, Reason, Turn, room, spiller
from tieredkv.block.anchors import longest_restorable
from tieredkv.outcomes import Tier
from tieredkv.plan import Parts, tail_in_tier
from tieredkv.table import key_index
from tieredkv.tier.slab_format import SLOT_HEADER_NBYTES

MEMORY_ONLY: dict[str, Any] = {"host_nbytes": 0, "disk_nbytes": 0}


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_tails_leave_before_heads(tmp_path: Path, policy: str) -> None:
    """B64: a prompt under pressure gets shorter from its end."""
    with opened(tmp_path, policy=policy, device_nbytes=32 * 4096, **MEMORY_ONLY) as kv:
        space = kv.namespace(IDENTITY, LAYOUTS["full"])
        store(space, prompt(0, 20 * SIZE + 1))
        lengths = []
        for seed in range(1, 30):
            assert store(space, prompt(seed, SIZE + 1)).num_new == 1
            lengths.append(space.lookup(prompt(0, 20 * SIZE + 1)).num_tokens // SIZE)
            kv.check()
        assert lengths == sorted(lengths, reverse=True)
        assert all(one - other <= 1 for one, other in zip([20, *lengths], lengths, strict=False))
        assert lengths[10] == 20 and lengths[-1] <= 3, lengths


def test_lru_order_is_by_last_use(tmp_path: Path) -> None:
    with opened(tmp_path, device_nbytes=16 * 4096, **MEMORY_ONLY) as kv:
        space = kv.namespace(IDENTITY, LAYOUTS["full"])
        for seed in range(4):
            store(space, prompt(seed, 4 * SIZE + 1))
        load_checked(space, prompt(0, 4 * SIZE + 1))
        store(space, prompt(9, 4 * SIZE + 1))
        found = [space.lookup(prompt(seed, 4 * SIZE + 1)).num_tokens // SIZE for seed in range(4)]
        assert found == [4, 0, 4, 4]


def test_a_hit_touches_every_tier(tmp_path: Path) -> None:
    """A prompt always hit on the device is not the coldest on disk."""
    with opened(tmp_path, device_nbytes="1MiB", disk_nbytes="8MiB", log_keep_nbytes=0) as kv:
        space = kv.namespace(IDENTITY, LAYOUTS["full"])
        store(space, prompt(0)).wait(60)
        for seed in range(1, 60):
            assert store(space, prompt(seed)).wait(60)
            load_checked(space, prompt(0))
        with kv._lock:
            rows = kv._table.find(space.chain(prompt(0)))
            assert (kv._table.slot[Tier.DISK, 0, rows] >= 0).all()
        assert kv.stats().tiers[-1].num_evictions > 0
        assert space.lookup(prompt(1)).num_tokens == 0


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_a_disk_smaller_than_memory_keeps_what_is_used_most(tmp_path: Path, policy: str) -> None:
    """At close, spills of what nobody used for longest do not push out what was hit last."""
    sizes = {"device_nbytes": "16MiB", "host_nbytes": 0, "disk_nbytes": "10752KiB", "log_keep_nbytes": 0}
    sizes |= {"spill": "evict", "policy": policy}
    with opened(tmp_path, **sizes) as kv:
        space = kv.namespace(IDENTITY, LAYOUTS["full"])
        for seed in range(150):
            store(space, prompt(seed))
            load_checked(space, prompt(0))
        with kv._lock:  # the wishes of sessions, of which nobody reads any more
            kv._table.pins[kv._table.find(space.chain(prompt(2)))] += 1
            kv._table.rank[kv._table.find(space.chain(prompt(3)))] = 1
        assert kv.stats().tiers[0].num_evictions == 0
        flushed = kv.flush()
        assert not flushed.ok and "have no disk copy" in flushed.failures[0]
        assert kv.stats().tiers[-1].num_evictions == 0, (
            "what fits was spilled, and nothing for another's sake"
        )
    with opened(tmp_path, **sizes) as kv:
        space = kv.namespace(IDENTITY, LAYOUTS["full"])
        assert load_checked(space, prompt(0)) == (320, Reason.COMPLETE)
        for seed in (149, 2, 3):
            assert load_checked(space, prompt(seed)) == (320, Reason.COMPLETE)
        assert load_checked(space, prompt(1))[0] == load_checked(space, prompt(4))[0] == 0
        disk = kv.stats().tiers[-1]
        assert disk.live_nbytes > 0.9 * disk.budget_nbytes, "the disk is used as far as it goes"


def test_room_for_one_part_size_does_not_cost_what_is_hit_its_other_parts(tmp_path: Path) -> None:
    """Chains of two part sizes go by: as long as slots come free by policy, no chunk is emptied for them."""
    layout = BlockLayout(
        SIZE, (group_of("full", [0], width=96), group_of("window", [1], window=16 * SIZE, width=480))
    )
    whole, num_tokens = {"device": 64 * SIZE}, 64 * SIZE
    sizes = {"device_nbytes": "16MiB", "host_nbytes": 0, "disk_nbytes": "32MiB", "log_keep_nbytes": 0}
    with opened(tmp_path, **sizes) as kv:
        space = kv.namespace(IDENTITY, layout)
        assert store(space, prompt(0, num_tokens)).wait(60)
        for seed in range(1, 65):
            assert store(space, prompt(seed, num_tokens)).wait(60)
            if seed % 4 == 0:
                with space.load(prompt(0, num_tokens + 1)) as prefix:
                    assert prefix.by_tier == whole, f"after {seed} chains"
        with kv._lock:
            rows = kv._table.find(space.chain(prompt(0, num_tokens)))
            assert (kv._table.slot[Tier.DISK, 0, rows] >= 0).all()
            assert (kv._table.slot[Tier.DISK, 1, rows[-16:]] >= 0).all()
        assert kv.stats().tiers[-1].num_evictions > 0


def test_what_was_held_while_it_was_stranded_goes_with_the_next_call(tmp_path: Path) -> None:
    """Held by another call's move, not by a pin: no load need ever come for it to be looked at again."""
    with opened(tmp_path, **MEMORY_ONLY) as kv:
        space = kv.namespace(IDENTITY, LAYOUTS["mixed"])
        store(space, prompt(0))
        with kv._lock:
            rows = kv._table.find(space.chain(prompt(0)))
            kv._table.moving[rows[:4]] += 1
            for resident in kv._residents.values():
                resident.leave(Parts.of([(int(rows[-1]), 1)]), evicted=True)
            kv._room.drop_stranded([int(rows[-1])])
            kv._table.moving[rows[:4]] -= 1
        with pytest.raises(AssertionError, match="no restorable boundary needs"):
            assert_nothing_stranded(kv)
        store(space, prompt(1))
        assert_nothing_stranded(kv)
        kv.check()


def test_a_demotion_copies_runs_and_not_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tails go first, and what lies end to end on the device does so in host memory."""
    tokens = prompt(0, 40 * SIZE + 1)
    with opened(tmp_path, device_nbytes="1MiB", host_nbytes="1MiB", disk_nbytes=0) as kv:
        space = kv.namespace(IDENTITY, LAYOUTS["full"])
        store(space, tokens)
        copies, copy = list[int](), kv._stream.copy

        def counted(dst: torch.Tensor, src: torch.Tensor) -> None:
            copies.append(dst.nbytes)
            copy(dst, src)

        device = kv._residents[Tier.DEVICE]
        with kv._lock:
            leaving = device.parts_of(kv._table.find(space.chain(tokens))[::-1])
            kv._room._start_moves(leaving)
        monkeypatch.setattr(kv._stream, "copy", counted)
        kv._room._let_go(device, leaving, time.monotonic() + 5)
        per_chunk = device.arena.slots_per_chunk(4096)
        assert sum(copies) == 40 * 4096 and len(copies) <= 1 + 40 // per_chunk
        with space.load(tokens) as prefix:
            assert prefix.by_tier == {"host": 40 * SIZE}
            assert_right(space, tokens, prefix)
        kv.check()


def test_room_on_a_full_disk_is_made_for_what_is_queued_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Choosing and logging who leaves, for each small batch again, would be slower than the disk."""
    monkeypatch.setattr(spiller, "_BATCH_NBYTES", 4096)
    num_blocks = 256
    with opened(tmp_path, device_nbytes="2MiB", host_nbytes=0, disk_nbytes="16MiB", spill="evict") as kv:
        space, room = kv.namespace(IDENTITY, LAYOUTS["full"]), kv._room
        assert room is not None
        rounds: list[int] = []
        leave_disk = room._leave_disk

        def noted(parts: Parts, until: float) -> bool:
            rounds.append(len(parts))
            return leave_disk(parts, until)

        monkeypatch.setattr(room, "_leave_disk", noted)
        for seed in range(12):
            store(space, prompt(seed, num_blocks * SIZE + 1))
            assert kv.flush(30).ok
            kv.check()
        assert sum(rounds) > 2 * num_blocks, "the disk was never full"
        assert len(rounds) < sum(rounds) / 8, f"{len(rounds)} times for {sum(rounds)} parts"


def test_room_is_made_once_for_what_several_requests_want(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or as many more useful blocks would leave the disk than come."""
    go, begun, spill = threading.Event(), threading.Semaphore(0), spiller.Spiller._spill

    def waiting(self: Any, wanted: Any) -> bool:
        begun.release()
        return go.wait(60) and spill(self, wanted)

    monkeypatch.setattr(spiller.Spiller, "_spill", waiting)
    with opened(tmp_path) as kv:
        space = kv.namespace(IDENTITY, LAYOUTS["full"])
        for _ in range(8):  # the workers hold three of these requests, the queue the others
            store(space, prompt(0, 8 * SIZE + 1))
        assert kv._spiller is not None and all(begun.acquire(timeout=10) for _ in range(3))
        stride = 4096 + SLOT_HEADER_NBYTES
        assert kv._spiller._num_queued[stride] == 5 * 8
        assert kv._spiller._num_soon(stride) == 8 and kv._spiller._num_soon(stride + 4096) == 0
        go.set()
        quiet(kv)
        assert kv._spiller._num_soon(stride) == 0


def test_arc_keeps_what_came_twice_through_a_scan(tmp_path: Path) -> None:
    found = {}
    for policy in ("lru", "arc"):
        with opened(tmp_path / policy, policy=policy, device_nbytes=64 * 4096, **MEMORY_ONLY) as kv:
            space = kv.namespace(IDENTITY, LAYOUTS["full"])
            for _ in range(3):
                for seed in range(3):
                    store(space, prompt(seed, 10 * SIZE + 1))
                    load_checked(space, prompt(seed, 10 * SIZE + 1))
            for seed in range(100, 120):
                store(space, prompt(seed, 10 * SIZE + 1))
            found[policy] = sum(space.lookup(prompt(seed, 10 * SIZE + 1)).num_tokens for seed in range(3))
            kv.check()
    assert found["lru"] == 0 and found["arc"] == 3 * 10 * SIZE


@pytest.mark.parametrize("layout", ["full", "mixed", "uneven", "two"])
@pytest.mark.parametrize("changes", [MEMORY_ONLY, {"disk_nbytes": "12MiB", "log_keep_nbytes": 0}])
def test_nothing_is_stranded_and_lookups_find_the_most(
    tmp_path: Path, layout: str, changes: dict[str, Any]
) -> None:
    """P11, B36: random trees of prompts; at each step the hit is the largest restorable boundary."""
    seed = random.randrange(1 << 20)
    print("seed", seed)
    rng = random.Random(seed)
    trunks = [prompt(1000 + n, 16 * SIZE) for n in range(4)]
    with opened(tmp_path, device_nbytes="256KiB", **changes) as kv:
        space = kv.namespace(IDENTITY, LAYOUTS[layout])
        for step in range(150):
            tokens = np.concatenate(
                (
                    rng.choice(trunks)[: rng.randrange(1, 17) * SIZE],
                    prompt(rng.randrange(20), rng.randrange(1, 8) * SIZE + 1),
                )
            )
            ends = [len(tokens) // SIZE * SIZE, rng.randrange(1, len(tokens) // SIZE) * SIZE]
            if rng.random() < 0.7:
                store(space, tokens, anchors=ends)
            else:
                load_checked(space, tokens)
            with kv._lock:
                rows = kv._table.find(space.chain(tokens))
                present = kv._table.present(rows, len(space.layout.groups))
                best = longest_restorable(space.layout, present, (len(tokens) - 1) // SIZE)
                assert space.lookup(tokens).num_tokens == best * SIZE
            if step % 10 == 9:
                quiet(kv)
                kv.check()
                assert_nothing_stranded(kv)


@pytest.mark.parametrize("spill", ["eager", "evict"])
@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_a_full_disk_of_a_closed_store_has_no_block_without_those_before_it(
    tmp_path: Path, policy: str, spill: str
) -> None:
    """P11: nothing goes to the disk in the place of what it follows, or without it."""
    seed = random.randrange(1 << 20)
    print("seed", seed)
    rng = random.Random(seed)
    trunks = [prompt(1000 + n, 100 * SIZE) for n in range(4)]
    seen: list[np.ndarray] = []
    changes = {"policy": policy, "spill": spill, "device_nbytes": "4MiB", "host_nbytes": "8MiB"}
    for _ in range(3):
        with opened(tmp_path, disk_nbytes=int(10.5 * 2**20), log_keep_nbytes=0, **changes) as kv:
            space = kv.namespace(IDENTITY, LAYOUTS["full"])
            for tokens in seen:
                rows = kv._table.find(space.chain(tokens))
                there = kv._table.on_disk(rows)[0] & (rows >= 0)
                assert (there == np.logical_and.accumulate(there)).all()
            for _ in range(40):
                if seen and rng.random() < 0.3:
                    load_checked(space, rng.choice(seen))
                    continue
                branch = prompt(rng.randrange(20), rng.randrange(1, 200) * SIZE + 1)
                seen.append(np.concatenate((rng.choice(trunks)[: rng.randrange(1, 101) * SIZE], branch)))
                store(space, seen[-1])


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_a_chat_longer_than_the_disk_keeps_its_beginning_there(
    tmp_path: Path, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nobody looks through the whole chain for room that cannot be."""
    asked = 0

    def counted(*args: Any) -> int:
        nonlocal asked
        asked += args[1] is Tier.DISK
        return tail_in_tier(*args)

    monkeypatch.setattr(room, "tail_in_tier", counted)
    tokens = prompt(0, 3000 * SIZE + 1)
    sizes: dict[str, Any] = {
        "device_nbytes": "4MiB",
        "host_nbytes": "12MiB",
        "disk_nbytes": int(10.5 * 2**20),
    }
    with opened(tmp_path, policy=policy, log_keep_nbytes=0, **sizes) as kv:
        space = kv.namespace(IDENTITY, LAYOUTS["full"])
        for end in range(100, 3001, 50):
            store(space, tokens[: end * SIZE + 1])
    assert asked < 100, asked
    with opened(tmp_path, policy=policy, log_keep_nbytes=0, **sizes) as kv:
        space = kv.namespace(IDENTITY, LAYOUTS["full"])
        assert 1000 * SIZE < space.lookup(tokens).num_tokens < 3000 * SIZE
        load_checked(space, tokens)


def test_holes_are_filled_on_the_next_pass(tmp_path: Path) -> None:
    """B36: what was refused or lost is taken when its prompt comes again."""
    with opened(tmp_path, device_nbytes="1MiB", **MEMORY_ONLY) as kv:
        space = kv.namespace(IDENTITY, LAYOUTS["full"])
        store(space, prompt(0))
        with kv._lock:
            rows = kv._table.find(space.chain(prompt(0)))
            for row in rows[3::3].tolist():
                kv._residents[Tier.DEVICE].leave(Parts.of([(row, 0)]), evicted=False)
        assert load_checked(space, prompt(0))[0] == 3 * SIZE
        again = store(space, prompt(0))
        assert (again.num_new, again.num_refused) == (6, 0)
        assert load_checked(space, prompt(0)) == (320, Reason.COMPLETE)


def test_a_prefix_below_the_device_is_read_once(tmp_path: Path) -> None:
    """More than the device holds: the rest is used from where it lies, or read into memory of its own."""
    with opened(tmp_path, device_nbytes="32KiB", host_nbytes="32KiB") as kv:
        space = kv.namespace(IDENTITY, MIXED)
        assert store(space, prompt(0)).wait(60)
        for _ in range(3):
            assert load_checked(space, prompt(0)) == (320, Reason.COMPLETE)
            kv.check()


@pytest.mark.parametrize("spill", ["eager", "evict"])
@pytest.mark.parametrize("layout", ["full", "mixed"])
def test_keys_of_eight_bits_never_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spill: str, layout: str
) -> None:
    """P2: heads collide, are evicted and stored again, over all tiers and restarts; never another's bytes."""
    monkeypatch.setattr(key_index, "KEY_MASKS", (np.uint64(0xFF), np.uint64(0)))
    seed = random.randrange(1 << 20)
    print("seed", seed)
    rng = random.Random(seed)
    refused = hits = 0
    trunks = [prompt(1000 + n, 8 * SIZE) for n in range(12)]
    for _ in range(3):
        with opened(
            tmp_path, spill=spill, device_nbytes="96KiB", host_nbytes="64KiB", disk_nbytes="8MiB"
        ) as kv:
            space = kv.namespace(IDENTITY, LAYOUTS[layout])
            for step in range(150):
                head = rng.choice(trunks)[: rng.randrange(1, 9) * SIZE]
                tokens = np.concatenate((head, prompt(rng.randrange(30), rng.randrange(1, 5) * SIZE + 1)))
                if rng.random() < 0.5:
                    stored = store(space, tokens)
                    assert stored.num_new + stored.num_present + stored.num_refused == len(tokens) // SIZE
                    if stored.reason is Reason.KEY_TAKEN:
                        refused += stored.num_refused
                else:
                    hits += load_checked(space, tokens)[0]
                if step % 25 == 24:
                    quiet(kv)
                    kv.check()
                if rng.random() < 0.02:
                    kv.purge(space)
                    space = kv.namespace(IDENTITY, LAYOUTS[layout])
            assert kv.stats().counters["refused_blocks"] > 0
    assert refused > 100 and hits > 0


def test_budgets_of_every_tier_hold_after_every_step(tmp_path: Path) -> None:
    """P13."""
    rng = random.Random(3)
    with opened(
        tmp_path, device_nbytes="128KiB", host_nbytes="96KiB", disk_nbytes="12MiB", log_keep_nbytes=0
    ) as kv:
        space = kv.namespace(IDENTITY, LAYOUTS["uneven"])
        for _ in range(120):
            tokens = prompt(rng.randrange(40), rng.randrange(2, 18) * SIZE)
            store(space, tokens) if rng.random() < 0.6 else load_checked(space, tokens)
            for tier in kv.stats().tiers:
                assert tier.live_nbytes <= tier.used_nbytes <= tier.budget_nbytes, tier
        quiet(kv)
        kv.check()


def test_session_pins_hold_and_let_go(tmp_path: Path) -> None:
    with opened(tmp_path, device_nbytes=40 * 4096, **MEMORY_ONLY) as kv:
        space = kv.namespace(IDENTITY, MIXED)
        session = kv.session("a", space)
        store(space, prompt(0, 8 * SIZE + 1))
        session.commit(prompt(0, 8 * SIZE + 1), [Turn("user", 20)], anchors=[8 * SIZE])
        session.pin()
        for seed in range(1, 20):
            store(space, prompt(seed, 8 * SIZE + 1))
        assert load_checked(space, prompt(0, 8 * SIZE + 1))[0] == 8 * SIZE
        session.unpin()
        for seed in range(20, 40):
            store(space, prompt(seed, 8 * SIZE + 1))
        assert load_checked(space, prompt(0, 8 * SIZE + 1))[0] == 0
        assert kv.stats().num_pins == 0
        kv.check()


def test_unpinning_a_session_takes_no_one_elses_pin(tmp_path: Path) -> None:
    with opened(tmp_path, device_nbytes="1MiB", **MEMORY_ONLY) as kv:
        space = kv.namespace(IDENTITY, MIXED)
        session = kv.session("a", space)
        session.commit(prompt(0), [], anchors=[320])
        session.pin()  # before its blocks are there
        store(space, prompt(0))
        with space.load(prompt(0)) as prefix:
            assert prefix.num_tokens == 320
            session.unpin()
            rows = kv._table.find(space.chain(prompt(0)))
            assert (kv._table.pins[rows] >= 1).all(), "the prefix is not pinned any more"
        assert kv.stats().num_pins == 0
        kv.check()


def test_anchors_of_two_sessions_are_counted_apart(tmp_path: Path) -> None:
    """One session's anchor was evicted and came again; the other's letting go does not take it."""
    with opened(tmp_path, device_nbytes="1MiB", **MEMORY_ONLY) as kv:
        space = kv.namespace(IDENTITY, MIXED)
        one, other = kv.session("one", space), kv.session("other", space)
        one.commit(prompt(0), [], anchors=[320])
        store(space, prompt(0))
        other.commit(prompt(0), [], anchors=[320])
        other.commit(prompt(0), [], anchors=[])
        quiet(kv)
        assert space.lookup(prompt(0)).num_tokens == 320, "the first session still names this anchor"
        one.commit(prompt(0), [], anchors=[])
        quiet(kv)
        assert space.lookup(prompt(0)).num_tokens == 0
        kv.check()


def test_a_block_evicted_from_disk_alone_comes_there_again_with_its_token_ids(tmp_path: Path) -> None:
    with opened(tmp_path, device_nbytes="1MiB", durability="flush") as kv:
        space = kv.namespace(IDENTITY, MIXED)
        assert store(space, prompt(0), anchors=[320]).wait(60)
        assert not kv._table.tokens, "ids of blocks that are all on disk are kept in their slots alone"
        assert kv._room is not None and kv._disk is not None
        disk = kv._residents[Tier.DISK]
        with kv._lock:
            leaving = disk.parts_of(kv._table.find(space.chain(prompt(0))))
            kv._room._start_moves(leaving)
        kv._room._let_go(kv._residents[Tier.DISK], leaving, time.monotonic() + 5)
        assert kv.flush(60).num_spilled == len(leaving)
        with kv._lock:
            rows = kv._table.find(space.chain(prompt(0)))
            slots = kv._table.slot[Tier.DISK, 0, rows].astype(np.int64)
        headers = kv._disk.store.read_headers(MIXED.part_nbytes[0], slots).headers
        assert (headers["num_tokens"] == SIZE).all()
        assert headers["tokens"][:, :SIZE].ravel().tolist() == prompt(0)[: len(rows) * SIZE].tolist()
        kv.check()


def test_memory_only_disk_helper_really_empties(tmp_path: Path) -> None:
    with opened(tmp_path) as kv:
        space = kv.namespace(IDENTITY, MIXED)
        store(space, prompt(0))
        memory_only_disk(kv)
        assert space.lookup(prompt(0)).by_tier == {"disk": 320}


def test_nothing_above_a_tail_goes_before_all_of_the_tail(tmp_path: Path) -> None:
    """A tail whose window part is of no anchor gives that up first; its full part still goes before its parent's."""
    with opened(tmp_path, device_nbytes="1MiB", **MEMORY_ONLY) as kv:
        space = kv.namespace(IDENTITY, LAYOUTS["mixed"])
        store(space, prompt(0), anchors=[320])
        room, device = kv._room, kv._residents[Tier.DEVICE]
        assert room is not None
        with kv._lock:
            rows = kv._table.find(space.chain(prompt(0))).tolist()
            device.leave(
                Parts.of([(rows[-2], 1)]), evicted=True
            )  # the last boundary cannot be restored any more
            tail_groups = set(device.groups_of(rows[-1]))
            assert tail_groups == {0, 1}
            victims = np.array([rows[-1], rows[-2], rows[-3]], dtype=np.int32)
            leaving = list(room._tails(device, 1 << 30, victims))
        at = {part: place for place, part in enumerate(leaving)}
        above = [at[part] for part in leaving if part[0] != rows[-1]]
        assert leaving[0] == (rows[-1], 1)
        assert not above or max(at[rows[-1], group] for group in tail_groups) < min(above)
