"""The sessions of a store from outside: what each holds, and what a resume would find. Reads only."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from difflib import get_close_matches

import numpy as np

from ..block.anchors import longest_restorable, num_full_blocks, restorable
from ..block.hashing import chain
from ..errors import BadInput, CorruptFormat
from ..outcomes import Reason, Tier
from ..speeds import is_worth, nbytes_by_tier, read_speeds
from ..system import Fs
from ..table.catalog import Catalog, NamespaceRow, SessionRow
from ..table.key_index import Rows
from ..tier.slab_format import SLOT_HEADER_NBYTES
from .report import Condition, Reading, read

_NUM_NAMED = 5  # of the sessions there are, where none has the name asked for: those most like it


@dataclass(frozen=True)
class SessionInfo:
    """One conversation: never its tokens or texts.

    Attributes:
        unshared_nbytes, shared_nbytes: its parts on disk, headers included: its own, and those of others too.
        expires_in_s: seconds of the store's clock until it goes; None without an expiry of its own.
        used_at: wall time of its last use, seconds since 1970; None where the store never noted the time.
    """

    name: str
    namespace: int
    num_turns: int
    num_tokens: int
    unshared_nbytes: int
    shared_nbytes: int
    pinned: bool
    priority: int
    expires_in_s: float | None
    used_at: float | None


@dataclass(frozen=True)
class Listing:
    """The sessions that a store still tells of, and what is wrong with it: damage may have taken others."""

    sessions: tuple[SessionInfo, ...]
    condition: Condition


@dataclass(frozen=True)
class Expected:
    """What resuming should take on one device, as learned from earlier prompts; None where it is not known.

    Attributes:
        restore_s: seconds that loading what is found takes.
        compute_s: seconds that computing the same tokens takes.
        is_loaded: what would be done: loading, unless computing is known to be clearly sooner.
    """

    device: str
    restore_s: float | None
    compute_s: float | None
    is_loaded: bool


@dataclass(frozen=True)
class ResumeInfo:
    """What a resume of a session would find after a restart.

    Attributes:
        by_tier: tokens by the tier they would be read from: after a restart all are on disk.
        anchors: the boundaries that the session keeps, and whether a restore could start there.
        reason, detail: why not more than `num_restorable`.
        expected: what it should take, by the devices that the store knows of.
        condition: what is wrong with the store, which may have taken some of the session.
    """

    name: str
    num_tokens: int
    num_restorable: int
    num_full: int
    by_tier: dict[str, int]
    anchors: dict[int, bool]
    reason: str
    detail: str
    condition: Condition
    expected: tuple[Expected, ...] = ()


def list_sessions(path: str | os.PathLike[str], fs: Fs | None = None) -> Listing:
    """Every session of the store at `path`, by name; those that expired until they are erased. Raises as `read`."""
    reading = read(path, fs)
    catalog = reading.state.catalog
    rows = {name: _block_rows(reading, row) for name, row in catalog.sessions.items()}
    holders = Counter(row for held in rows.values() for row in set(held[held >= 0].tolist()))
    infos = (_info(reading, row, rows[name], holders) for name, row in sorted(catalog.sessions.items()))
    return Listing(tuple(infos), reading.condition)


def explain_session(path: str | os.PathLike[str], name: str, fs: Fs | None = None) -> ResumeInfo:
    """What a resume of the session `name` would find.

    Raises:
        BadInput: there is no session of that name; NotAStore, NewerFormat, PathUnusable: as `read`.
    """
    reading = read(path, fs)
    condition = reading.condition
    row = reading.state.catalog.sessions.get(name)
    if row is None:
        names = reading.state.catalog.sessions
        known = sorted(get_close_matches(name, names, n=_NUM_NAMED, cutoff=0.0))
        more = f" and {len(names) - _NUM_NAMED} more" if len(names) > _NUM_NAMED else ""
        why = f"; {condition}" if condition.exit_code else ""
        raise BadInput(
            f"{reading.path}: no session {name!r}; there are: {', '.join(known) or 'none'}{more}{why}"
        )
    namespace = reading.state.catalog.namespaces.get(row.namespace)
    if namespace is None or namespace.layout.is_stand_in:
        why = "its namespace is not known: the log that named it was lost"
        return ResumeInfo(name, len(row.tokens), 0, 0, {}, {}, str(Reason.CORRUPT), why, condition)
    layout, blocks = namespace.layout, _block_rows(reading, row)
    present = reading.state.table.present(blocks, len(layout.groups))
    size, end = layout.block_size, longest_restorable(layout, present, len(blocks))
    good, full = restorable(layout, present), num_full_blocks(layout, present)
    anchors = {at: bool(good[at // size - 1]) for at in row.anchors if 0 < at <= len(blocks) * size}
    reason, detail = Reason.COMPLETE, ""
    if full > end:
        reason = Reason.NO_ANCHOR
        detail = f"full parts reach token {full * size}, no anchor after token {end * size}"
    elif end < len(blocks):
        reason, detail = Reason.EVICTED, f"from token {end * size}: evicted, or never stored"
    elif not len(blocks):
        reason, detail = Reason.TOO_SHORT, f"a block is {size} tokens"
    by_tier = {"disk": end * size} if end else {}
    expected = _expected(reading, namespace, by_tier) if end else ()
    return ResumeInfo(
        name, len(row.tokens), end * size, full * size, by_tier, anchors, str(reason), detail, condition, expected
    )  # fmt: skip


def _expected(reading: Reading, namespace: NamespaceRow, by_tier: dict[str, int]) -> tuple[Expected, ...]:
    try:
        known = read_speeds(reading.fs, reading.path)
    except (OSError, CorruptFormat):
        return ()
    found, num_tokens = [], sum(by_tier.values())
    for key, speeds in known.items():
        if key.namespace == namespace.digest.hex():
            restore_s = speeds.restore_s(nbytes_by_tier(namespace.layout, by_tier))
            compute_s = speeds.compute_s(0, num_tokens, num_tokens + 1)
            sooner = (
                restore_s is not None and compute_s is not None and is_worth(restore_s - compute_s, restore_s)
            )
            found.append(Expected(key.device, restore_s, compute_s, not sooner))
    return tuple(found)


def _block_rows(reading: Reading, row: SessionRow) -> Rows:
    """Rows of the session's whole blocks, -1 where a block is not there."""
    namespace = reading.state.catalog.namespaces.get(row.namespace)
    if namespace is None or namespace.layout.is_stand_in:
        return np.zeros(0, dtype=np.int32)
    return reading.state.table.find(chain(namespace.digest, row.tokens, namespace.layout.block_size))


