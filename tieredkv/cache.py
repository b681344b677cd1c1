"""The whole cache: opened on a directory, closed once. Everything else is reached from here."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from .block.identity import Identity, differences
from .block.layout import BlockLayout
from .config import Config
from .disk import Disk, open_disk
from .errors import BadConfig, BadInput, Closed, Forked, SessionError, StoreUnusable
from .machine import Sizes, resolve
from .mover import Mover
from .namespace import Core, Namespace
from .outcomes import Counters, Flushed, Health, RecoveryReport, Stats, Tier, TierStats, Trouble
from .pace import Pace
from .plan import Parts
from .policy import make_policy
from .removal import Remover
from .residency import Residency
from .room import Room
from .session_file import read_session
from .sessions import Session, Sessions
from .spiller import Cause, Spiller
from .system import Clock, Fs, OsFs, SystemClock, path_of
from .table.catalog import NamespaceRow, SessionRow
from .table.journal import InDoubt, Ticket
from .table.key_index import Rows
from .table.state import State
from .tier.arena import Arena
from .tier.copier import Copier
from .tier.slab_format import SLOT_HEADER_NBYTES
from .tier.stream import CopyStream, stream_for
from .tier.tensor import TensorTier
from .units import format_nbytes
from .wal.records import NAMESPACE, Run

_LOG = logging.getLogger("tieredkv")
_CLOSE_S = 30.0
_AT_EXIT_S = 2.0  # for all caches together that nobody closed
_MAX_FAILED_SYNCS = 3


def open_cache(
    path: str | os.PathLike[str],
    config: Config | None = None,
    *,
    fs: Fs | None = None,
    clock: Clock | None = None,
) -> TieredCache:
    """Open the store in a directory, recovering whatever is there; a missing directory becomes a new store.

    Args:
        path: the store's directory; `~` is expanded, and a relative one is taken from where the process is now.
        config: budgets and choices; the defaults if None.
        fs, clock: doors to files and time, for tests.

    Raises:
        StoreUnusable: held by a living process, of a newer format, not a store, or not to be used; nothing
            on disk was changed. `on_unusable="memory"` runs without the disk tier instead.
        BadConfig: a budget or device that cannot work.
    """
    where = os.path.abspath(path_of(path))  # the process may change its directory
    return TieredCache(where, Config() if config is None else config, fs or OsFs(), clock or SystemClock())


def _holds(arena: Arena, strides: Counter[int]) -> bool:
    """Whether the arena, empty, takes one block with parts of these sizes: each size has chunks of its own."""
    spans = (int(_nbytes_in_chunks(arena, stride, np.array(n))) for stride, n in strides.items())
    return sum(spans) <= arena.budget_nbytes


def _nbytes_in_chunks(arena: Arena, stride: int, num_parts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """What so many parts of one size take, in whole chunks."""
    return -(-num_parts // arena.slots_per_chunk(stride)) * arena.chunk_span(stride)


class WorkingBuffer(Protocol):
    """A running session's own KV."""

    def nbytes(self) -> int:
        """Bytes it holds now."""
        ...


