"""A store as it was: its state at an LSN, the difference between two, the life of a block or a session.

A state can be rebuilt from the previous checkpoint on. A life is told from the log, record by record, from the
oldest kept segment on, whatever checkpoints there are; what was before that is known from its outcome alone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import BadInput, CorruptFormat
from ..outcomes import Tier
from ..system import Fs
from ..table.catalog import SessionRow
from ..table.checkpoint import read_checkpoint
from ..table.recovery import WAL
from ..table.state import State
from ..tier.slab_format import SLOT_HEADER_NBYTES
from ..wal.format import CheckpointRef
from ..wal.reader import LogRead
from ..wal.records import DROP, PUT, REMOVAL, SESSION, SESSION_END, Run
from .kept_log import KeptLog, describe
from .report import Condition, Reading, read

_PREFIX = re.compile("[0-9a-f]{8,64}")


@dataclass(frozen=True)
class PartAt:
    """A part on disk: where, of which put, and the LSN of the record that says so."""

    digest: str
    parent: str | None
    namespace: int
    group: int
    slot: int
    put_seq: int
    checksum: str
    lsn: int


@dataclass(frozen=True)
class SessionAt:
    """A session, its tokens as a number."""

    name: str
    namespace: int
    num_tokens: int
    num_turns: int
    anchors: tuple[int, ...]
    pinned: bool
    expires_at: float

    @classmethod
    def of(cls, row: SessionRow) -> SessionAt:
        return cls(
            row.name, row.namespace, len(row.tokens), len(row.turns), row.anchors, row.pinned, row.expires_at
        )


@dataclass(frozen=True)
class Budgets:
    """Bytes on disk at an LSN: slots of live parts, log segments begun by then, and the checkpoint below."""

    parts_nbytes: int
    log_nbytes: int
    checkpoint_nbytes: int
    by_namespace: dict[int, int]


@dataclass
class Moment:
    """The durable state when the record `lsn` had just been applied, rebuilt from the checkpoint at `base_lsn`."""

    lsn: int
    base_lsn: int
    earliest_lsn: int
    last_lsn: int
    state: State
    budgets: Budgets
    condition: Condition

    def parts(self) -> Iterator[PartAt]:
        table = self.state.table
        for row in table.live_rows().tolist():
            parent = int(table.parent[row])
            for group in np.flatnonzero(table.slot[Tier.DISK, :, row] >= 0).tolist():
                yield PartAt(
                    digest=table.digest[row].tobytes().hex(),
                    parent=table.digest[parent].tobytes().hex() if parent >= 0 else None,
                    namespace=int(table.namespace[row]), group=group,
                    slot=int(table.slot[Tier.DISK, group, row]), put_seq=int(table.put_seq[group, row]),
                    checksum=f"{int(table.checksum[group, row]):016x}", lsn=int(table.lsn[group, row]),
                )  # fmt: skip

    def sessions(self) -> tuple[SessionAt, ...]:
        rows = self.state.catalog.sessions.values()
        return tuple(SessionAt.of(row) for row in sorted(rows, key=lambda row: row.name))


def state_at(path: str | os.PathLike[str], lsn: int | None = None, fs: Fs | None = None) -> Moment:
    """The state at `lsn`; at the end of the log if None.

    Raises:
        BadInput: before the previous checkpoint, or behind the end of the log; it names the LSNs there are.
        NotAStore, NewerFormat, PathUnusable: as `audit.read`.
    """
    reading = read(path, fs)
    bases = _whole_checkpoints(reading)
    earliest, last = bases[-1].lsn, reading.log.last_lsn
    if lsn is None:
        lsn = last
    if lsn < earliest:
        raise BadInput(
            f"the state at LSN {lsn} is gone: the previous checkpoint, LSN {earliest}, is the earliest"
        )
    if lsn > last:
        raise BadInput(f"LSN {lsn} is behind the end of the log: the last is LSN {last}")
    base = next(ref for ref in bases if ref.lsn <= lsn)
    state = _replay_to(reading, base, lsn)
    return Moment(
        lsn, base.lsn, earliest, last, state, _budgets(reading, state, base, lsn), reading.condition
    )


def _whole_checkpoints(reading: Reading) -> list[CheckpointRef]:
    """The checkpoint in use, and the one before it if that is whole and the log behind it is there."""
    if reading.checkpoint is None:
        raise BadInput(
            "no checkpoint of this store is whole, so no state but the last can be rebuilt: see --verify"
        )
    found, older = reading.found, [reading.checkpoint]
    for ref in found.candidates():
        if ref.lsn < older[-1].lsn and len(older) < 2 and _reaches(reading, ref):
            older.append(ref)
    return older


def _reaches(reading: Reading, ref: CheckpointRef) -> bool:
    log = LogRead(reading.fs, f"{reading.path}/{WAL}", reading.found.segments, ref.lsn)
    if log.damage or not log.line or log.line[0].previous.lsn > ref.lsn:
        return False
    try:
        read_checkpoint(reading.fs, reading.path, ref)
    except CorruptFormat:
        return False
    return True


def _replay_to(reading: Reading, base: CheckpointRef, lsn: int) -> State:
    state = State()
    state.clear()
    if base.lsn:
        state.restore(read_checkpoint(reading.fs, reading.path, base))
    log = LogRead(reading.fs, f"{reading.path}/{WAL}", reading.found.segments, base.lsn)
    for lsns, run in log.gathered():
        each = np.arange(lsns, lsns + len(run)) if isinstance(lsns, int) else lsns
        count = int(np.searchsorted(each, lsn, side="right"))
        if count:
            state.apply(each[:count], Run(run.kind, run.records[:count]))
    state.settle()
    return state


def _budgets(reading: Reading, state: State, base: CheckpointRef, lsn: int) -> Budgets:
    by_namespace = {number: _nbytes_of(state, number) for number in sorted(state.catalog.namespaces)}
    begun = [s.nbytes for s in reading.found.segments if s.header and s.header.first_lsn <= lsn + 1]
    return Budgets(sum(by_namespace.values()), sum(begun), base.nbytes, by_namespace)


def _nbytes_of(state: State, number: int) -> int:
    table = state.table
    rows = table.live_rows()
    rows = rows[table.namespace[rows] == number]
    sizes = np.array(state.catalog.namespaces[number].layout.part_nbytes, dtype=np.int64) + SLOT_HEADER_NBYTES
    counts = (table.slot[Tier.DISK][: len(sizes), rows] >= 0).sum(axis=1)
    return int(counts @ sizes[: len(counts)])


# ---- the difference ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """What changed from one LSN to another. A part is moved when another put of it is in force."""

    from_lsn: int
    to_lsn: int
    added: tuple[PartAt, ...]
    gone: tuple[PartAt, ...]
    moved: tuple[PartAt, ...]
    sessions_added: tuple[SessionAt, ...]
    sessions_gone: tuple[SessionAt, ...]
    sessions_changed: tuple[tuple[SessionAt, SessionAt], ...]
    parts_nbytes: tuple[int, int]
    condition: Condition


def difference(path: str | os.PathLike[str], a: int, b: int, fs: Fs | None = None) -> Difference:
    """From LSN `a` to LSN `b`; raises as `state_at`."""
    one, other = state_at(path, a, fs), state_at(path, b, fs)
    before = {(p.digest, p.group): p for p in one.parts()}
    after = {(p.digest, p.group): p for p in other.parts()}
    talks, later = ({s.name: s for s in moment.sessions()} for moment in (one, other))
    rows, rows_later = one.state.catalog.sessions, other.state.catalog.sessions
    return Difference(
        from_lsn=a, to_lsn=b,
        added=tuple(part for key, part in after.items() if key not in before),
        gone=tuple(part for key, part in before.items() if key not in after),
        moved=tuple(p for key, p in after.items() if key in before and before[key].put_seq != p.put_seq),
        sessions_added=tuple(s for name, s in later.items() if name not in talks),
        sessions_gone=tuple(s for name, s in talks.items() if name not in later),
        sessions_changed=tuple(
            (talks[name], later[name]) for name in later
            if name in talks and rows[name].encode() != rows_later[name].encode()
        ),
        parts_nbytes=(one.budgets.parts_nbytes, other.budgets.parts_nbytes),
        condition=other.condition,
    )  # fmt: skip


# ---- lives ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Life:
    """What happened to one block or session.

    Attributes:
        known_from_lsn: the oldest kept segment begins here; nothing before it is known record by record.
        events: records in order, as plain values with `lsn`, `segment` and `counts`: whether the record lies
            before the end of the log.
        before: what the records show was there before the first kept one.
        now: what recovery would rebuild of it.
        gaps: `(first, last)` LSNs that damage took.
        condition: what is wrong with the store: damage may have taken records that would be told here.
    """

    subject: str
    known_from_lsn: int
    last_lsn: int
    events: tuple[dict[str, Any], ...]
    before: str
    now: tuple[dict[str, Any], ...]
    gaps: tuple[tuple[int, int], ...]
    condition: Condition


def life_of_block(path: str | os.PathLike[str], prefix: str, fs: Fs | None = None) -> Life:
    """The life of the block whose digest, in hex, begins with `prefix`.

    Raises:
        BadInput: not 8 to 64 hex digits, or the beginning of several digests.
        NotAStore, NewerFormat, PathUnusable: as `audit.read`.
    """
    wanted = _wanted(prefix)
    reading = read(path, fs)
    kept = KeptLog(reading.fs, reading.path, reading.found, reading.log.after_lsn)
    events: list[dict[str, Any]] = []
    digests = set[str]()
    namespaces = set[int]()
    for standing, runs in ((True, kept.runs()), (False, kept.stray_runs())):
        for first_lsn, run in runs:
            if run.kind in (PUT, DROP):
                assert not isinstance(run.records, tuple), "blocks are logged in columns"
                for index in np.flatnonzero(_begin_with(run.records["digest"], wanted)).tolist():
                    event = describe(run.kind, run.records[index])
                    digests.add(event["digest"])
                    if "namespace" in event:
                        namespaces.add(event["namespace"])
                    events.append(_placed(kept, first_lsn + index, event, standing))
            elif run.kind == REMOVAL:
                removals = [describe(run.kind, blob) for blob in run.records]
                events += [
                    _placed(kept, first_lsn + index, event, standing)
                    for index, event in enumerate(removals)
                    if event.get("namespace") in namespaces
                ]
    now = _parts_now(reading, wanted)
    digests |= {part["digest"] for part in now}
    if len(digests) > 1:
        raise BadInput(
            f"{prefix} begins {len(digests)} digests: give more of it ({', '.join(sorted(digests)[:4])})"
        )
    subject = digests.pop() if digests else prefix
    return Life(
        subject, kept.first_lsn, reading.log.last_lsn, tuple(events), _before_block(kept, events, now), tuple(now),
        tuple(kept.gaps), reading.condition,
    )  # fmt: skip


def _wanted(prefix: str) -> str:
    if not _PREFIX.fullmatch(prefix.lower()):
        raise BadInput(f"{prefix!r} begins no digest: give its first 8 to 64 hex digits")
    return prefix.lower()


def _begin_with(digests: npt.NDArray[np.uint8], wanted: str) -> npt.NDArray[np.bool_]:
    """Which digests begin with these hex digits; the last may be half a byte."""
    given = np.frombuffer(bytes.fromhex(wanted + "0" * (len(wanted) % 2)), dtype=np.uint8)
    mask = np.full(len(given), 0xFF, dtype=np.uint8)
    mask[-1] <<= 4 * (len(wanted) % 2)
    same: npt.NDArray[np.bool_] = (digests[:, : len(given)] & mask == given).all(axis=1)
    return same


def _placed(kept: KeptLog, lsn: int, event: dict[str, Any], counts: bool) -> dict[str, Any]:
    return {"lsn": lsn, "segment": kept.segment_of(lsn), **event, "counts": counts}


def _parts_now(reading: Reading, wanted: str) -> list[dict[str, Any]]:
    table = reading.state.table
    rows = table.live_rows()
    parts = []
    for row in rows[_begin_with(table.digest[rows], wanted)].tolist():
        for group in np.flatnonzero(table.slot[Tier.DISK, :, row] >= 0).tolist():
            parts.append(
                {"digest": table.digest[row].tobytes().hex(), "namespace": int(table.namespace[row]), "group": group,
                 "slot": int(table.slot[Tier.DISK, group, row]), "put_seq": int(table.put_seq[group, row]),
                 "lsn": int(table.lsn[group, row])}
            )  # fmt: skip
    return parts


def _before_block(kept: KeptLog, events: list[dict[str, Any]], now: list[dict[str, Any]]) -> str:
    begun = {event["put_seq"] for event in events if event["kind"] == "put"}
    older = [e for e in events if e["kind"] == "drop" and e["put_seq"] not in begun]
    older += [part for part in now if part["put_seq"] not in begun]
    if older:
        return f"put before LSN {kept.first_lsn}, where the kept log begins"
    if kept.first_lsn == 1:
        return "" if events else "never logged: the log is whole from LSN 1 on"
    return f"nothing is known before LSN {kept.first_lsn}, where the kept log begins"


def life_of_session(path: str | os.PathLike[str], name: str, fs: Fs | None = None) -> Life:
    """The life of the session `name`; raises NotAStore, NewerFormat, PathUnusable as `audit.read`."""
    reading = read(path, fs)
    kept = KeptLog(reading.fs, reading.path, reading.found, reading.log.after_lsn)
    events: list[dict[str, Any]] = []
    for standing, runs in ((True, kept.runs()), (False, kept.stray_runs())):
        space = -1
        for first_lsn, run in runs:
            if run.kind not in (SESSION, SESSION_END, REMOVAL):
                continue
            for index, blob in enumerate(run.records):
                event = describe(run.kind, blob)
                space = event.get("namespace", space) if event.get("name") == name else space
                if name == event.get("name") or name in event.get("sessions", ()) or _purges(event, space):
                    events.append(_placed(kept, first_lsn + index, event, standing))
    row = reading.state.catalog.sessions.get(name)
    now = () if row is None else (vars(SessionAt.of(row)),)
    return Life(
        name, kept.first_lsn, reading.log.last_lsn, tuple(events), _before_session(kept, events, now), now,
        tuple(kept.gaps), reading.condition,
    )  # fmt: skip


def _purges(event: dict[str, Any], namespace: int) -> bool:
    return event["kind"] == "removal" and namespace >= 0 and event.get("namespace") == namespace


def _before_session(kept: KeptLog, events: list[dict[str, Any]], now: tuple[dict[str, Any], ...]) -> str:
    first = next((event for event in events if event["kind"] == "session"), None)
    if first is not None and first.get("num_kept"):
        if first["base"] != first["name"]:
            return f"begun as a fork of {first['base']!r}"
        return f"it had {first['num_kept']} tokens or more before LSN {first['lsn']}"
    if first is None and (now or events):
        return f"begun before LSN {kept.first_lsn}, where the kept log begins"
    if kept.first_lsn == 1:
        return "" if events else "never logged: the log is whole from LSN 1 on"
    return f"nothing is known before LSN {kept.first_lsn}, where the kept log begins"


# ---- export --------------------------------------------------------------------------------------


def records(path: str | os.PathLike[str], fs: Fs | None = None) -> Iterator[dict[str, Any]]:
    """Every record that the log still holds and that counts, as plain values, in LSN order.

    Raises:
        NotAStore, NewerFormat, PathUnusable: as `audit.read`.
    """
    yield from records_of(read(path, fs))


def records_of(reading: Reading) -> Iterator[dict[str, Any]]:
    """As `records`, of a store that is read already."""
    kept = KeptLog(reading.fs, reading.path, reading.found, reading.log.after_lsn)
    for first_lsn, run in kept.runs():
        for index, record in enumerate(run.records):
            lsn = first_lsn + index
            yield {"lsn": lsn, "segment": kept.segment_of(lsn), **describe(run.kind, record)}
