"""A log of many records, written by the log's own writer, and what reading it costs."""

from __future__ import annotations

import contextlib
import gc
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
from bench.child import Say

from tieredkv.audit import report
from tieredkv.block.layout import TOKENS, BlockLayout, LayerGroup, TensorSpec
from tieredkv.system import OsFs
from tieredkv.table.catalog import NamespaceRow
from tieredkv.table.recovery import recover
from tieredkv.table.state import State
from tieredkv.units import MiB
from tieredkv.wal import CheckpointRef, LogWriter, Run
from tieredkv.wal.records import DROP, DROP_DTYPE, NAMESPACE, PUT, PUT_DTYPE

CHAIN = 64
PUTS, DROPS = 56, 8
"""Records of a frame: a batch of parts of half a MiB as the spiller writes it, and what was evicted for it."""

SEGMENT_NBYTES = 16 * MiB


def write_log(path: Path, num_records: int, num_blocks: int = 0) -> None:
    """A store whose log holds `num_records`, and no checkpoint: puts of chains, and drops of earlier puts.

    Args:
        num_blocks: of which the puts are, again and again; 0 for a new block in every put.
    """
    fs, wal_dir = OsFs(), f"{path}/wal"
    fs.make_dir(wal_dir)
    writer = LogWriter(fs, wal_dir, segment_nbytes=SEGMENT_NBYTES)
    numbers = {"open_number": 1, "checkpoint": CheckpointRef()}
    writer.start(1, durable_lsn=0, **numbers)  # type: ignore[arg-type]
    rng = np.random.default_rng(1)
    known = rng.integers(0, 256, (num_blocks, 32), dtype=np.uint8)
    writer.append([Run(NAMESPACE, (_namespace(),))], 1, 0)
    lsn, earlier = 2, np.zeros(0, PUT_DTYPE)
    while lsn <= num_records:
        puts = _puts(rng, lsn, min(PUTS, num_records + 1 - lsn), known)
        drops = _drops(earlier, rng, min(DROPS, num_records + 1 - lsn - len(puts)))
        runs = [Run(PUT, puts)] + ([Run(DROP, drops)] if len(drops) else [])
        if writer.room_nbytes < 2 * (PUTS * PUT_DTYPE.itemsize + DROPS * DROP_DTYPE.itemsize):
            writer.rotate(durable_lsn=lsn - 1, **numbers)  # type: ignore[arg-type]
        writer.append(runs, lsn, 0)
        lsn += sum(map(len, runs))
        earlier = puts
    writer.sync()
    writer.append((), lsn, lsn - 1)
    writer.sync()
    writer.close()


def _namespace() -> bytes:
    spec = TensorSpec(0, "k", (1, TOKENS, 8), "float32")
    return NamespaceRow(1, bytes(range(32)), {}, BlockLayout(32, (LayerGroup("full", (spec,)),))).encode()


def _puts(rng: np.random.Generator, lsn: int, count: int, known: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
    puts = np.zeros(count, PUT_DTYPE)
    if len(known):
        puts["digest"] = known[(lsn + np.arange(count)) % len(known)]
    else:
        puts["digest"] = rng.integers(0, 256, (count, 32), dtype=np.uint8)
    puts["parent"][1:] = puts["digest"][:-1]
    puts["namespace"], puts["num_tokens"] = 1, 32
    puts["slot"] = puts["put_seq"] = puts["checksum"] = np.arange(lsn, lsn + count)
    return puts


def _drops(puts: npt.NDArray[Any], rng: np.random.Generator, count: int) -> npt.NDArray[Any]:
    chosen = puts[rng.permutation(len(puts))[: max(0, count)]]
    drops = np.zeros(len(chosen), DROP_DTYPE)
    for name in ("digest", "put_seq", "slot", "group"):
        drops[name] = chosen[name]
    drops["cause"] = 1
    return drops


# ---- jobs, each in a fresh process ---------------------------------------------------------------


def replay_once(say: Say, path: str) -> dict[str, Any]:
    """Replay the log as the tool does, beside plain reads with xxh3 of the same files."""
    read_s = min(_read_all(path) for _ in range(3))
    _settle_imports()
    before = peak_nbytes()
    began = time.perf_counter()
    reading = report.read(path)
    seconds = time.perf_counter() - began
    return {
        "seconds": seconds, "read_s": min(read_s, *(_read_all(path) for _ in range(2))),
        "peak_nbytes": peak_nbytes() - before, "table_nbytes": reading.state.table.nbytes,
        "num_records": reading.log.num_records, "end": str(reading.log.end), "num_blocks": len(reading.state.table),
    }  # fmt: skip


def recover_once(say: Say, path: str) -> dict[str, Any]:
    """Recover, which changes nothing here: there is no checkpoint to remove."""
    _settle_imports()
    state = State()
    state.clear()
    began = time.perf_counter()
    recovered = recover(OsFs(), path, state)
    state.settle()
    return {"seconds": time.perf_counter() - began, "num_records": recovered.report.num_replayed}


def _settle_imports() -> None:
    """What importing torch left for the garbage collector is not to be paid for by whoever comes next."""
    gc.collect()
    gc.freeze()


def _read_all(path: str) -> float:
    fs, buffer = OsFs(), memoryview(bytearray(4 * MiB))
    began = time.perf_counter()
    for name in fs.list_names(f"{path}/wal"):
        digest, at = xxhash.xxh3_64(), 0
        with contextlib.closing(fs.open_file(f"{path}/wal/{name}")) as file:
            while done := file.preadv([buffer], at):
                digest.update(buffer[:done])
                at += done
    return time.perf_counter() - began


def peak_nbytes() -> int:
    """The most memory that this process has had resident."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise OSError("the system does not tell VmHWM")
