"""Named, durable token sequences: conversations. A session keeps the boundaries that it will resume at."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

import numpy as np

from .block.hashing import DIGEST_NBYTES, Digests, Tokens, as_tokens, chain
from .errors import BadInput, SessionError
from .namespace import Namespace
from .outcomes import Stored
from .plan import Parts, unneeded_window_parts
from .room import Room
from .session_file import SessionFile, write_session
from .spiller import Cause
from .system import Clock
from .table.catalog import CatalogLog, SessionRow, Turn, session_with, to_record
from .table.key_index import Rows
from .table.state import State
from .units import is_whole
from .wal.records import CLOCK, SESSION

_DAY_S = 86_400.0

PRIORITIES = {"low": -1, "normal": 0, "high": 1}
"""Of lower rank is evicted first."""


class Session:
    """One conversation of one namespace. Made by `TieredCache.session`; one thread at a time may use it."""

    def __init__(
        self, owner: Sessions, space: Namespace, row: SessionRow, release: Callable[[], None]
    ) -> None:
        self._owner = owner
        self.space = space
        self._row = row
        self._release: Callable[[], None] | None = release
        self._is_going = False  # a delete of it is under way

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def name(self) -> str:
        return self._row.name

    @property
    def tokens(self) -> Tokens:
        """int32 `[n]`: every committed token."""
        return self._row.tokens

    @property
    def turns(self) -> tuple[Turn, ...]:
        """Messages, each with the token count at which it ends."""
        return self._row.turns

    @property
    def meta(self) -> Mapping[str, Any]:
        """The application's own small JSON."""
        return self._row.meta

    @property
    def anchors(self) -> tuple[int, ...]:
        """Boundaries, in tokens, that this session keeps restorable."""
        return self._row.anchors

    @property
    def pinned(self) -> bool:
        return self._row.pinned

    @property
    def priority(self) -> str:
        """`low`, `normal` or `high`."""
        return next(name for name, rank in PRIORITIES.items() if rank == self._row.priority)

    def commit(
        self,
        tokens: object,
        turns: Sequence[Turn],
        *,
        anchors: Sequence[int] = (),
        stored: Sequence[Stored] = (),
        meta: Mapping[str, Any] | None = None,
    ) -> None:
        """Make this the session's content. On return it is committed: it survives SIGKILL.

        The blocks of `stored` are waited for first, at most the deadline, so that the record never promises
        more than is there. Anchors that the session no longer names are let go.

        Raises:
            BadInput: turns or anchors beyond the tokens.
            SessionError: the log did not take the record.
        """
        ids, size = as_tokens(tokens).copy(), self.space.layout.block_size
        ids.setflags(write=False)  # what is held must stay what was logged
        _check_turns(turns, len(ids))
        if not all(is_whole(a) and 0 <= a <= len(ids) and a % size == 0 for a in anchors):
            raise BadInput(f"an anchor lies beyond {len(ids)} tokens, or off the block size {size}")
        until = time.monotonic() + self._owner.deadline_s
        for batch in stored:
            batch.wait(max(0.0, until - time.monotonic()))
        changes: dict[str, Any] = {
            "tokens": ids,
            "turns": tuple(turns),
            "anchors": tuple(sorted(set(anchors))),
        }
        if meta is not None:
            changes["meta"] = dict(meta)
        self._change(**changes)

    def rollback(self, num_tokens: int) -> None:
        """Cut the session back to `num_tokens`; blocks that other sessions share stay."""
        if not is_whole(num_tokens) or not 0 <= num_tokens <= len(self.tokens):
            raise BadInput(f"cannot roll {len(self.tokens)} tokens back to {num_tokens!r}")
        self.commit(
            self.tokens[:num_tokens],
            [turn for turn in self.turns if turn.end <= num_tokens],
            anchors=[anchor for anchor in self.anchors if anchor <= num_tokens],
        )

    def follow(self, space: Namespace) -> None:
        """Go on in another namespace with the same tokens: none of its blocks are there yet.

        Turns, meta, pin, priority and expiry stay as they are.
        """
        self.check_open()
        self.space = space
        moved = self._owner.followed(self._row, space)
        self._row = self._put(moved) if len(self.tokens) else moved

    def fork(self, name: str) -> Session:
        """A new session with the same content: blocks are shared, nothing is copied.

        Raises:
            SessionError: a session of that name exists; or this one is closed.
        """
        self._check_change()
        return self._owner.open(name, self.space, like=self._row)

    def pin(self) -> None:
        """Keep this session's blocks against eviction until `unpin`; the wish is durable."""
        self._change(pinned=True)

    def unpin(self) -> None:
        self._change(pinned=False)

    def prioritise(self, priority: str) -> None:
        """Let this session's own blocks be evicted before (`"low"`) or after (`"high"`) those of others.

        A block that sessions share goes with the highest of them; the wish is durable.
        """
        if priority not in PRIORITIES:
            raise BadInput(f"priority {priority!r}: choose one of {', '.join(map(repr, PRIORITIES))}")
        self._change(priority=PRIORITIES[priority])

    def expire(self, days: float | None) -> None:
        """Stop matching this session `days` from now, on the store's own clock; None: when the store says so."""
        if days is not None and not (isinstance(days, int | float) and days > 0):
            raise BadInput(f"a session expires after more than zero days, not {days!r}")
        self._change(expires_at=self._owner.clock_s() + days * _DAY_S if days is not None else 0.0)
        self._owner.note_time()

    def export(self, path: str | os.PathLike[str]) -> None:
        """Write the session to one file: see `session_file`.

        Raises:
            OSError: it could not be written; nothing is left of it, and an older file of that name stays.
            SessionError: the session is closed.
        """
        self.check_open()
        write_session(path, self._row, self.space)

    def delete(self) -> None:
        """Remove the session and every block that no other session shares, from all tiers; synced on return.

        Those that it held before a rollback, an edit or a change of the model go too.

        Raises:
            SessionError: it is closed; blocks that go are in use, and nothing was changed; or the removal is logged,
                but not everything could be erased before the deadline.
        """
        self.check_open()
        self._is_going = True
        try:
            self._owner.remove([self.name])
        finally:
            if not self._owner.has_row(self.name):
                self.close()
            self._is_going = False

    def close(self) -> None:
        """Let the name be opened again. Closing twice is harmless."""
        release, self._release = self._release, None
        if release is not None:
            release()

    def _change(self, **changes: Any) -> None:
        self._row = self._put(session_with(self._row, **changes))

    def leave(self, tokens: object) -> None:
        """Blocks of these tokens were stored for what the session does not keep: with it they are deleted."""
        self._row = self._put(self._row, as_tokens(tokens))

    def _put(self, row: SessionRow, also_left: Tokens | None = None) -> SessionRow:
        self._check_change()
        return self._owner.put(row, self.name, self._check_change, also_left)

    def _check_change(self) -> None:
        """Raises SessionError or Closed: nothing can be logged of it any more."""
        self.check_open()
        if self._is_going:
            raise SessionError(f"session {self.name!r} is being deleted")
        self.space.check_open()

    def check_open(self) -> None:
        """Raises SessionError once it is closed."""
        if self._release is None:
            raise SessionError(f"session {self.name!r} is closed")


