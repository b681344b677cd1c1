"""The disk tier when the disk fails: full, read-only, failing syncs, hung, damaged. It forgets, and says so."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
import time
from collections.abc import Iterator
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
    Gate,
    HookedFs,
    assert_right,
    comes_true,
    directory_nbytes,
    load_checked,
    memory_only_disk,
    opened,
    prompt,
    quiet,
    settled,
    small,
    store,
)

from tieredkv import Reason, Turn, removal, spiller
from tieredkv.cache import TieredCache, open_cache
from tieredkv.disk import shares
from tieredkv.errors import Closed, DamagedStore, PathUnusable, SessionError
from tieredkv.machine import resolve
from tieredkv.outcomes import Tier
from tieredkv.system.fs import File, OsFs
from tieredkv.table.recovery import recover
from tieredkv.table.state import State
from tieredkv.tier import tensor


class Fault:
    """Raises `code` from chosen operations on chosen paths while it is on, from the n-th call on."""

    def __init__(
        self, code: int, operations: set[str], where: str = "", *, first: int = 0, count: int = 1 << 30
    ) -> None:
        self.code, self.operations, self.where = code, operations, where
        self.first, self.last = first, first + count
        self.on = True
        self.num_calls = 0

    def __call__(self, operation: str, path: str) -> None:
        if self.on and operation in self.operations and self.where in path:
            self.num_calls += 1
            if self.first < self.num_calls <= self.last:
                raise OSError(self.code, os.strerror(self.code), path)


def test_space_for_a_long_spill_is_found_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To find some, the system waits for every write under way in that file: not for each chunk again."""
    monkeypatch.setattr(spiller, "_BATCH_NBYTES", 1 << 20)
    found: list[str] = []
    fs = HookedFs(lambda operation, path: found.append(path) if operation == "allocate" else None)
    sizes = {"device_nbytes": "32MiB", "host_nbytes": 0, "disk_nbytes": "96MiB", "spill": "evict"}
    with opened(tmp_path, fs=fs, **sizes) as kv:
        space = kv.namespace(IDENTITY, LAYOUTS["full"])
        for seed in range(12):
            store(space, prompt(seed, 160 * SIZE))
        assert kv.flush().ok
        assert kv.stats().tiers[-1].live_nbytes > 3 * kv._residents[Tier.DISK].arena.chunk_nbytes
        # Whoever comes first finds it for all that is queued then, which what the other workers hold is not.
        assert 1 <= len([path for path in found if "/slabs/" in path]) <= spiller._NUM_WORKERS
        kv.check()
    with opened(tmp_path, **sizes) as kv:
        space = kv.namespace(IDENTITY, LAYOUTS["full"])
        for seed in range(12):
            assert load_checked(space, prompt(seed, 160 * SIZE + 1)) == (160 * SIZE, Reason.COMPLETE)
        assert directory_nbytes(tmp_path) <= 96 << 20


def fill(kv: TieredCache, seeds: range, layout: str = "mixed") -> None:
    space = kv.namespace(IDENTITY, LAYOUTS[layout])
    for seed in seeds:
        store(space, prompt(seed)).wait(3)


# ---- durability ----------------------------------------------------------------------------------


@pytest.mark.parametrize("durability", ["group", "flush", "none"])
def test_levels(tmp_path: Path, durability: str) -> None:
    with opened(tmp_path, durability=durability) as kv:
        space = kv.namespace(IDENTITY, MIXED)
        stored = store(space, prompt(0))
        assert stored.wait(60)
        if durability == "group":
            assert comes_true(lambda: kv.stats().durable_lsn == kv.stats().last_lsn)
        else:
            time.sleep(0.2)
            assert kv.stats().durable_lsn < kv.stats().last_lsn
        flushed = kv.flush(60)
        assert flushed.ok and flushed.durable_lsn == kv.stats().last_lsn
    with opened(tmp_path, durability=durability) as kv:
        assert kv.recovery.num_replayed == 0, "a clean close leaves nothing to replay"
        assert load_checked(kv.namespace(IDENTITY, MIXED), prompt(0))[0] == 320


def test_flush_spills_what_write_back_kept(tmp_path: Path) -> None:
    with opened(tmp_path, spill="evict", device_nbytes="1MiB") as kv:
        space = kv.namespace(IDENTITY, MIXED)
        store(space, prompt(0))
        assert kv.stats().tiers[-1].num_parts == 0
        flushed = kv.flush(60)
        assert flushed.ok and flushed.num_spilled == 23
        assert kv.stats().tiers[-1].num_parts == 23


def test_an_acknowledged_wait_means_committed(tmp_path: Path) -> None:
    """Also when another request carries the blocks, or an earlier store of them is still under way."""
    gate = Gate()
    fs = HookedFs(lambda op, path: gate.pass_through() if op == "pwritev" and "slabs" in path else None)
    with opened(tmp_path, fs=fs, device_nbytes="1MiB") as kv:
        space = kv.namespace(IDENTITY, MIXED)
        gate.shut()
        first = store(space, prompt(0))
        again = store(space, prompt(0))
        longer = store(space, np.concatenate((prompt(0)[:320], prompt(1))))
        assert not first.wait(0.1) and not again.wait(0.1) and not longer.wait(0.1)
        gate.open()
        assert again.wait(60) and kv.stats().tiers[-1].num_parts >= 23
        assert first.wait(60) and longer.wait(60)


