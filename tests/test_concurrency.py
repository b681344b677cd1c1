"""Many threads, tiny pools, late copies, forks: no wrong byte, no deadlock, nothing left behind."""

from __future__ import annotations

import faulthandler
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from children import outcome_of
from core_helpers import (
    IDENTITY,
    LAYOUTS,
    MIXED,
    SIZE,
    assert_nothing_stranded,
    assert_right,
    load_checked,
    memory_only_disk,
    opened,
    prompt,
    quiet,
    small,
    store,
)

from tieredkv import Reason, Turn
from tieredkv.cache import TieredCache, open_cache
from tieredkv.errors import Closed, Forked, SessionError
from tieredkv.outcomes import Tier
from tieredkv.system import OsFs, SystemClock
from tieredkv.testing.fake_device import LateStream, poison


@pytest.fixture(autouse=True)
def watchdog() -> Iterator[None]:
    """A deadlock shows every thread's stack and ends the run."""
    faulthandler.dump_traceback_later(90, exit=True, file=sys.__stderr__)
    yield
    faulthandler.cancel_dump_traceback_later()


def together(workers: list[Callable[[], None]], seconds: float) -> None:
    """Run each worker again and again in its own thread until time is over; the first failure is raised."""
    failures: list[BaseException] = []
    stop = time.monotonic() + seconds

    def run(worker: Callable[[], None]) -> None:
        try:
            while time.monotonic() < stop and not failures:
                worker()
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=run, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a worker hangs"
    if failures:
        raise failures[0]


