"""Looks into a store from outside: what is there, and whether every reachable byte verifies. Reads only.

The same survey, checkpoint and log code that recovery uses, without what recovery changes; so it may run on
the store of a living process, and then sees it as a crash at this moment would leave it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..errors import NotAStore
from ..outcomes import Tier
from ..system import Fs, OsFs, path_of
from ..table.key_index import Rows
from ..table.recovery import SLABS, WAL, Survey, restore, survey
from ..table.salvage import salvage
from ..table.state import State
from ..tier.base import PartStore, Verdict
from ..tier.lmdb_store import PAYLOAD_NAME, LmdbStore
from ..tier.slab import SlabStore
from ..tier.slab_format import EXPECTED_DTYPE, SLOT_HEADER_NBYTES
from ..units import PAGE_NBYTES
from ..wal.format import CheckpointRef
from ..wal.reader import End, LogRead

_BATCH_NBYTES = 32 << 20
_READ_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class NamespaceStat:
    """One identity's share of the store."""

    number: int
    digest: str
    num_blocks: int
    num_parts: int
    nbytes: int
    groups: tuple[str, ...]


@dataclass(frozen=True)
class SessionStat:
    """One conversation: never its tokens, only their number."""

    name: str
    namespace: int
    num_tokens: int
    num_turns: int
    anchors: tuple[int, ...]
    pinned: bool


@dataclass(frozen=True)
class StoreStat:
    """What a store directory holds, and what the next recovery would find."""

    path: str
    namespaces: tuple[NamespaceStat, ...]
    sessions: tuple[SessionStat, ...]
    num_blocks: int
    parts_by_tier: dict[str, int]
    nbytes_by_tier: dict[str, int]
    log_nbytes: int
    num_segments: int
    first_lsn: int
    last_lsn: int
    durable_lsn: int
    log_end: str
    checkpoints: tuple[int, ...]
    checkpoint_lsn: int
    checkpoint_nbytes: int
    last_open_number: int
    num_to_replay: int
    damage: tuple[str, ...]
    exit_code: int = 0


@dataclass(frozen=True)
class BadPart:
    """A part that a hit would not be served from."""

    digest: str
    group: int
    slot: int
    verdict: str
    lsn: int


@dataclass(frozen=True)
class FsckReport:
    """Every reachable byte, verified or named. `exit_code`: 0 clean, 1 loss that recovery mends, 2 damage."""

    path: str
    num_parts: int
    nbytes: int
    bad: tuple[BadPart, ...]
    counts: dict[str, int]
    log_end: str
    damage: tuple[str, ...]
    repaired: bool = False
    exit_code: int = 0


@dataclass(frozen=True)
class Condition:
    """What is wrong with a store, as far as its table and log tell; no payload is read for it.

    `exit_code`: 0 clean, 1 loss that recovery mends, 2 damage.
    """

    log_end: str
    damage: tuple[str, ...]
    exit_code: int

    def __str__(self) -> str:
        """One line, empty for a clean store."""
        if self.damage:
            return "the store is damaged: " + "; ".join(self.damage)
        return f"something was lost: the log ends {self.log_end}" if self.exit_code else ""


@dataclass
class Reading:
    """A store's durable state as recovery would rebuild it, read without changing anything."""

    fs: Fs
    path: str
    found: Survey
    state: State
    log: LogRead
    checkpoint: CheckpointRef | None
    damage: list[str] = field(default_factory=list)
    num_salvaged: int = 0

    @property
    def condition(self) -> Condition:
        code = 2 if self.damage else 0 if self.log.end.end is End.CLEAN else 1
        return Condition(str(self.log.end), tuple(self.damage), code)


def read(path: str | os.PathLike[str], fs: Fs | None = None) -> Reading:
    """Rebuild the state of the store at `path` in memory.

    Raises:
        NotAStore: nothing of ours is there.
        NewerFormat, PathUnusable: as `open`.
    """
    fs = fs or OsFs()
    path = path_of(path)
    found = survey_store(fs, path)
    state, damage = State(), list[str]()
    if fs.exists(f"{path}/{SLABS}") and not fs.is_dir(f"{path}/{SLABS}"):
        damage.append(f"{SLABS} is no directory: opening the store puts it aside")
    checkpoint = restore(fs, path, found, state, damage)
    log = LogRead(fs, f"{path}/{WAL}", found.segments, checkpoint.lsn if checkpoint else 0)
    for lsns, run in log.gathered():
        state.apply(lsns, run)
    num_salvaged = 0
    if log.end.end is End.CORRUPT or checkpoint is None:
        num_salvaged = _salvage(fs, path, state)
    state.settle()
    if not fs.exists(f"{path}/{SLABS}") and any(True for _ in batches_of(state)):
        damage.append(f"{SLABS} is missing: nothing of what the table names is there")
    return Reading(fs, path, found, state, log, checkpoint, damage + log.damage, num_salvaged)


