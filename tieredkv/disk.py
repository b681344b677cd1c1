"""The disk tier of an open store: lock, recovery, payload store, arena and journal, opened and closed as one."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .config import Config
from .errors import BadConfig, CorruptFormat, PathUnusable, TieredKVError
from .machine import Sizes
from .outcomes import Counters, RecoveryReport, Tier
from .plan import Parts
from .policy import make_policy
from .residency import Residency, Slots
from .system import Fs, Lock
from .table.journal import Journal, Ticket
from .table.recovery import SLABS, TRACE, WAL, Recovered, Survey, claim, payload_names, recover, unlink_broken
from .table.salvage import salvage
from .table.state import State
from .table.trace import NO_TRACE, NoTrace, Trace, traces_nbytes, unlink_traces
from .tier.arena import Arena
from .tier.base import FailedPlace, PartStore, StoreFailed
from .tier.slab import SlabStore
from .tier.slab_format import SLOT_HEADER_NBYTES
from .units import KiB, MiB, align_up, format_nbytes
from .wal.reader import Head
from .wal.records import DROP, DROP_DTYPE
from .wal.writer import LogWriter

_CHUNK_NBYTES = 4 * MiB
_REMOVED = 4  # a cause of drops, `spiller.Cause.REMOVED`
_MIN_SEGMENT_NBYTES = 256 * KiB
_MAX_SEGMENT_NBYTES = 16 * MiB
_CATALOG_NBYTES = 4 * MiB
_TABLE_NBYTES = 48 * KiB
"""Of a table: pages that LMDB takes whatever it holds, and the ends of pages."""
_MAX_TRACE_NBYTES = 64 * MiB


class Disk:
    """What the cache holds while its directory is open."""

    def __init__(
        self,
        *,
        lock: threading.Condition,
        state: State,
        store: PartStore,
        resident: Residency,
        journal: Journal,
        lock_file: Lock,
        report: RecoveryReport,
        open_number: int,
        trace: NoTrace,
        forget: Callable[[], None],
        counters: Counters,
    ) -> None:
        self._lock = lock
        self._state = state
        self.store = store
        self.resident = resident
        self.journal = journal
        self.report = report
        self._lock_file = lock_file
        self._put_seq = open_number << 32
        self.trace = trace
        self._forget = forget
        self._counters = counters
        self._failed: list[FailedPlace] = []
        self._discarding = threading.Lock()
        self.on_failed_sync: Callable[[Parts], None] = lambda _parts: None

    @property
    def nbytes(self) -> int:
        """Bytes of everything in the directory: slabs, log and checkpoints."""
        log_nbytes = self.journal.log_nbytes + self.journal.checkpoint_nbytes
        return self.resident.arena.used_nbytes + log_nbytes + self.trace.nbytes

    def next_put_seq(self, count: int) -> int:
        """The first of `count` put numbers that were never used before (lock held)."""
        first = self._put_seq
        self._put_seq += count
        return first

    def sync_parts(self) -> bool:
        """Make payloads durable; what a failed slab cannot keep is dropped, and False returned until that is so.

        A part may be written before its slab fails and logged after it: it is looked for each time.
        """
        failed: Sequence[FailedPlace] = ()
        try:
            self.store.sync()
        except StoreFailed as error:
            failed = error.failed
            self._counters.add("slab_sync_errors", len(failed))
        with self._lock:
            for place in failed:
                self.resident.arena.retire(place.part_nbytes + SLOT_HEADER_NBYTES, place.chunks)
            self._failed += [place for place in failed if place not in self._failed]
            lost = [self._not_durable(place.part_nbytes, place.chunks) for place in self._failed]
            for parts in lost:
                self.on_failed_sync(parts[~self._state.table.leaving[parts.groups, parts.rows]])
        if failed or any(lost):
            return False
        self._discard_failed()
        return True

    def _discard_failed(self) -> None:
        """Unlink failed slabs that nothing lives in any more; their chunks serve again."""
        with self._discarding:
            for place in list(self._failed):
                stride, arena = place.part_nbytes + SLOT_HEADER_NBYTES, self.resident.arena
                with self._lock:
                    if arena.num_live_in(stride, place.chunks):
                        continue
                try:
                    self.store.discard(place)
                except OSError:
                    self._counters.add("slab_discard_errors")
                    continue
                with self._lock:
                    arena.reinstate(stride, place.chunks)
                    self._failed.remove(place)

    def _not_durable(self, part_nbytes: int, chunks: range) -> Parts:
        """Parts put into these chunks since the last good sync; the chunks take nothing new (lock held)."""
        table, arena = self._state.table, self.resident.arena
        stride = part_nbytes + SLOT_HEADER_NBYTES
        per_chunk = arena.slots_per_chunk(stride)
        rows = table.live_rows()
        slots = table.slot[Tier.DISK][:, rows]
        inside = (slots >= chunks.start * per_chunk) & (slots < chunks.stop * per_chunk)
        groups, at = np.nonzero(inside & (table.lsn[:, rows] > self.journal.durable_lsn))
        lost = Parts(rows[at], groups)
        return lost[self.resident.strides_of(lost) == stride]

    def erase(self, until: float, no_spills: AbstractContextManager[bool]) -> bool:
        """After a removal: blank every slot that may hold old bytes, and leave no log or checkpoint of them.

        Args:
            no_spills: a scope in which nothing is on its way to the disk, if it says so.

        Raises:
            OSError: what cannot be written any more, or not now, may hold some.
        """
        self._forget()
        self._discard_failed()
        if self.store.blank_drops_all:
            with no_spills as are_none:
                if not (are_none and self._drop_all(until)):
                    return False
                self.store.blank(0, [])
        else:
            self._empty_spare()
            for part_nbytes in self.store.num_chunks():
                self._blank_free(part_nbytes)
        if not (self.sync_parts() and self.journal.forget_past(until)):
            return False
        if self._failed:
            raise OSError("a slab that failed to sync, and takes no writes, has blocks of others in it")
        return True

    def _drop_all(self, until: float) -> bool:
        """Every part on DISK goes with the one payload file: logged first, so that no row names what is gone."""
        while True:
            ticket, num_moving = self._drop_still()
            if not ticket.wait(max(0.0, until - time.monotonic())):
                return False
            if not num_moving:
                return True
            with self._lock:
                self._lock.wait(min(0.05, max(0.001, until - time.monotonic())))

    def _drop_still(self) -> tuple[Ticket, int]:
        """Drop what is on DISK and does not move; how many blocks there move."""
        table, resident = self._state.table, self.resident
        with self._lock:
            rows = table.live_rows()
            rows = rows[(table.slot[Tier.DISK][:, rows] >= 0).any(axis=0)]
            moves = table.moving[rows] > 0
            rows = rows[~moves]
            groups, at = np.nonzero(table.slot[Tier.DISK][:, rows] >= 0)
            rows = rows[at]
            records = np.zeros(len(rows), dtype=DROP_DTYPE)
            records["digest"], records["group"], records["cause"] = table.digest[rows], groups, _REMOVED
            records["put_seq"] = table.put_seq[groups, rows]
            records["slot"] = table.slot[Tier.DISK, groups, rows]
            slots, strides = records["slot"].astype(np.int64), resident.strides_of(Parts(rows, groups))
            np.add.at(table.moving, rows, 1)

            def applied(_lsn: int, named: npt.NDArray[np.int32]) -> None:
                np.subtract.at(table.moving, rows, 1)
                resident.free_each(strides[named >= 0], slots[named >= 0])
                resident.left(named[named >= 0], evicted=False)
                table.free_if_empty(rows)

            def failed(_error: Exception) -> None:
                np.subtract.at(table.moving, rows, 1)

            return self.journal.submit(DROP, records, applied, failed), int(moves.sum())

    def _empty_spare(self) -> None:
        """Give back the space of chunks in which nothing lives; blank what the system does not take back."""
        arena = self.resident.arena
        with self._lock:
            spare = [*arena.retire_spare(0), *self._left_over()]
        try:
            self.resident.punch(spare)
            for stride, chunk in spare:
                if chunk in self.store.held_chunks(stride - SLOT_HEADER_NBYTES):
                    per_chunk = arena.slots_per_chunk(stride)
                    slots = np.arange(chunk * per_chunk, (chunk + 1) * per_chunk)
                    self.store.blank(stride - SLOT_HEADER_NBYTES, slots)
        finally:
            with self._lock:
                for stride, chunk in spare:
                    arena.reinstate(stride, [chunk])

    def _left_over(self) -> list[tuple[int, int]]:
        """`(stride, chunk)` of what the budget has back and the system has not; retired now (lock held)."""
        arena, left = self.resident.arena, []
        for part_nbytes in self.store.num_chunks():
            stride = part_nbytes + SLOT_HEADER_NBYTES
            for chunk in arena.not_taken(stride, sorted(self.store.held_chunks(part_nbytes))):
                arena.retire(stride, [chunk])
                left.append((stride, chunk))
        return left

    def _blank_free(self, part_nbytes: int) -> None:
        """Blank the free slots between live ones, holding them meanwhile so that none is used."""
        stride = part_nbytes + SLOT_HEADER_NBYTES
        with self._lock:
            slots = self.resident.arena.free_slots(stride)
            self.resident.arena.claim(stride, slots)
        try:
            self.store.blank(part_nbytes, slots)
        finally:
            with self._lock:
                self.resident.free(stride, slots)

    def close(self, until: float) -> None:
        """Write a checkpoint, stop the journal, close files, give the lock back."""
        try:
            self.journal.checkpoint(until)
            self.journal.close(until)
            self.store.close()
        finally:
            self.trace.close()
            self._lock_file.close()


def open_disk(
    fs: Fs,
    path: str,
    config: Config,
    sizes: Sizes,
    state: State,
    lock: threading.Condition,
    residents: dict[Tier, Residency],
    counters: Counters,
    stride_on_disk: Callable[[int, int], int],
) -> Disk:
    """Lock and recover the store at `path`, and start its journal. Adds the DISK tier to `residents`.

    Raises:
        BadConfig, StoreUnusable: and nothing on disk was changed.
    """
    trace_nbytes = _trace_nbytes(fs, path, config, sizes)
    segment_nbytes, log_max_nbytes, parts_nbytes, catalog_nbytes = shares(sizes, trace_nbytes)
    first_look: list[Survey] = []
    lock_file = claim(fs, path, first_look.append)
    try:
        recovered = _recover(fs, path, config, sizes, state, counters)
        state.catalog.max_nbytes = catalog_nbytes
        _count_read_errors(first_look[0], recovered, counters)
        # Also above what salvaged slots hold, which no segment header may tell any more.
        open_number = max(recovered.open_number, (state.table.last_put_seq() >> 32) + 1)
        store = _make_store(fs, path, config, sizes, counters)
        resident, num_dropped = _resident(config, parts_nbytes, state, store, counters, stride_on_disk)
        residents[Tier.DISK] = resident
        writer = LogWriter(
            fs, f"{path}/{WAL}", segment_nbytes=segment_nbytes, next_number=recovered.next_segment,
            position=recovered.position,
        )  # fmt: skip
        disk_of: list[Disk] = []
        journal = Journal(
            fs=fs, store_dir=path, wal_dir=f"{path}/{WAL}", writer=writer, state=state, lock=lock,
            sync_parts=lambda: disk_of[0].sync_parts(),
            interval_s=config.commit_interval_ms / 1e3 if config.durability == "group" else None,
            open_number=open_number, next_lsn=recovered.next_lsn, durable_lsn=recovered.durable_lsn,
            segments=recovered.segments, checkpoints=[recovered.checkpoint],
            log_keep_nbytes=log_max_nbytes - 2 * segment_nbytes, log_max_nbytes=log_max_nbytes, counters=counters,
        )  # fmt: skip
        trace = _trace(fs, path, config, state, lock, trace_nbytes, lambda: journal.applied_lsn, counters)
        resident.trace = trace
        disk = Disk(
            lock=lock, state=state, store=store, resident=resident, journal=journal, lock_file=lock_file,
            report=_report(recovered, state, num_dropped), open_number=open_number,
            trace=trace, forget=lambda: _forget(fs, path, trace), counters=counters,
        )  # fmt: skip
        disk_of.append(disk)
        journal.start(must_checkpoint=recovered.must_checkpoint)
        trace.start()
        _return_freed_memory()
        return disk
    except OSError as error:
        lock_file.close()
        raise PathUnusable(f"{path} cannot be used as a store: {error}") from error
    except TieredKVError:
        lock_file.close()
        raise


def _refuse_other_kind(fs: Fs, path: str, config: Config) -> None:
    """Parts of the other kind of disk would be beyond every budget and every removal, and none of them served.

    Raises:
        BadConfig: the parts that are there are of that kind.
    """
    slabs, lmdb = payload_names(fs, path)
    mine, others, other = (lmdb, slabs, "slab") if config.disk == "lmdb" else (slabs, lmdb, "lmdb")
    if others and not mine:
        raise BadConfig(
            f"disk={config.disk!r}: the store at {path} keeps its parts in {SLABS}/{others[0]}; open it with"
            f" disk={other!r}, or choose another directory"
        )
    for name in others:
        fs.unlink(f"{path}/{SLABS}/{name}")


def _recover(fs: Fs, path: str, config: Config, sizes: Sizes, state: State, counters: Counters) -> Recovered:
    _refuse_other_kind(fs, path, config)
    recovered = recover(
        fs, path, state, strict=config.strict,
        salvage=lambda: _salvage(fs, path, config, sizes, state, counters),
    )  # fmt: skip
    state.settle()
    return recovered


def _count_read_errors(first_look: Survey, recovered: Recovered, counters: Counters) -> None:
    """Also where nothing was lost by it, for the segment was not needed, or could be read the second time."""
    looks = (*first_look.segments, *recovered.segments)
    num_damaged = len({segment.number for segment in looks if segment.head is Head.DAMAGED})
    if num_errors := num_damaged + recovered.num_read_errors:
        counters.add("log_read_errors", num_errors)


def _resident(
    config: Config,
    parts_nbytes: int,
    state: State,
    store: PartStore,
    counters: Counters,
    stride_on_disk: Callable[[int, int], int],
) -> tuple[Residency, int]:
    """The DISK tier's residents as recovered, and how many parts could not be kept."""
    # A value in LMDB takes a page more than a slot, three for the two of the smallest part, and a write transaction
    # needs some to spare.
    arena_nbytes = parts_nbytes * 5 // 8 if config.disk == "lmdb" else parts_nbytes
    arena = Arena(arena_nbytes, chunk_nbytes=_CHUNK_NBYTES, shared=False)
    num_dropped = _claim_slots(state, arena, stride_on_disk)
    policy = make_policy(config.policy, max(arena_nbytes, arena.live_nbytes), state.table.keys_of)
    resident = Residency(Tier.DISK, state.table, arena, policy, stride_on_disk, _puncher(store, counters))
    resident.enter_all()
    _punch_unused(store, resident)
    return resident, num_dropped


