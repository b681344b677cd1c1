"""What surrounds a store goes wrong: full disks of every kind, limits, a hung disk, a second writer, forks, exits.

Each scenario runs in a child of its own and returns what was not as promised.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tieredkv
from tieredkv import Config, TieredCache
from tieredkv.errors import Forked, StoreHeld, StoreUnusable
from tieredkv.testing.oracle import Findings, Prompt, differences
from tieredkv.testing.sim_fs import Fault, SimFs

from .power import LoopDisk
from .processes import Say
from .workload import BLOCK_SIZE, small_scale, space_of

_DEADLINE_S = 1.0
_EXIT_S = 5.0
_FILLER_NBYTES = 1 << 20


def _config(**fixed: Any) -> Config:
    values: dict[str, Any] = {
        "device_nbytes": "64KiB", "host_nbytes": "64KiB", "disk_nbytes": "32MiB", "block_size": BLOCK_SIZE,
        "device": "cpu", "deadline_s": _DEADLINE_S, "log_keep_nbytes": "64KiB", "commit_interval_ms": 20.0,
    }  # fmt: skip
    return Config(**{**values, **fixed})


def _prompt(number: int, num_blocks: int = 3) -> Prompt:
    return Prompt("a", (*(10_000 * number + n for n in range(num_blocks * BLOCK_SIZE)), 7))


def _store(cache: TieredCache, number: int) -> bool:
    """Store a prompt; whether it was taken whole and committed."""
    prompt, space = _prompt(number), space_of(cache, "a")
    end = len(prompt.tokens) // BLOCK_SIZE * BLOCK_SIZE
    stored = space.store(prompt.ids(), prompt.kv(space), anchors=[end])
    return bool(stored.wait(5.0)) and stored.num_refused == 0 and not cache.health().troubles


def _read(cache: TieredCache, number: int, found: Findings) -> int:
    prompt, space = _prompt(number), space_of(cache, "a")
    with space.load(prompt.ids()) as prefix:
        found.wrong_bytes += differences(space, prompt, prefix)
        return int(prefix.num_tokens)


def _back_in_service(cache: TieredCache, found: Findings, first: int) -> None:
    """Space is back: within a few seconds a put is taken, committed and flushed."""
    until = time.monotonic() + 8.0
    number = first
    while time.monotonic() < until:
        number += 1
        if _store(cache, number) and cache.flush(5.0).ok and _read(cache, number, found):
            return
        time.sleep(0.2)
    found.broken.append(f"not back in service after space returned: {cache.health()}")


def _fill_until_refused(cache: TieredCache, found: Findings, limit: int = 3000) -> int:
    """Store until something is refused; returns how many went in."""
    for number in range(limit):
        if not _store(cache, number):
            if cache.health().ok and not _failures(cache):
                found.uncounted_failures.append("a put was refused, and nothing was counted")
            return number
    return limit


def _failures(cache: TieredCache) -> dict[str, int]:
    words = ("error", "no_space", "bypassed", "refused")
    return {n: c for n, c in cache.stats().counters.items() if c and any(w in n for w in words)}


def _after(cache: TieredCache, found: Findings) -> None:
    try:
        cache.check()
    except AssertionError as error:
        found.broken.append(f"check: {error}")
    began = time.monotonic()
    cache.close()
    if time.monotonic() - began > 10:
        found.hangs.append(f"close took {time.monotonic() - began:.0f} s")


# ---- a full disk ---------------------------------------------------------------------------------


def full_bytes(say: Say) -> Findings:
    """A small file system fills; reads go on; it serves again when a file of others goes."""
    found, disk = Findings(), LoopDisk(by_copy=False)
    try:
        with open(f"{disk.home}/filler", "wb") as filler:
            free = os.statvfs(disk.home)
            os.posix_fallocate(filler.fileno(), 0, free.f_bavail * free.f_frsize - 3 * _FILLER_NBYTES)
        cache = tieredkv.open(f"{disk.home}/store", _config())
        full_at = _fill_until_refused(cache, found)
        if _read(cache, max(0, full_at - 1), found) == 0 and full_at:
            found.broken.append("a block stored before the disk was full cannot be read")
        os.unlink(f"{disk.home}/filler")
        _back_in_service(cache, found, 10_000)
        _after(cache, found)
    finally:
        disk.remove()
    return found


def full_inodes(say: Say) -> Findings:
    """No inode is left, with bytes free."""
    found, disk = Findings(), LoopDisk(by_copy=False, options=("-N", "32"))
    try:
        cache = tieredkv.open(f"{disk.home}/store", _config())
        names = []
        with contextlib.suppress(OSError):
            for number in range(100):
                Path(f"{disk.home}/{number}").touch()
                names.append(f"{disk.home}/{number}")
        _store(cache, 1)
        if not cache.health().ok or _failures(cache):
            _read(cache, 1, found)
        else:
            found.uncounted_failures.append("no slab could be made, and nothing was counted")
        for name in names:
            os.unlink(name)
        _back_in_service(cache, found, 100)
        _after(cache, found)
    finally:
        disk.remove()
    return found


def file_size_limit(say: Say) -> Findings:
    """RLIMIT_FSIZE: true short writes, then EFBIG."""
    found, folder = Findings(), tempfile.mkdtemp(prefix="limit-")
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with small_scale():
            cache = tieredkv.open(f"{folder}/store", _config(disk_io="buffered"))
            _store(cache, 0)
            resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, before[1]))
            _fill_until_refused(cache, found, 200)
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            _read(cache, 0, found)
            _back_in_service(cache, found, 10_000)
            _after(cache, found)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return found


def read_only(say: Say) -> Findings:
    """The file system turns read-only under open files; what is stored can be read, and read after remounting."""
    found, disk = Findings(), LoopDisk(by_copy=False, options=("-e", "remount-ro"))
    try:
        cache = tieredkv.open(f"{disk.home}/store", _config())
        _store(cache, 0)
        if not cache.flush(5.0).ok:
            found.broken.append("a flush failed on a sound disk")
        device = subprocess.run(
            ["findmnt", "-no", "SOURCE", disk.home], capture_output=True, text=True
        ).stdout.strip()
        trigger = Path(f"/sys/fs/ext4/{os.path.basename(device)}/trigger_fs_error")
        if not trigger.exists():
            return found
        trigger.write_text("test")
        _fill_until_refused(cache, found, 300)
        _read(cache, 0, found)
        _after(cache, found)
        disk.recover()
        cache = tieredkv.open(f"{disk.home}/store", _config())
        if _read(cache, 0, found) == 0:
            found.lost_flushed.append("a flushed prompt is gone after a read-only turn")
        _after(cache, found)
    finally:
        disk.remove()
    return found


def hung_disk(say: Say) -> Findings:
    """The disk answers after a minute; every call that serves returns by its deadline."""
    found = Findings()
    for call in ("preadv", "pwritev", "datasync", "allocate"):
        with small_scale():
            fs = SimFs()
            cache = tieredkv.open("/sim/hung", _config(host_nbytes="0"), fs=fs)
            for number in range(4):
                _store(cache, number)
            fs.faults.append(Fault(call, 1, effect="delay", delay_s=60.0, again=True))
            for name, act in _calls(cache, found):
                say(at=name)
                began = time.monotonic()
                act()
                took = time.monotonic() - began
                if took > 1.2 * _DEADLINE_S + 0.3:
                    found.hangs.append(
                        f"{name} took {took:.1f} s with {call} hung, the deadline is {_DEADLINE_S} s"
                    )
            fs.power_off()
            cache.close(2.0)
    return found


def _calls(cache: TieredCache, found: Findings) -> Iterator[tuple[str, Callable[[], Any]]]:
    space = space_of(cache, "a")
    for number in range(4):
        prompt = _prompt(number)
        yield f"lookup {number}", lambda prompt=prompt: space.lookup(prompt.ids())
        yield f"load {number}", lambda number=number: _read(cache, number, found)
    for number in range(100, 104):
        prompt = _prompt(number)
        yield (
            f"store {number}",
            lambda prompt=prompt: space.store(prompt.ids(), prompt.kv(space), anchors=[48]),
        )
    yield "flush", lambda: cache.flush(_DEADLINE_S)


# ---- limits --------------------------------------------------------------------------------------


def descriptors(say: Say) -> Findings:
    """Few descriptors; none is left behind by many openings."""
    found, folder = Findings(), tempfile.mkdtemp(prefix="fds-")
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    try:
        counts = []
        for number in range(20):
            with tieredkv.open(f"{folder}/store", _config()) as cache:
                _store(cache, number)
                _read(cache, number, found)
            counts.append(len(os.listdir("/proc/self/fd")))
        if counts[-1] != counts[0]:
            found.leaks.append(f"open descriptors went from {counts[0]} to {counts[-1]}")
        if threading.active_count() > 1:
            found.leaks.append(f"{threading.active_count()} threads are left")
        _out_of_descriptors(folder, found)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return found


def _out_of_descriptors(folder: str, found: Findings) -> None:
    """Every descriptor is taken while the store runs."""
    with tieredkv.open(f"{folder}/store", _config()) as cache:
        taken = []
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        for number in range(4):
            _store(cache, 500 + number)
            _read(cache, number, found)
        for fd in taken:
            os.close(fd)
        _back_in_service(cache, found, 600)


def memory(say: Say) -> Findings:
    """Little address space: what does not fit is refused by name, and what is open goes on."""
    found, folder = Findings(), tempfile.mkdtemp(prefix="mem-")
    try:
        cache = tieredkv.open(f"{folder}/store", _config())
        _store(cache, 0)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (used + (8 << 20), resource.RLIM_INFINITY))
        for number in range(30):
            try:
                _store(cache, number)
                _read(cache, number, found)
            except (MemoryError, RuntimeError):
                continue
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        _back_in_service(cache, found, 600)
        _after(cache, found)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return found


# ---- more than one process -----------------------------------------------------------------------


def two_writers(say: Say) -> Findings:
    """The second is refused by name, in this process, by a link and in another; a dead holder holds nothing."""
    found, folder = Findings(), tempfile.mkdtemp(prefix="two-")
    try:
        os.symlink(f"{folder}/store", f"{folder}/link")
        reading, writing = os.pipe()
        holder = os.fork()
        if holder == 0:
            tieredkv.open(f"{folder}/store", _config())
            os.write(writing, b"open")
            signal.pause()
        os.read(reading, 4)
        for path in (f"{folder}/store", f"{folder}/link"):
            _must_be_held(path, str(holder), found)
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
        with tieredkv.open(f"{folder}/store", _config()) as cache:
            _must_be_held(f"{folder}/link", str(os.getpid()), found)
            _store(cache, 1)
            _read(cache, 1, found)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return found


def _must_be_held(path: str, pid: str, found: Findings) -> None:
    try:
        tieredkv.open(path, _config()).close()
        found.broken.append(f"a second writer opened {os.path.basename(path)}")
    except StoreHeld as error:
        if pid not in str(error):
            found.broken.append(f"the refusal does not name the holder {pid}: {error}")


def forks(say: Say) -> Findings:
    """A child may do anything with the cache it inherits, with and without locks held in the parent."""
    found, folder = Findings(), tempfile.mkdtemp(prefix="fork-")
    try:
        cache = tieredkv.open(f"{folder}/store", _config())
        space = space_of(cache, "a")
        for number in range(3):
            _store(cache, number)
        for held in (False, True):
            with cache._lock if held else contextlib.nullcontext():
                pid = os.fork()
                if pid == 0:
                    os._exit(_use_in_child(cache, space))
            _await_child(pid, found, f"fork with {'a' if held else 'no'} lock held")
            if not _store(cache, 50 + held) or not _read(cache, 50 + held, found):
                found.broken.append("the parent does not store after a fork")
        _after(cache, found)
        with tieredkv.open(f"{folder}/store", _config()) as cache:
            for number in range(3):
                if not _read(cache, number, found):
                    found.lost_committed.append(f"prompt {number} is gone after forks")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return found


def _use_in_child(cache: TieredCache, space: Any) -> int:
    prompt = _prompt(77)
    acts: tuple[Callable[[], Any], ...] = (
        lambda: space.lookup(prompt.ids()), lambda: space.load(prompt.ids()), lambda: cache.flush(1.0),
        lambda: space.store(prompt.ids(), prompt.kv(space)), cache.stats,
    )  # fmt: skip
    for number, act in enumerate(acts):
        try:
            act()
            return 10 + number
        except Forked:
            pass
    cache.close()
    return 0


def _await_child(pid: int, found: Findings, what: str) -> None:
    until = time.monotonic() + _EXIT_S
    while time.monotonic() < until:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            if status:
                found.broken.append(f"{what}: the child ended with {os.waitstatus_to_exitcode(status)}")
            return
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    found.hangs.append(f"{what}: the child did not end in {_EXIT_S} s")


# ---- exits ---------------------------------------------------------------------------------------

_EXITS = {
    "return with close": ("cache.close()", 0, None),
    "return without close": ("pass", 0, None),
    "sys.exit": ("sys.exit(3)", 3, None),
    "an exception": ("raise ValueError('x')", 1, None),
    "KeyboardInterrupt": ("time.sleep(60)", -signal.SIGINT, signal.SIGINT),
    "SIGTERM": ("time.sleep(60)", -signal.SIGTERM, signal.SIGTERM),
    "a forgotten prefix": ("prefix = space.load(prompt.ids())", 0, None),
    "work under way": (
        "[space.store(p.ids(), p.kv(space)) for p in map(environment._prompt, range(100, 160))]", 0, None,
    ),
}  # fmt: skip


def exits(say: Say) -> Findings:
    """However a process ends, it ends soon, and what was committed is there."""
    found, folder = Findings(), tempfile.mkdtemp(prefix="exit-")
    try:
        for number, (name, (last, code, number_of_signal)) in enumerate(_EXITS.items()):
            say(at=name)
            _exit_by(f"{folder}/{number}", name, last, code, number_of_signal, found)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return found


def _exit_by(path: str, name: str, last: str, code: int, by: signal.Signals | None, found: Findings) -> None:
    script = textwrap.dedent(f"""
        import sys, time, tieredkv
        from campaign import environment
        from campaign.workload import space_of
        cache = tieredkv.open({path!r}, environment._config())
        space = space_of(cache, "a")
        prompt = environment._prompt(1)
        assert environment._store(cache, 1)
        print("stored", flush=True)
        {last}
    """)
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=_environ(),
    ) as child:
        assert child.stdout is not None, "it is a pipe"
        child.stdout.readline()
        began = time.monotonic()
        if by is not None:
            child.send_signal(by)
        try:
            ended = child.wait(_EXIT_S + 10)
        except subprocess.TimeoutExpired:
            child.kill()
            found.hangs.append(f"{name}: not ended in {_EXIT_S + 10} s")
            return
    took = time.monotonic() - began
    if took > _EXIT_S:
        found.hangs.append(f"{name}: ended after {took:.1f} s")
    if ended != code:
        found.broken.append(f"{name}: ended with {ended}, not {code}")
    try:
        with tieredkv.open(path, _config()) as cache:
            if _read(cache, 1, found) == 0:
                found.lost_committed.append(f"{name}: the committed prompt is gone")
    except StoreUnusable as error:
        found.open_failures.append(f"{name}: {error}")


def _environ() -> dict[str, str]:
    homes = [str(Path(__file__).parents[1]), str(Path(tieredkv.__file__).parents[1])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(homes)}


# ---- all -----------------------------------------------------------------------------------------

NEED_MOUNTS = (full_bytes, full_inodes, read_only)
ANYWHERE = (file_size_limit, hung_disk, descriptors, memory, two_writers, forks, exits)


def jobs(mounts: bool) -> Iterator[tuple[str, Callable[[Say], Any]]]:
    """Every scenario that can run here."""
    for scenario in (*(NEED_MOUNTS if mounts else ()), *ANYWHERE):

        def job(say: Say, scenario: Callable[[Say], Findings] = scenario) -> dict[str, Any]:
            return {"findings": vars(_named(scenario.__name__, scenario(say)))}

        yield scenario.__name__, job


def _named(name: str, found: Findings) -> Findings:
    return Findings(**{kind: [f"{name}: {line}" for line in lines] for kind, lines in vars(found).items()})
