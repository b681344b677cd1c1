"""Making room goes wrong: interrupted, refused by the log, pinned meanwhile, or in the way of what it is for."""

from __future__ import annotations

import errno
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_helpers import (
    IDENTITY,
    LAYOUTS,
    SIZE,
    Gate,
    HookedFs,
    comes_true,
    group_of,
    memory_only_disk,
    opened,
    prompt,
    quiet,
    small,
    store,
)

from tieredkv import BlockLayout, Turn, room
from tieredkv import open as open_store
from tieredkv.outcomes import Tier
from tieredkv.tier.slab_format import SLOT_HEADER_NBYTES

FULL = LAYOUTS["full"]
NOBODY = np.zeros(0, np.int32)


@pytest.mark.parametrize("where", ["spill_now", "copy_slots"])
def test_an_interrupt_in_store_leaves_nothing_moving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Ctrl-C while room was made kept those blocks moving for ever: no store and no purge went through after it."""
    host_nbytes = 0 if where == "spill_now" else 8 * 4096
    with opened(tmp_path, spill="evict", device_nbytes=16 * 4096, host_nbytes=host_nbytes) as kv:
        space = kv.namespace(IDENTITY, FULL)
        store(space, prompt(0, 16 * SIZE + 1))

        def interrupted(*_args: Any) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(*((kv._spiller, where) if where == "spill_now" else (room, where)), interrupted)
            with pytest.raises(KeyboardInterrupt):
                store(space, prompt(1, 4 * SIZE + 1))
        quiet(kv)
        kv.check()
        assert not kv._table.moving.any() and not kv._table.uses.any()
        for resident, tier in zip(kv._residents.values(), kv.stats().tiers, strict=True):
            assert sum(map(resident.arena.num_live, resident.arena.strides)) == tier.num_parts
        assert store(space, prompt(2, 14 * SIZE + 1)).num_new == 14
        assert store(space, prompt(3, 14 * SIZE + 1)).num_refused == 0
        kv.purge(space)


def test_a_log_that_fails_while_the_disk_is_full_bypasses_the_disk(tmp_path: Path) -> None:
    """Each store asked the log again and again until its deadline that something leaves the disk."""
    is_bad = threading.Event()

    def hook(op: str, path: str) -> None:
        if is_bad.is_set() and "/wal/" in path:
            raise OSError(errno.EIO, "the disk is broken")

    with opened(
        tmp_path, HookedFs(hook), device_nbytes="1MiB", host_nbytes=0, disk_nbytes="8MiB", log_keep_nbytes=0
    ) as kv:
        space, number = kv.namespace(IDENTITY, FULL), 0
        while not kv.stats().tiers[-1].num_evictions:
            store(space, prompt(number, 100 * SIZE + 1)).wait(60)
            number += 1
        quiet(kv)
        is_bad.set()
        for _ in range(6):
            number += 1
            assert store(space, prompt(number, 100 * SIZE + 1)).num_refused == 0
        failed = kv.stats().counters.get("drop_not_logged_parts", 0)
        assert failed < 1000, f"{failed} times"
        assert comes_true(lambda: not kv._table.moving.any())
        kv.check()


def test_what_was_pinned_since_it_was_chosen_stays_on_disk(tmp_path: Path) -> None:
    with opened(tmp_path, device_nbytes="1MiB", host_nbytes=0) as kv:
        space, tokens = kv.namespace(IDENTITY, FULL), prompt(0, 20 * SIZE + 1)
        assert store(space, tokens).wait(60)
        session = kv.session("a", space)
        session.commit(tokens, [Turn("user", 20)], anchors=[20 * SIZE])
        memory_only_disk(kv)
        disk = kv._residents[Tier.DISK]
        with kv._lock:
            leaving = kv._room._choose(disk, 10 * (FULL.part_nbytes[0] + SLOT_HEADER_NBYTES), NOBODY)
        assert len(leaving)
        session.pin()
        kv._room._let_go(disk, leaving, time.monotonic() + 5)
        assert space.lookup(tokens).num_tokens == 20 * SIZE
        session.unpin()
        kv.check()


@pytest.mark.parametrize("host_nbytes", [0, 8 * 4096])
def test_a_chat_longer_than_the_only_memory_keeps_its_beginning(tmp_path: Path, host_nbytes: int) -> None:
    """A refused store made room of the same chat's own tail, so that less of it was left than before."""
    with opened(tmp_path, device_nbytes=16 * 4096, host_nbytes=host_nbytes, disk_nbytes=0) as kv:
        space, tokens, reached = kv.namespace(IDENTITY, FULL), prompt(0, 64 * SIZE + 1), 0
        for num_blocks in (16, 20, 24, 30, 20, 40):
            store(space, tokens[: num_blocks * SIZE + 1])
            kv.check()
            found = space.lookup(tokens).num_tokens // SIZE
            assert found >= reached, f"{found} blocks of {num_blocks}, {reached} before"
            reached = found
        assert reached >= 16
        assert store(space, prompt(1, 10 * SIZE + 1)).num_new == 10, "another chat gets room"


