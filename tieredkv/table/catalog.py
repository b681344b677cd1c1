"""Namespaces and sessions: the rows of the table that are not blocks. Changed only by `apply`."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from ..block.hashing import Tokens, common_prefix
from ..block.layout import BlockLayout
from ..errors import CorruptFormat, SessionError
from ..units import format_nbytes
from ..wal.records import CLOCK, NAMESPACE, REMOVAL, REMOVED, SESSION, SESSION_END, Run

_LENGTH = struct.Struct("<I")


@dataclass(frozen=True)
class NamespaceRow:
    """One identity's namespace: its number in this store, digest, fingerprint and layout."""

    number: int
    digest: bytes
    fingerprint: Mapping[str, Any]
    layout: BlockLayout

    @cached_property
    def nbytes(self) -> int:
        """What it takes in a checkpoint."""
        return _LENGTH.size + len(self.encode())

    def encode(self) -> bytes:
        return _to_json(
            {
                "number": self.number,
                "digest": self.digest.hex(),
                "fingerprint": self.fingerprint,
                "layout": self.layout.describe(),
            }
        )

    @classmethod
    def decode(cls, blob: bytes) -> NamespaceRow:
        values = _from_json(blob)
        return cls(
            values["number"],
            bytes.fromhex(values["digest"]),
            values["fingerprint"],
            BlockLayout.from_description(values["layout"]),
        )


@dataclass(frozen=True)
class Turn:
    """One message of a session: who spoke, and the token count at which it ended."""

    role: str
    end: int


@dataclass(frozen=True)
class SessionRow:
    """A named, durable token sequence.

    `anchors` are the boundaries, in tokens, that the session keeps restorable; of lower `priority` is evicted
    first; `expires_at` and `used_at` are on the store's own clock (seconds), 0 for never; `left` are blocks, as
    digests in hex, that it held once and that may still be stored: they go when it is deleted.
    """

    name: str
    namespace: int
    tokens: Tokens = field(repr=False)
    turns: tuple[Turn, ...] = ()
    anchors: tuple[int, ...] = ()
    meta: Mapping[str, Any] = field(default_factory=dict, repr=False)
    pinned: bool = False
    priority: int = 0
    expires_at: float = 0.0
    used_at: float = 0.0
    left: tuple[str, ...] = field(default=(), repr=False)

    @cached_property
    def nbytes(self) -> int:
        """What it takes in a checkpoint by itself; less where another session begins alike."""
        return _LENGTH.size + len(replace(self, tokens=self.tokens[:0]).encode()) + 4 * len(self.tokens)

    def encode(self, before: SessionRow | None = None) -> bytes:
        """As a record: what differs from `before`, a row that the log already holds, of this name or another's."""
        if before is None or before.namespace != self.namespace:
            before, kept = SessionRow(self.name, self.namespace, self.tokens[:0]), 0
            head: dict[str, Any] = {}
        else:
            kept = common_prefix(before.tokens, self.tokens)
            head = {"base": before.name, "kept": kept}
        head |= {"name": self.name, "namespace": self.namespace}
        head |= {n: getattr(self, n) for n in _PLAIN_FIELDS if getattr(self, n) != getattr(before, n)}
        if self.turns != before.turns:
            head["turns"] = [[turn.role, turn.end] for turn in self.turns]
        packed = _to_json(head)
        return _LENGTH.pack(len(packed)) + packed + self.tokens[kept:].astype("<i4").tobytes()

    @classmethod
    def decode(cls, blob: bytes, known: Mapping[str, SessionRow]) -> SessionRow:
        """The row that a record describes, on top of the rows in `known`.

        Raises:
            CorruptFormat: the record builds on a row that is not known, or has fewer tokens than it keeps.
        """
        (length,) = _LENGTH.unpack_from(blob)
        head = _from_json(blob[_LENGTH.size : _LENGTH.size + length])
        added = np.frombuffer(blob, dtype="<i4", offset=_LENGTH.size + length).astype(np.int32)
        kept, base = head.get("kept", 0), cls(head["name"], head["namespace"], added[:0])
        if "base" in head:
            base = known.get(head["base"], base)
            if kept > len(base.tokens) or head["base"] not in known:
                raise CorruptFormat(f"a session record keeps {kept} tokens of {len(base.tokens)}")
        changes = {name: head[name] for name in _PLAIN_FIELDS if name in head}
        changes |= {name: tuple(changes[name]) for name in ("anchors", "left") if name in changes}
        if "turns" in head:
            changes["turns"] = tuple(Turn(role, end) for role, end in head["turns"])
        # What only shares another row's tokens shares their memory too.
        tokens = np.concatenate((base.tokens[:kept], added)) if len(added) else base.tokens[:kept]
        return replace(base, name=head["name"], namespace=head["namespace"], tokens=tokens, **changes)


_PLAIN_FIELDS = ("anchors", "meta", "pinned", "priority", "expires_at", "used_at", "left")


class CatalogLog(Protocol):
    """Logs records of the catalog, made as of their place in the log, and waits until they are applied."""

    def __call__(
        self,
        kind: int,
        make: Callable[[], tuple[bytes, ...]],
        what: str,
        row: SessionRow | NamespaceRow | None = None,
    ) -> None:
        """Raises SessionError: the log does not take the records, or the disk budget does not take `row`."""
        ...