def survey_store(fs: Fs, path: str) -> Survey:
    """What lies in a store's directory. Raises as `read`."""
    if fs.exists(path) and not fs.is_dir(path):
        raise NotAStore(f"{path} is no directory")
    found = survey(fs, path)
    if found.is_new:
        raise NotAStore(f"{path} holds no store")
    return found


def _salvage(fs: Fs, path: str, state: State) -> int:
    """As recovery would; returns how many parts only their slot headers knew."""
    if not fs.is_dir(f"{path}/{SLABS}"):
        return 0
    store = payloads_of(fs, path)
    try:
        return salvage(store, state)
    finally:
        store.close()


def stat(path: str | os.PathLike[str], fs: Fs | None = None) -> StoreStat:
    """What the store at `path` holds. Raises as `read`."""
    reading = read(path, fs)
    table, catalog, log = reading.state.table, reading.state.catalog, reading.log
    namespaces = tuple(_namespace_stat(reading.state, number) for number in sorted(catalog.namespaces))
    segments = reading.found.segments
    headers = reading.found.headers
    return StoreStat(
        path=reading.path,
        namespaces=namespaces,
        sessions=tuple(
            SessionStat(row.name, row.namespace, len(row.tokens), len(row.turns), row.anchors, row.pinned)
            for row in sorted(catalog.sessions.values(), key=lambda row: row.name)
        ),
        num_blocks=len(table),
        parts_by_tier={"disk": sum(n.num_parts for n in namespaces)},
        nbytes_by_tier={"disk": sum(n.nbytes for n in namespaces)},
        log_nbytes=sum(segment.nbytes for segment in segments),
        num_segments=len(segments),
        first_lsn=headers[0].first_lsn if headers else 0,
        last_lsn=log.last_lsn,
        durable_lsn=min(log.durable_lsn, log.last_lsn),
        log_end=str(log.end),
        checkpoints=reading.found.checkpoints,
        checkpoint_lsn=log.after_lsn,
        checkpoint_nbytes=reading.checkpoint.nbytes if reading.checkpoint else 0,
        last_open_number=max((header.open_number for header in headers), default=0),
        num_to_replay=log.num_records,
        damage=tuple(reading.damage),
        exit_code=reading.condition.exit_code,
    )


def _namespace_stat(state: State, number: int) -> NamespaceStat:
    table, row = state.table, state.catalog.namespaces[number]
    rows = table.live_rows()
    rows = rows[table.namespace[rows] == number]
    here = table.slot[Tier.DISK][: len(row.layout.groups), rows] >= 0
    counts = here.sum(axis=1)
    nbytes = sum(
        int(n) * (size + SLOT_HEADER_NBYTES) for n, size in zip(counts, row.layout.part_nbytes, strict=True)
    )
    kinds = tuple(f"window({g.window})" if g.window else g.kind for g in row.layout.groups)
    return NamespaceStat(number, row.digest.hex(), len(rows), int(counts.sum()), nbytes, kinds)


def fsck(
    path: str | os.PathLike[str],
    progress: Callable[[int, int], None] = lambda _done, _total: None,
    fs: Fs | None = None,
) -> FsckReport:
    """Verify every part that the table names: header, identity, lengths, checksum. Changes nothing.

    Args:
        progress: told how many parts of how many are done.

    Raises:
        NotAStore, NewerFormat, PathUnusable: as `read`.
    """
    reading = read(path, fs)
    store = payloads_of(reading.fs, reading.path)
    try:
        bad, counts, num_parts, nbytes = _verify(reading, store, progress)
    finally:
        store.close()
    damage = list(reading.damage)
    corrupt = counts.get("corrupt", 0) + counts.get("unreadable", 0)
    torn = reading.log.end.end is not End.CLEAN or len(bad) > corrupt
    code = 2 if corrupt or damage else 1 if torn else 0
    return FsckReport(
        path=reading.path,
        num_parts=num_parts,
        nbytes=nbytes,
        bad=tuple(bad),
        counts=counts,
        log_end=str(reading.log.end),
        damage=tuple(damage),
        exit_code=code,
    )