# ---- budgets -------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["mixed", "uneven"])
@pytest.mark.parametrize("disk_nbytes", [13 << 20, 24 << 20])
def test_budgets_hold_at_every_instant(tmp_path: Path, layout: str, disk_nbytes: int) -> None:
    """P13, B40: measured from outside, all the time, log and checkpoints included."""
    worst, stop = [0], threading.Event()

    def watch() -> None:
        while not stop.is_set():
            worst[0] = max(worst[0], directory_nbytes(tmp_path))
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with opened(tmp_path, disk_nbytes=disk_nbytes, log_keep_nbytes=0, device_nbytes="512KiB") as kv:
            space = kv.namespace(IDENTITY, LAYOUTS[layout])
            session = kv.session("a", space)
            for seed in range(60):
                store(space, prompt(seed))
                session.commit(prompt(seed, 2000), [], meta={"pad": "x" * 3000})
                for tier in kv._residents.values():
                    assert tier.arena.used_nbytes <= tier.arena.budget_nbytes
                if seed % 20 == 19:
                    kv.checkpoint()
                    kv.check()
            counters = kv.stats().counters
            assert counters.get("checkpoints", 0) >= 3
            assert kv.stats().disk_nbytes <= disk_nbytes
    finally:
        stop.set()
        watcher.join()
    assert worst[0] <= disk_nbytes, f"{worst[0]} bytes at one moment, {worst[0] - disk_nbytes} too many"
    with opened(tmp_path, disk_nbytes=disk_nbytes, log_keep_nbytes=0) as kv:
        assert (
            kv.session("a", kv.namespace(IDENTITY, LAYOUTS[layout])).tokens.tolist()
            == prompt(59, 2000).tolist()
        )


def test_the_shares_add_up(tmp_path: Path) -> None:
    for nbytes in [8 << 20, 100 << 20, 5 << 30, 1 << 40]:
        segment, log_max, parts, catalog = shares(
            resolve(small(disk_nbytes=nbytes, log_keep_nbytes="64MiB"), str(tmp_path))
        )
        assert segment % 4096 == 0 and log_max >= 2 * segment and parts > nbytes // 3
        assert log_max + 2 * segment + nbytes // 24 + 3 * catalog + parts <= nbytes, (
            "log, four segments at its cap, tables, parts"
        )


def test_sessions_stop_at_what_is_set_aside_for_them(tmp_path: Path) -> None:
    """P13: a checkpoint holds every session, and three of them fit beside everything else."""
    disk_nbytes = 8 << 20
    with opened(tmp_path, disk_nbytes=disk_nbytes, log_keep_nbytes=0) as kv:
        space, catalog = kv.namespace(IDENTITY, MIXED), kv._state.catalog
        made = 0
        with pytest.raises(SessionError, match="delete some, or raise disk_nbytes"):
            while True:
                with kv.session(f"s{made}", space) as session:
                    session.commit(prompt(made, 5000), [Turn("user", 5000)])
                made += 1
        limit = shares(resolve(kv.config, str(tmp_path))).catalog_nbytes
        assert catalog.nbytes <= limit < catalog.nbytes + 4 * 5000 + 1000
        assert made > 2 and f"s{made}" not in {row.name for row in kv.sessions()}
        first = kv.session("s0", space)
        for number in range(40):
            first.fork(f"f{number}").close()
        assert catalog.nbytes > 2 * limit, "each by itself; what forks share stands once"
        for number in range(3):
            first.commit(prompt(0, 5000), [Turn("user", 5000)], meta={"n": number})
            assert kv.checkpoint()
        assert sum(path.stat().st_size for path in tmp_path.glob("table-*")) <= disk_nbytes // 24 + 3 * limit
        kv.session("s1", space).delete()
        kv.session("another", space).commit(prompt(99, 5000), [Turn("user", 5000)])
        assert catalog.nbytes == sum(row.nbytes for row in catalog.sessions.values()) + sum(
            row.nbytes for row in catalog.namespaces.values()
        )
        sessions = dict(catalog.sessions)
    with opened(tmp_path, disk_nbytes=disk_nbytes, log_keep_nbytes=0) as kv:
        assert {name: row.encode() for name, row in kv._state.catalog.sessions.items()} == {
            name: row.encode() for name, row in sessions.items()
        }


def test_many_small_records_rotate_the_log_and_checkpoint_it(tmp_path: Path) -> None:
    """P13: the log never outgrows what `shares` sets aside for it, at no commit."""
    with opened(tmp_path, disk_nbytes="16MiB", log_keep_nbytes=0) as kv:
        space = kv.namespace(IDENTITY, MIXED)
        session = kv.session("a", space)
        segment, log_max, *_ = shares(resolve(kv.config, str(tmp_path)))
        most = 0
        for number in range(300):
            session.commit(prompt(number, 1500), [Turn("user", 1500)], meta={"n": number})
            most = max(most, kv.stats().log_nbytes)
        assert log_max < most <= log_max + 2 * segment
        assert kv.stats().counters["checkpoints"] >= 1
        assert comes_true(lambda: len(list(tmp_path.glob("table-*.lmdb"))) <= 2)
    with opened(tmp_path, disk_nbytes="16MiB", log_keep_nbytes=0) as kv:
        session = kv.session("a", kv.namespace(IDENTITY, MIXED))
        assert session.meta == {"n": 299} and session.tokens.tolist() == prompt(299, 1500).tolist()


