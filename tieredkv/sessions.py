"""Named, durable token sequences: conversations. A session keeps the boundaries that it will resume at."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .block.hashing import Tokens, as_tokens
from .errors import BadInput, SessionError
from .namespace import Namespace
from .outcomes import Stored
from .table.catalog import SessionRow, Turn, session_with

if TYPE_CHECKING:
    from types import TracebackType

    from .cache import TieredCache

_DAY_S = 86_400.0


class Session:
    """One conversation of one namespace. Made by `TieredCache.session`; one thread at a time may use it."""

    def __init__(
        self, cache: TieredCache, space: Namespace, row: SessionRow, release: Callable[[], None]
    ) -> None:
        self._cache = cache
        self.space = space
        self._row = row
        self._release: Callable[[], None] | None = release

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
        ids, size = as_tokens(tokens), self.space.layout.block_size
        if any(turn.end > len(ids) for turn in turns) or any(a > len(ids) or a % size for a in anchors):
            raise BadInput(f"a turn or anchor lies beyond {len(ids)} tokens, or off the block size {size}")
        until = time.monotonic() + self._cache.deadline_s
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
        if not 0 <= num_tokens <= len(self.tokens):
            raise BadInput(f"cannot roll {len(self.tokens)} tokens back to {num_tokens}")
        self.commit(
            self.tokens[:num_tokens],
            [turn for turn in self.turns if turn.end <= num_tokens],
            anchors=[anchor for anchor in self.anchors if anchor <= num_tokens],
        )

    def fork(self, name: str) -> Session:
        """A new session with the same content: blocks are shared, nothing is copied.

        Raises:
            SessionError: a session of that name exists.
        """
        if self._cache.has_session(name):
            raise SessionError(f"a session named {name!r} exists")
        forked = self._cache.session(name, self.space)
        forked._change(
            tokens=self.tokens, turns=self.turns, anchors=self.anchors, meta=self.meta, expires_at=0.0
        )
        return forked

    def pin(self) -> None:
        """Keep this session's blocks against eviction until `unpin`; the wish is durable."""
        self._change(pinned=True)

    def unpin(self) -> None:
        self._change(pinned=False)

    def expire(self, days: float) -> None:
        """Stop matching this session `days` from now, on the store's own clock."""
        if days <= 0:
            raise BadInput(f"a session expires after more than zero days, not {days}")
        self._change(expires_at=self._cache.clock_s() + days * _DAY_S)

    def delete(self) -> None:
        """Remove the session and every block that no other session shares, from all tiers; synced on return."""
        row, release = self._row, self._release
        self._release = None
        self._cache.remove_sessions([row.name])
        if release is not None:
            release()

    def close(self) -> None:
        """Let the name be opened again. Closing twice is harmless."""
        release, self._release = self._release, None
        if release is not None:
            release()

    def _change(self, **changes: Any) -> None:
        if self._release is None:
            raise SessionError(f"session {self.name!r} is closed")
        after = session_with(self._row, **changes)
        self._cache.put_session(self._row, after)
        self._row = after


def no_session(name: str, namespace: int) -> SessionRow:
    """A session that nothing was said in."""
    return SessionRow(name, namespace, np.zeros(0, dtype=np.int32))
