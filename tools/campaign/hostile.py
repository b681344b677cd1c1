"""Hostile files: a small store with one thing changed, opened by a forked child and read whole.

Nothing may kill the process, raise out of `open`, hang, or give a byte that was not stored. A newer format is
refused, and nothing on disk changes. The payload file of `disk="lmdb"` is exempt: it is read through a map.
"""

from __future__ import annotations

import os
import random
import shutil
import socket
import struct
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lmdb
import xxhash

from tieredkv import Config
from tieredkv import open as open_store
from tieredkv.errors import NewerFormat, StoreUnusable
from tieredkv.system import OsFs
from tieredkv.testing.oracle import Expectation, Findings, Oracle, Prompt, examine, observed
from tieredkv.testing.sim_disk import Image
from tieredkv.testing.sim_fs import SimFs
from tieredkv.wal.format import HEADER_NBYTES

from .processes import Outcome, Say, run_jobs
from .simulated import PATH
from .workload import FULL, Events, Life, seeded_salts, small_scale, space_of

CONFIG = Config(
    device_nbytes="64KiB", host_nbytes="0", disk_nbytes="2MiB", block_size=16, durability="flush",
    deadline_s=2.0, device="cpu", log_keep_nbytes="1MiB",
)  # fmt: skip
_SLOT_NBYTES = 8192
_PAGE_NBYTES = 4096
_LINE_NBYTES = 64
_NUM_PROMPTS = 6
_STRAYS = (
    "wal/0000009999.wal", "wal/9999999999.wal", "table-00000000000000999999.lmdb", "slabs/4096-999.slab",
    "slabs/12288-000.slab", "slabs/1-000.slab", "wal/x", "slabs/x", "table-x.lmdb.tmp",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One hostile store: `make` gives its image; `refused` says that only a refusal is right.

    `may_refuse`: the caller can mend it, as where another thing than a file lies in the place of the lock.
    """

    name: str
    make: Callable[[Image], Image]
    refused: bool = False
    may_refuse: bool = False


def base() -> tuple[Image, Expectation]:
    """A store of six one-block prompts and a session, some in its checkpoint, some in the log behind it."""
    fs = SimFs()
    events = Events(lambda: fs.num_ops)
    life = Life(PATH, CONFIG, events, random.Random(0), fs=fs, layout=FULL)
    with small_scale(), seeded_salts(1), observed(events):
        life.open()
        for number in range(_NUM_PROMPTS):
            life._store_prompt(Prompt("a", (*(1000 * number + n for n in range(16)), 7)))
            if number == _NUM_PROMPTS // 2:
                life._checkpoint()
        life._turn()
        life._flush()
        image = fs.disk.seen()
        life.close()
    oracle = Oracle()
    oracle.add(events.kept)
    prompts = oracle.expect(power=False).prompts
    return image, Expectation(power=False, prompts=prompts)


# ---- cases ---------------------------------------------------------------------------------------


def bit_cases(image: Image) -> Iterator[Case]:
    """Every bit of segment headers, frames and checkpoint values; of every slot header at once, and one in
    each line of every payload at once (each slot is a chain of its own)."""
    for path, data in sorted(image.files.items()):
        name = os.path.basename(path)
        if name.endswith(".wal"):
            yield from (_flip(path, bit) for bit in range(len(data.rstrip(b"\0")) * 8))
            yield from (_flip(path, bit) for bit in range(len(data.rstrip(b"\0")) * 8, HEADER_NBYTES * 8))
        elif name.endswith(".lmdb"):
            for start, end in _values(data):
                yield from (_flip(path, bit) for bit in range(start * 8, end * 8))
        elif name.endswith(".slab"):
            slots = [at for at in range(0, len(data), _SLOT_NBYTES) if any(data[at : at + _PAGE_NBYTES])]
            yield from (_flip_all(path, slots, bit) for bit in range(_PAGE_NBYTES * 8))
            for line in range(_PAGE_NBYTES // _LINE_NBYTES):
                bit = (_PAGE_NBYTES + line * _LINE_NBYTES) * 8 + line * 5 % (_LINE_NBYTES * 8)
                yield _flip_all(path, slots, bit)


def _flip(path: str, bit: int) -> Case:
    return Case(f"bit {bit} of {os.path.basename(path)}", lambda image: image.with_bit_flipped(path, bit))


def _flip_all(path: str, slots: Sequence[int], bit: int) -> Case:
    def make(image: Image) -> Image:
        data = bytearray(image.files[path])
        for slot in slots:
            data[slot + bit // 8] ^= 1 << bit % 8
        return image.with_file(path, bytes(data))

    return Case(f"bit {bit} of every slot of {os.path.basename(path)}", make)


def _values(data: bytes) -> list[tuple[int, int]]:
    """Where the values of a checkpoint lie in its file."""
    with tempfile.TemporaryDirectory() as folder:
        real = f"{folder}/t"
        Path(real).write_bytes(data)
        with lmdb.open(real, subdir=False, readonly=True, lock=False) as env, env.begin() as txn:
            values = [bytes(value) for _, value in txn.cursor()]
    places = ((data.find(value), len(value)) for value in values if value)
    return [(at, at + nbytes) for at, nbytes in places if at >= 0]


def cut_cases(image: Image) -> Iterator[Case]:
    """Every truncation: by the byte of log and checkpoints, by the line of slabs; and files that are too long."""
    for path, data in sorted(image.files.items()):
        name = os.path.basename(path)
        step = 512 if name.endswith(".slab") else 1
        used = len(data.rstrip(b"\0")) + 64
        for nbytes in range(0, min(used, len(data)), step):
            yield Case(f"{name} cut to {nbytes}", lambda i, p=path, n=nbytes: i.with_file(p, i.files[p][:n]))
        for more in (1, 4096, 1 << 20):
            yield Case(
                f"{name} with {more} more", lambda i, p=path, n=more: i.with_file(p, i.files[p] + bytes(n))
            )
        yield Case(f"no {name}", lambda i, p=path: i.with_file(p, None))


def swap_cases(image: Image) -> Iterator[Case]:
    """Slots, headers or payloads that changed places, and pages of zeros."""
    path = next(p for p in image.files if p.endswith(".slab"))
    slots = [
        at for at in range(0, len(image.files[path]), _SLOT_NBYTES) if any(image.files[path][at : at + 8])
    ]
    for what, first, nbytes in (("slots", 0, _SLOT_NBYTES), ("headers", 0, 4096), ("payloads", 4096, 4096)):
        for one in slots:
            for other in slots:
                if one < other:
                    yield Case(
                        f"{what} at {one} and {other} swapped",
                        _swapped(path, one + first, other + first, nbytes),
                    )
    for name in image.files:
        for page in range(0, len(image.files[name]), 4096):
            if any(image.files[name][page : page + 4096]):
                yield Case(
                    f"page {page} of {os.path.basename(name)} is zeros", _overwritten(name, page, bytes(4096))
                )


def _swapped(path: str, one: int, other: int, nbytes: int) -> Callable[[Image], Image]:
    def make(image: Image) -> Image:
        data = bytearray(image.files[path])
        data[one : one + nbytes], data[other : other + nbytes] = (
            data[other : other + nbytes],
            data[one : one + nbytes],
        )
        return image.with_file(path, bytes(data))

    return make


def _overwritten(path: str, at: int, piece: bytes) -> Callable[[Image], Image]:
    def make(image: Image) -> Image:
        data = bytearray(image.files[path])
        data[at : at + len(piece)] = piece
        return image.with_file(path, bytes(data))

    return make


def strange_cases(image: Image) -> Iterator[Case]:
    """Files of other content, absurd numbers, a newer format, another byte order, names that are not ours."""
    rng = random.Random(7)
    paths = sorted(image.files)
    for path in paths:
        name = os.path.basename(path)
        nbytes = len(image.files[path])
        contents = {
            "random bytes": rng.randbytes(nbytes), "ones": b"\xff" * nbytes, "nothing": b"", "a byte": b"t",
            **{f"the content of {os.path.basename(p)}": image.files[p] for p in paths if p != path},
        }  # fmt: skip
        for what, content in contents.items():
            yield Case(f"{name} holds {what}", lambda i, p=path, c=content: i.with_file(p, c))
    for extra in _STRAYS:
        for what, content in (("random", rng.randbytes(8192)), ("blank", bytes(8192)), ("empty", b"")):
            yield Case(
                f"a stray {extra}, {what}", lambda i, e=extra, c=content: i.with_file(f"{PATH}/{e}", c)
            )
    yield from _header_cases(image)


def _header_cases(image: Image) -> Iterator[Case]:
    wals = sorted(p for p in image.files if p.endswith(".wal"))
    for path in wals:
        name, header = os.path.basename(path), image.files[path][:HEADER_NBYTES]
        newer = _resealed(header, 8, struct.pack("<I", 2))
        yield Case(f"{name} is of a newer format", _overwritten(path, 0, newer), refused=True)
        yield Case(f"{name} claims a newer format", _overwritten(path, 8, struct.pack("<I", 2)))
        yield Case(
            f"{name} in another byte order",
            _overwritten(path, 0, _resealed(header, 8, struct.pack(">I", 1))),
        )
        for at in (12, 32, 40, 48, 56, 64, 80, 88, 112):
            for value in (0, 1, 1 << 31, (1 << 64) - 1):
                raw = struct.pack("<Q", value)[: 4 if at == 12 else 8]
                yield Case(f"{name} says {value} at {at}", _overwritten(path, 0, _resealed(header, at, raw)))
        for at in (40, 44):
            for value in (0, 1, 0x7FFFFFFF, 0xFFFFFFFF):
                yield Case(f"the first frame of {name} says {value} at {at}",
                           _overwritten(path, HEADER_NBYTES + at, struct.pack("<I", value)))  # fmt: skip
    table = next(p for p in image.files if p.endswith(".lmdb"))
    yield Case("a checkpoint in another byte order", _overwritten(table, 16, struct.pack(">I", 0xBEEFC0DE)))
    slab = next(p for p in image.files if p.endswith(".slab"))
    for at, raw in (
        (16, struct.pack("<I", 2)),
        (22, b"\xff\xff"),
        (24, b"\xff"),
        (32, b"\xff" * 8),
        (40, b"\xff" * 8),
    ):
        sealed = _resealed(image.files[slab][:4096], at, raw)
        yield Case(f"a slot header says {raw!r} at {at}", _overwritten(slab, 0, sealed))


def _resealed(page: bytes, at: int, raw: bytes) -> bytes:
    """A 4096-byte header with one field changed and a checksum that fits."""
    changed = bytearray(page)
    changed[at : at + len(raw)] = raw
    changed[4088:] = struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(changed[:4088])))
    return bytes(changed)


def all_cases(image: Image) -> list[Case]:
    return [*strange_cases(image), *swap_cases(image), *cut_cases(image), *bit_cases(image)]


# ---- real files that are none --------------------------------------------------------------------

KINDS = (
    "symlink to itself",
    "dangling symlink",
    "symlink away",
    "fifo",
    "directory",
    "socket",
    "unreadable",
    "empty",
)


def real_case(say: Say, kind: str, victim: str) -> dict[str, Any]:
    """A store on real files where one name is something else; opened, read and written."""
    image, expected = base()
    folder = Path(tempfile.mkdtemp(prefix="hostile-"))
    findings = Findings()
    try:
        image.write_to(folder / "store", PATH)
        path = folder / "store" / victim
        _replace(path, kind, folder)
        say(at=f"{victim} is a {kind}")
        with small_scale():
            case = Case(f"{victim} is a {kind}", lambda i: i, may_refuse=victim == "LOCK")
            _read_all(OsFs(), str(folder / "store"), expected, case, findings)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {"findings": vars(findings), "hostile": 1}


def _replace(path: Path, kind: str, folder: Path) -> None:
    saved = folder / "saved"
    if path.is_dir() and not path.is_symlink():
        shutil.move(path, saved)
    elif path.exists():
        os.replace(path, saved)
    if kind == "symlink to itself":
        path.symlink_to(path)
    elif kind == "dangling symlink":
        path.symlink_to(folder / "nowhere")
    elif kind == "symlink away":
        path.symlink_to(saved)
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            os.chdir(path.parent)
            server.bind(path.name)
    elif kind == "unreadable":
        path.touch(mode=0)
    else:
        path.touch()


# ---- opening -------------------------------------------------------------------------------------


def run_cases(say: Say, seed_image: Image, expected: Expectation, cases: Sequence[Case]) -> dict[str, Any]:
    """Open each case and read everything."""
    findings = Findings()
    with small_scale():
        for number, case in enumerate(cases):
            say(at=number)
            image = case.make(seed_image)
            _read_all(SimFs(image), PATH, expected, case, findings)
    return {"findings": vars(findings), "hostile": len(cases)}


def _read_all(fs: Any, path: str, expected: Expectation, case: Case, findings: Findings) -> None:
    before = fs.disk.seen().digest() if isinstance(fs, SimFs) else b""
    try:
        cache = open_store(path, CONFIG, fs=fs)
    except StoreUnusable as error:
        allowed = isinstance(error, NewerFormat) if case.refused else case.may_refuse
        if not allowed:
            findings.open_failures.append(f"{case.name}: {error}")
        elif before and fs.disk.seen().digest() != before:
            findings.broken.append(f"{case.name}: refused, but the disk has changed")
        return
    except Exception as error:
        findings.open_failures.append(f"{case.name}: {type(error).__name__}: {error}")
        return
    if case.refused:
        findings.broken.append(f"{case.name}: it was opened")
    try:
        found = examine(cache, expected, lambda c, t: space_of(c, t, FULL), lossless=False)
        findings.add(Findings(**{k: [f"{case.name}: {line}" for line in v] for k, v in vars(found).items()}))
        cache.close()
    except Exception as error:
        findings.broken.append(f"{case.name}: {type(error).__name__}: {error}")


def run_all(seed: int, every: int, on_done: Callable[[int, int, Findings], None], batch: int = 250) -> int:
    """Every `every`-th of the bit and truncation cases, all of the others; returns how many.

    Args:
        on_done: told after each batch how many are done, of how many, and what the batch found.
    """
    image, expected = base()
    few = [*strange_cases(image), *swap_cases(image)]
    many = [*cut_cases(image), *bit_cases(image)][seed % every :: every]
    cases = few + many
    waiting = [cases[at : at + batch] for at in range(0, len(cases), batch)]
    done, total = 0, len(cases) + len(KINDS) * len(_victims(image))
    while waiting:
        round_, waiting = waiting, []

        def job(say: Say, mine: Sequence[Case]) -> dict[str, Any]:
            return run_cases(say, image, expected, mine)

        named = [(str(n), lambda say, mine=mine: job(say, mine)) for n, mine in enumerate(round_)]
        for outcome in run_jobs(named, timeout_s=30.0):
            mine = round_[int(outcome.name)]
            count, found = _take(outcome, mine, waiting)
            done += count
            on_done(done, total, found)
    real = [(f"{v} {k}", lambda say, k=k, v=v: real_case(say, k, v)) for v in _victims(image) for k in KINDS]
    for outcome in run_jobs(real, timeout_s=30.0):
        count, found = _take(outcome, [], [])
        done += count
        on_done(done, total, found)
    return done


def _take(outcome: Outcome, mine: Sequence[Case], waiting: list[Sequence[Case]]) -> tuple[int, Findings]:
    """How many of one batch are done, and what was found; after a death or a hang the cases behind it wait on."""
    if outcome.result:
        return int(outcome.result["hostile"]), Findings(**outcome.result["findings"])
    found = Findings()
    at = outcome.words[-1]["at"] if mine and outcome.words else 0
    name = mine[at].name if mine else outcome.name
    (found.hangs if outcome.hung else found.dead_processes).append(f"{name}: {outcome.hung or outcome.died}")
    if mine[at + 1 :]:
        waiting.append(mine[at + 1 :])
    return at + 1 if mine else 1, found


def _victims(image: Image) -> list[str]:
    """Every file of the store, and its directories and lock."""
    files = [path[len(PATH) + 1 :] for path in sorted(image.files)]
    return [*files, "wal", "slabs", "LOCK"]