# ---- space ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("where", ["slabs", "wal", "table", ""])
def test_no_space_refuses_and_comes_back_by_itself(tmp_path: Path, code: int, where: str) -> None:
    """P8, B29: reads go on, nothing half-done is matched, and service returns when space does."""
    fault = Fault(
        code,
        {"allocate", "pwritev", "create", "datasync"} if where != "wal" else {"allocate", "create"},
        where,
    )
    fault.on = False
    with opened(
        tmp_path, fs=HookedFs(fault), device_nbytes="128KiB", host_nbytes="128KiB", log_keep_nbytes=0
    ) as kv:
        space = kv.namespace(IDENTITY, MIXED)
        fill(kv, range(6))
        memory_only_disk(kv)
        fault.on = True
        session = kv.session("a", space)
        for seed in range(6, 26):
            store(space, prompt(seed))
            with_trouble(lambda seed=seed: session.commit(prompt(seed, 4000), [], meta={"pad": "y" * 4000}))
        for seed in range(6):
            assert load_checked(space, prompt(seed))[0] == 320
        kv.check()
        fault.on = False
        assert settled(kv, prompt(99)), kv.flush(60)
        session.commit(prompt(3), [])
        assert kv.health().ok, kv.health()
        quiet(kv)
        kv.check()
    with opened(tmp_path) as kv:
        space = kv.namespace(IDENTITY, MIXED)
        assert not kv.recovery.damage
        assert load_checked(space, prompt(99))[0] == 320
        assert [load_checked(space, prompt(seed))[0] for seed in range(6)] == [320] * 6
        assert kv.session("a", space).tokens.tolist() == prompt(3).tolist()


def with_trouble(call: Any) -> None:
    with contextlib.suppress(SessionError):
        call()


def test_space_that_is_short_at_open_is_no_open_store(tmp_path: Path) -> None:
    with opened(tmp_path) as kv:
        fill(kv, range(2))
    before = sorted(p.name for p in (tmp_path / "wal").iterdir())
    with pytest.raises(PathUnusable, match="No space"):
        open_cache(tmp_path, small(), fs=HookedFs(Fault(errno.ENOSPC, {"allocate", "pwritev", "create"})))
    assert before == sorted(p.name for p in (tmp_path / "wal").iterdir())
    with opened(
        tmp_path, fs=HookedFs(Fault(errno.ENOSPC, {"allocate", "pwritev", "create"})), on_unusable="memory"
    ) as kv:
        assert kv.health().mode == "memory"
    with opened(tmp_path) as kv:
        assert load_checked(kv.namespace(IDENTITY, MIXED), prompt(0))[0] == 320


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
def test_a_read_only_directory(tmp_path: Path, code: int) -> None:
    """B56, B71."""
    with opened(tmp_path) as kv:
        fill(kv, range(1))
    fault = Fault(code, {"lock", "make_dir", "create", "pwritev", "allocate", "rename", "unlink"})
    with pytest.raises(PathUnusable, match=str(tmp_path)):
        open_cache(tmp_path, small(), fs=HookedFs(fault))
    with opened(tmp_path, fs=HookedFs(fault), on_unusable="memory") as kv:
        space = kv.namespace(IDENTITY, MIXED)
        store(space, prompt(5))
        assert load_checked(space, prompt(5))[0] == 320
        assert os.strerror(code) in kv.health().troubles[0].what
    with opened(tmp_path) as kv:
        assert load_checked(kv.namespace(IDENTITY, MIXED), prompt(0))[0] == 320


def test_a_flush_on_a_disk_that_stays_full_gives_up_and_the_next_may_succeed(tmp_path: Path) -> None:
    fault = Fault(errno.ENOSPC, {"pwritev", "allocate", "create"}, "wal")
    fault.on = False
    with opened(tmp_path, fs=HookedFs(fault), durability="flush") as kv:
        space = kv.namespace(IDENTITY, LAYOUTS["full"])
        assert store(space, prompt(0)).wait(60)
        fault.on = True
        with contextlib.suppress(SessionError):
            kv.session("a", space).commit(prompt(0), [])
        began = time.monotonic()
        assert not kv.flush(60).ok
        assert time.monotonic() - began < 30, "it waited for its deadline"
        fault.on = False
        assert kv.flush(60).ok


# ---- failed syncs --------------------------------------------------------------------------------


def test_a_slab_removed_from_outside_is_written_again(tmp_path: Path) -> None:
    """P4, P7: a flush that says yes has a copy on disk, though somebody took the slabs away before it."""
    with opened(tmp_path, durability="flush", device_nbytes="1MiB") as kv:
        space = kv.namespace(IDENTITY, MIXED)
        assert store(space, prompt(0), anchors=[320]).wait(60)
        for slab in (tmp_path / "slabs").iterdir():
            slab.unlink()
        assert kv.flush(60).ok
        assert kv.stats().counters["failed_sync_parts"] > 0
        kv.check()
    with opened(tmp_path) as kv:
        assert load_checked(kv.namespace(IDENTITY, MIXED), prompt(0))[0] == 320


