"""Public reports of limits, leaks, cancelled calls, stuck locks and forks: the same kinds, made here."""

from __future__ import annotations

import errno
import gc
import os
import resource
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from children import outcome_of
from core_helpers import (
    IDENTITY,
    LAYOUTS,
    MIXED,
    Gate,
    HookedFs,
    load_checked,
    memory_only_disk,
    opened,
    prompt,
    quiet,
    settled,
    store,
)

from tieredkv import Reason, spiller


def test_thousands_of_blocks_are_a_few_files_and_a_lookup_asks_none_of_them(tmp_path: Path) -> None:
    calls: Counter[str] = Counter()
    fs = HookedFs(lambda operation, _path: calls.update([operation]))
    with opened(tmp_path, fs=fs, disk_nbytes="64MiB", durability="flush") as kv:
        space = kv.namespace(IDENTITY, LAYOUTS["full"])
        for seed in range(100):
            assert store(space, prompt(seed)).wait(60)
        assert kv.stats().num_blocks == 2000 and kv.flush(60).ok
        quiet(kv)
        calls.clear()
        assert [space.lookup(prompt(seed)).num_tokens for seed in range(100)] == [320] * 100
        assert not calls, f"100 lookups asked the file system: {calls}"
        assert sum(1 for where in tmp_path.rglob("*") if where.is_file()) < 20


@pytest.mark.parametrize("disk", ["slab", "lmdb"])
def test_a_file_that_may_not_grow_ends_no_process(tmp_path: Path, disk: str) -> None:
    """A true short write and EFBIG, from the system: stores are refused, reads go on, service comes back.

    With LMDB it comes back with the next opening: what a failed commit left in its file is not to be built on.
    """

    def act() -> None:
        changes = {"disk": disk, "disk_nbytes": "64MiB", "device_nbytes": "128KiB", "log_keep_nbytes": 0}
        with opened(tmp_path, **changes) as kv:
            space = kv.namespace(IDENTITY, MIXED)
            for seed in range(4):
                assert store(space, prompt(seed)).wait(60)
            memory_only_disk(kv)
            largest = max(p.stat().st_size for p in tmp_path.rglob("*") if p.is_file())
            hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (largest + 100, hard))
            for seed in range(10, 90):
                store(space, prompt(seed))
            assert kv.stats().counters.get("disk_write_errors", 0) or kv.stats().counters.get(
                "spill_no_space_parts"
            )
            assert [load_checked(space, prompt(seed), 5)[0] for seed in range(4)] == [320] * 4
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
            assert disk == "lmdb" or settled(kv, prompt(99))
            kv.check()
        with opened(tmp_path, **changes) as kv:
            assert settled(kv, prompt(99))
            memory_only_disk(kv)
            assert load_checked(kv.namespace(IDENTITY, MIXED), prompt(99))[0] == 320

    assert outcome_of(act, 60) == 0


def test_sixty_four_descriptors_are_enough_for_any_number_of_openings(tmp_path: Path) -> None:
    def act() -> None:
        limit = 64 + len(os.listdir("/proc/self/fd"))  # beyond those that the tests before left open
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        for number in range(12):
            with opened(tmp_path, trace=True) as kv:
                for name, layout in LAYOUTS.items():
                    space = kv.namespace(IDENTITY, layout)
                    assert store(space, prompt(number, 81)).wait(60), name
                memory_only_disk(kv)
                for layout in LAYOUTS.values():
                    load_checked(kv.namespace(IDENTITY, layout), prompt(number, 81))
                counters = kv.stats().counters
                assert not any(name.endswith("errors") for name in counters), counters

    assert outcome_of(act, 60) == 0