def _check_turns(turns: Sequence[Turn], num_tokens: int) -> None:
    """Raises BadInput: one without a role, or whose end does not lie between the end before it and the tokens'."""
    last = 0
    if isinstance(turns, str) or not isinstance(turns, Sequence):
        raise BadInput(f"turns are a sequence of Turn, not a {type(turns).__name__}")
    for turn in turns:
        if not isinstance(turn, Turn):
            raise BadInput(f"a turn is a Turn, not a {type(turn).__name__}")
        if not isinstance(turn.role, str):
            raise BadInput(f"a turn's role is a text, not {turn.role!r}")
        if not is_whole(turn.end) or not last <= turn.end <= num_tokens:
            raise BadInput(f"a turn ends at {turn.end!r}, not between {last} and {num_tokens} tokens")
        last = turn.end


@dataclass(frozen=True)
class _Hold:
    """What one session counts for: its whole blocks, and among them those before its anchors, by digest."""

    namespace: int
    tokens: Tokens = field(repr=False)
    digests: Digests
    ends: Digests = field(default_factory=lambda: np.zeros((0, DIGEST_NBYTES), dtype=np.uint8))
    is_pinned: bool = False
    priority: int = 0

    @property
    def pinned(self) -> Digests:
        """The blocks that it pins."""
        return self.digests if self.is_pinned else self.digests[:0]


