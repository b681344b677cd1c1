"""One writer per directory: living, dead, and dead with a living child."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tieredkv.errors import StoreHeld
from tieredkv.system import OsFs
from tieredkv.system.lock import Owner


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "LOCK")


@pytest.fixture
def started() -> Iterator[list[int]]:
    """Processes to end with the test, whoever's children they are by then."""
    pids: list[int] = []
    yield pids
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


def in_child(started: list[int], work: Callable[[], str]) -> tuple[int, str]:
    """Run `work` in a forked child that then waits to be killed; its pid, and what `work` answered."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            answer = work()
        except Exception as error:
            answer = type(error).__name__
        os.write(write_end, answer.encode() or b"-")
        while True:
            signal.pause()
    started.append(pid)
    os.close(write_end)
    answer = os.read(read_end, 1000).decode()
    os.close(read_end)
    return pid, answer


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def hold(path: str, fork: Callable[[], int] | None = None) -> Callable[[], str]:
    """Take the lock for good; with `fork`, leave a child as well, and answer its pid."""

    def work() -> str:
        globals()["held"] = OsFs().lock(path)
        child = fork() if fork else -1
        while child == 0:
            signal.pause()
        return str(child)

    return work


def test_the_file_names_its_owner_and_is_private(path: str) -> None:
    old = os.umask(0)
    try:
        lock = OsFs().lock(path)
    finally:
        os.umask(old)
    assert json.loads(Path(path).read_bytes())["pid"] == os.getpid()
    assert Owner.parse(Path(path).read_bytes()) == Owner.current()
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    lock.close()


def test_a_second_lock_in_one_process_is_refused_also_by_another_name(path: str, tmp_path: Path) -> None:
    lock = OsFs().lock(path)
    (tmp_path.parent / "alias").symlink_to(tmp_path)
    for name in (path, str(tmp_path.parent / "alias" / "LOCK")):
        with pytest.raises(StoreHeld, match=f"process {os.getpid()}"):
            OsFs().lock(name)
    lock.close()
    OsFs().lock(path).close()


def test_a_living_process_is_named(path: str, started: list[int]) -> None:
    pid, _ = in_child(started, hold(path))
    with pytest.raises(StoreHeld, match=f"process {pid}"):
        OsFs().lock(path)
    assert Owner.parse(Path(path).read_bytes()).pid == pid  # type: ignore[union-attr]
    kill(pid)
    OsFs().lock(path).close()


def test_a_process_that_died_unreaped_holds_nothing(path: str, started: list[int]) -> None:
    pid, _ = in_child(started, hold(path))
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    OsFs().lock(path).close()


def test_a_child_of_os_fork_does_not_keep_the_lock(path: str, started: list[int]) -> None:
    pid, child = in_child(started, hold(path, os.fork))
    started.append(int(child))
    kill(pid)
    os.kill(int(child), 0)
    inode = os.stat(path).st_ino
    lock = OsFs().lock(path)
    assert os.stat(path).st_ino == inode  # the child had closed it: nothing to take over
    lock.close()


def test_a_child_forked_behind_pythons_back_is_taken_over(path: str, started: list[int]) -> None:
    pid, child = in_child(started, hold(path, ctypes.PyDLL(None).fork))
    started.append(int(child))
    with pytest.raises(StoreHeld, match=f"process {pid}"):
        OsFs().lock(path)
    kill(pid)
    os.kill(int(child), 0)
    inode = os.stat(path).st_ino
    lock = OsFs().lock(path)
    assert os.stat(path).st_ino != inode and os.listdir(os.path.dirname(path)) == ["LOCK"]
    with pytest.raises(StoreHeld, match=f"process {os.getpid()}"):
        OsFs().lock(path)
    lock.close()
    OsFs().lock(path).close()


def test_of_many_takers_one_wins(path: str, started: list[int]) -> None:
    go_read, go_write = os.pipe()
    pids, pipes = [], []
    for _ in range(6):
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.read(go_read, 1)
            try:
                globals()["held"] = OsFs().lock(path)
                os.write(write_end, b"won")
            except StoreHeld:
                os.write(write_end, b"held")
            while True:
                signal.pause()
        started.append(pid)
        pids.append(pid)
        pipes.append(read_end)
        os.close(write_end)
    os.write(go_write, b"!" * len(pids))
    answers = sorted(os.read(pipe, 10) for pipe in pipes)
    for fd in (*pipes, go_read, go_write):
        os.close(fd)
    assert answers == [b"held"] * 5 + [b"won"]


def test_the_parents_lock_survives_a_child_that_exits(path: str) -> None:
    lock = OsFs().lock(path)
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    with pytest.raises(StoreHeld):
        OsFs().lock(path)
    lock.close()


@pytest.mark.parametrize("content", [b"", b"garbage", b"[]", b'{"pid": "x"}', b"{}", b"\xff" * 5000])
def test_an_unlocked_file_may_say_anything(path: str, content: bytes) -> None:
    Path(path).write_bytes(content)
    lock = OsFs().lock(path)
    assert Owner.parse(Path(path).read_bytes()) == Owner.current()
    lock.close()


@pytest.mark.parametrize("content", [b"", b"garbage", b'{"pid": 1}'])
def test_a_held_file_that_names_nobody_is_believed(path: str, content: bytes) -> None:
    lock = OsFs().lock(path)
    Path(path).write_bytes(content)
    with pytest.raises(StoreHeld, match="another process"):
        OsFs().lock(path)
    lock.close()


def test_only_a_certain_death_counts() -> None:
    current = Owner.current()
    gone = Owner(2**22 + 12345, "1", current.boot, current.namespace)
    assert not current.is_dead() and gone.is_dead()
    assert Owner(current.pid, "1", current.boot, current.namespace).is_dead()  # its pid was reused
    assert not Owner(gone.pid, "1", "another boot", current.namespace).is_dead()
    assert not Owner(gone.pid, "1", current.boot, "pid:[1]").is_dead()
    assert not Owner(gone.pid, "", current.boot, current.namespace).is_dead()


def test_what_is_no_plain_file_is_not_locked(tmp_path: Path) -> None:
    (tmp_path / "dir").mkdir()
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "target").write_bytes(b"")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    for name in ("dir", "fifo", "link", "no/such/dir"):
        with pytest.raises(OSError):
            OsFs().lock(str(tmp_path / name))