def _return_freed_memory() -> None:
    """Recovery's temporaries are freed, but glibc keeps them for itself unless told."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _trace_nbytes(fs: Fs, path: str, config: Config, sizes: Sizes) -> int:
    """What is set aside for the trace: its bound while it is written, else what an earlier opening left of one."""
    if config.trace:
        return min(_MAX_TRACE_NBYTES, sizes.disk_nbytes // 32)
    return traces_nbytes(fs, path)


def _trace(
    fs: Fs,
    path: str,
    config: Config,
    state: State,
    lock: threading.Condition,
    max_nbytes: int,
    lsn: Callable[[], int],
    counters: Counters,
) -> NoTrace:
    if not config.trace:
        return NO_TRACE
    return Trace(fs, path, state.table, lock=lock, max_nbytes=max_nbytes, lsn=lsn, counters=counters)


def _forget(fs: Fs, path: str, trace: NoTrace) -> None:
    """A removal reaches what tells of earlier times too: traces, and the copies that mending a log left."""
    if trace is NO_TRACE:
        unlink_traces(fs, f"{path}/{TRACE}")
    trace.forget()
    unlink_broken(fs, path)


class Shares(NamedTuple):
    """Bytes of a segment, of the whole log, of parts, and of the namespaces and sessions in each table."""

    segment_nbytes: int
    log_max_nbytes: int
    parts_nbytes: int
    catalog_nbytes: int


def shares(sizes: Sizes, trace_nbytes: int = 0) -> Shares:
    """How the disk budget is shared.

    Two segments, the log that is kept and three tables are set aside at once, so that neither a log at its
    cap nor a checkpoint being written ever needs room that parts have taken. Two segments more are for a log
    at its cap: the next checkpoint is named by a new one, before the second newest, which may have been taken
    in the middle of a segment, lets go of its own.

    Raises:
        BadConfig: nothing is left for parts.
    """
    budget = sizes.disk_nbytes
    segment = align_up(min(_MAX_SEGMENT_NBYTES, max(_MIN_SEGMENT_NBYTES, budget // 64)))
    log_max = min(sizes.log_keep_nbytes, budget // 8) + 2 * segment
    catalog = min(budget // 64, max(budget // 512, _CATALOG_NBYTES))
    tables = budget // 24 + 3 * (_TABLE_NBYTES + catalog)
    parts = budget - log_max - 2 * segment - tables - trace_nbytes
    if parts < _CHUNK_NBYTES:
        raise BadConfig(
            f"disk_nbytes={format_nbytes(budget)} leaves too little for parts beside the log: give 8 MiB or more"
        )
    return Shares(segment, log_max, parts, catalog)


def _salvage(fs: Fs, path: str, config: Config, sizes: Sizes, state: State, counters: Counters) -> int:
    store = _make_store(fs, path, config, sizes, counters)
    try:
        return salvage(store, state)
    finally:
        store.close()


def _make_store(fs: Fs, path: str, config: Config, sizes: Sizes, counters: Counters) -> PartStore:
    if config.disk == "lmdb":
        from .tier.lmdb_store import LmdbStore

        map_nbytes = shares(sizes, _trace_nbytes(fs, path, config, sizes)).parts_nbytes
        return LmdbStore(fs, f"{path}/{SLABS}", map_nbytes=map_nbytes)
    return SlabStore(fs, f"{path}/{SLABS}", disk_io=config.disk_io, counters=counters)


def _punch_unused(store: PartStore, resident: Residency) -> None:
    """Give back the file space of chunks in which nothing lives: leftovers of parts that were dropped."""
    for part_nbytes in store.num_chunks():
        stride = part_nbytes + SLOT_HEADER_NBYTES
        chunks = sorted(store.held_chunks(part_nbytes))
        unused = [chunk for chunk in chunks if not resident.arena.num_live_in(stride, [chunk])]
        resident.punch([(stride, chunk) for chunk in unused])


def _puncher(store: PartStore, counters: Counters) -> Callable[[Sequence[tuple[int, int]]], None]:
    def punch(chunks: Sequence[tuple[int, int]]) -> None:
        for stride, chunk in chunks:
            try:
                store.release(stride - SLOT_HEADER_NBYTES, [chunk])
            except OSError:
                counters.add("punch_errors")

    return punch


def _claim_slots(state: State, arena: Arena, stride_on_disk: Callable[[int, int], int]) -> int:
    """Tell the arena which slots live. Of rows that name one slot the newest put is right; returns the others."""
    table, dropped = state.table, 0
    by_stride: dict[int, list[tuple[npt.NDArray[np.int32], int]]] = {}
    rows = table.live_rows()
    for namespace in np.unique(table.namespace[rows]).tolist():
        mine = rows[table.namespace[rows] == namespace]
        if namespace not in state.catalog.namespaces:
            table.slot[Tier.DISK][:, mine] = -1
            dropped += len(mine)
            continue
        for group in range(len(state.catalog.namespaces[namespace].layout.groups)):
            here = mine[table.slot[Tier.DISK, group, mine] >= 0]
            if len(here):
                by_stride.setdefault(stride_on_disk(int(here[0]), group), []).append((here, group))
    for stride, parts in by_stride.items():
        dropped += _claim_stride(state, arena, stride, parts)
    table.free_if_empty(rows)
    return dropped


def _claim_stride(
    state: State, arena: Arena, stride: int, parts: list[tuple[npt.NDArray[np.int32], int]]
) -> int:
    table = state.table
    rows = np.concatenate([here for here, _ in parts])
    groups = np.concatenate([np.full(len(here), group) for here, group in parts])
    slots: Slots = table.slot[Tier.DISK, groups, rows].astype(np.int64)
    newest = np.lexsort((table.put_seq[groups, rows], slots))
    last = np.append(slots[newest][1:] != slots[newest][:-1], True)
    keep, lose = newest[last], newest[~last]
    table.slot[Tier.DISK, groups[lose], rows[lose]] = -1
    try:
        arena.claim(stride, slots[keep])
    except CorruptFormat:
        table.slot[Tier.DISK, groups[keep], rows[keep]] = -1
        return len(rows)
    return len(lose)


def _report(recovered: Recovered, state: State, num_dropped: int) -> RecoveryReport:
    table = state.table
    rows = table.live_rows()
    return replace(
        recovered.report,
        num_blocks=len(rows),
        num_parts=int((table.slot[Tier.DISK][:, rows] >= 0).sum()),
        num_sessions=len(state.catalog.sessions),
        num_dropped=num_dropped,
    )