def _info(reading: Reading, row: SessionRow, blocks: Rows, holders: Counter[int]) -> SessionInfo:
    catalog, table = reading.state.catalog, reading.state.table
    here = blocks[blocks >= 0]
    nbytes = {True: 0, False: 0}
    if len(here):
        sizes = np.array(catalog.namespaces[row.namespace].layout.part_nbytes) + SLOT_HEADER_NBYTES
        on_disk = table.slot[Tier.DISK][: len(sizes), here] >= 0
        for block, total in zip(here.tolist(), (sizes[:, None] * on_disk).sum(axis=0).tolist(), strict=True):
            nbytes[holders[block] > 1] += total
    return SessionInfo(
        name=row.name,
        namespace=row.namespace,
        num_turns=len(row.turns),
        num_tokens=len(row.tokens),
        unshared_nbytes=nbytes[False],
        shared_nbytes=nbytes[True],
        pinned=row.pinned,
        priority=row.priority,
        expires_in_s=row.expires_at - _clock_s(catalog) if row.expires_at else None,
        used_at=catalog.wall_s + row.used_at - catalog.clock_s if catalog.wall_s else None,
    )


def _clock_s(catalog: Catalog) -> float:
    """How far the store's clock is, as far as the store itself tells."""
    return max([catalog.clock_s, *(row.used_at for row in catalog.sessions.values())])
