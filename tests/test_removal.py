"""Purge and delete beside everything else that goes on, and when the disk does not take them."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from core_helpers import (
    IDENTITY,
    LAYOUTS,
    HookedFs,
    comes_true,
    load_checked,
    memory_only_disk,
    opened,
    prompt,
    store,
    values_of,
)

from tieredkv import Identity, Turn
from tieredkv.errors import BadConfig, Closed, SessionError
from tieredkv.outcomes import Tier
from tieredkv.system import OsFs
from tieredkv.table import journal

FULL = LAYOUTS["full"]
OTHER = Identity(weights="cd" * 32)
SAID = prompt(0)


class FailingFs(HookedFs):
    """The next `left` calls of `operations` on paths with `where` in them fail with `code`."""

    def __init__(self, code: int, operations: set[str], where: str) -> None:
        super().__init__(self._look)
        self.code, self.operations, self.where, self.left = code, operations, where, 0

    def _look(self, operation: str, path: str) -> None:
        if self.left and operation in self.operations and self.where in path:
            self.left -= 1
            raise OSError(self.code, os.strerror(self.code), path)


def full_log() -> FailingFs:
    return FailingFs(errno.ENOSPC, {"pwritev", "create", "allocate"}, "/wal/")


def payload_of(space: Any) -> bytes:
    """Bytes of the first block of `SAID`, as they lie in a part."""
    (spec, *_) = space.layout.groups[0].tensors
    return values_of(space.chain(SAID)[:1], spec).numpy().tobytes()[:256]


def files_with(path: Path, raw: bytes) -> list[str]:
    return [str(p) for p in path.rglob("*") if p.is_file() and raw in p.read_bytes()]


# ---- beside others -------------------------------------------------------------------------------


def test_what_others_log_during_a_purge_survives_a_crash_after_it(tmp_path: Path) -> None:
    """Also what is logged between the snapshot of the purge's checkpoint and the segment that names it."""
    with opened(tmp_path / "store") as kv:
        going, stays = kv.namespace(IDENTITY, FULL), kv.namespace(OTHER, FULL)
        assert store(going, SAID).wait(60) and store(stays, prompt(1)).wait(60)
        session = kv.session("chat", stays)
        session.commit(prompt(1), [Turn("user", 20)])
        write = journal.write_checkpoint

        def others_go_on(*given: Any) -> Any:
            thread = threading.Thread(target=lambda: session.commit(prompt(1), [Turn("user", 40)]))
            thread.start()
            thread.join()
            return write(*given)

        journal.write_checkpoint = others_go_on  # type: ignore[assignment]
        try:
            kv.purge(going)
        finally:
            journal.write_checkpoint = write
        kv.session("later", stays).commit(prompt(1), [Turn("user", 60)])
        assert kv.flush(60).ok
        shutil.copytree(tmp_path / "store", tmp_path / "crashed")
    with opened(tmp_path / "crashed", strict=True) as kv:
        assert {row.name: row.turns[0].end for row in kv.sessions()} == {"chat": 40, "later": 60}
        assert load_checked(kv.namespace(OTHER, FULL), prompt(1))[0] == 320