def test_where_the_disk_takes_less_than_a_batch_its_heads_get_there(tmp_path: Path) -> None:
    """Tails came first, were written in place of what they follow, and went with it."""
    with opened(
        tmp_path, spill="evict", device_nbytes="4MiB", host_nbytes=0, disk_nbytes="8MiB", log_keep_nbytes=0
    ) as kv:
        space, tokens, stride = kv.namespace(IDENTITY, FULL), prompt(0, 500 * SIZE + 1), 2 * 4096
        store(space, tokens)
        device, disk = kv._residents[Tier.DEVICE], kv._residents[Tier.DISK]
        with kv._lock:
            taken = disk.arena.allocate(stride, disk.arena.num_free(stride) - 450)  # by what cannot leave
            rows = kv._table.find(space.chain(tokens))
            leaving = device.parts_of(rows[::-1][:100])
            kv._room._start_moves(leaving)
        kv._room._let_go(device, leaving, time.monotonic() + 5)
        quiet(kv)
        on_disk = kv._table.on_disk(rows)[0]
        assert on_disk.sum() == 450 and on_disk[:450].all()
        assert space.lookup(tokens).num_tokens == 450 * SIZE
        with kv._lock:
            disk.free(stride, taken)


def test_chunks_that_must_stay_are_found_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever wanted room looked at the whole table for each chunk of a chat that fills the disk."""
    layout = BlockLayout(SIZE, (group_of("full", [0], width=160), group_of("window", [1], window=40)))
    stride = layout.part_nbytes[0] + SLOT_HEADER_NBYTES
    with opened(tmp_path, device_nbytes="8MiB", host_nbytes=0, disk_nbytes="64MiB", log_keep_nbytes=0) as kv:
        space, disk = kv.namespace(IDENTITY, layout), kv._residents[Tier.DISK]
        with kv._lock:
            count = disk.arena.num_free(stride)
            rows = kv._table.register(space.row.number, space.chain(prompt(0, count * SIZE + 1)))
            slots = disk.arena.allocate(stride, count)
            kv._table.slot[Tier.DISK, 0, rows] = slots
            disk.enter(rows)
            looks = list[int]()
            parts_in = kv._room._parts_in
            monkeypatch.setattr(kv._room, "_parts_in", lambda *args: looks.append(1) or parts_in(*args))
            monkeypatch.setattr(kv._spiller, "rows_on_their_way", lambda: rows[-1:])
            assert not kv._room._choose_chunk(disk, 1) and not looks
            monkeypatch.setattr(kv._spiller, "rows_on_their_way", lambda: rows[: count // 2])
            parts = kv._room._choose_chunk(disk, 1)
            assert (
                len(parts)
                and len(looks) == 1
                and set(parts.rows.tolist()) <= set(rows[count // 2 :].tolist())
            )
            kv._room._end_moves(parts)
            kv._table.slot[Tier.DISK, 0, rows] = -1
            disk.left(rows, evicted=False)
            disk.free(stride, slots)
            kv._table.free_if_empty(rows)


def test_who_waits_for_a_spill_is_told_when_the_cache_closes(tmp_path: Path) -> None:
    """What was still in the queue was never spilled, and its waiters waited for ever."""
    gate = Gate()
    fs = HookedFs(lambda op, path: gate.pass_through() if op == "pwritev" and "slabs" in path else None)
    kv = open_store(tmp_path, small(deadline_s=2.0, device_nbytes="4MiB"), fs=fs)
    space = kv.namespace(IDENTITY, FULL)
    gate.shut()
    stored = [store(space, prompt(seed, 4 * SIZE + 1)) for seed in range(8)]
    told: list[bool] = []
    waiters = [threading.Thread(target=lambda s=s: told.append(s.wait()), daemon=True) for s in stored]
    for waiter in waiters:
        waiter.start()
    assert not kv.close(0.5).ok
    gate.open()
    for waiter in waiters:
        waiter.join(60)
    assert len(told) == len(stored) and not all(told)


def test_space_that_is_on_its_way_is_not_given_to_other_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks taken for full parts went back for window parts, and then got their space: beside the budget."""
    layout = LAYOUTS["uneven"]
    with opened(tmp_path, device_nbytes="1MiB", host_nbytes=0, disk_nbytes="32MiB", log_keep_nbytes=0) as kv:
        kv.namespace(IDENTITY, layout)
        disk, slabs, (full, window) = kv._residents[Tier.DISK], kv._disk.store, layout.part_nbytes
        began, go, reserve = threading.Event(), threading.Event(), slabs.reserve

        def slow(*args: Any) -> None:
            began.set()
            assert go.wait(60)
            reserve(*args)

        monkeypatch.setattr(slabs, "reserve", slow)
        finder = threading.Thread(target=kv._spiller._find_space, args=(full, 1 << 20))
        finder.start()
        assert began.wait(60)
        slots = kv._room.reserve(Tier.DISK, window, 1 << 20, time.monotonic() + 0.5)
        go.set()
        finder.join(60)
        held = sorted(slabs.held_chunks(full))
        assert held and not disk.arena.not_taken(full + SLOT_HEADER_NBYTES, held)
        assert disk.arena.used_nbytes <= disk.arena.budget_nbytes
        assert slabs.allocated_nbytes <= disk.arena.budget_nbytes
        with kv._lock:
            disk.free(window + SLOT_HEADER_NBYTES, slots)
            assert len(disk.arena.retire_spare(0)) >= len(held), "then they are spare like any other"