def test_what_is_logged_after_its_slab_has_failed_is_never_called_durable(tmp_path: Path) -> None:
    """P7: the payload was written before the sync that failed, the record came after it."""
    gate, fault = Gate(), Fault(errno.EIO, {"datasync"}, "slabs", count=1)

    def hook(operation: str, path: str) -> None:
        if operation == "pwritev" and path.endswith(".wal"):
            gate.pass_through()
        fault(operation, path)

    with opened(tmp_path, fs=HookedFs(hook), durability="flush", device_nbytes="1MiB") as kv:
        space, disk = kv.namespace(IDENTITY, LAYOUTS["full"]), kv._disk
        assert disk is not None
        gate.shut()
        stored = store(space, prompt(0))
        assert comes_true(lambda: gate.num_waited > 0), "written, and not in the log"
        assert not disk.sync_parts()
        gate.open()
        assert stored.wait(60)
        (place,) = disk._failed
        assert disk._not_durable(place.part_nbytes, place.chunks), "its record is there"
        assert not disk.sync_parts(), "and it cannot become durable"
        assert kv.flush(60).ok
        with kv._lock:
            assert kv._table.on_disk(kv._table.find(space.chain(prompt(0)))).all(), "it was spilled again"
            assert not any(disk._not_durable(p.part_nbytes, p.chunks) for p in disk._failed)
    with opened(tmp_path) as kv:
        assert load_checked(kv.namespace(IDENTITY, LAYOUTS["full"]), prompt(0))[0] == 320


@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.parametrize("where", ["wal", "slabs"])
def test_one_failed_sync_loses_nothing_acknowledged(tmp_path: Path, where: str, nth: int) -> None:
    """P7: no second try on that file; what was flushed is there, service goes on."""
    fault = Fault(errno.EIO, {"datasync"}, where, first=nth - 1, count=1)
    fault.on = False
    flushed: list[int] = []
    with opened(tmp_path, fs=HookedFs(fault), durability="flush", device_nbytes="1MiB") as kv:
        space = kv.namespace(IDENTITY, MIXED)
        fault.on = True
        for seed in range(8):
            store(space, prompt(seed)).wait(60)
            if kv.flush(60).ok:
                flushed.append(seed)
        assert len(flushed) >= 6, flushed
        counters = kv.stats().counters
        assert counters.get("log_sync_errors" if where == "wal" else "failed_sync_parts", 0) > 0
        for seed in range(8):
            assert load_checked(space, prompt(seed))[0] == 320
        assert kv.flush(60).ok
        quiet(kv)
        kv.check()
    with opened(tmp_path) as kv:
        space = kv.namespace(IDENTITY, MIXED)
        for seed in range(8):
            assert load_checked(space, prompt(seed))[0] == 320
        kv.check()


def test_a_log_that_keeps_failing_is_read_only_and_says_so(tmp_path: Path) -> None:
    fault = Fault(errno.EIO, {"datasync"}, "wal")
    fault.on = False
    with opened(tmp_path, fs=HookedFs(fault), deadline_s=0.5) as kv:
        space = kv.namespace(IDENTITY, MIXED)
        fill(kv, range(2))
        assert kv.flush(60).ok
        memory_only_disk(kv)
        fault.on = True
        store(space, prompt(5))
        assert not kv.flush(3).ok
        health = kv.health()
        assert not health.ok and health.mode == "read-only"
        began = time.monotonic()
        with pytest.raises(SessionError):
            kv.session("a", space).commit(prompt(0), [])
        for seed in range(2):
            assert load_checked(space, prompt(seed))[0] == 320
        store(space, prompt(6))
        assert load_checked(space, prompt(6))[0] == 320
        assert time.monotonic() - began < 3
        time.sleep(0.2)
        assert not kv.health().ok, "trouble was forgotten"
    with opened(tmp_path) as kv:
        assert load_checked(kv.namespace(IDENTITY, MIXED), prompt(0))[0] == 320


def test_health_says_since_when(tmp_path: Path) -> None:
    fault = Fault(errno.EIO, {"pwritev"}, "slabs")
    with opened(tmp_path, fs=HookedFs(fault), deadline_s=0.3) as kv:
        space = kv.namespace(IDENTITY, MIXED)
        assert not store(space, prompt(0)).wait(3)
        first = kv.health()
        assert not first.ok and "nput/output" in first.troubles[0].what
        time.sleep(0.3)
        again = kv.health()
        assert again.troubles[0].since_s == pytest.approx(first.troubles[0].since_s, abs=0.05)
        assert kv.stats().counters["disk_write_errors"] >= 1
        assert load_checked(space, prompt(0))[0] == 320


# ---- a disk that hangs ---------------------------------------------------------------------------


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open()


@pytest.mark.parametrize(
    "operations",
    [{"preadv"}, {"pwritev"}, {"datasync"}, {"preadv", "pwritev", "datasync", "allocate", "punch"}],
)
def test_a_hung_disk_costs_at_most_the_deadline(tmp_path: Path, gate: Gate, operations: set[str]) -> None:
    """P9, B57."""
    deadline_s = 0.4
    fs = HookedFs(lambda op, _path: gate.pass_through() if op in operations else None)
    kv = open_cache(
        tmp_path, small(deadline_s=deadline_s, device_nbytes="128KiB", host_nbytes="128KiB"), fs=fs
    )
    try:
        space = kv.namespace(IDENTITY, MIXED)
        fill(kv, range(8))
        memory_only_disk(kv)
        gate.shut()
        for seed in range(4):
            began = time.monotonic()
            load_checked(space, prompt(seed))
            assert time.monotonic() - began < 1.5 * deadline_s + 0.2, f"load {seed}"
        for seed in range(20, 24):
            began = time.monotonic()
            store(space, prompt(seed))
            assert time.monotonic() - began < 1.5 * deadline_s + 0.2, f"store {seed}"
        for call in (lambda: kv.flush(0.5), lambda: kv.checkpoint(0.5), kv.stats, kv.health, kv.check):
            began = time.monotonic()
            call()
            assert time.monotonic() - began < 1.2
        began = time.monotonic()
        with_trouble(lambda: kv.session("a", space).commit(prompt(0), []))
        assert time.monotonic() - began < 1.5 * deadline_s + 0.2
        gate.open()
        assert settled(kv, prompt(50))
        for seed in range(8):
            assert load_checked(space, prompt(seed), 5)[0] in (0, 320)
        assert load_checked(space, prompt(50), 5) == (320, Reason.COMPLETE)
        quiet(kv)
        kv.check()
    finally:
        gate.open()
        kv.close(5)