class Catalog:
    """Every namespace by number and every session by name, with the removals that are not finished.

    Attributes:
        max_nbytes: what is set aside for it in a checkpoint; whoever adds to it looks first.
    """

    max_nbytes = sys.maxsize
    _nbytes: int | None  # of all rows, None until somebody asks

    def __init__(self) -> None:
        self.clear()

    @property
    def nbytes(self) -> int:
        """What all rows take in a checkpoint at most, each by itself."""
        if self._nbytes is None:
            self._nbytes = sum(row.nbytes for row in self.namespaces.values())
            self._nbytes += sum(row.nbytes for row in self.sessions.values())
        return self._nbytes

    def check_room(self, row: SessionRow | NamespaceRow, coming_nbytes: int, what: str) -> None:
        """Raise SessionError if a checkpoint with `row`, and `coming_nbytes` of others, outgrows `max_nbytes`."""
        if self.nbytes + coming_nbytes + row.nbytes <= self.max_nbytes:
            return
        sessions, namespaces = dict(self.sessions), dict(self.namespaces)
        if isinstance(row, SessionRow):
            sessions[row.name] = row
        else:
            namespaces[row.number] = row
        nbytes = sum(n.nbytes for n in namespaces.values()) + len(_pack(_encoded(sessions.values())))
        if nbytes + coming_nbytes > self.max_nbytes:
            raise SessionError(
                f"no space for {what}: sessions and namespaces would take {format_nbytes(nbytes)}, and disk_nbytes"
                f" leaves them {format_nbytes(self.max_nbytes)}; delete some, or raise disk_nbytes"
            )

    def clear(self) -> None:
        self.namespaces: dict[int, NamespaceRow] = {}
        self.sessions: dict[str, SessionRow] = {}
        self.removals: list[dict[str, Any]] = []
        self.clock_s = self.wall_s = 0.0
        self._nbytes = None

    def by_digest(self, digest: bytes) -> NamespaceRow | None:
        return next((row for row in self.namespaces.values() if row.digest == digest), None)

    def apply(self, run: Run) -> None:
        """Apply logged records of the kinds that are not about blocks."""
        for blob in run.records:
            self._apply_one(run.kind, bytes(blob))

    def _apply_one(self, kind: int, blob: bytes) -> None:
        if kind == NAMESPACE:
            namespace = NamespaceRow.decode(blob)
            self.namespaces[namespace.number] = namespace
            self._nbytes = None
        elif kind == SESSION:
            session = SessionRow.decode(blob, self.sessions)
            before = self.sessions.get(session.name)
            self.sessions[session.name] = session
            if self._nbytes is not None:
                self._nbytes += session.nbytes - (before.nbytes if before else 0)
        elif kind == SESSION_END:
            self.sessions.pop(_from_json(blob)["name"], None)
            self._nbytes = None
        elif kind == REMOVAL:
            self._begin_removal(_from_json(blob))
        elif kind == REMOVED:
            self.removals.clear()
        elif kind == CLOCK:
            times = _from_json(blob)
            self.clock_s, self.wall_s = max(self.clock_s, times["clock_s"]), times["wall_s"]

    def _begin_removal(self, removal: dict[str, Any]) -> None:
        self.removals.append(removal)
        self._nbytes = None
        for name in removal.get("sessions", ()):
            self.sessions.pop(name, None)
        number = removal.get("namespace")
        if number is not None:
            self.namespaces.pop(number, None)
            self.sessions = {n: s for n, s in self.sessions.items() if s.namespace != number}

    def snapshot(self) -> dict[str, bytes]:
        """The catalog as two values of a checkpoint."""
        blobs = [n.encode() for n in self.namespaces.values()]
        sessions = _encoded(self.sessions.values())
        rest = _to_json({"removals": self.removals, "clock_s": self.clock_s, "wall_s": self.wall_s})
        return {"namespaces": _pack(blobs), "sessions": _pack(sessions), "catalog": rest}

    def restore(self, packed: Mapping[str, bytes]) -> None:
        """The inverse of `snapshot`."""
        self.clear()
        for blob in _unpack(packed["namespaces"]):
            self._apply_one(NAMESPACE, blob)
        for blob in _unpack(packed["sessions"]):
            self._apply_one(SESSION, blob)
        rest = _from_json(packed["catalog"])
        self.removals, self.clock_s, self.wall_s = rest["removals"], rest["clock_s"], rest["wall_s"]


def session_with(row: SessionRow, **changes: Any) -> SessionRow:
    """A copy of `row` with some fields changed."""
    return replace(row, **changes)


def _encoded(sessions: Iterable[SessionRow]) -> list[bytes]:
    """Sessions on top of one another: what begins alike stands once, as forks do in memory."""
    ordered = sorted(sessions, key=lambda row: (row.namespace, row.tokens.tobytes()))
    befores: list[SessionRow | None] = [None, *ordered]
    return [row.encode(before) for before, row in zip(befores, ordered, strict=False)]


def _pack(blobs: list[bytes]) -> bytes:
    return b"".join(_LENGTH.pack(len(b)) + b for b in blobs)


def _unpack(packed: bytes) -> list[bytes]:
    blobs, at = [], 0
    while at < len(packed):
        (length,) = _LENGTH.unpack_from(packed, at)
        blobs.append(packed[at + _LENGTH.size : at + _LENGTH.size + length])
        at += _LENGTH.size + length
    return blobs


def _to_json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def _from_json(blob: bytes) -> Any:
    try:
        return json.loads(blob)
    except ValueError as error:
        raise CorruptFormat(f"a record of {len(blob)} bytes is not JSON") from error


def to_record(value: Mapping[str, Any]) -> bytes:
    """A plain mapping as the body of a SESSION_END, REMOVAL, REMOVED or CLOCK record."""
    return _to_json(value)