def payloads_of(fs: Fs, path: str) -> PartStore:
    """The payload store of a directory, for reading."""
    slabs = f"{path}/{SLABS}"
    names = fs.list_names(slabs) if fs.is_dir(slabs) else []
    if PAYLOAD_NAME in names:
        return LmdbStore(fs, slabs, map_nbytes=fs.file_nbytes(f"{slabs}/{PAYLOAD_NAME}"), read_only=True)
    return SlabStore(fs, slabs, read_only=True)


def _verify(
    reading: Reading, store: PartStore, progress: Callable[[int, int], None]
) -> tuple[list[BadPart], dict[str, int], int, int]:
    table = reading.state.table
    bad: list[BadPart] = []
    counts: dict[str, int] = {}
    batches = list(batches_of(reading.state))
    total = sum(len(rows) for _, _, rows in batches)
    done = nbytes = 0
    for part_nbytes, group, rows in batches:
        verdicts, _ = check_parts(reading.state, store, part_nbytes, group, rows)
        for row, verdict in zip(rows.tolist(), verdicts, strict=True):
            name = _name(verdict, int(table.lsn[group, row]), reading.log.durable_lsn)
            counts[name] = counts.get(name, 0) + 1
            if verdict is not Verdict.OK:
                slot = int(table.slot[Tier.DISK, group, row])
                lsn = int(table.lsn[group, row])
                bad.append(BadPart(table.digest[row].tobytes().hex(), group, slot, name, lsn))
        done += len(rows)
        nbytes += len(rows) * (part_nbytes + SLOT_HEADER_NBYTES)
        progress(done, total)
    return bad, counts, total, nbytes


def _name(verdict: Verdict, lsn: int, durable_lsn: int) -> str:
    """How a verdict is called: above the durable LSN a part may never have been completed."""
    if verdict is Verdict.OTHER:
        return "superseded"
    if verdict is Verdict.CORRUPT and lsn > durable_lsn:
        return "unwritten"
    return str(verdict.value)


def batches_of(state: State) -> Iterator[tuple[int, int, Rows]]:
    """Parts to read, in slot order: part size, group and rows of one batch."""
    table = state.table
    rows = table.live_rows()
    for number, namespace in state.catalog.namespaces.items():
        mine = rows[table.namespace[rows] == number]
        for group, part_nbytes in enumerate(namespace.layout.part_nbytes):
            slots = table.slot[Tier.DISK, group, mine]
            here = mine[slots >= 0]
            here = here[np.argsort(table.slot[Tier.DISK, group, here])]
            step = max(1, _BATCH_NBYTES // part_nbytes)
            for at in range(0, len(here), step):
                yield part_nbytes, group, here[at : at + step]


def check_parts(
    state: State, store: PartStore, part_nbytes: int, group: int, rows: Rows
) -> tuple[list[Verdict], list[memoryview]]:
    """Read and check one batch of `batches_of`: a verdict and the payload for each of `rows`."""
    expected = expected_of_rows(state, group, rows)
    buffer = torch.empty(len(rows) * part_nbytes + PAGE_NBYTES, dtype=torch.uint8)
    skip = -buffer.data_ptr() % PAGE_NBYTES
    memory = buffer.numpy().data[skip:]
    into = [memory[at * part_nbytes : (at + 1) * part_nbytes] for at in range(len(rows))]
    slots = state.table.slot[Tier.DISK, group, rows].astype(np.int64)
    return store.read(part_nbytes, slots, expected, into, _READ_TIMEOUT_S), into


def expected_of_rows(state: State, group: int, rows: Rows) -> npt.NDArray[Any]:
    """What the slots of `rows` must say of themselves (`EXPECTED_DTYPE`); rows of one namespace."""
    table = state.table
    expected = np.zeros(len(rows), dtype=EXPECTED_DTYPE)
    expected["digest"] = table.digest[rows]
    expected["group"] = group
    expected["put_seq"] = table.put_seq[group, rows]
    expected["checksum"] = table.checksum[group, rows]
    number = int(table.namespace[rows[0]])
    expected["namespace"] = np.frombuffer(state.catalog.namespaces[number].digest, dtype=np.uint8)
    return expected