def test_a_segment_never_names_an_older_checkpoint_than_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that did would take the newer back, whose log is gone: a purge lost every session to a crash after it."""
    with opened(tmp_path / "store") as kv:
        space = kv.namespace(IDENTITY, FULL)
        session = kv.session("chat", space)
        for number in range(3):
            session.commit(SAID, [], meta={"number": number})
            assert kv.checkpoint()
        log = kv._disk.journal
        sync = log._sync_round

        def another_checkpoint() -> None:
            """The thread that syncs was just writing one; a purge then leaves none before it."""
            monkeypatch.setattr(log, "_sync_round", sync)
            for number in (3, 4):
                session.commit(SAID, [], meta={"number": number})
                assert kv.checkpoint()
            sync()

        monkeypatch.setattr(log, "_sync_round", another_checkpoint)
        log._rotate()
        shutil.copytree(tmp_path / "store", tmp_path / "crashed")
    with opened(tmp_path / "crashed", strict=True) as kv:
        assert [dict(row.meta) for row in kv.sessions()] == [{"number": 4}]


def test_a_purged_namespace_takes_no_session_back(tmp_path: Path) -> None:
    with opened(tmp_path) as kv:
        space = kv.namespace(IDENTITY, FULL)
        session = kv.session("alice", space)
        session.commit(SAID, [Turn("user", 9)], meta={"title": "of nobody else"})
        kv.purge(space)
        for call in (lambda: session.fork("bob"), lambda: session.commit(SAID, []), session.pin):
            with pytest.raises(Closed):
                call()
        assert kv.sessions() == () and not files_with(tmp_path, b"of nobody else")
        assert kv.session("bob", kv.namespace(OTHER, FULL)).tokens.size == 0


@pytest.mark.parametrize("way", ["purge", "delete"])
def test_a_commit_does_not_bring_back_what_a_removal_takes_at_that_moment(tmp_path: Path, way: str) -> None:
    with opened(tmp_path) as kv:
        for _ in range(12):
            space = kv.namespace(IDENTITY, FULL)
            session = kv.session("alice", space)
            session.commit(SAID, [], anchors=[320])
            session.pin()
            began = threading.Event()

            def talk(session: Any = session, began: threading.Event = began) -> None:
                until = time.monotonic() + 20
                while time.monotonic() < until:
                    try:
                        session.commit(SAID, [], anchors=[320], meta={"at": time.monotonic()})
                    except (Closed, SessionError):
                        return
                    began.set()

            thread = threading.Thread(target=talk)
            thread.start()
            assert began.wait(60)
            if way == "purge":
                kv.purge(space)
            else:
                session.delete()
            thread.join()
            session.close()
            assert kv.sessions() == ()
            with kv._lock:
                assert not kv._table._wishes and not kv._sessions._held
        kv.check()
    with opened(tmp_path) as kv:
        assert kv.sessions() == ()


def test_with_lmdb_a_purge_loses_nothing_that_others_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is stored just before the one payload file goes is not in it: it waits for the next one."""
    with opened(tmp_path, disk="lmdb", device_nbytes="16MiB") as kv:
        stays, going = kv.namespace(OTHER, FULL), kv.namespace(IDENTITY, FULL)
        assert store(going, SAID).wait(60)
        disk = kv._disk
        assert disk is not None
        blank, stored = disk.store.blank, list[Any]()

        def store_and_blank(*args: Any) -> None:
            stored.append(store(stays, prompt(1)))
            assert not stored[0].wait(0.5), "no payload is on its way to a file that goes"
            blank(*args)

        monkeypatch.setattr(disk.store, "blank", store_and_blank)
        kv.purge(going)
        assert stored[0].wait(60)
        memory_only_disk(kv)
        assert load_checked(stays, prompt(1))[0] == 320


# ---- when the disk does not take them ------------------------------------------------------------


@pytest.mark.parametrize("way", ["purge", "delete"])
def test_a_removal_that_the_log_does_not_take_is_told_and_changes_nothing(tmp_path: Path, way: str) -> None:
    fs = full_log()
    with opened(tmp_path, fs=fs, deadline_s=5.0) as kv:
        space = kv.namespace(IDENTITY, FULL)
        assert store(space, SAID).wait(60)
        session = kv.session("alice", space)
        session.commit(SAID, [], anchors=[320])
        session.pin()
        assert kv.flush(60).ok
        pins, raw = kv.stats().num_pins, payload_of(space)
        assert pins and files_with(tmp_path, raw)
        fs.left = 2  # one append, and the segment that it then begins; after that there is space again
        with pytest.raises(SessionError, match="did not take that the blocks go"):
            kv.purge(space) if way == "purge" else session.delete()
        assert not fs.left and kv.stats().num_pins == pins
        assert [row.name for row in kv.sessions()] == ["alice"]
        assert load_checked(space, SAID)[0] == 320
        kv.check()
        kv.purge(space) if way == "purge" else session.delete()
        assert kv.stats().num_pins == 0 and not files_with(tmp_path, raw)
        kv.check()