def test_no_tail_has_room_before_its_head_was_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two batches of one chat the second had the last room: it lay on disk behind nothing."""
    with opened(tmp_path, device_nbytes="4MiB", host_nbytes=0, disk_nbytes="8MiB", log_keep_nbytes=0) as kv:
        space, tokens, stride = kv.namespace(IDENTITY, FULL), prompt(0, 400 * SIZE + 1), 2 * 4096
        disk, spill = kv._residents[Tier.DISK], kv._spiller
        with kv._lock:
            taken = disk.arena.allocate(stride, disk.arena.num_free(stride) - 300)  # by what cannot leave
        has_room, calls = threading.Event(), list[int]()
        reserve, write = spill.reserve, kv._disk.store.write

        def delayed(part_nbytes: int, count: int, *args: Any, **options: Any) -> Any:
            calls.append(count)
            if len(calls) > 1:
                return reserve(part_nbytes, count, *args, **options)
            comes_true(lambda: len(calls) > 1, 0.5)  # if the second may, it goes first
            try:
                return reserve(part_nbytes, count, *args, **options)
            finally:
                has_room.set()

        def slow(*args: Any) -> Any:
            assert has_room.wait(60)
            return write(*args)

        monkeypatch.setattr(kv._disk.store, "write", slow)
        monkeypatch.setattr(spill, "reserve", delayed)
        store(space, tokens[: 200 * SIZE + 1])
        assert comes_true(lambda: len(calls) == 1)
        store(space, tokens)
        quiet(kv)
        on_disk = kv._table.on_disk(kv._table.find(space.chain(tokens)))[0]
        assert on_disk.sum() >= 200 and on_disk[: int(on_disk.sum())].all(), np.flatnonzero(on_disk)
        with kv._lock:
            disk.free(stride, taken)


def test_a_spill_that_ends_just_after_nobody_could_leave_makes_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All were being spilled when one was to be chosen, none was when that was asked: the store was refused."""
    with opened(tmp_path, device_nbytes=16 * 4096, host_nbytes=0) as kv:
        space, spill, choose = kv.namespace(IDENTITY, FULL), kv._spiller, kv._room._choose
        assert store(space, prompt(0, 16 * SIZE + 1)).wait(60)
        quiet(kv)
        enders = list[threading.Thread]()

        def end() -> None:
            with kv._lock:
                spill._in_flight.pop((-1, 0))
                kv._lock.notify_all()

        def late(*args: Any) -> Any:
            if enders:
                return choose(*args)
            spill._in_flight[-1, 0] = []
            enders.append(threading.Thread(target=end))
            enders[0].start()
            return room.NO_PARTS

        await_spill = kv._room._await_spill

        def slow(*args: Any) -> bool:
            enders[0].join(0.5)  # it ends now, unless the lock is held
            return await_spill(*args)

        monkeypatch.setattr(kv._room, "_choose", late)
        monkeypatch.setattr(kv._room, "_await_spill", slow)
        stored = store(space, prompt(1, 8 * SIZE + 1))
        enders[0].join(60)
        assert stored.num_new == 8 and stored.num_refused == 0
