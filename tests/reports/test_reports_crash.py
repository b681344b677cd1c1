"""Public reports of what a kill, a power cut or a failing disk left behind: the same kinds, made here."""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lmdb
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from children import die, outcome_of
from core_helpers import (
    IDENTITY,
    MIXED,
    HookedFs,
    directory_nbytes,
    load_checked,
    memory_only_disk,
    opened,
    prompt,
    quiet,
    small,
    store,
)

from tieredkv import Reason, Turn
from tieredkv.cache import open_cache
from tieredkv.system import File, OsFs
from tieredkv.table.recovery import recover
from tieredkv.table.state import State
from tieredkv.testing.sim_fs import SimFs


class HalfWriting:
    """A file whose write is cut by SIGKILL when its time has come: the first half of the bytes is there."""

    def __init__(self, file: File, is_time: Any) -> None:
        self._file, self._is_time = file, is_time

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def pwritev(self, buffers: Sequence[Any], offset: int) -> None:
        if self._is_time():
            whole = b"".join(bytes(memoryview(buffer).cast("B")) for buffer in buffers)
            self._file.pwritev([whole[: len(whole) // 2]], offset)
            die()
        self._file.pwritev(buffers, offset)


class DyingFs(OsFs):
    """The real file system of a process that dies in the middle of its n-th write, or before its n-th rename."""

    def __init__(self, where: str, nth: int) -> None:
        self.where, self.left = where, nth

    def is_time(self, path: str) -> bool:
        self.left -= self.where in path
        return self.where in path and self.left < 0

    def open_file(self, path: str, **options: Any) -> Any:
        file = super().open_file(path, **options)
        return HalfWriting(file, lambda: self.is_time(path)) if self.where != "rename" else file

    def rename(self, old: str, new: str) -> None:
        if self.where == "rename" and self.is_time("rename"):
            die()
        super().rename(old, new)


@pytest.mark.parametrize("where", ["/wal/", "/slabs/", "/trace/", "rename"])
def test_killed_in_the_middle_of_a_write(tmp_path: Path, where: str) -> None:
    """Again and again at another write, each life on what the last one left: it opens, also strictly; what was
    committed is there; half a block is none; no half-made file stays, and the budget holds."""
    changes = {"disk_io": "buffered", "trace": True, "disk_nbytes": "12MiB", "log_keep_nbytes": 0}
    said = tmp_path / "said"
    said.touch()

    def life(nth: int) -> None:
        kv = open_cache(tmp_path / "store", small(**changes), fs=DyingFs(where, nth))
        space = kv.namespace(IDENTITY, MIXED)
        session = kv.session(f"s{nth}", space)
        for number in range(12):
            seed = 100 * nth + number
            stored = store(space, prompt(seed, 81))
            session.commit(prompt(seed, 81), [Turn("user", 81)], stored=[stored])
            with open(said, "a") as file:
                file.write(f"{seed} {int(stored.wait(0))}\n")
            if number % 4 == 3:
                kv.checkpoint()
        kv.close()  # the trace is written by and by, at the latest here

    ends = set()
    for nth in (0, 1, 4, 11):
        ends.add(outcome_of(lambda nth=nth: life(nth)))
        with opened(tmp_path / "store", strict=True, **changes) as kv:
            kv.check()
            space = kv.namespace(IDENTITY, MIXED)
            for line in said.read_text().splitlines():
                seed, committed = map(int, line.split())
                assert load_checked(space, prompt(seed, 81))[0] == 80 or not committed
            assert not list((tmp_path / "store").rglob("*.tmp")) and not kv.recovery.damage
            assert directory_nbytes(tmp_path / "store") <= 12 << 20
            assert kv.stats().disk_nbytes <= 12 << 20
    assert -signal.SIGKILL in ends and ends <= {-signal.SIGKILL, 0}, (
        "a life that writes so often ends by itself"
    )


@pytest.mark.parametrize("lost", ["all", "names", "data"])
def test_a_flush_that_changed_segments_survives_a_power_cut(lost: str) -> None:
    """New segments, slabs and checkpoints are in their directories for good before anything relies on them."""
    fs = SimFs()
    kv = open_cache("/s/store", small(durability="flush", log_keep_nbytes=0), fs=fs)
    space = kv.namespace(IDENTITY, MIXED)
    session = kv.session("s", space)
    for number in range(3):
        stored = store(space, prompt(number))
        session.commit(prompt(number), [], stored=[stored], meta={"n": number})
        assert kv.checkpoint() if number < 2 else kv.flush(60).ok
    assert kv.stats().counters["checkpoints"] >= 2
    frozen = fs.disk.freeze()
    kinds = {"all": ("name", "size", "data"), "names": ("name",), "data": ("size", "data")}[lost]
    image = frozen.image(frozenset(item for item in frozen.items() if item.kind in kinds))
    fs.power_off()
    kv.close(1)
    with opened("/s/store", fs=SimFs(image), strict=True) as kv:
        space = kv.namespace(IDENTITY, MIXED)
        assert [load_checked(space, prompt(number))[0] for number in range(3)] == [320] * 3
        assert kv.session("s", space).meta == {"n": 2}


def test_lmdb_is_never_asked_to_be_fast_at_the_price_of_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every environment, of payloads and of checkpoints, syncs, and writes through no map."""
    flags: list[dict[str, Any]] = []

    def open_noting(*args: Any, **named: Any) -> Any:
        env = real(*args, **named)
        flags.append(env.flags())
        return env

    real = lmdb.open
    monkeypatch.setattr(lmdb, "open", open_noting)
    with opened(tmp_path, disk="lmdb", disk_nbytes="16MiB") as kv:
        assert store(kv.namespace(IDENTITY, MIXED), prompt(0)).wait(60) and kv.checkpoint()
    assert len(flags) >= 2
    for found in flags:
        assert found["sync"] and found["metasync"] and found["meminit"]
        assert not found["writemap"] and not found["map_async"]


def test_lmdb_payloads_survive_kills_and_no_reader_stays_behind(tmp_path: Path) -> None:
    """Processes killed while they write and read: the next one opens, right to the byte, with the table empty."""
    changes = {"disk": "lmdb", "disk_nbytes": "16MiB", "device_nbytes": "64KiB", "host_nbytes": 0}

    def life(number: int) -> None:
        left = [3 + number]

        def hook(operation: str, path: str) -> None:
            if operation == "pwritev" and "/wal/" in path:
                left[0] -= 1
                if left[0] < 0:
                    die()

        kv = open_cache(tmp_path, small(**changes), fs=HookedFs(hook))
        space = kv.namespace(IDENTITY, MIXED)
        for seed in range(30):
            store(space, prompt(seed, 81))
            load_checked(space, prompt(seed // 2, 81))

    for number in range(5):
        assert outcome_of(lambda number=number: life(number)) == -signal.SIGKILL
        with opened(tmp_path, strict=True, **changes) as kv:
            space = kv.namespace(IDENTITY, MIXED)
            for seed in range(30):
                load_checked(space, prompt(seed, 81))
            assert kv._disk is not None and kv._disk.store._env.info()["num_readers"] <= 8  # type: ignore[attr-defined]
            assert not any(kv.stats().counters.get(f"{name}_parts") for name in ("corrupt", "superseded"))
            kv.check()


def test_blocks_that_the_disk_refused_are_taken_when_they_come_again(tmp_path: Path) -> None:
    """Every third write of payloads fails: no mark of progress passes a block that was not written."""
    calls = [0]

    def hook(operation: str, path: str) -> None:
        if operation == "pwritev" and "/slabs/" in path and calls[0] >= 0:
            calls[0] += 1
            if calls[0] % 3 == 0:
                raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    with opened(tmp_path, fs=HookedFs(hook), device_nbytes="1MiB", deadline_s=1.0) as kv:
        space = kv.namespace(IDENTITY, MIXED)
        for seed in range(6):
            store(space, prompt(seed)).wait(0.2)
        quiet(kv)
        assert kv.stats().counters["disk_write_errors"] > 0
        calls[0] = -1
        until = time.monotonic() + 60
        while not all(store(space, prompt(seed)).wait(2) for seed in range(6)) or not kv.flush(2).ok:
            assert time.monotonic() < until, kv.health()
        memory_only_disk(kv)
        assert [load_checked(space, prompt(seed)) for seed in range(6)] == [(320, Reason.COMPLETE)] * 6
        kv.check()


def test_opening_takes_time_in_proportion_to_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight times the records are far from 64 times the time."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "tools")
    from replaying.big_log import write_log

    took = []
    for num_records in (10_000, 80_000):
        path = tmp_path / f"{num_records}"
        write_log(path, num_records)
        times = []
        for _ in range(3):
            began = time.process_time()
            assert recover(OsFs(), str(path), State()).report.num_replayed == num_records
            times.append(time.process_time() - began)
        took.append(min(times))
    assert took[1] < 24 * took[0], f"seconds: {took}"
