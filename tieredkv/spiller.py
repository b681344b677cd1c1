"""Copies parts to DISK and takes them off again: payload first, then the record, then the table.

A part that is being written is `moving` until its record is applied, so its source stays where it is. A
slot that a drop gives up is free only after that drop is applied.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from .block.hashing import Digests
from .block.layout import BlockLayout
from .outcomes import Counters, Tier
from .pace import Pace
from .plan import Flags, Parts, heads_first, heads_in_memory
from .residency import Residency, Slots
from .table.block_table import BlockTable
from .table.journal import Journal, Ticket
from .table.key_index import Rows
from .table.trace import Event
from .tier.base import PartStore
from .tier.slab_format import SLOT_HEADER_NBYTES, new_headers
from .tier.tensor import TensorTier
from .units import MiB
from .wal.records import DROP, DROP_DTYPE, PUT, PUT_DTYPE

_BATCH_NBYTES = 32 * MiB
"""Small enough that while one batch is looked for, logged or ends, others keep the disk busy; large enough that the
large parts of two keep every thread of the store at work."""

_MOST_SOON = 256
"""For so many parts at least, if they wait, room is made at once: to choose and log who leaves is rare then."""

_QUEUE_NBYTES = 256 * MiB
_NUM_WORKERS = 3
_RETRY_S = 1.0
_NO_SLOTS: Slots = np.empty(0, np.int64)


class Cause(IntEnum):
    """Why a part left the disk."""

    EVICTED = 1
    RELEASED = 2
    DAMAGED = 3
    REMOVED = 4
    FAILED_SYNC = 5


class Spilling:
    """A request to spill. `wait` returns True once each part is committed, or no longer wanted.

    It returns False at the time-out, and when a part could not be written or logged.
    """

    def __init__(self) -> None:
        self._done = threading.Event()
        self._num_open = 1
        self._failed = False
        self._lock = threading.Lock()

    def wait(self, timeout_s: float | None = None) -> bool:
        at_most = None if timeout_s is None else min(timeout_s, threading.TIMEOUT_MAX)
        return self._done.wait(at_most) and not self._failed

    def began(self, count: int = 1) -> None:
        with self._lock:
            self._num_open += count

    def ended(self, count: int = 1, *, failed: bool = False) -> None:
        with self._lock:
            self._failed |= failed
            self._num_open -= count
            if self._num_open == 0:
                self._done.set()


@dataclass(frozen=True)
class _Wanted:
    """Parts waiting to be spilled. Rows may change hands meanwhile; digests may not."""

    digests: Digests
    groups: npt.NDArray[np.int64]
    num_by_stride: Counter[int]
    spilling: Spilling


class Reserve(Protocol):
    """Room on the disk: `Room.reserve` of that tier."""

    def __call__(
        self, part_nbytes: int, count: int, until: float, *, num_soon: Callable[[], int]
    ) -> Slots: ...


def _no_room(part_nbytes: int, count: int, until: float, *, num_soon: Callable[[], int]) -> Slots:
    return _NO_SLOTS


class Spiller:
    """The only writer of the disk tier.

    Args:
        lock: the metadata lock; no I/O happens under it.
        layout_of: a row's layout.
        namespace_digest: a namespace number's digest.
    """

    def __init__(
        self,
        *,
        lock: threading.Condition,
        table: BlockTable,
        store: PartStore,
        resident: Residency,
        memories: dict[Tier, TensorTier],
        journal: Journal,
        layout_of: Callable[[int], BlockLayout],
        namespace_digest: Callable[[int], bytes],
        next_put_seq: Callable[[int], int],
        pace: Pace,
        counters: Counters,
        deadline_s: float,
    ) -> None:
        self._lock = lock
        self._table = table
        self._store = store
        self._resident = resident
        self._memories = memories
        self._journal = journal
        self._layout_of = layout_of
        self._namespace_digest = namespace_digest
        self._next_put_seq = next_put_seq
        self._pace = pace
        self._counters = counters
        self._deadline_s = deadline_s
        self.reserve: Reserve = _no_room
        self.on_moved: Callable[[], None] = lambda: None
        self.trouble: str | None = None
        self.troubled_at = 0.0  # monotonic, when trouble began
        self._off_until = 0.0
        self._in_flight: dict[tuple[int, int], list[Spilling]] = {}
        self._queue: deque[_Wanted] = deque()
        self._num_queued: Counter[int] = Counter()  # parts by stride
        self._num_busy = 0
        self._closing = False
        self._wake = threading.Condition()
        # Held until a batch has its room: no tail has some before its head was given up, and comes along with it.
        self._in_order = threading.Lock()
        self._workers = [
            threading.Thread(target=self._work, name=f"tieredkv-spill-{n}", daemon=True)
            for n in range(_NUM_WORKERS)
        ]
        for worker in self._workers:
            worker.start()

    # ---- what the mover says -------------------------------------------------------------------

    @property
    def is_off(self) -> bool:
        """Bypassed for a while after a failure; tried again by itself."""
        return time.monotonic() < self._off_until

    @property
    def is_spilling(self) -> bool:
        """Whether any part is on its way to the disk (lock held)."""
        return bool(self._in_flight)

    def rows_on_their_way(self) -> Rows:
        """Blocks with a part that is on its way to the disk (lock held)."""
        return np.array([*{row for row, _ in self._in_flight}], dtype=np.int32)

    def enqueue(self, rows: Rows, groups: npt.NDArray[np.int64], *, all_of_them: bool = False) -> Spilling:
        """Spill these parts in the background (lock held). Beyond the queue's bound they are let be.

        `all_of_them` is for a flush, which asks for what was let be, and waits.
        """
        spilling, pieces = self._pieces(Parts(rows, groups))
        nbytes = sum(stride * n for piece in pieces for stride, n in piece.num_by_stride.items())
        with self._wake:
            is_full = self._queue_nbytes + nbytes > _QUEUE_NBYTES and self._queue and not all_of_them
            if self._closing or is_full:
                self._counters.add("spill_queue_full_parts", len(rows))
                spilling.ended(len(pieces), failed=True)
                return spilling
            self._queue.extend(pieces)
            self._count_queued(pieces)
            self._wake.notify_all()
        return spilling

    def _count_queued(self, pieces: Sequence[_Wanted]) -> None:
        for piece in pieces:
            self._num_queued.update(piece.num_by_stride)

    @property
    def _queue_nbytes(self) -> int:
        return sum(stride * count for stride, count in self._num_queued.items())

    def _pieces(self, parts: Parts) -> tuple[Spilling, list[_Wanted]]:
        """One request in batches, so that several workers serve it at once (lock held)."""
        strides = self._resident.strides_of(parts)
        cuts = np.flatnonzero(np.diff(np.cumsum(strides) // _BATCH_NBYTES)) + 1
        edges = [0, *cuts.tolist(), len(parts)]
        spilling = Spilling()
        spilling.began(len(edges) - 2)
        return spilling, [
            _Wanted(
                self._table.digest[parts.rows[at:end]],
                parts.groups[at:end],
                Counter(strides[at:end].tolist()),
                spilling,
            )
            for at, end in pairwise(edges)
        ]

    def spill_now(self, parts: Parts, until: float) -> None:
        """Spill these parts before all others, and wait at most to `until` for them to be committed."""
        if self.is_off:
            return
        with self._lock:
            spilling, pieces = self._pieces(parts)
        with self._wake:
            if self._closing:
                return
            self._queue.extendleft(reversed(pieces))
            self._count_queued(pieces)
            self._wake.notify_all()
        with self._pace.hurry():
            spilling.wait(max(0.0, until - time.monotonic()))
        # A part may have been on its way already, in another request.
        with self._lock:
            while any(part in self._in_flight for part in parts) and time.monotonic() < until:
                self._lock.wait(min(0.05, max(0.001, until - time.monotonic())))

    def remember_tokens(self, parts: Parts) -> None:
        """Blocks that stay in memory when these parts leave the disk take their token ids back from the headers."""
        table, known = self._table, self._table.tokens
        with self._lock:
            stays = (table.slot[: Tier.DISK, :, parts.rows] >= 0).any(axis=(0, 1))
            lacks = np.array([row not in known for row in parts.rows.tolist()], dtype=np.bool_)
            parts = parts[stays & lacks]
            parts = parts[np.unique(parts.rows, return_index=True)[1]]
            slots = table.slot[Tier.DISK, parts.groups, parts.rows].astype(np.int64)
            sizes = self._resident.strides_of(parts) - SLOT_HEADER_NBYTES
        for size in np.unique(sizes).tolist():
            mine = sizes == size
            found = self._store.read_headers(size, slots[mine])
            with self._lock:
                sound = found.sound & (found.headers["digest"] == table.digest[parts.rows[mine]]).all(axis=1)
                for row, header in zip(parts.rows[mine][sound].tolist(), found.headers[sound], strict=True):
                    known[row] = header["tokens"][: header["num_tokens"]].tobytes()

    def drop(self, parts: Parts, cause: Cause) -> Ticket:
        """Log that these parts leave the disk (lock held). Their slots are free once that is applied."""
        table, rows, groups = self._table, parts.rows, parts.groups
        records = np.zeros(len(parts), dtype=DROP_DTYPE)
        records["digest"] = table.digest[rows]
        records["put_seq"] = table.put_seq[groups, rows]
        records["slot"] = slots = table.slot[Tier.DISK, groups, rows].astype(np.int64)
        records["group"], records["cause"] = groups, cause
        strides = self._resident.strides_of(parts)
        np.add.at(table.moving, rows, 1)
        table.leaving[groups, rows] = True

        def applied(_lsn: int, named: Rows) -> None:
            np.subtract.at(table.moving, rows, 1)
            gone, evicted = named >= 0, cause == Cause.EVICTED
            self._resident.free_each(strides[gone], slots[gone])
            self._resident.left(rows[gone], evicted=evicted)
            self._resident.trace.note(
                Event.EVICT if evicted else Event.LEAVE, Tier.DISK, rows[gone], groups[gone]
            )
            table.free_if_empty(rows)

        def failed(error: Exception) -> None:
            np.subtract.at(table.moving, rows, 1)
            table.leaving[groups, rows] = False
            self._counters.add("drop_not_logged_parts", len(rows))
            self._failed(error)

        return self._journal.submit(DROP, records, applied, failed)

    def drain(self, until: float) -> bool:
        """Wait until the queue is empty and nothing is being written; False at the deadline."""
        with self._pace.hurry(), self._wake:
            while self._queue or self._num_busy:
                left = until - time.monotonic()
                if left <= 0 or self.is_off:
                    return False
                self._wake.wait(min(left, 0.05))
        with self._lock:
            while self._in_flight and time.monotonic() < until:
                self._lock.wait(min(0.05, max(0.001, until - time.monotonic())))
            return not self._in_flight

    @contextlib.contextmanager
    def paused(self, until: float) -> Iterator[bool]:
        """Nothing is on its way to the disk in this scope; False where something still is at `until`."""
        with self._in_order:  # no batch begins
            with self._lock:
                while self._in_flight and time.monotonic() < until:
                    self._lock.wait(min(0.05, max(0.001, until - time.monotonic())))
                is_idle = not self._in_flight
            yield is_idle

    def close(self, until: float) -> None:
        """Stop the workers; parts still queued are not spilled."""
        with self._wake:
            self._closing = True
            left = [*self._queue]
            self._queue.clear()
            self._num_queued.clear()
            self._wake.notify_all()
        for piece in left:
            piece.spilling.ended(failed=True)
        for worker in self._workers:
            worker.join(max(0.0, until - time.monotonic()))

    # ---- the workers ---------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            with self._wake:
                while not self._queue and not self._closing:
                    self._wake.wait()
                if self._closing:
                    return
                wanted = self._queue.popleft()
                self._num_queued.subtract(wanted.num_by_stride)
                self._num_busy += 1
            done, began = False, time.monotonic()
            try:
                done = self._spill(wanted)
            finally:
                wanted.spilling.ended(failed=not done)
                with self._wake:
                    self._num_busy -= 1
                    self._wake.notify_all()
            self._pace.rest(time.monotonic() - began)

    def _spill(self, wanted: _Wanted) -> bool:
        """False if it was not even tried."""
        if self.is_off:
            self._counters.add("spill_bypassed_parts", len(wanted.groups))
            return False
        with self._in_order:
            batches = [(nbytes, *self._with_room(nbytes, parts)) for nbytes, parts in self._take(wanted)]
        for part_nbytes, parts, slots in batches:
            if parts:
                self._write(part_nbytes, parts.rows, parts.groups, slots)
        return True

    def _take(self, wanted: _Wanted) -> list[tuple[int, Parts]]:
        """Mark what is still to be spilled as moving, by part size, and what of the blocks above is in memory alone.

        What is on its way already is waited for.
        """
        table, spilling = self._table, wanted.spilling
        with self._lock:
            rows, needed = self._still_wanted(wanted.digests, wanted.groups)
            parts = Parts(rows, wanted.groups)[needed]
            heads = heads_in_memory(table, self._layout_of, parts)
            parts = heads_first(table, Parts.joined([heads, parts]))  # where room ends, tails go without
            spilling.began(len(parts))
            fresh = np.ones(len(parts), dtype=np.bool_)
            for number, part in enumerate(parts):
                waiting = self._in_flight.setdefault(part, [])
                fresh[number] = not waiting
                waiting.append(spilling)
            parts = parts[fresh]
            np.add.at(table.moving, parts.rows, 1)
            sizes = self._resident.strides_of(parts) - SLOT_HEADER_NBYTES
        return [(size, parts[sizes == size]) for size in np.unique(sizes).tolist()]

    def _with_room(self, part_nbytes: int, parts: Parts) -> tuple[Parts, Slots]:
        """The parts that there is room for, and where; the others are given up."""
        stride, slots = part_nbytes + SLOT_HEADER_NBYTES, _NO_SLOTS
        with self._wake:
            num_queued = self._num_queued[stride]
        try:
            self._find_space(part_nbytes, len(parts) + num_queued)
            until = time.monotonic() + self._deadline_s
            slots = self.reserve(part_nbytes, len(parts), until, num_soon=partial(self._num_soon, stride))
        except Exception as error:  # the disk would not say what is in the way, or there is no memory
            self._failed(error)
        if len(slots) < len(parts):
            self._counters.add("spill_no_space_parts", len(parts) - len(slots))
            self._give_up(parts[len(slots) :])
        return parts[: len(slots)], slots

    def _write(self, part_nbytes: int, rows: Rows, groups: npt.NDArray[np.int64], slots: Slots) -> None:
        try:
            headers, payloads = self._gather(part_nbytes, rows, groups)
            checksums = self._store.write(part_nbytes, slots, headers, payloads)
        except Exception as error:  # of the disk, or no memory: nobody may wait for parts that nobody moves
            self._failed(error)
            with self._lock:
                self._resident.free(part_nbytes + SLOT_HEADER_NBYTES, slots)
            self._give_up(Parts(rows, groups))
            return
        self.trouble = None
        self._log_put(part_nbytes, rows, groups, slots, headers, checksums)

    def _num_soon(self, stride: int) -> int:
        """How many parts of this size wait in the queue, up to about `_MOST_SOON`, that are not on DISK by then.

        What several requests ask for is counted once, or more would have to leave than comes.
        """
        with self._wake:
            ends = accumulate(len(piece.groups) for piece in self._queue)
            count = next((n for n, end in enumerate(ends, 1) if end >= _MOST_SOON), len(self._queue))
            pieces = [self._queue[n] for n in range(count)]
        if not pieces:
            return 0
        groups = np.concatenate([piece.groups for piece in pieces])
        with self._lock:
            rows, needed = self._still_wanted(np.concatenate([piece.digests for piece in pieces]), groups)
            needed &= self._table.moving[rows] == 0
            parts = Parts(rows, groups)[needed]
            parts = parts[self._resident.strides_of(parts) == stride]
        return len(set(parts))

    def _still_wanted(self, digests: Digests, groups: npt.NDArray[np.int64]) -> tuple[Rows, Flags]:
        """The rows of these parts, and which of them are in memory and not on DISK (lock held)."""
        table = self._table
        rows, at = table.find(digests), np.arange(len(groups))
        in_memory = table.slot[: Tier.DISK, groups, rows].max(axis=0) >= 0
        return rows, (rows >= 0) & in_memory & ~table.on_disk(rows)[groups, at]

    def _find_space(self, part_nbytes: int, count: int) -> None:
        """Disk space for so many parts at once, those queued behind the next included, as far as the budget goes.

        For the system to find it, every write under way in that file must end: chunk by chunk, a long spill would
        stand still again and again.
        """
        arena, stride = self._resident.arena, part_nbytes + SLOT_HEADER_NBYTES
        with self._lock:
            chunks = arena.take_chunks(stride, count)
            arena.keep(stride, chunks)  # given back meanwhile, they would have their space beside the budget
        if chunks:
            try:
                self._store.reserve(part_nbytes, chunks)
            except OSError:  # the write asks again, and may get it
                self._counters.add("disk_space_errors")
            finally:
                with self._lock:
                    arena.unkeep(stride, chunks)

    def _gather(
        self, part_nbytes: int, rows: Rows, groups: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[Any], list[memoryview]]:
        """Headers and payloads of parts that are moving, so their memory slots stay."""
        headers = new_headers(len(rows))
        with self._lock:
            table = self._table
            parents = table.parent[rows]
            headers["digest"] = table.digest[rows]
            headers["parent"] = np.where((parents >= 0)[:, None], table.digest[parents], 0)
            headers["group"] = groups
            first = self._next_put_seq(len(rows))
            headers["put_seq"] = np.arange(first, first + len(rows), dtype=np.uint64)
            headers["payload_nbytes"] = part_nbytes
            numbers = table.namespace[rows]
            for number in np.unique(numbers).tolist():
                digest = np.frombuffer(self._namespace_digest(number), dtype=np.uint8)
                headers["namespace"][numbers == number] = digest
            host, device = table.slot[Tier.HOST, groups, rows], table.slot[Tier.DEVICE, groups, rows]
            ids = [table.tokens.get(row, b"") for row in rows.tolist()]
        counts = np.array([len(body) // 4 for body in ids])
        headers["num_tokens"] = counts
        for count in set(counts.tolist()):
            mine = np.flatnonzero(counts == count)
            joined = b"".join([ids[number] for number in mine.tolist()])
            headers["tokens"][mine, :count] = np.frombuffer(joined, dtype="<i4").reshape(len(mine), count)
        from_host = self._readable(part_nbytes, Tier.HOST, host[host >= 0])
        from_device = self._readable(part_nbytes, Tier.DEVICE, device[host < 0])
        return headers, [next(from_host if there else from_device) for there in (host >= 0).tolist()]

    def _readable(self, part_nbytes: int, tier: Tier, slots: Slots) -> Iterator[memoryview]:
        """The bytes of each slot."""
        memory = self._memories.get(tier)
        if memory is None or not len(slots):
            return iter(())
        if memory.host_addressable:
            return iter(memory.memory(part_nbytes, slots.astype(np.int64)))
        return (memory.parts(part_nbytes, slot, 1).cpu().numpy().reshape(-1).data for slot in slots.tolist())

    def _log_put(
        self,
        part_nbytes: int,
        rows: Rows,
        groups: npt.NDArray[np.int64],
        slots: Slots,
        headers: npt.NDArray[Any],
        checksums: npt.NDArray[np.uint64],
    ) -> None:
        records = np.zeros(len(rows), dtype=PUT_DTYPE)
        for name in ("digest", "parent", "group", "put_seq", "num_tokens"):
            records[name] = headers[name]
        records["slot"], records["checksum"] = slots, checksums
        with self._lock:
            records["namespace"] = self._table.namespace[rows]
        stride = part_nbytes + SLOT_HEADER_NBYTES

        def applied(_lsn: int, named: Rows) -> None:
            if (named >= 0).all():
                self._resident.enter(named)
            else:
                self._resident.enter(named[named >= 0])
                self._resident.free(stride, slots[named < 0])
            self._resident.trace.note(Event.SPILL, Tier.DISK, named[named >= 0], groups[named >= 0])
            self._forget_tokens(rows)
            self._moved(rows, groups, failed=False)

        def failed(error: Exception) -> None:
            self._failed(error)
            self._resident.free(stride, slots)
            self._moved(rows, groups, failed=True)

        self._journal.submit(PUT, records, applied, failed)

    def _forget_tokens(self, rows: Rows) -> None:
        """Blocks all of whose parts are on DISK have their token ids in the slot headers (lock held)."""
        slots = self._table.slot[:, :, rows] >= 0
        whole = ~(slots.any(axis=0) & ~slots[Tier.DISK]).any(axis=0)
        for row in rows[whole].tolist():
            self._table.tokens.pop(row, None)

    # ---- ends ----------------------------------------------------------------------------------

    def _give_up(self, parts: Parts) -> None:
        with self._lock:
            self._moved(parts.rows, parts.groups, failed=True)
            self._lock.notify_all()

    def _moved(self, rows: Rows, groups: npt.NDArray[np.int64], *, failed: bool) -> None:
        np.subtract.at(self._table.moving, rows, 1)
        waiting = Counter(spilling for part in Parts(rows, groups) for spilling in self._in_flight.pop(part))
        for spilling, count in waiting.items():
            spilling.ended(count, failed=failed)
        self.on_moved()

    def _failed(self, error: Exception) -> None:
        if not isinstance(error, (OSError, MemoryError)):  # a fault of our own is shown as one
            where = threading.current_thread()
            threading.excepthook(threading.ExceptHookArgs((type(error), error, error.__traceback__, where)))
        self._counters.add("disk_write_errors")
        if self.trouble is None:
            self.troubled_at = time.monotonic()
        self.trouble = str(error)
        self._off_until = time.monotonic() + _RETRY_S
