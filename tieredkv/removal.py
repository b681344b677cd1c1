"""Purge and delete: what is removed on request is gone from every tier, the log and every checkpoint, provably."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from .disk import Disk
from .errors import SessionError
from .outcomes import Tier
from .plan import Parts
from .room import Room
from .sessions import Sessions
from .spiller import Cause, Spiller
from .table.catalog import CatalogLog, SessionRow, to_record
from .table.journal import DONE, InDoubt
from .table.state import State
from .tier.tensor import TensorTier
from .wal.records import REMOVAL, REMOVED

_REMOVAL_S = 30.0

_Going = Callable[[], tuple[list[SessionRow], list[int]]]
"""Which sessions and rows go, as of now."""


class Remover:
    """Removes sessions or a namespace. Returns only when nothing of it is left, or raises.

    The order: drops, then the removal's own record, synced; memory zeroed; old slots blanked; a checkpoint
    without it; the log and the checkpoints before that unlinked. A removal that a crash cut short is
    finished by the next open.

    Args:
        in_use_s: the longest to wait for those who use what goes.
    """

    def __init__(
        self,
        *,
        lock: threading.Condition,
        state: State,
        sessions: Sessions,
        memories: dict[Tier, TensorTier],
        room: Room | None,
        spiller: Spiller | None,
        disk: Disk | None,
        log: CatalogLog,
        in_use_s: float,
    ) -> None:
        self._lock = lock
        self._state = state
        self._sessions = sessions
        self._memories = memories
        self._room = room
        self._spiller = spiller
        self._disk = disk
        self._log = log
        self._in_use_s = in_use_s

    def remove_sessions(self, names: Iterable[str]) -> None:
        """Remove sessions and the blocks that no other session shares, also those that they held once."""
        wanted = set(names)

        def going() -> tuple[list[SessionRow], list[int]]:
            known = self._state.catalog.sessions
            rows = [row for name, row in known.items() if name in wanted]
            kept = {r for name, row in known.items() if name not in wanted for r in self._block_rows(row)}
            ever = {r for row in rows for r in (*self._block_rows(row), *self._left_rows(row))}
            return rows, self._and_below(ever - kept)

        self._remove(going, {"sessions": sorted(wanted)})

    def _and_below(self, rows: set[int]) -> list[int]:
        """These blocks and all that continue them: prompts of no session, and what rollbacks left behind.

        Without the blocks that go they could never be reached; and they may hold what was said here.
        """
        found, below = set(rows), list(rows)
        while below:
            children = set(self._state.table.children(below.pop())) - found
            found |= children
            below += children
        return sorted(found)

    def _block_rows(self, row: SessionRow) -> list[int]:
        return [r for r in self._sessions.block_rows(row).tolist() if r >= 0]

    def _left_rows(self, row: SessionRow) -> list[int]:
        return [r for r in self._sessions.left_rows(row).tolist() if r >= 0]

    def purge(self, namespace: int) -> None:
        """Remove everything of a namespace."""

        def going() -> tuple[list[SessionRow], list[int]]:
            table = self._state.table
            rows = table.live_rows()
            sessions = [row for row in self._state.catalog.sessions.values() if row.namespace == namespace]
            return sessions, rows[table.namespace[rows] == namespace].tolist()

        self._remove(going, {"namespace": namespace})

    def _remove(self, going: _Going, removal: dict[str, Any]) -> None:
        until = time.monotonic() + _REMOVAL_S
        if self._spiller is not None:
            self._spiller.drain(until)
        with self._lock:
            sessions, rows = self._take_hold(going)
            table = self._state.table
            parts = [(row, group) for row in rows for group in range(table.num_groups)]
            for row in rows:
                table.tokens.pop(row, None)
            ticket = self._room.release(Parts.of(parts), Cause.REMOVED) if self._room is not None else DONE
            table.forget_gone()
            for memory in self._memories.values():
                memory.zero_free()
        try:
            if not ticket.wait(max(0.0, until - time.monotonic())) and not ticket.is_in_doubt:
                raise SessionError(f"the log did not take that the blocks go: {ticket.error}")
            with self._sessions.doubting([session.name for session in sessions]):
                self._log(REMOVAL, lambda: (to_record(removal),), "the removal")
        except InDoubt:
            raise
        except BaseException:
            self._hold_again(session.name for session in sessions)
            raise
        with self._lock:
            self._sessions.release_gone()
        if not ticket.wait(0.0):  # it was in doubt, and lies before the removal in the log
            raise SessionError(f"the removal is logged, but not that all blocks go: {ticket.error}")
        self.finish()

    def _hold_again(self, names: Iterable[str]) -> None:
        """Nothing was removed: the sessions hold what they held."""
        with self._lock:
            for row in [self._state.catalog.sessions.get(name) for name in names]:
                if row is not None:
                    self._sessions.hold(row)

    def _take_hold(self, going: _Going) -> tuple[list[SessionRow], list[int]]:
        """What goes. Wait until nobody uses the blocks that go (lock held); their sessions hold them no more.

        Raises:
            SessionError: they are still in use at the deadline; nothing was changed.
        """
        table, until = self._state.table, time.monotonic() + self._in_use_s
        while True:
            sessions, rows = going()
            for session in sessions:
                self._sessions.release(session.name)
            held = [row for row in rows if table.is_held(row) or table.uses[row] > 0]
            if not held:
                return sessions, rows
            for session in sessions:
                self._sessions.hold(session)
            if time.monotonic() > until:
                raise SessionError(
                    f"{len(held)} blocks to be removed are in use: close the prefixes that hold them"
                )
            self._lock.wait(0.05)

    def _no_spills(self, until: float) -> AbstractContextManager[bool]:
        return nullcontext(True) if self._spiller is None else self._spiller.paused(until)

    def finish(self) -> None:
        """Erase what a logged removal left on disk.

        Raises:
            SessionError: not all of it; the next open tries again.
        """
        until = time.monotonic() + _REMOVAL_S
        try:
            erased = self._disk is None or self._disk.erase(until, self._no_spills(until))
            why = self._disk.journal.trouble if self._disk else None
        except OSError as error:
            erased, why = False, str(error)
        if not erased:
            raise SessionError(f"the removal is logged but not all erased: {why}")
        self._log(REMOVED, lambda: (to_record({}),), "the end of the removal")