def branching(rng: random.Random, trunks: list[np.ndarray]) -> np.ndarray:
    """A prompt that shares a head with others."""
    trunk = rng.choice(trunks)
    cut = rng.randrange(1, 12) * SIZE
    tail = prompt(rng.randrange(12), rng.randrange(1, 10) * SIZE + 3)
    return np.concatenate((trunk[:cut], tail))


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ("mixed", {}),
        ("uneven", {"policy": "arc", "disk_nbytes": "12MiB"}),
        ("window", {"spill": "evict"}),
        ("mixed", {"disk_nbytes": 0}),
    ],
)
def test_sixteen_threads_and_no_wrong_byte(tmp_path: Path, layout: str, changes: dict[str, Any]) -> None:
    """B02, B03, B05, B11."""
    seed = random.randrange(1 << 30)
    print("seed", seed)
    trunks = [prompt(100 + n, 12 * SIZE) for n in range(4)]
    with opened(tmp_path, **({"device_nbytes": "200KiB", "host_nbytes": "120KiB"} | changes)) as kv:
        space = kv.namespace(IDENTITY, LAYOUTS[layout])
        hits = [0] * 16

        def worker(number: int) -> Callable[[], None]:
            rng = random.Random(seed + number)

            def step() -> None:
                tokens = branching(rng, trunks)
                end = len(tokens) // SIZE * SIZE
                if rng.random() < 0.5:
                    store(space, tokens, anchors=[end, end // 2 // SIZE * SIZE])
                else:
                    hits[number] += load_checked(space, tokens)[0]
                if rng.random() < 0.02:
                    kv.check()

            return step

        together([worker(number) for number in range(16)], 2.5)
        quiet(kv)
        kv.check()
        assert sum(hits) > 0
        assert kv.stats().num_pins == 0
        assert not kv._table.uses.any()
        assert_nothing_stranded(kv)
        counters = kv.stats().counters
        assert not any(counters.get(name) for name in ("corrupt_parts", "superseded_parts")), counters
    with opened(tmp_path, **changes) as kv:
        space = kv.namespace(IDENTITY, LAYOUTS[layout])
        for number in range(200):
            load_checked(space, branching(random.Random(seed + number), trunks))
        kv.check()


def test_two_threads_meet_the_same_damage(tmp_path: Path) -> None:
    """Both report it, it is dropped once, and its slot is given back once."""
    with opened(tmp_path) as kv:
        space = kv.namespace(IDENTITY, MIXED)
        for seed in range(4):
            store(space, prompt(seed))
        memory_only_disk(kv)
        slab = next((tmp_path / "slabs").glob("*.slab"))
        raw = slab.read_bytes()
        damaged = bytearray(raw)
        for at in range(4096 + 100, len(raw), 8192):
            damaged[at] ^= 0xFF
        with open(slab, "r+b") as file:
            file.write(damaged)
        barrier = threading.Barrier(8)

        def load() -> None:
            barrier.wait(60)
            for seed in range(4):
                assert load_checked(space, prompt(seed))[0] == 0

        threads = [threading.Thread(target=load) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        quiet(kv)
        kv.check()
        for seed in range(4):
            assert store(space, prompt(seed)).wait(60)
        memory_only_disk(kv)
        for seed in range(4):
            assert load_checked(space, prompt(seed)) == (320, Reason.COMPLETE)
        kv.check()


def test_a_loaded_prefix_under_pressure_stays(tmp_path: Path) -> None:
    """P10: what is pinned neither leaves nor changes, also when everything else must."""
    with opened(tmp_path, device_nbytes="200KiB", host_nbytes="100KiB", disk_nbytes="9MiB") as kv:
        space = kv.namespace(IDENTITY, MIXED)
        store(space, prompt(0)).wait(60)
        memory_only_disk(kv)
        with space.load(prompt(0)) as prefix:
            for seed in range(1, 90):
                store(space, prompt(seed))
            assert_right(space, prompt(0), prefix)
            assert space.lookup(prompt(0)).num_tokens == 320
            kv.check()
        assert kv.stats().num_pins == 0


def test_everything_pinned_refuses_at_once(tmp_path: Path) -> None:
    """B50: no endless search for a victim."""
    with opened(tmp_path, device_nbytes="96KiB", host_nbytes=0, disk_nbytes=0) as kv:
        space = kv.namespace(IDENTITY, MIXED)
        assert store(space, prompt(0)[: 20 * SIZE + 1]).num_refused == 0
        with space.load(prompt(0)) as prefix:
            assert prefix.num_tokens == 320
            began = time.monotonic()
            stored = store(space, prompt(1))
            assert time.monotonic() - began < 1.0
            assert stored.num_refused >= 19 and stored.reason is Reason.NO_SPACE
            kv.check()
            assert_right(space, prompt(0), prefix)
        assert store(space, prompt(1)).num_refused == 0
        kv.check()


# ---- late copies ---------------------------------------------------------------------------------


def late_cache(path: Path, **changes: Any) -> tuple[TieredCache, LateStream]:
    stream = LateStream(delay_s=0.0005, seed=7)
    return TieredCache(str(path), small(**changes), OsFs(), SystemClock(), stream=stream), stream


def poison_free_slots(kv: TieredCache) -> None:
    """What no slot owns reads as poison from now on."""
    with kv._lock:
        for tier, memory in kv._memories.items():
            arena = kv._residents[tier].arena
            free = torch.ones(memory.buffer.numel(), dtype=torch.bool)
            for stride in arena.strides:
                for slot in arena.live_slots(stride).tolist():
                    at = arena.offset(stride, slot)
                    free[at : at + stride] = False
            memory.buffer[free] = 0xA5


@pytest.mark.parametrize("layout", ["mixed", "uneven"])
def test_late_copies_are_waited_for(tmp_path: Path, layout: str) -> None:
    """B01: store reads what the kernel will have written, load returns what the copy will have brought."""
    kv, stream = late_cache(tmp_path, device_nbytes="160KiB", host_nbytes="160KiB")
    try:
        space = kv.namespace(IDENTITY, LAYOUTS[layout])
        for seed in range(6):
            tokens = prompt(seed, 8 * SIZE + 2)
            from core_helpers import kv_of

            final = kv_of(space, tokens)
            early = {layer: tuple(torch.full_like(t, -7) for t in ts) for layer, ts in final.items()}
            for layer, tensors in early.items():
                for at, tensor in enumerate(tensors):
                    stream.compute(lambda t=tensor, f=final[layer][at]: t.copy_(f))
            space.store(tokens, early, anchors=[8 * SIZE])
            for tensors in early.values():
                for tensor in tensors:
                    poison(tensor)  # ours again as soon as store returns
            poison_free_slots(kv)
        for _ in range(2):
            for seed in range(6):
                assert load_checked(space, prompt(seed, 8 * SIZE + 2))[0] == 8 * SIZE
                poison_free_slots(kv)
        kv.check()
    finally:
        stream.close()
        kv.close(10)


def test_late_copies_and_threads(tmp_path: Path) -> None:
    """B11: no slot serves another block while a copy from or to it is under way."""
    kv, stream = late_cache(tmp_path, device_nbytes="200KiB", host_nbytes="120KiB")
    try:
        space = kv.namespace(IDENTITY, MIXED)
        trunks = [prompt(100 + n, 12 * SIZE) for n in range(3)]

        def worker(number: int) -> Callable[[], None]:
            rng = random.Random(number)

            def step() -> None:
                tokens = branching(rng, trunks)
                if rng.random() < 0.5:
                    store(space, tokens)
                else:
                    load_checked(space, tokens)
                if number == 0:
                    poison_free_slots_safely(kv)

            return step

        together([worker(number) for number in range(4)], 2.0)
        quiet(kv)
        kv.check()
    finally:
        stream.close()
        kv.close(10)


def poison_free_slots_safely(kv: TieredCache) -> None:
    """Free slots can be reserved at any moment after the lock is given back, so all of it happens under it."""
    poison_free_slots(kv)


# ---- closing while others work -------------------------------------------------------------------


def test_closing_under_load_is_bounded_and_clean(tmp_path: Path) -> None:
    kv = open_cache(tmp_path, small())
    space = kv.namespace(IDENTITY, MIXED)
    failures: list[BaseException] = []

    def work(number: int) -> None:
        rng = random.Random(number)
        try:
            while True:
                tokens = prompt(rng.randrange(30))
                if rng.random() < 0.5:
                    store(space, tokens)
                else:
                    load_checked(space, tokens)
        except Closed:
            pass
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    began = time.monotonic()
    kv.close(10)
    assert time.monotonic() - began < 10
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert not failures, failures[0]
    with opened(tmp_path) as kv:
        space = kv.namespace(IDENTITY, MIXED)
        for seed in range(30):
            load_checked(space, prompt(seed))
        kv.check()


# ---- forks ---------------------------------------------------------------------------------------


def test_a_forked_child_is_told_and_harms_nothing(tmp_path: Path) -> None:
    """P15, B60."""
    with opened(tmp_path) as kv:
        space = kv.namespace(IDENTITY, MIXED)
        session = kv.session("a", space)
        store(space, prompt(0)).wait(60)
        prefix = space.load(prompt(0))

        def child() -> None:
            calls = [
                lambda: space.lookup(prompt(0)), lambda: space.load(prompt(0)), lambda: store(space, prompt(1)),
                lambda: kv.namespace(IDENTITY, MIXED), kv.flush, kv.stats, kv.checkpoint,
                lambda: session.commit([1], []), lambda: kv.session("b", space), lambda: kv.purge(space),
            ]  # fmt: skip
            for call in calls:
                with pytest.raises(Forked):
                    call()
            began = time.monotonic()
            prefix.close()
            session.close()
            kv.close()
            assert time.monotonic() - began < 1

        with kv._lock:  # as another thread may hold it at the moment of the fork
            assert outcome_of(child, 10.0) == 0
        hold = threading.Event()
        held = threading.Event()

        def holder() -> None:
            with kv._lock:
                held.set()
                hold.wait(60)

        thread = threading.Thread(target=holder)
        thread.start()
        held.wait(60)
        try:
            assert outcome_of(child, 10.0) == 0
        finally:
            hold.set()
            thread.join()
        assert_right(space, prompt(0), prefix)
        prefix.close()
        session.commit(prompt(0), [Turn("user", 20)])
        store(space, prompt(1)).wait(60)
        assert kv.flush(60).ok
        kv.check()
    with opened(tmp_path) as kv:
        space = kv.namespace(IDENTITY, MIXED)
        assert [load_checked(space, prompt(seed))[0] for seed in (0, 1)] == [320, 320]


def test_the_lock_is_free_after_its_owner_died_though_a_child_of_it_lives(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    owner = os.fork()
    if owner == 0:
        kv = open_cache(tmp_path, small())
        store(kv.namespace(IDENTITY, MIXED), prompt(0)).wait(60)
        child = os.fork()
        if child == 0:
            time.sleep(30)
            os._exit(0)
        os.write(write_end, f"{child}\n".encode())
        time.sleep(30)
        os._exit(0)
    child = int(os.read(read_end, 100))
    os.kill(owner, 9)
    os.waitpid(owner, 0)
    try:
        os.kill(child, 0)
        with opened(tmp_path) as kv:
            assert load_checked(kv.namespace(IDENTITY, MIXED), prompt(0))[0] == 320
    finally:
        os.kill(child, 9)
        os.close(read_end)
        os.close(write_end)


def test_working_buffers_come_and_go_while_they_are_counted(tmp_path: Path) -> None:
    class Buffer:
        def nbytes(self) -> int:
            return 1

    held = [Buffer() for _ in range(2000)]
    with opened(tmp_path) as kv:
        list(map(kv.count_working, held))

        def come() -> None:
            held.append(Buffer())
            kv.count_working(held[-1])
            del held[0]

        before = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        try:
            together([come, kv.stats], 2.0)
        finally:
            sys.setswitchinterval(before)
        assert kv.stats().working_nbytes == len(held)


# ---- removal beside use --------------------------------------------------------------------------


def test_purging_what_is_in_use_leaves_a_cache_that_works(tmp_path: Path) -> None:
    with opened(tmp_path) as kv:
        space = kv.namespace(IDENTITY, MIXED)
        store(space, prompt(0)).wait(60)
        failures: list[BaseException] = []
        stop = threading.Event()

        def work(number: int) -> None:
            rng = random.Random(number)
            while not stop.is_set():
                try:
                    tokens = prompt(rng.randrange(6))
                    store(space, tokens)
                    load_checked(space, tokens)
                except (Closed, SessionError):
                    return
                except BaseException as failure:
                    failures.append(failure)
                    return

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        time.sleep(0.3)
        kv.purge(space)
        stop.set()
        for thread in threads:
            thread.join(10)
        assert not failures, failures[0]
        again = kv.namespace(IDENTITY, MIXED)
        assert store(again, prompt(9)).num_refused == 0
        assert load_checked(again, prompt(9))[0] == 320
        assert kv.flush(60).ok
        quiet(kv)
        kv.check()
    with opened(tmp_path) as kv:
        kv.check()
        assert load_checked(kv.namespace(IDENTITY, MIXED), prompt(9))[0] == 320


def test_purging_what_a_prefix_holds_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path, deadline_s=0.3) as kv:
        space = kv.namespace(IDENTITY, MIXED)
        store(space, prompt(0)).wait(60)
        with space.load(prompt(0)) as prefix:
            with pytest.raises(SessionError, match="in use"):
                kv.purge(space)
            assert_right(space, prompt(0), prefix)
        again = kv.namespace(IDENTITY, MIXED)
        assert load_checked(again, prompt(0))[0] == 320
        kv.purge(again)
        again = kv.namespace(IDENTITY, MIXED)
        assert again.lookup(prompt(0)).num_tokens == 0
        for seed in range(1, 12):
            assert store(again, prompt(seed)).num_refused == 0
        assert kv.flush(60).ok
        quiet(kv)
        kv.check()
        with kv._lock:
            alive = {int(n) for n in kv._table.namespace[kv._table.live_rows()]}
            assert alive <= set(kv._state.catalog.namespaces), "rows of a namespace that is gone"


def test_tiers_are_named(tmp_path: Path) -> None:
    with opened(tmp_path) as kv:
        kv.namespace(IDENTITY, MIXED)
        assert [tier.name for tier in kv.stats().tiers] == ["device", "host", "disk"]
        assert list(kv._residents) == [Tier.DEVICE, Tier.HOST, Tier.DISK]