@pytest.mark.parametrize("operation", ["preadv", "pwritev"])
def test_whichever_call_fails_every_later_one_returns(tmp_path: Path, operation: str) -> None:
    """One read or write in a batch fails, while garbage is collected in the middle of it: no lock stays held."""
    with opened(tmp_path, device_nbytes="64KiB", host_nbytes=0, deadline_s=5.0) as kv:
        assert store(kv.namespace(IDENTITY, MIXED), prompt(0)).wait(60)
    for nth in (0, 1, 4):
        left = [nth]

        def hook(called: str, path: str, left: list[int] = left) -> None:
            if called == operation and "/slabs/" in path:
                left[0] -= 1
                if left[0] == -1:
                    gc.collect()
                    raise OSError(errno.EIO, os.strerror(errno.EIO), path)

        with opened(tmp_path, fs=HookedFs(hook), device_nbytes="64KiB", host_nbytes=0, deadline_s=5.0) as kv:
            space = kv.namespace(IDENTITY, MIXED)
            began = time.monotonic()
            for seed in (0, 1):
                load_checked(space, prompt(seed))
                store(space, prompt(seed)).wait(1)
            for call in (kv.flush, kv.stats, kv.health, kv.check):
                call()
            kv.session("s", space).commit([1], [])
            assert time.monotonic() - began < 20
            assert kv.stats().num_pins == 0 and not kv._table.uses.any()
            left[0] = -10
            assert settled(kv, prompt(0)), store(space, prompt(0))
            assert load_checked(space, prompt(0)) == (320, Reason.COMPLETE), nth


def test_what_waits_for_a_slow_disk_is_bounded_and_what_was_let_be_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spiller, "_QUEUE_NBYTES", 256 * 1024)
    gate = Gate()
    fs = HookedFs(lambda op, path: gate.pass_through() if op == "pwritev" and "slabs" in path else None)
    with opened(tmp_path, fs=fs, device_nbytes="8MiB", deadline_s=10.0) as kv:
        space = kv.namespace(IDENTITY, MIXED)
        gate.shut()
        for seed in range(40):
            assert store(space, prompt(seed)).num_refused == 0
            assert kv._spiller is not None and kv._spiller._queue_nbytes <= 256 * 1024
        assert kv.stats().counters["spill_queue_full_parts"] > 0
        gate.open()
        assert kv.flush(20).ok
        memory_only_disk(kv)
        assert [load_checked(space, prompt(seed))[0] for seed in range(40)] == [320] * 40


def test_removals_and_stores_in_turn_leave_the_books_as_they_were(tmp_path: Path) -> None:
    with opened(tmp_path) as kv:
        space = kv.namespace(IDENTITY, MIXED)
        used = set()
        for number in range(15):
            with kv.session("s", space) as session:
                stored = store(space, prompt(number % 3))
                assert stored.num_refused == 0
                session.commit(prompt(number % 3), [], anchors=[320], stored=[stored])
                session.delete()
            used.add((kv.stats().num_blocks, *(tier.live_nbytes for tier in kv.stats().tiers)))
            kv.check()
        assert used == {(0, 0, 0, 0)}


FORKING = """
import gc, os, sys
sys.path[:0] = sys.argv[2:]
from core_helpers import *
kv = open_cache(sys.argv[1], small())
space = kv.namespace(IDENTITY, MIXED)
assert store(space, prompt(0)).wait(60)
prefix = space.load(prompt(0))
child = os.fork()
if child == 0:  # it never asks for the cache, and ends as any program does
    del kv, space, prefix
    gc.collect()
    sys.exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert_right(space, prompt(0), prefix)
prefix.close()
assert store(space, prompt(1)).wait(60) and kv.flush(60).ok
kv.check()
assert kv.close(10).ok
"""


def test_a_child_that_never_asks_for_the_cache_ends_and_harms_nothing(tmp_path: Path) -> None:
    here = Path(__file__).parents[1]
    command = [sys.executable, "-c", FORKING, str(tmp_path), str(here), str(here.parent)]
    subprocess.run(command, check=True, timeout=60)
    with opened(tmp_path, strict=True) as kv:
        space = kv.namespace(IDENTITY, MIXED)
        assert [load_checked(space, prompt(seed))[0] for seed in (0, 1)] == [320, 320]