def test_closing_over_a_hung_disk_is_bounded(tmp_path: Path, gate: Gate) -> None:
    fs = HookedFs(lambda op, _path: gate.pass_through() if op in {"pwritev", "datasync"} else None)
    kv = open_cache(tmp_path, small(deadline_s=0.3), fs=fs)
    space = kv.namespace(IDENTITY, MIXED)
    store(space, prompt(0)).wait(3)
    gate.shut()
    store(space, prompt(1))
    began = time.monotonic()
    assert not kv.close(1.0).ok
    assert time.monotonic() - began < 6
    gate.open()


def test_a_late_read_writes_into_nobody_elses_slot(tmp_path: Path, gate: Gate) -> None:
    """B11, B54: the slot a timed-out read was meant for is not given away while the read may still land."""
    fs = HookedFs(lambda op, path: gate.pass_through() if op == "preadv" and "slabs" in path else None)
    with opened(tmp_path, fs=fs, deadline_s=0.3, device_nbytes="128KiB", host_nbytes=0) as kv:
        space = kv.namespace(IDENTITY, MIXED)
        fill(kv, range(4))
        memory_only_disk(kv)
        gate.shut()
        assert load_checked(space, prompt(0)) == (0, Reason.TIMED_OUT)
        for seed in range(10, 13):
            store(space, prompt(seed, 6 * SIZE + 1))
        # it may take a busy disk longer than this deadline to let go of what makes room
        last = prompt(13, 6 * SIZE + 1)
        assert comes_true(
            lambda: not store(space, last).num_refused and space.lookup(last).num_tokens == 6 * SIZE
        )
        with space.load(last) as prefix:
            assert prefix.num_tokens == 6 * SIZE
            gate.open()
            time.sleep(0.3)
            assert_right(space, last, prefix)
        for seed in range(10, 14):
            load_checked(space, prompt(seed, 6 * SIZE + 1))
        # left alone for a while, then tried again
        assert comes_true(lambda: load_checked(space, prompt(0))[0] == 320), "reads never came back"
        assert kv.stats().counters["reads_bypassed_parts"] > 0
        quiet(kv)
        kv.check()
        assert kv.stats().counters["timed_out_parts"] > 0


# ---- damage --------------------------------------------------------------------------------------


def slabs(path: Path) -> list[Path]:
    return sorted((path / "slabs").glob("*.slab"))