class TieredCache:
    """Blocks of KV on the device, in host memory and on disk. Any thread of the opening process may call."""

    def __init__(
        self, path: str, config: Config, fs: Fs, clock: Clock, stream: CopyStream | None = None
    ) -> None:
        self.path = path
        self.config = config
        self.fs = fs
        self._sizes: Sizes = resolve(config, path)
        self._clock = clock
        self._opened_at = time.monotonic()
        self._pid = os.getpid()
        self._closed = False
        self._counters = Counters()
        self._lock = threading.Condition(threading.RLock())
        self._state = State()
        self._table = self._state.table
        self.pace = Pace()
        self._copier = Copier()
        self._stream = stream or stream_for(self._sizes.device, self._copier)
        self._memories: dict[Tier, TensorTier] = {}
        self._residents: dict[Tier, Residency] = {}
        self._spaces: dict[bytes, Namespace] = {}
        # Namespaces of which it is not known whether the log took their purge.
        self._going: dict[bytes, Ticket] = {}
        self._working: weakref.WeakSet[WorkingBuffer] = weakref.WeakSet()
        self._making = threading.Lock()
        self._unusable: str | None = None
        self._coming_nbytes = 0  # rows of the catalog in records that are not applied yet
        self._disk = self._open_disk(fs)
        self._spiller: Spiller | None = None
        self._room: Room | None = None
        self._mover: Mover | None = None
        self._sessions = Sessions(
            lock=self._lock, state=self._state, clock=clock, log=self._log, remove=self._remove_sessions,
            room=lambda: self._room, check_open=self.check_open, deadline_s=config.deadline_s,
            expire_days=config.expire_days,
        )  # fmt: skip
        if self._state.catalog.removals:
            try:
                self._remover().finish()
            except SessionError as error:
                self._counters.add("unfinished_removal_errors")
                _LOG.warning("%s: %s", path, error)
        _OPEN.add(self)

    def _open_disk(self, fs: Fs) -> Disk | None:
        if self._sizes.disk_nbytes == 0:
            self._table.settle()
            return None
        try:
            return open_disk(
                fs, self.path, self.config, self._sizes, self._state, self._lock, self._residents, self._counters,
                self._stride_on_disk,
            )  # fmt: skip
        except StoreUnusable as error:
            if self.config.on_unusable != "memory":
                raise
            self._unusable = str(error)
            _LOG.warning("running without the disk tier: %s", error)
            self._state.clear()
            self._state.settle()
            return None

    def __enter__(self) -> TieredCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def device(self) -> torch.device:
        """The torch device of the device tier."""
        return self._sizes.device

    @property
    def deadline_s(self) -> float:
        return self.config.deadline_s

    @property
    def recovery(self) -> RecoveryReport:
        """What `open` found; also after closing."""
        return self._disk.report if self._disk is not None else RecoveryReport()

    def check_open(self) -> None:
        """Raises Closed or Forked where a call cannot be served."""
        if self._closed:
            raise Closed(f"the cache on {self.path} is closed")
        if os.getpid() != self._pid:
            raise Forked(f"the cache on {self.path} belongs to process {self._pid}; open your own in a child")

    # ---- namespaces ----------------------------------------------------------------------------

    def namespace(self, identity: Identity, layout: BlockLayout) -> Namespace:
        """The blocks of one identity, made if they are new.

        Raises:
            BadInput: no `Identity`, or no `BlockLayout`.
            BadConfig: a tier's budget is smaller than one block.
            SessionError: the log has not taken it, or a purge of it, in time.
        """
        self.check_open()
        if not (isinstance(identity, Identity) and isinstance(layout, BlockLayout)):
            kinds = f"{type(identity).__name__} and {type(layout).__name__}"
            raise BadInput(f"a namespace is of an Identity and a BlockLayout, not of {kinds}")
        digest = identity.digest(layout)
        with self._making:
            self._await_purge(digest)
            if digest not in self._spaces:
                self._make_tiers(layout)
                row = self._namespace_row(digest, identity, layout)
                self._spaces[digest] = Namespace(row, self._core())
            return self._spaces[digest]

    def _await_purge(self, digest: bytes) -> None:
        """A purge that the log may still take would take whatever is put into the namespace meanwhile."""
        ticket = self._going.get(digest)
        if ticket is None:
            return
        ticket.wait(self.deadline_s)
        if ticket.is_in_doubt:
            raise SessionError("the namespace is being purged, and the log has not taken that yet")
        del self._going[digest]

    def _namespace_row(self, digest: bytes, identity: Identity, layout: BlockLayout) -> NamespaceRow:
        with self._lock:
            known = self._state.catalog.by_digest(digest)
            number = 1 + max(self._state.catalog.namespaces, default=0)
        if known is not None and not known.layout.is_stand_in:
            return known
        number = known.number if known is not None else number
        row = NamespaceRow(number, digest, identity.fingerprint(), layout)
        self._log(NAMESPACE, lambda: (row.encode(),), "the namespace", row)
        return row

    def _log(
        self,
        kind: int,
        make: Callable[[], tuple[bytes, ...]],
        what: str,
        row: SessionRow | NamespaceRow | None = None,
    ) -> None:
        """As `CatalogLog` says."""
        self.check_open()
        with self._lock:
            if self._disk is None:
                self._state.apply(0, Run(kind, make()))
                return
            if row is not None:
                self._state.catalog.check_room(row, self._coming_nbytes, what)
            nbytes = row.nbytes if row is not None else 0
            ticket = self._disk.journal.submit(kind, make())
            self._coming_nbytes += nbytes
        try:
            done = ticket.wait(self.deadline_s)
        finally:
            with self._lock:
                self._coming_nbytes -= nbytes
        if not done:
            why = ticket.error or f"not within {self.deadline_s} s"
            error = SessionError(f"the log did not take {what}: {why}")
            raise error if ticket.error is not None else InDoubt(str(error), ticket)

    def _make_tiers(self, layout: BlockLayout) -> None:
        """The memory tiers, at the first namespace: only then is the size of a part known."""
        if not self._memories:
            self._memories.update(self._make_memories(max(layout.part_nbytes)))
            for tier, memory in self._memories.items():
                self._residents[tier] = self._memory_resident(tier, memory)
            self._residents = dict(sorted(self._residents.items()))
            self._make_movers()
        for tier, resident in self._residents.items():
            header = SLOT_HEADER_NBYTES if tier is Tier.DISK else 0
            strides = Counter(n + header for n in layout.part_nbytes)
            if not resident.arena.slots_per_chunk(max(strides)):
                raise BadConfig(
                    f"a part of this model, {format_nbytes(max(strides))}, does not fit the"
                    f" {format_nbytes(resident.arena.chunk_nbytes)} in which the {tier.name.lower()} tier takes"
                    " memory since its first namespace: ask for this model's first, or raise"
                    f" {tier.name.lower()}_nbytes"
                )
            if not _holds(resident.arena, strides):
                raise BadConfig(
                    f"{tier.name.lower()}_nbytes gives {format_nbytes(resident.arena.budget_nbytes)} to blocks, too"
                    f" little for one of this model, {format_nbytes(sum(strides.elements()))} in whole chunks of"
                    f" {format_nbytes(resident.arena.chunk_nbytes)} for each part size: raise the budget"
                )

    def _make_memories(self, largest: int) -> dict[Tier, TensorTier]:
        """All or none of them, for parts up to `largest` bytes."""
        memories = {Tier.DEVICE: self._memory("device", self._sizes.device_nbytes, largest, self.device)}
        try:
            if self._sizes.host_nbytes:
                memories[Tier.HOST] = self._memory("host", self._sizes.host_nbytes, largest, None)
        except BaseException:
            memories[Tier.DEVICE].close()
            raise
        return memories

    def _memory(self, name: str, nbytes: int, largest: int, device: torch.device | None) -> TensorTier:
        if nbytes < largest:
            raise BadConfig(f"{name}_nbytes={nbytes}: a part of this model needs {largest}; raise the budget")
        cpu = device is None or device.type == "cpu"
        memory = TensorTier(
            name, nbytes, min_chunk_nbytes=largest, device=device or torch.device("cpu"),
            pinned=cpu and self.device.type == "cuda", stream=self._stream,
        )  # fmt: skip
        if memory.pin_refusal is not None:
            self._counters.add("memory_not_pinned")
            _LOG.warning("copies to and from %s memory are slower: %s", name, memory.pin_refusal)
        return memory

    def _memory_resident(self, tier: Tier, memory: TensorTier) -> Residency:
        policy = make_policy(self.config.policy, memory.arena.budget_nbytes, self._table.keys_of)
        resident = Residency(tier, self._table, memory.arena, policy, self._stride_in_memory)
        if self._disk is not None:
            resident.trace = self._disk.trace
        return resident

    def _make_movers(self) -> None:
        disk = self._disk
        common: dict[str, Any] = {
            "lock": self._lock, "table": self._table, "counters": self._counters, "deadline_s": self.deadline_s,
        }  # fmt: skip
        if disk is not None:
            self._spiller = Spiller(
                store=disk.store, resident=self._residents[Tier.DISK], memories=self._memories,
                journal=disk.journal, layout_of=self._layout_of, namespace_digest=self._namespace_digest,
                next_put_seq=disk.next_put_seq, pace=self.pace, **common,
            )  # fmt: skip
        self._room = Room(
            residents=self._residents, memories=self._memories, spiller=self._spiller,
            layout_of=self._layout_of, **common,
        )  # fmt: skip
        self._mover = Mover(
            residents=self._residents, memories=self._memories, store=disk.store if disk else None,
            room=self._room, namespace_digest=self._namespace_digest, **common,
        )  # fmt: skip

        if disk is not None:
            disk.on_failed_sync = self._give_up
            self._room.trim(Tier.DISK, time.monotonic() + _CLOSE_S)
        self._sessions.remove_expired()

    def _give_up(self, parts: Parts) -> None:
        """A slab failed to sync: what it cannot keep is off the disk until it is spilled again (lock held)."""
        assert self._spiller is not None, "only a disk tier fails to sync"
        if parts:
            self._counters.add("failed_sync_parts", len(parts))
            self._spiller.drop(parts, Cause.FAILED_SYNC)

    def _core(self) -> Core:
        assert self._mover is not None and self._room is not None, "tiers are made before namespaces"
        return Core(
            lock=self._lock, table=self._table, residents=self._residents, mover=self._mover,
            spiller=self._spiller, eager=self.config.spill == "eager", pace=self.pace, counters=self._counters,
            deadline_s=self.deadline_s, drop_failed=self._drop_failed, drop_stranded=self._room.drop_stranded,
            look_again=self._room.look_again,
            identity_differences=self._identity_differences, copy=self._copier.copy, check_open=self.check_open,
        )  # fmt: skip

    def _layout_of(self, row: int) -> BlockLayout:
        return self._state.catalog.namespaces[int(self._table.namespace[row])].layout

    def _namespace_digest(self, number: int) -> bytes:
        return self._state.catalog.namespaces[number].digest

    def _stride_in_memory(self, row: int, group: int) -> int:
        return self._layout_of(row).part_nbytes[group]

    def _stride_on_disk(self, row: int, group: int) -> int:
        return self._layout_of(row).part_nbytes[group] + SLOT_HEADER_NBYTES

    def _identity_differences(self, row: NamespaceRow) -> list[str]:
        """In which fields the nearest other namespace differs, when this one holds nothing (lock held)."""
        rows = self._table.live_rows()
        if (self._table.namespace[rows] == row.number).any():
            return []
        mine = {**row.fingerprint, "layout": row.layout.describe()}
        others = [
            differences(mine, {**other.fingerprint, "layout": other.layout.describe()})
            for other in self._state.catalog.namespaces.values()
            if other.number != row.number
        ]
        return min(others, key=len, default=[])

    def _drop_failed(self, parts: Sequence[tuple[int, int]], cause: Cause) -> None:
        """Take parts that failed their check off the disk; copies above, if any, are sound and stay."""
        with self._lock:
            on_disk = Parts.of((r, g) for r, g in parts if self._table.slot[Tier.DISK, g, r] >= 0)
            if on_disk and self._spiller is not None:
                self._spiller.drop(on_disk, cause)

    def count_working(self, buffer: WorkingBuffer) -> None:
        """Show a live sequence's own KV in `stats`, for as long as it lives; no tier's budget covers it."""
        with self._lock:  # which `stats` looks through them under
            self._working.add(buffer)

    # ---- sessions and removal ------------------------------------------------------------------

    def session(self, name: str, space: Namespace, like: SessionRow | None = None) -> Session:
        """Open or resume the session `name` of a namespace; or begin it with what another one there holds.

        One that was last of another identity goes on in this one: its tokens are the same, its blocks are computed
        anew, and those of before go with it when it is deleted. A tenant's name is not another's.

        Raises:
            BadInput: not a namespace of this cache, or one that was purged; no name.
            SessionError: it is open already in this process; or of another salt; or it should begin `like` another,
                and exists.
        """
        self.check_open()
        self._check_ours(space)
        return self._sessions.open(name, space, like)

    def import_session(
        self, path: str | os.PathLike[str], space: Namespace, name: str | None = None
    ) -> Session:
        """The session that `Session.export` wrote to `path`, under its own name or another.

        Raises:
            BadInput: not such a file, cut, damaged, or of another identity: the field is named. Nothing changed.
            SessionError: a session of that name exists.
        """
        self.check_open()
        self._check_ours(space)
        return self._sessions.import_(read_session(path, space), space, name)

    def is_session_open(self, name: str) -> bool:
        """Whether this process has the session open."""
        return self._sessions.is_open(name)

    def has_session(self, name: str) -> bool:
        """Whether a session of this name is recorded and has not expired, or is open in this process."""
        return self._sessions.exists(name)

    def sessions(self) -> tuple[SessionRow, ...]:
        """Every session that has not expired, by name."""
        self.check_open()
        return self._sessions.rows()

    def purge(self, space: Namespace) -> None:
        """Remove everything of a namespace from every tier, log and checkpoint; synced on return.

        The namespace object is of no use afterwards; ask `namespace` for it again.

        Raises:
            BadInput: not a namespace of this cache, or one that was purged.
            SessionError: parts of it are in use, and nothing is removed; or the removal is logged but could not
                be finished: the next open finishes it.
        """
        self.check_open()
        with self._making:
            with self._lock:
                self._check_ours(space)
                del self._spaces[space.digest]
                space.retire()
            in_doubt = False
            try:
                self._remover().purge(space.row.number)
            except InDoubt as error:
                self._going[space.digest], in_doubt = error.ticket, True
                raise
            finally:
                with self._lock:
                    if space.row.number in self._state.catalog.namespaces and not in_doubt:
                        self._spaces[space.digest] = space
                        space.revive()

    def _check_ours(self, space: object) -> None:
        """Namespaces of other caches have the same numbers, and a number is given out again after a purge."""
        if not isinstance(space, Namespace) or self._spaces.get(space.digest) is not space:
            raise BadInput(f"{type(space).__name__} is no namespace of this cache, or one that was purged")

    def _remove_sessions(self, names: Iterable[str]) -> None:
        self.check_open()
        self._remover().remove_sessions(names)

    def _remover(self) -> Remover:
        return Remover(
            lock=self._lock, state=self._state, sessions=self._sessions, memories=self._memories,
            room=self._room, spiller=self._spiller, disk=self._disk, log=self._log, in_use_s=self.deadline_s,
        )  # fmt: skip

    # ---- the whole -----------------------------------------------------------------------------

    def flush(self, timeout_s: float | None = None) -> Flushed:
        """Spill every registered block that has no disk copy, sync slabs, then the log."""
        self.check_open()
        until = time.monotonic() + (_CLOSE_S if timeout_s is None else timeout_s)
        return self._flush(until)

    def _flush(self, until: float) -> Flushed:
        disk, spiller = self._disk, self._spiller
        if disk is None:
            return Flushed(0, 0, ("there is no disk tier",))
        num_spilled, failures = self._spill_all(spiller, until) if spiller is not None else (0, [])
        for _ in range(_MAX_FAILED_SYNCS):
            num_failed = self._counters.get("failed_sync_parts")
            if not disk.journal.flush(until):
                failures.append(f"log: {disk.journal.trouble or 'not synced before the deadline'}")
            if spiller is None or self._counters.get("failed_sync_parts") == num_failed:
                return Flushed(disk.journal.durable_lsn, num_spilled, tuple(failures))
            failures = self._spill_all(spiller, until)[1]  # what a failed slab could not keep goes to another
        return Flushed(
            disk.journal.durable_lsn, num_spilled, (*failures, "slabs fail to sync, one after another")
        )

    def _spill_all(self, spiller: Spiller, until: float) -> tuple[int, list[str]]:
        """Spill what has no disk copy; how many parts that were, and what went wrong."""
        failures = []
        with self._lock:
            parts = self._unspilled()
            parts = parts[np.isin(parts.rows, self._most_wanted(self._residents[Tier.DISK]))]
            if parts:
                spiller.enqueue(parts.rows, parts.groups, all_of_them=True)
        if not spiller.drain(until):
            failures.append(f"spill: {spiller.trouble or 'not done before the deadline'}")
        with self._lock:
            left = len(self._unspilled())
        if left:
            failures.append(f"{left} parts have no disk copy: {spiller.trouble or 'no space'}")
        return len(parts), failures

    def _unspilled(self) -> Parts:
        """Parts in memory without a disk copy (lock held)."""
        rows = self._table.live_rows()
        in_memory = (self._table.slot[: Tier.DISK, :, rows] >= 0).any(axis=0)
        groups, at = np.nonzero(in_memory & ~self._table.on_disk(rows))
        return Parts(rows[at], groups.astype(np.int64))

    def _most_wanted(self, disk: Residency) -> Rows:
        """Blocks in memory, as far as the disk takes them all at once (lock held).

        Those that are pinned come first, then those of higher rank, then those used last. Were more spilled, then
        what nobody used for longest would push out what everybody uses.
        """
        pieces = [self._residents[tier].oldest_first()[::-1] for tier in self._memories]
        rows, first = np.unique(np.concatenate(pieces), return_index=True)
        rows = rows[np.lexsort((first, -self._table.rank[rows], self._table.pins[rows] == 0))]
        groups, at = np.nonzero((self._table.slot[: Tier.DISK, :, rows] >= 0).any(axis=0))
        strides = disk.strides_of(Parts(rows[at], groups.astype(np.int64)))
        nbytes = np.zeros(len(rows), dtype=np.int64)
        for stride in np.unique(strides).tolist():
            num_parts = np.cumsum(np.bincount(at[strides == stride], minlength=len(rows)))
            nbytes += _nbytes_in_chunks(disk.arena, stride, num_parts)
        return rows[nbytes <= disk.arena.budget_nbytes]

    def checkpoint(self, timeout_s: float = _CLOSE_S) -> bool:
        """Write a checkpoint now, so that the next open replays nothing; False without a disk tier."""
        self.check_open()
        return self._disk is not None and self._disk.journal.checkpoint(time.monotonic() + timeout_s)

    def stats(self) -> Stats:
        """A snapshot of tiers, log and counters."""
        self.check_open()
        disk, counters = self._disk, dict(self._counters.snapshot())
        if disk is not None and disk.store.direct_refused:
            counters["direct_refused"] = 1
        with self._lock:
            tiers = tuple(self._tier_stats(tier, resident) for tier, resident in self._residents.items())
            return Stats(
                tiers=tiers,
                num_blocks=len(self._table),
                num_namespaces=len(self._state.catalog.namespaces),
                num_sessions=len(self._state.catalog.sessions),
                num_pins=int(self._table.pins.sum()),
                working_nbytes=sum(buffer.nbytes() for buffer in list(self._working)),
                log_nbytes=disk.journal.log_nbytes if disk else 0,
                checkpoint_nbytes=disk.journal.checkpoint_nbytes if disk else 0,
                disk_nbytes=disk.nbytes if disk else 0,
                last_lsn=disk.journal.applied_lsn if disk else 0,
                durable_lsn=disk.journal.durable_lsn if disk else 0,
                counters=counters,
            )

    def _tier_stats(self, tier: Tier, resident: Residency) -> TierStats:
        rows = self._table.live_rows()
        return TierStats(
            name=tier.name.lower(),
            budget_nbytes=resident.arena.budget_nbytes,
            used_nbytes=resident.arena.used_nbytes,
            live_nbytes=resident.arena.live_nbytes,
            num_parts=int((self._table.slot[tier][:, rows] >= 0).sum()),
            num_blocks=len(resident.policy),
            num_evictions=resident.num_evictions,
            hit_tokens=resident.hit_tokens,
        )

    def health(self) -> Health:
        """What does not serve, if anything."""
        troubles: list[Trouble] = []
        if self._unusable:
            troubles.append(Trouble(self.path, self._unusable, 0.0))
        if self._spiller is not None and self._spiller.trouble:
            troubles.append(
                Trouble("disk tier", self._spiller.trouble, self._spiller.troubled_at - self._opened_at)
            )
        if self._disk is not None and self._disk.journal.trouble:
            troubles.append(
                Trouble("log", self._disk.journal.trouble, self._disk.journal.troubled_at - self._opened_at)
            )
        mode = "memory" if self._disk is None else "read-only" if self._disk.journal.read_only else "tiered"
        return Health(not troubles, mode, tuple(troubles))

    def check(self) -> None:
        """Every invariant of table, tiers and log; AssertionError with both numbers where one fails."""
        with self._lock:
            self._table.check()
            for resident in self._residents.values():
                resident.check()

    def close(self, timeout_s: float = _CLOSE_S) -> Flushed:
        """Flush, write a checkpoint, and give everything back, within `timeout_s`. Closing twice is harmless."""
        if self._closed or os.getpid() != self._pid:
            self._closed = True
            return Flushed(0, 0)
        until = time.monotonic() + timeout_s
        try:
            if self._room is not None:
                self._sessions.remove_expired()
            self._sessions.note_time()
        except SessionError as error:
            _LOG.warning("closing goes on without this: %s", error)
        flushed = self._flush(until)
        self._closed = True
        if self._spiller is not None:
            self._spiller.close(until)
        if self._disk is not None:
            self._disk.close(until)
        with self._lock:
            while self._table.uses.any() and time.monotonic() < until:
                self._lock.wait(0.05)
            if not self._table.uses.any():  # else the memory goes with the last call that uses it
                for memory in self._memories.values():
                    memory.close()
        self._copier.close()
        return flushed


_OPEN: weakref.WeakSet[TieredCache] = weakref.WeakSet()
_BEFORE_CLOSING: list[Callable[[float], None]] = []


def before_closing_at_exit(act: Callable[[float], None]) -> None:
    """Have `act(until)` called at exit before open caches are closed: it ends what uses them, in time.

    It is called once more after that, if there is time left for what did not end.
    """
    _BEFORE_CLOSING.append(act)


@atexit.register
def _close_all() -> None:
    """At exit: a thread that is in a call of torch when the interpreter ends takes the process down (SIGABRT)."""
    until = time.monotonic() + _AT_EXIT_S
    for act in _BEFORE_CLOSING:
        act(until)
    for cache in list(_OPEN):
        try:
            cache.close(max(0.0, until - time.monotonic()))
        except Exception:  # the others are closed all the same
            _LOG.exception("%s: closing at exit failed", cache.path)
    for act in _BEFORE_CLOSING:
        act(until)