def test_a_failed_slab_with_blocks_of_others_makes_a_purge_say_so(tmp_path: Path) -> None:
    """No slot in it can be blanked. The next opening does, and ends the removal."""
    fs = FailingFs(errno.EIO, {"datasync"}, ".slab")
    with opened(tmp_path, fs=fs) as kv:
        going, stays = kv.namespace(IDENTITY, FULL), kv.namespace(OTHER, FULL)
        assert store(going, SAID).wait(60) and store(stays, prompt(1)).wait(60) and kv.flush(60).ok
        raw, fs.left = payload_of(going), 1
        store(stays, prompt(2))
        kv.flush(60)
        assert not fs.left
        with pytest.raises(SessionError, match="not all erased: a slab that failed to sync"):
            kv.purge(going)
        assert load_checked(stays, prompt(1))[0] == 320
    with opened(tmp_path) as kv:
        assert not files_with(tmp_path, raw)
        assert load_checked(kv.namespace(OTHER, FULL), prompt(1))[0] == 320


def test_a_failed_slab_is_discarded_once(tmp_path: Path) -> None:
    """By the purge or by the thread that syncs, which come to it at once."""
    fs = FailingFs(errno.EIO, {"datasync"}, ".slab")
    with opened(tmp_path, fs=fs, commit_interval_ms=5) as kv:
        for _ in range(5):
            space = kv.namespace(IDENTITY, FULL)
            assert store(space, SAID).wait(60) and kv.flush(60).ok
            fs.left = 1
            store(space, prompt(1))
            kv.flush(60)
            kv.purge(space)
            assert kv.stats().counters.get("journal_faults", 0) == 0
        assert store(kv.namespace(IDENTITY, FULL), SAID).wait(60)


@pytest.mark.parametrize(("one", "two"), [("slab", "lmdb"), ("lmdb", "slab")])
def test_a_store_of_the_other_kind_of_disk_is_refused(tmp_path: Path, one: str, two: str) -> None:
    with opened(tmp_path, disk=one) as kv:
        assert store(kv.namespace(IDENTITY, FULL), SAID).wait(60)
    with pytest.raises(BadConfig, match=f"open it with disk='{one}'"), opened(tmp_path, disk=two):
        pass
    with opened(tmp_path, disk=one) as kv:
        assert load_checked(kv.namespace(IDENTITY, FULL), SAID)[0] == 320


def test_a_read_that_comes_late_leaves_no_byte_of_what_was_purged_in_memory(tmp_path: Path) -> None:
    inside, go_on, holds = threading.Event(), threading.Event(), threading.Event()

    class SlowFile:
        """The bytes are there, but the call that read them does not return."""

        def __init__(self, file: Any) -> None:
            self.file = file

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

        def preadv(self, *given: Any, **named: Any) -> int:
            done: int = self.file.preadv(*given, **named)
            if holds.is_set():
                inside.set()
                go_on.wait(60)
            return done

    class SlowFs(OsFs):
        def open_file(self, path: str, **options: Any) -> Any:
            file = super().open_file(path, **options)
            return SlowFile(file) if path.endswith(".slab") else file

    with opened(tmp_path, fs=SlowFs(), deadline_s=0.5) as kv:
        space = kv.namespace(IDENTITY, FULL)
        assert store(space, SAID).wait(60)
        raw, pool = payload_of(space), kv._memories[Tier.DEVICE]
        memory_only_disk(kv)
        holds.set()
        with space.load(SAID, 0.5) as prefix:
            assert prefix.num_tokens == 0
        assert inside.wait(60)
        holds.clear()
        kv.purge(space)
        go_on.set()
        assert comes_true(lambda: kv._residents[Tier.DEVICE].arena.live_nbytes == 0)
        assert raw not in pool.buffer.numpy().tobytes()