def flip(path: Path, at: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize("at", [0, 17, 100, 1030, 4090, 4096, 5000, 8191])
@pytest.mark.parametrize("disk_io", ["direct", "buffered"])
def test_a_flipped_bit_is_a_miss_that_heals(tmp_path: Path, at: int, disk_io: str) -> None:
    """P1, B31: a miss with its reason, dropped and counted; stored again, it works."""
    with opened(tmp_path, disk_io=disk_io) as kv:
        space = kv.namespace(IDENTITY, LAYOUTS["full"])
        store(space, prompt(0, 4 * SIZE + 1)).wait(60)
        memory_only_disk(kv)
        slot = int(kv._table.slot[2, 0, kv._table.find(space.chain(prompt(0, 4 * SIZE)))[2]])
        flip(slabs(tmp_path)[0], slot * 8192 + at)
        found, reason = load_checked(space, prompt(0, 4 * SIZE + 1))
        assert (found, reason) in ((2 * SIZE, Reason.CORRUPT), (2 * SIZE, Reason.SUPERSEDED))
        quiet(kv)
        kv.check()
        assert sum(kv.stats().counters.get(f"{name}_parts", 0) for name in ("corrupt", "superseded")) == 1
        again = space.lookup(prompt(0, 4 * SIZE + 1))
        assert again.num_tokens == 2 * SIZE
        assert store(space, prompt(0, 4 * SIZE + 1)).wait(60)
        memory_only_disk(kv)
        assert load_checked(space, prompt(0, 4 * SIZE + 1)) == (4 * SIZE, Reason.COMPLETE)
        kv.check()


def test_swapped_slots_are_misses(tmp_path: Path) -> None:
    with opened(tmp_path) as kv:
        space = kv.namespace(IDENTITY, LAYOUTS["full"])
        store(space, prompt(0)).wait(60)
        memory_only_disk(kv)
        raw = bytearray(slabs(tmp_path)[0].read_bytes())
        raw[0:8192], raw[8192:16384] = raw[8192:16384], raw[0:8192]
        slabs(tmp_path)[0].write_bytes(raw)
        assert load_checked(space, prompt(0))[0] < 320
        quiet(kv)
        kv.check()
        store(space, prompt(0)).wait(60)
        memory_only_disk(kv)
        assert load_checked(space, prompt(0))[0] == 320


@pytest.mark.parametrize("how", ["deleted", "truncated", "zeroed", "garbage"])
@pytest.mark.parametrize("when", ["open", "closed"])
def test_a_lost_slab_is_misses_and_the_store_goes_on(tmp_path: Path, how: str, when: str) -> None:
    """B28, B55."""

    def harm() -> None:
        path = slabs(tmp_path)[0]
        nbytes = path.stat().st_size
        if how == "deleted":
            path.unlink()
        elif how == "truncated":
            os.truncate(path, 8192 * 5 + 100)
        else:
            fill_with = b"\0" if how == "zeroed" else b"\x5a"
            with open(path, "r+b") as file:
                file.write(fill_with * nbytes)

    with opened(tmp_path) as kv:
        fill(kv, range(5))
        if when == "open":
            memory_only_disk(kv)
            harm()
            go_on(kv)
    if when == "closed":
        harm()
        with opened(tmp_path) as kv:
            go_on(kv)
    with opened(tmp_path) as kv:
        if how == "deleted" and when == "open":  # nobody can tell before this, and it is all gone
            go_on(kv)
        space = kv.namespace(IDENTITY, MIXED)
        assert [load_checked(space, prompt(seed))[0] for seed in range(5)] == [320] * 5
        kv.check()


def go_on(kv: TieredCache) -> None:
    space = kv.namespace(IDENTITY, MIXED)
    for seed in range(5):
        load_checked(space, prompt(seed))
    quiet(kv)
    kv.check()
    assert all(settled(kv, prompt(seed)) for seed in range(5))
    memory_only_disk(kv)
    for seed in range(5):
        assert load_checked(space, prompt(seed)) == (320, Reason.COMPLETE)
    kv.check()


def test_strict_refuses_damage_that_is_otherwise_reported(tmp_path: Path) -> None:
    with opened(tmp_path) as kv:
        fill(kv, range(3))
    checkpoint = sorted(tmp_path.glob("table-*.lmdb"))[-1]
    flip(checkpoint, checkpoint.stat().st_size // 2)
    with pytest.raises(DamagedStore):
        open_cache(tmp_path, small(strict=True))
    with opened(tmp_path) as kv:
        assert kv.recovery.damage
        kv.check()
        space = kv.namespace(IDENTITY, MIXED)
        for seed in range(3):
            assert load_checked(space, prompt(seed))[0] == 320, (
                "the older checkpoint and the log, or the slots, have it"
            )
    with opened(tmp_path, strict=True) as kv:
        assert not kv.recovery.damage


# ---- LMDB as the payload store -------------------------------------------------------------------


def test_lmdb_payloads(tmp_path: Path) -> None:
    with opened(tmp_path, disk="lmdb", disk_nbytes="24MiB") as kv:
        space = kv.namespace(IDENTITY, LAYOUTS["uneven"])
        for seed in range(60):
            store(space, prompt(seed)).wait(60)
        assert directory_nbytes(tmp_path) <= 24 << 20
        memory_only_disk(kv)
        found = [load_checked(space, prompt(seed))[0] for seed in range(60)]
        assert found[-1] == 320 and 0 < sum(found) < 60 * 320
        quiet(kv)
        kv.check()
    with opened(tmp_path, disk="lmdb", disk_nbytes="24MiB") as kv:
        space = kv.namespace(IDENTITY, LAYOUTS["uneven"])
        assert [load_checked(space, prompt(seed))[0] for seed in range(60)] == found
        kv.purge(space)
        raw = b"".join(p.read_bytes() for p in tmp_path.rglob("*") if p.is_file())
        assert prompt(59)[: 4 * SIZE].tobytes() not in raw
        kv.check()


def test_a_hung_disk_costs_one_deadline_and_then_nothing(tmp_path: Path, gate: Gate) -> None:
    """P9: after one read that did not come back the tier is bypassed, and holds no device slots."""
    fs = HookedFs(lambda op, path: gate.pass_through() if op == "preadv" and "slabs" in path else None)
    with opened(tmp_path, fs=fs, deadline_s=0.3, device_nbytes="128KiB", host_nbytes=0) as kv:
        space = kv.namespace(IDENTITY, MIXED)
        fill(kv, range(4))
        memory_only_disk(kv)
        gate.shut()
        assert load_checked(space, prompt(0)) == (0, Reason.TIMED_OUT)
        began = time.monotonic()
        for seed in range(1, 4):
            assert load_checked(space, prompt(seed)) == (0, Reason.TIMED_OUT)
        assert time.monotonic() - began < 0.8, "three more loads waited for a disk known to hang"
        gate.open()


def test_a_log_that_cannot_be_synced_at_open_is_said_and_checkpointed(tmp_path: Path) -> None:
    """What was replayed may not be on the disk: the next segment follows a checkpoint, and the report says so."""
    with opened(tmp_path) as kv:
        assert store(kv.namespace(IDENTITY, MIXED), prompt(0)).wait(60)
    old = {path.name for path in (tmp_path / "wal").iterdir()}

    def hook(operation: str, path: str) -> None:
        if operation == "datasync" and os.path.basename(path) in old:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with opened(tmp_path, fs=HookedFs(hook)) as kv:
        assert any("could not be synced" in line for line in kv.recovery.damage), kv.recovery
        assert load_checked(kv.namespace(IDENTITY, MIXED), prompt(0)) == (320, Reason.COMPLETE)
    assert not opened_damage(tmp_path)


def opened_damage(path: Path) -> tuple[str, ...]:
    """What the next opening finds wrong."""
    with opened(path) as kv:
        return kv.recovery.damage


def test_a_file_system_without_direct_transfers_is_counted(tmp_path: Path) -> None:
    class Through(OsFs):
        def open_file(self, path: str, *, direct: bool = False, **how: Any) -> File:
            return super().open_file(path, **how)

    with opened(tmp_path, fs=Through()) as kv:
        store(kv.namespace(IDENTITY, LAYOUTS["full"]), prompt(0))
        assert kv.flush(60).ok
        assert kv.stats().counters["direct_refused"] == 1


@pytest.mark.parametrize("call", ["open", "preadv"])
def test_an_error_of_a_log_file_at_open_is_counted_wherever_it_strikes(tmp_path: Path, call: str) -> None:
    """Also in a segment that is only kept, behind the checkpoint, and where the second look succeeds."""
    whole = tmp_path / "whole"
    with opened(whole) as kv:
        for seed in range(3):
            store(kv.namespace(IDENTITY, LAYOUTS["full"]), prompt(seed))
            assert kv.flush(60).ok and kv.checkpoint()
    num_calls, fails_at = 0, 0

    def fail_once(operation: str, path: str) -> None:
        nonlocal num_calls
        if operation == call and path.endswith(".wal"):
            num_calls += 1
            if num_calls == fails_at:
                raise OSError(errno.EIO, "made to fail", path)

    with opened(whole, fs=HookedFs(fail_once)):
        num_openings = num_calls
    assert num_openings >= 8, "two looks at some segments"
    for fails_at in range(1, num_openings + 1):
        shutil.copytree(whole, copy := tmp_path / f"copy-{fails_at}")
        num_calls = 0
        with opened(copy, fs=HookedFs(fail_once)) as kv:
            assert num_calls >= fails_at
            assert kv.stats().counters.get("log_read_errors") == 1 or kv.recovery.damage, fails_at


@pytest.mark.parametrize("call", ["open", "preadv"])
def test_a_log_that_cannot_be_read_is_left_as_it_is(tmp_path: Path, call: str) -> None:
    """It says nothing of what is in it: neither is the store begun anew, nor does a checkpoint go."""
    with opened(tmp_path) as kv:
        store(kv.namespace(IDENTITY, LAYOUTS["full"]), prompt(0))
        assert kv.flush(60).ok and kv.checkpoint()
        store(kv.namespace(IDENTITY, LAYOUTS["full"]), prompt(1))
        assert kv.flush(60).ok

    def contents() -> dict[str, bytes]:
        return {str(p): p.read_bytes() for p in tmp_path.rglob("*") if p.is_file() and p.name != "LOCK"}

    def refuse(operation: str, path: str) -> None:
        if operation == call and path.endswith(".wal"):
            raise OSError(errno.EIO, "made to fail", path)

    before = contents()
    with pytest.raises(PathUnusable, match=r"log segment .*\.wal cannot be read: made to fail"):
        open_cache(tmp_path, small(), fs=HookedFs(refuse))
    assert contents() == before
    with opened(tmp_path) as kv:
        for seed in (0, 1):
            assert load_checked(kv.namespace(IDENTITY, LAYOUTS["full"]), prompt(seed))[0] == 320


@pytest.mark.parametrize("code", [errno.EACCES, errno.EMFILE])
def test_no_segment_is_left_out_that_could_be_opened_another_time(tmp_path: Path, code: int) -> None:
    """One that belongs to another user, or when descriptors have run out: what it holds is not given up for that."""
    for seed in (0, 1):
        with opened(tmp_path / "store") as kv:
            store(kv.namespace(IDENTITY, LAYOUTS["full"]), prompt(seed))
            assert kv.flush(60).ok
    assert len([*(tmp_path / "store").glob("wal/*.wal")]) >= 2
    num_refused = 0
    for fails_at in range(1, 100):
        num_opened, copy = 0, shutil.copytree(tmp_path / "store", tmp_path / f"copy-{fails_at}")

        def fail_once(operation: str, path: str, fails_at: int = fails_at) -> None:
            nonlocal num_opened
            if operation == "open" and path.endswith(".wal"):
                num_opened += 1
                if num_opened == fails_at:
                    raise OSError(code, os.strerror(code), path)

        try:
            open_cache(copy, small(), fs=HookedFs(fail_once)).close()
        except PathUnusable as error:
            num_refused += 1
            assert ".wal" in str(error) and os.strerror(code) in str(error)
        with opened(copy) as kv:
            for seed in (0, 1):
                assert load_checked(kv.namespace(IDENTITY, LAYOUTS["full"]), prompt(seed))[0] == 320, fails_at
        if num_opened < fails_at:
            break
    assert num_refused >= 4, num_refused  # each segment, looked at and then read


def test_a_checkpoint_that_cannot_be_read_and_has_no_other_before_it_stays(tmp_path: Path) -> None:
    with opened(tmp_path / "whole") as kv:
        space, other = kv.namespace(IDENTITY, LAYOUTS["full"]), kv.namespace(IDENTITY, MIXED)
        assert store(space, prompt(0)).wait(60)
        kv.purge(other)  # leaves one checkpoint and the log behind it
        tmp_path = shutil.copytree(tmp_path / "whole", tmp_path / "copy")
    (table,) = tmp_path.glob("table-*.lmdb")

    def refuse(operation: str, path: str) -> None:
        if operation == "open" and path.endswith(table.name):
            raise OSError(errno.EIO, "made to fail", path)

    with pytest.raises(PathUnusable, match=r"table-.* cannot be read"):
        open_cache(tmp_path, small(), fs=HookedFs(refuse))
    with opened(tmp_path) as kv:
        assert load_checked(kv.namespace(IDENTITY, LAYOUTS["full"]), prompt(0))[0] == 320
    table, *_ = tmp_path.glob("table-*.lmdb")
    for path in tmp_path.glob("table-*.lmdb"):
        path.unlink()
        path.symlink_to("/dev/zero")  # no file of ours: nothing to wait for
    with opened(tmp_path) as kv:
        assert kv.recovery.damage


@pytest.mark.parametrize("suffix", ["", ".tmp"])
def test_directories_in_the_place_of_checkpoints_are_put_aside(tmp_path: Path, suffix: str) -> None:
    """Nobody can write a checkpoint over one; it is not ours, so it stays with all that is in it."""
    for seed in (0, 1):
        with opened(tmp_path) as kv:
            store(kv.namespace(IDENTITY, LAYOUTS["full"]), prompt(seed))
            assert kv.flush(60).ok and kv.checkpoint()
    tables = sorted(tmp_path.glob("table-*.lmdb"))
    for path in tables:
        path.unlink()
        folder = path.with_name(path.name + suffix)
        folder.mkdir()
        (folder / "of_somebody").write_text("here")
    for _ in range(2):
        with opened(tmp_path) as kv:
            for seed in (0, 1):
                assert load_checked(kv.namespace(IDENTITY, LAYOUTS["full"]), prompt(seed))[0] == 320
            assert kv.checkpoint()
    aside = sorted(tmp_path.glob("table-*.broken"))
    assert [path.name for path in aside] == [f"{path.name}{suffix}.broken" for path in tables]
    assert all((path / "of_somebody").read_text() == "here" for path in aside)


def test_a_purge_blanks_what_cannot_be_punched(tmp_path: Path) -> None:
    """Also a chunk that had gone back to the budget before, and that the system would not take then."""
    fs = HookedFs(Fault(errno.EIO, {"punch"}))
    with opened(tmp_path, fs=fs) as kv:
        for seed, layout in enumerate(("full", "mixed")):
            space = kv.namespace(IDENTITY, LAYOUTS[layout])
            marker = prompt(seed)[:SIZE].tobytes()
            assert store(space, prompt(seed)).wait(60)
            assert kv.flush(60).ok and any(marker in p.read_bytes() for p in tmp_path.glob("slabs/*"))
            kv.purge(space)
            assert not any(marker in p.read_bytes() for p in tmp_path.rglob("*") if p.is_file())
        assert kv.stats().counters["punch_errors"] >= 2


def test_what_a_segment_that_cannot_be_read_may_name_stays(tmp_path: Path) -> None:
    with opened(tmp_path) as kv:
        for seed in range(3):
            store(kv.namespace(IDENTITY, LAYOUTS["full"]), prompt(seed))
            assert kv.flush(60).ok and kv.checkpoint()
    newest, tables = max(tmp_path.glob("wal/*.wal")).name, {p.name for p in tmp_path.glob("table-*")}

    def refuse(operation: str, path: str) -> None:
        if operation == "open" and path.endswith(newest):
            raise OSError(errno.EIO, "made to fail", path)

    fs = HookedFs(refuse)
    state = State()
    recover(fs, str(tmp_path), state)
    assert {p.name for p in tmp_path.glob("table-*")} == tables


def test_a_purge_that_the_log_takes_too_late_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is put into the namespace after it would belong to nothing."""
    monkeypatch.setattr(removal, "_REMOVAL_S", 1.0)
    gate = Gate()
    fs = HookedFs(lambda op, path: gate.pass_through() if op == "pwritev" and path.endswith(".wal") else None)
    with opened(tmp_path, fs=fs, deadline_s=0.2) as kv:
        space = kv.namespace(IDENTITY, LAYOUTS["full"])
        store(space, prompt(0))
        assert kv.flush(60).ok
        gate.shut()
        with pytest.raises(SessionError, match="did not take"):
            kv.purge(space)
        with pytest.raises(SessionError, match="being purged"):
            kv.namespace(IDENTITY, LAYOUTS["full"])
        with pytest.raises(Closed):
            space.lookup(prompt(0))
        gate.open()
        assert comes_true(lambda: not kv._state.catalog.namespaces)
        again = kv.namespace(IDENTITY, LAYOUTS["full"])
        assert load_checked(again, prompt(0))[0] == 0
        assert store(again, prompt(1)).wait(60)
        assert load_checked(again, prompt(1))[0] == 320


def test_memory_that_cannot_be_pinned_is_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor, "_pin", lambda buffer: "no pages left")
    with opened(tmp_path, host_nbytes="1MiB") as kv:
        monkeypatch.setattr(type(kv), "device", torch.device("cuda"))  # what it asks of its host memory there
        kv._memory("host", 1 << 20, 4096, None).close()
        assert kv.stats().counters["memory_not_pinned"] == 1
    assert "host memory are slower: no pages left" in caplog.text


@pytest.mark.parametrize("error", [MemoryError(), ValueError("a fault of our own")])
def test_parts_that_cannot_be_gathered_are_given_up_and_spilled_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """The worker ended with them moving: nobody could evict or purge them, and who waited waited for ever."""
    shown = list[type]()
    monkeypatch.setattr(threading, "excepthook", lambda args: shown.append(args.exc_type))
    with opened(tmp_path) as kv:
        space = kv.namespace(IDENTITY, MIXED)

        def failing(*_args: Any) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(kv._spiller, "_gather", failing)
            assert not store(space, prompt(0)).wait(60)
        assert comes_true(lambda: not kv._table.moving.any())
        assert kv.stats().counters["disk_write_errors"] >= 1
        assert set(shown) == ({ValueError} if isinstance(error, ValueError) else set())
        kv.check()
        assert comes_true(lambda: not kv._spiller.is_off)
        assert kv.flush(60).ok
        assert settled(kv, prompt(0))