class Sessions:
    """Every session of a cache: opens them by name, logs them, and holds the anchors that they name.

    Args:
        log: logs records of the catalog, made as of their place in the log, and waits until they are applied.
        remove: removes sessions with their unshared blocks.
        expire_days: how long a session without an expiry of its own, and not pinned, lives on after its last use.
        room: what takes parts out of the tiers, once there are tiers.
    """

    def __init__(
        self,
        *,
        lock: threading.Condition,
        state: State,
        clock: Clock,
        log: CatalogLog,
        remove: Callable[[Iterable[str]], None],
        room: Callable[[], Room | None],
        check_open: Callable[[], None],
        deadline_s: float,
        expire_days: float | None,
    ) -> None:
        self._lock = lock
        self._table = state.table
        self._catalog = state.catalog
        self._clock = clock
        self._log = log
        self.remove = remove
        self._room = room
        self._check_open = check_open
        self.deadline_s = deadline_s
        self._expire_s = expire_days * _DAY_S if expire_days is not None else None
        self._open: set[str] = set()
        closed_s = max(0.0, clock.wall() - self._catalog.wall_s) if self._catalog.wall_s else 0.0
        known_s = max((row.used_at for row in self._catalog.sessions.values()), default=0.0)
        self._began_s = max(self._catalog.clock_s + closed_s, known_s) - clock.monotonic()
        self._in_doubt: set[str] = set()  # names whose last record may still arrive
        self._held: dict[str, _Hold] = {}
        self._is_ranked = False
        with lock:
            for row in self._catalog.sessions.values():
                self.hold(row)
            self._rank()

    # ---- by name -------------------------------------------------------------------------------

    def open(self, name: str, space: Namespace, like: SessionRow | None = None) -> Session:
        """Open or resume a session, or begin one with what another holds: blocks are shared, nothing is copied.

        Raises:
            BadInput: no name.
            SessionError: it is open already; or of another salt; or it should begin `like` another, and exists.
        """
        _check_name(name)
        with self._lock:
            if like is not None and self.exists(name):
                raise SessionError(f"a session named {name!r} exists")
            if name in self._open:
                raise SessionError(f"session {name!r} is open already; close it first")
            row = self._catalog.sessions.get(name)
            if row is None or self._is_expired(row):
                row = SessionRow(name, space.row.number, np.zeros(0, dtype=np.int32))
            elif row.namespace != space.row.number:
                row = self.followed(row, space)
            self._open.add(name)
        session = Session(self, space, row, lambda: self._open.discard(name))
        if like is not None:
            try:
                fresh = session_with(like, name=name, pinned=False, expires_at=0.0, left=())
                session._row = self.put(fresh, like.name, session._check_change)
            except BaseException:
                session.close()
                raise
        return session

    def followed(self, row: SessionRow, space: Namespace) -> SessionRow:
        """`row` as it goes on in another namespace: its tokens are the same, none of its blocks are there yet.

        Raises:
            SessionError: that namespace is of another salt, or what it was of before is not known any more.
        """
        before = self._catalog.namespaces.get(row.namespace)
        if before is not None and before.fingerprint.get("salt") != space.row.fingerprint.get("salt"):
            raise SessionError(
                f"session {row.name!r} is not of this salt, as far as is known: choose another name"
            )
        return session_with(row, namespace=space.row.number, anchors=())

    def import_(self, file: SessionFile, space: Namespace, name: str | None) -> Session:
        """A new session with what an exported one held.

        Raises:
            SessionError: a session of that name exists.
        """
        name = file.name if name is None else name
        _check_name(name)
        if self.exists(name):
            raise SessionError(f"a session named {name!r} exists: import it under another name")
        session = self.open(name, space)
        try:
            stored = file.store(space)
            session.commit(
                file.tokens,
                file.turns,
                anchors=file.anchors,
                stored=[stored] if stored else [],
                meta=file.meta,
            )
            if file.priority:
                session._change(priority=file.priority)
        except BaseException:
            session.close()
            raise
        return session

    def is_open(self, name: str) -> bool:
        with self._lock:
            return name in self._open

    def exists(self, name: str) -> bool:
        with self._lock:
            row = self._catalog.sessions.get(name)
            return name in self._open or (row is not None and not self._is_expired(row))

    def has_row(self, name: str) -> bool:
        """Whether anything is recorded under this name, expired or not."""
        with self._lock:
            return name in self._catalog.sessions

    def rows(self) -> tuple[SessionRow, ...]:
        """Every session that has not expired, by name."""
        with self._lock:
            rows = sorted(self._catalog.sessions.values(), key=lambda row: row.name)
            return tuple(row for row in rows if not self._is_expired(row))

    def put(
        self, after: SessionRow, like: str, check: Callable[[], None], also_left: Tokens | None = None
    ) -> SessionRow:
        """Log a session's new content, then let go of the anchors that it no longer names.

        Args:
            like: the session that it was made from: only what differs is logged.
            check: asked where the record gets its place in the log: behind a removal it would bring back what went.
            also_left: tokens whose blocks the session held once, beyond those that its record named.

        Returns:
            The row as it was logged.
        """
        self._check_open()
        with self._lock:
            hold = self._hold_of(after, self._held.get(like))
            also = self._digests(session_with(after, tokens=also_left)) if also_left is not None else None
            after = session_with(after, used_at=self.clock_s(), left=self._left(after.name, hold, also))

        def make() -> tuple[bytes, ...]:
            check()
            # A delta is right only on top of the row that it was made from.
            base = None if like in self._in_doubt else self._catalog.sessions.get(like)
            self._in_doubt.add(after.name)
            return (after.encode(base),)

        self._log(SESSION, make, f"session {after.name!r}", after)
        with self._lock:
            self._in_doubt.discard(after.name)
            if after.name not in self._catalog.sessions:  # removed meanwhile
                return after
            before = self._held.get(after.name)
            self._count_up(after.name, hold)
            self._rank()
            if before is not None:
                self._let_go(before)
        return after

    @contextlib.contextmanager
    def doubting(self, names: Collection[str]) -> Iterator[None]:
        """Until the end of this scope no record may build on these rows, which a removal takes away."""
        with self._lock:
            self._in_doubt.update(names)
        yield
        with self._lock:
            self._in_doubt.difference_update(names)

    # ---- time ----------------------------------------------------------------------------------

    def clock_s(self) -> float:
        """The store's own clock: open time, and wall time while closed as far as that went forward."""
        return self._began_s + self._clock.monotonic()

    def note_time(self) -> None:
        """Log how far the store's clock is."""
        if self._catalog.sessions:
            times = {"clock_s": self.clock_s(), "wall_s": self._clock.wall()}
            self._log(CLOCK, lambda: (to_record(times),), "the time")

    def remove_expired(self) -> None:
        """Erase sessions whose time is over; they stopped matching when it was."""
        with self._lock:
            names = [row.name for row in self._catalog.sessions.values() if self._is_expired(row)]
        if names:
            self.remove(names)

    def _is_expired(self, row: SessionRow) -> bool:
        ends = row.expires_at
        if not ends and self._expire_s is not None and not row.pinned:
            ends = row.used_at + self._expire_s
        return 0 < ends <= self.clock_s()

    # ---- anchors -------------------------------------------------------------------------------

    def block_rows(self, row: SessionRow) -> Rows:
        """Rows of the session's whole blocks, -1 where a block is not there (lock held)."""
        return self._table.find(self._digests(row))

    def _digests(self, row: SessionRow) -> Digests:
        namespace = self._catalog.namespaces.get(row.namespace)
        if namespace is None or namespace.layout.is_stand_in:
            return np.zeros((0, DIGEST_NBYTES), dtype=np.uint8)
        return chain(namespace.digest, row.tokens, namespace.layout.block_size)

    def _block_size(self, row: SessionRow) -> int:
        namespace = self._catalog.namespaces.get(row.namespace)
        return namespace.layout.block_size if namespace is not None else 1

    def left_rows(self, row: SessionRow) -> Rows:
        """Rows of the blocks that the session held once, -1 where a block is not there (lock held)."""
        raw = bytes.fromhex("".join(row.left))
        return self._table.find(np.frombuffer(raw, dtype=np.uint8).reshape(-1, DIGEST_NBYTES))

    def _left(self, name: str, hold: _Hold, also: Digests | None) -> tuple[str, ...]:
        """What `left` becomes when a session goes on with `hold`: only blocks that are stored count (lock held)."""
        row, before = self._catalog.sessions.get(name), self._held.get(name)
        if row is None or before is None:
            return ()
        shared = min(len(before.digests), len(hold.digests))
        same = (before.digests[:shared] == hold.digests[:shared]).all(axis=1)
        shared = int(np.argmin(np.append(same, False)))
        cut, back = before.digests[shared:], hold.digests[shared:]
        if also is not None:
            cut = np.concatenate([cut, also])
            back = hold.digests  # of `also` too
        if not len(cut) and not row.left:
            return ()
        known = dict.fromkeys((*row.left, *(digest.tobytes().hex() for digest in cut)))
        for digest in back:
            known.pop(digest.tobytes().hex(), None)
        left = session_with(row, left=tuple(known))
        return tuple(d for d, at in zip(left.left, self.left_rows(left).tolist(), strict=True) if at >= 0)

    def hold(self, row: SessionRow) -> None:
        """Count this session among the holders of its anchors, and pin its blocks if it wants that (lock held).

        What it held before is no longer its own to count down.
        """
        self._count_up(row.name, self._hold_of(row, None))

    def _hold_of(self, row: SessionRow, like: _Hold | None) -> _Hold:
        """What a row holds. With the tokens of `like` that is the same, and nothing is hashed (lock held)."""
        if like is None or like.tokens is not row.tokens or like.namespace != row.namespace:
            like = _Hold(row.namespace, row.tokens, self._digests(row))
        blocks = [at // self._block_size(row) for at in row.anchors]
        ends = like.digests[[block - 1 for block in blocks if 0 < block <= len(like.digests)]]
        return replace(like, ends=ends, is_pinned=row.pinned, priority=row.priority)

    def _count_up(self, name: str, hold: _Hold) -> None:
        """Lock held."""
        self._table.wish(hold.ends, holders=1)
        self._table.wish(hold.pinned, pins=1)
        self._held[name] = hold  # last: what is in here is counted down once

    def release(self, name: str) -> None:
        """The session holds nothing any more (lock held)."""
        hold = self._held.pop(name, None)
        if hold is not None:
            self._count_down(hold)
            self._rank()

    def release_gone(self) -> None:
        """Sessions that are no more hold nothing, whatever was on its way when they were removed (lock held)."""
        for name in [*self._held]:
            if name not in self._catalog.sessions:
                self.release(name)

    def _rank(self) -> None:
        """Give each block the highest priority among the sessions that hold it (lock held)."""
        ranks = {hold.priority for hold in self._held.values()}
        if ranks - {0} or self._is_ranked:
            self._table.rank[:] = 0
            for hold in sorted(self._held.values(), key=lambda hold: hold.priority):
                rows = self._table.find(hold.digests)
                self._table.rank[rows[rows >= 0]] = hold.priority
        self._is_ranked = bool(ranks - {0})

    def _let_go(self, hold: _Hold) -> None:
        """These anchors are held once less: window parts that nobody needs then leave every tier (lock held)."""
        ends = [int(end) for end in self._count_down(hold) if end >= 0 and self._table.holders[end] == 0]
        room, namespace = self._room(), self._catalog.namespaces.get(hold.namespace)
        if room is None or namespace is None:
            return
        parts = [part for end in ends for part in unneeded_window_parts(self._table, namespace.layout, end)]
        if parts:
            room.release(Parts.of(dict.fromkeys(parts)), Cause.RELEASED)

    def _count_down(self, hold: _Hold) -> Rows:
        """Returns the rows at whose ends the anchors are, -1 where one is not here."""
        self._table.free_if_empty(self._table.wish(hold.pinned, pins=-1))
        self._lock.notify_all()
        return self._table.wish(hold.ends, holders=-1)


def _check_name(name: object) -> None:
    """Raises BadInput for what the log could not name."""
    if not isinstance(name, str):
        raise BadInput(f"a session's name is a str, not {name!r}")
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise BadInput(f"a session's name is text that UTF-8 can write, not {name!r}") from error
