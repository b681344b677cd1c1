"""Log, then apply: every durable change goes through here, and nothing else changes the durable state.

`submit` queues records. One committer thread takes the queue, appends a frame without any lock held, then
applies the records in LSN order under the metadata lock. One sync thread syncs payloads, then the log, then
moves `durable_lsn`: each interval at `"group"`, at the end of a segment, and for whoever waits. Those whom one
round woke share the next: it begins once they are all back, or after as long as a sync lasts. The sync thread
also writes checkpoints. A failed sync of the log is final for that segment: a new one repeats what was not
durable; after three failures in a row, or a fault of our own in either thread, the journal takes no more records.
"""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from ..errors import SessionError
from ..outcomes import Counters
from ..system import Fs
from ..wal.format import CheckpointRef, SegmentHeader, frame_nbytes
from ..wal.reader import Head, SegmentInfo
from ..wal.records import PUT, Records, Run, merge_runs
from ..wal.writer import LogWriter
from .checkpoint import Arrays, prune_checkpoints, write_checkpoint
from .key_index import Rows
from .state import State

_MAX_FAILURES = 3
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_BYTES_PER_ROW = 160
_CHECKPOINT_S = 30.0
_MAX_GATHER_S = 0.01
_RETRY_S = 0.02
_GIVE_UP_S = 1.0
"""Whoever waits for a sync is told that it fails once that long no round has succeeded. The next may."""
_PAUSE_S = 0.0005
_LOOK_S = 0.5
"""Both threads look by themselves that often: a caller's Ctrl-C in the middle of a `notify` can lose it."""

Applied = Callable[[int, Rows], None]
Failed = Callable[[Exception], None]


class _Gate:
    """Opened once, for one thread. Those that one round wakes do not queue for a lock, as with an Event."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def wait(self, timeout_s: float | None) -> None:
        self._lock.acquire(
            timeout=-1 if timeout_s is None else min(max(0.0, timeout_s), threading.TIMEOUT_MAX)
        )

    def open(self) -> None:
        self._lock.release()


class Ticket:
    """A submitted change. `wait` returns True once it is applied, which is to say committed."""

    __slots__ = ("_gates", "_is_done", "error", "lsn")

    def __init__(self) -> None:
        self._gates: list[_Gate] = []
        self._is_done = False
        self.error: Exception | None = None
        self.lsn = 0

    @property
    def is_in_doubt(self) -> bool:
        """It may still be applied, or fail."""
        return not self._is_done

    def wait(self, timeout_s: float | None) -> bool:
        if not self._is_done:
            gate = _Gate()
            self._gates.append(gate)
            if not self._is_done:  # asked again behind the append: `finish` looks for gates after it said so
                gate.wait(timeout_s)
        return self._is_done and self.error is None

    def finish(self, lsn: int, error: Exception | None = None) -> None:
        self.lsn, self.error = lsn, error
        self._is_done = True
        while self._gates:
            self._gates.pop().open()


class InDoubt(SessionError):
    """The log did not take a record in time, and may still."""

    def __init__(self, why: str, ticket: Ticket) -> None:
        super().__init__(why)
        self.ticket = ticket


DONE = Ticket()
DONE.finish(0)


def _ignore_applied(_lsn: int, _rows: Rows) -> None:
    pass


def _ignore_failed(_error: Exception) -> None:
    pass


@dataclass(frozen=True)
class _Segment:
    """A log file that is there: its number, bytes and first LSN."""

    number: int
    nbytes: int
    first_lsn: int

    @classmethod
    def of(cls, header: SegmentHeader) -> _Segment:
        return cls(header.number, header.segment_nbytes, header.first_lsn)


@dataclass
class _Entry:
    kind: int
    records: Records
    applied: Applied
    failed: Failed
    ticket: Ticket = field(default_factory=Ticket)

    @property
    def run(self) -> Run:
        return Run(self.kind, self.records)


class Journal:
    """The one writer of the log and of checkpoints, over a state that recovery has brought up to date.

    Args:
        lock: the metadata lock; `applied` and `failed` callbacks run with it held.
        sync_parts: make every payload written so far durable; False if some could not be and was given up,
            so that only a later round, which covers the drops, may move `durable_lsn`.
        interval_s: between syncs at `"group"`; None at the other levels.
        durable_lsn: the highest LSN known synced, payloads included.
        segments: the segments that are there, oldest first.
        checkpoints: the checkpoints that are there, newest first.
        log_keep_nbytes: log kept beyond what recovery needs.
        log_max_nbytes: log at which a checkpoint is forced.
    """

    def __init__(
        self,
        *,
        fs: Fs,
        store_dir: str,
        wal_dir: str,
        writer: LogWriter,
        state: State,
        lock: threading.Condition,
        sync_parts: Callable[[], bool],
        interval_s: float | None,
        open_number: int,
        next_lsn: int,
        durable_lsn: int,
        segments: Sequence[SegmentInfo],
        checkpoints: Sequence[CheckpointRef],
        log_keep_nbytes: int,
        log_max_nbytes: int,
        counters: Counters,
    ) -> None:
        self._fs = fs
        self._dir = store_dir
        self._wal_dir = wal_dir
        self._writer = writer
        self._state = state
        self._lock = lock
        self._sync_parts = sync_parts
        self._interval_s = interval_s
        self._open_number = open_number
        self._next_lsn = next_lsn
        self.applied_lsn = next_lsn - 1
        self.durable_lsn = durable_lsn
        self._told_lsn = durable_lsn  # what the log itself says is durable
        self._segments = [
            _Segment(s.number, s.nbytes, s.header.first_lsn if s.header else 0) for s in segments
        ]
        self._checkpoints = list(checkpoints)
        self._log_keep_nbytes = log_keep_nbytes
        self._log_max_nbytes = log_max_nbytes
        self._counters = counters
        if num_damaged := sum(segment.head is Head.DAMAGED for segment in segments):
            counters.add("unreadable_segments", num_damaged)  # also those that recovery did not need
        self._trouble: str | None = None
        self.troubled_at = 0.0  # monotonic
        self.read_only = False
        self._failures = 0
        self._kept: list[tuple[int, tuple[Run, ...]]] = []  # frames that no segment holds synced
        self._appended_nbytes = 0
        self._set_up_threads()

    def _set_up_threads(self) -> None:
        self._writing = threading.Lock()  # held while the writer's tail moves
        self._syncing = threading.Lock()  # held for a whole sync round
        # Held while a checkpoint is made or old files go, so that none is taken for old before it is listed.
        self._unlinking = threading.Lock()
        self._queue: deque[_Entry] = deque()
        self._taken: deque[_Entry] = deque()  # by the committer, at once: nobody waits while a batch is cut
        self._queued = threading.Condition(threading.Lock())
        self._closing = False
        # Entries ever taken; of those, the first so many are applied or failed; and made durable, and told.
        self._num_submitted, self._num_finished, self._num_durable = 0, 0, -1
        turn = threading.Lock()
        self._round = threading.Condition(turn)  # told when a sync round or a checkpoint is over
        self._asked = threading.Condition(turn)  # told when one is wanted
        # How many entries must be durable, ascending, and who waits for that.
        self._waiting: list[tuple[int, _Gate]] = []
        self._num_woken = 0  # by the last round
        self._num_awaited = 1  # before the sync thread is told
        self._round_s = 0.0
        self._checkpoint_wanted = self._stop_syncing = False
        self._num_failed_checkpoints = 0
        self._committer = threading.Thread(target=self._commit_loop, name="tieredkv-commit", daemon=True)
        self._syncer = threading.Thread(target=self._sync_loop, name="tieredkv-sync", daemon=True)

    def start(self, *, must_checkpoint: bool) -> None:
        """Begin the first segment of this open, and the two threads.

        Args:
            must_checkpoint: the directory does not hold everything in a form that recovers again; write a
                checkpoint first, for the segment to name.

        Raises:
            OSError: the store cannot be written.
        """
        # Openings that crash again and again leave a segment each, and no commit that would ask for a checkpoint.
        is_full = self.log_nbytes + self._writer.segment_nbytes > self._log_max_nbytes
        if must_checkpoint or (is_full and self.applied_lsn > self.checkpoint_lsn):
            if self.applied_lsn == 0:  # what was salvaged has no LSN, and 0 names the empty table
                self.applied_lsn, self._next_lsn = 1, 2
            self._sync_parts()
            snapshot = self._state.snapshot()
            ref = write_checkpoint(self._fs, self._dir, self.applied_lsn, snapshot)
            self._checkpoints.insert(0, ref)
            self.durable_lsn = self.applied_lsn
        header = self._writer.start(
            self._next_lsn,
            open_number=self._open_number,
            checkpoint=self._latest_checkpoint(),
            durable_lsn=self.durable_lsn,
        )
        self._segments.append(_Segment.of(header))
        if is_full:
            self._try_unlink_old(num_kept=min(2, len(self._checkpoints)))
        self._committer.start()
        self._syncer.start()

    @property
    def trouble(self) -> str | None:
        """What is wrong, if anything, since `troubled_at`."""
        return self._trouble

    @trouble.setter
    def trouble(self, what: str | None) -> None:
        if self._trouble is None:
            self.troubled_at = time.monotonic()
        self._trouble = what

    @property
    def log_nbytes(self) -> int:
        """Bytes of every segment that is there."""
        return sum(segment.nbytes for segment in self._segments)

    @property
    def checkpoint_nbytes(self) -> int:
        return sum(ref.nbytes for ref in self._checkpoints)

    @property
    def checkpoint_lsn(self) -> int:
        return self._checkpoints[0].lsn if self._checkpoints else 0

    # ---- callers -------------------------------------------------------------------------------

    def submit(
        self, kind: int, records: Records, applied: Applied = _ignore_applied, failed: Failed = _ignore_failed
    ) -> Ticket:
        """Queue records for the log; may be called with the metadata lock held.

        Exactly one of `applied(first_lsn, rows)` and `failed(error)` is called, with the lock held.
        """
        entry = _Entry(kind, records, applied, failed)
        with self._queued:
            if not self._closing and not self.read_only:
                self._queue.append(entry)
                self._num_submitted += 1
                self._queued.notify()
                return entry.ticket
        error = OSError("the log takes no more records")
        with self._lock:
            failed(error)
            self._lock.notify_all()
        entry.ticket.finish(0, error)
        return entry.ticket

    def flush(self, until: float) -> bool:
        """Make everything submitted before this call durable, but what its ticket says has failed.

        Returns:
            False if a sync failed or it took too long.
        """
        gate = _Gate()
        with self._round:
            wanted = self._num_submitted
            if self._is_durable(wanted) or self.read_only:
                return self._is_durable(wanted)
            self._waiting.append((wanted, gate))
            self._ask()
        gate.wait(until - time.monotonic())
        if not self._is_durable(wanted):
            with self._round, contextlib.suppress(ValueError):
                self._waiting.remove((wanted, gate))
        return self._is_durable(wanted)

    def _is_durable(self, num_entries: int) -> bool:
        """Whether the first so many are synced; they were applied before, so the order of reads matters."""
        if self._num_durable >= num_entries:
            return True
        return self.read_only and self._num_finished >= num_entries and self.durable_lsn >= self.applied_lsn

    def _ask(self) -> None:
        """Tell the sync thread if somebody's entries are applied, and all are there that it waits for (turn held)."""
        if len(self._waiting) >= self._num_awaited and self._waiting[0][0] <= self._num_finished:
            self._asked.notify()

    def checkpoint(self, until: float) -> bool:
        """Write a checkpoint of everything applied; False if that failed or took too long."""
        with self._lock:
            target = self.applied_lsn
        with self._round:
            num_failed = self._num_failed_checkpoints
            while self.checkpoint_lsn < target and self._num_failed_checkpoints == num_failed:
                if time.monotonic() >= until or self.read_only:
                    break
                self._checkpoint_wanted = True
                self._asked.notify()
                self._round.wait(max(0.0, min(0.1, until - time.monotonic())))
        return self.checkpoint_lsn >= target

    def forget_past(self, until: float) -> bool:
        """After a removal: nothing of the log or of a checkpoint from before now stays on disk.

        Ends the segment, writes a checkpoint of all that came before, and unlinks everything older. What others log
        meanwhile goes to the segment begun here and to those after it, and stays.

        Raises:
            OSError: the segment could not be ended.
        """
        self._rotate()
        with self._writing:
            keep_from, target = self._segments[-1].number, self._segments[-1].first_lsn - 1
        if not self.flush(until):  # what was appended before is applied then
            return False
        self.checkpoint(until)
        if self.checkpoint_lsn < target:
            return False
        with self._unlinking, self._writing:
            del self._checkpoints[1:]
            if prune_checkpoints(self._fs, self._dir, {self._checkpoints[0].lsn}):
                return False
            while len(self._segments) > 1 and (
                self._segments[0].number < keep_from
                or self._segments[1].first_lsn - 1 <= self.checkpoint_lsn  # nobody logged anything meanwhile
            ):
                self._writer.unlink_segment(self._segments[0].number)
                self._segments.pop(0)
            self._fs.sync_dir(self._wal_dir)
            self._fs.sync_dir(self._dir)
        return True

    def close(self, until: float) -> bool:
        """Commit what is queued, sync, and stop both threads; False if that did not fit before `until`."""
        with self._queued:
            self._closing = True
            self._queued.notify_all()
        if self._committer.ident is not None:
            self._committer.join(max(0.0, until - time.monotonic()))
        done = self.flush(until)
        with self._round:
            self._stop_syncing = True
            self._asked.notify()
        if self._syncer.ident is not None:
            self._syncer.join(max(0.0, until - time.monotonic()))
        if self._committer.is_alive() or self._syncer.is_alive():
            return False  # the disk holds it; whatever it is in the middle of is left to it
        self._writer.close()
        return done

    # ---- the committer -------------------------------------------------------------------------

    def _commit_loop(self) -> None:
        batch: list[_Entry] = []
        try:
            while batch := self._next_batch():
                self._commit(batch)
                self._finished(len(batch))
        except Exception as error:  # a fault of our own: nobody may wait for a thread that is gone
            self._end_with("committer", error, [*batch, *self._taken])

    def _next_batch(self) -> list[_Entry]:
        """Waits for entries; none once the journal closes."""
        if not self._taken:
            with self._queued:
                while not self._queue and not self._closing:
                    self._queued.wait(_LOOK_S)
                self._taken, self._queue = self._queue, self._taken
        return list(self._take_batch())

    def _take_batch(self) -> Iterator[_Entry]:
        """What fits one frame, at least one entry."""
        room = self._writer.max_frame_nbytes // 2
        while self._taken and room > 0:
            entry = self._taken.popleft()
            room -= frame_nbytes([entry.run])
            yield entry

    def _finished(self, count: int) -> None:
        """So many more entries are applied or failed."""
        self._num_finished += count
        wants_checkpoint = self._wants_checkpoint()
        with self._round:
            if wants_checkpoint:
                self._checkpoint_wanted = True
                self._asked.notify()
            elif self._waiting:
                self._ask()

    def _end_with(self, thread: str, error: Exception, batch: Sequence[_Entry] = ()) -> None:
        """Take no more records, fail those in hand and in the queue, and wake whoever waits."""
        self._counters.add("journal_faults")
        self.trouble = (
            f"the journal's {thread} failed and the disk takes no more: {type(error).__name__}: {error}"
        )
        with self._queued:
            self.read_only = True
            left = [*batch, *self._queue]
            self._queue.clear()
        with self._lock:
            for entry in left:
                if not entry.ticket.lsn:
                    self._tell_failed(entry, error)
            self._lock.notify_all()
        for entry in left:
            entry.ticket.finish(entry.ticket.lsn, error)
        self._release()

    def _tell_failed(self, entry: _Entry, error: Exception) -> None:
        try:
            entry.failed(error)
        except Exception:  # the fault may be in what it calls
            self._counters.add("journal_faults")

    def _commit(self, batch: Sequence[_Entry]) -> None:
        groups = list(_grouped(batch))
        lsn = self._next_lsn
        try:
            for runs in self._frames(run for run, _ in groups):
                self._append(runs)
        except OSError as error:
            self._commit_failed(batch, error)
            return
        with self._lock:
            for run, entries in groups:
                if run.kind == PUT:
                    lsn = self._apply(lsn, run, entries)
                else:  # one by one, for a drop must see what the one before it took
                    for entry in entries:
                        lsn = self._apply(lsn, entry.run, [entry])
            self.applied_lsn = lsn - 1
            self._lock.notify_all()
        for entry in batch:
            entry.ticket.finish(entry.ticket.lsn)

    def _apply(self, lsn: int, run: Run, entries: Sequence[_Entry]) -> int:
        """Apply the run that `entries` make up, and tell each; returns the next LSN (metadata lock held)."""
        rows = self._state.apply(lsn, run)
        for entry in entries:
            count = len(entry.records)
            entry.ticket.lsn = lsn
            entry.applied(lsn, rows[:count])
            lsn, rows = lsn + count, rows[count:]
        return lsn

    def _commit_failed(self, batch: Sequence[_Entry], error: Exception) -> None:
        self._counters.add("log_write_errors")
        self.trouble = str(error)
        with self._lock:
            for entry in batch:
                entry.failed(error)
            self._lock.notify_all()
        for entry in batch:
            entry.ticket.finish(0, error)

    def _frames(self, groups: Iterable[Run]) -> Iterator[list[Run]]:
        """The runs as frames, none larger than a frame may be."""
        limit, nbytes = self._writer.max_frame_nbytes // 2, 0
        runs: list[Run] = []
        for group in groups:
            for run in _pieces(group, limit):
                size = frame_nbytes([run])
                if runs and nbytes + size > limit:
                    yield runs
                    runs, nbytes = [], 0
                runs.append(run)
                nbytes += size
        if runs:
            yield runs

    def _append(self, runs: list[Run]) -> None:
        """Append one frame, in a new segment if it needs one. Raises OSError."""
        if frame_nbytes(runs) > self._writer.max_frame_nbytes:
            raise OSError(f"a record of {frame_nbytes(runs)} bytes does not fit a log segment")
        while not self._try_append(runs):
            if self.log_nbytes + self._writer.segment_nbytes > self._log_max_nbytes:
                self._checkpoint_at_cap()
            if frame_nbytes(runs) > self._writer.room_nbytes:
                self._rotate()

    def _checkpoint_at_cap(self) -> None:
        """The log may not grow before a checkpoint has made room. Raises OSError: it could not be written."""
        if not self.checkpoint(time.monotonic() + _CHECKPOINT_S):
            raise OSError(
                errno.ENOSPC, f"the log is at its cap and no checkpoint could be written: {self.trouble}"
            )

    def _try_append(self, runs: list[Run]) -> bool:
        """False if the segment has no room for the frame. Raises OSError."""
        with self._writing:
            if self._kept:
                self._repair()
            while frame_nbytes(runs) <= self._writer.room_nbytes:
                told = self.durable_lsn
                try:
                    self._appended_nbytes += self._writer.append(runs, self._next_lsn, told)
                except OSError:
                    self._repair()
                    continue
                self._told_lsn = told
                self._next_lsn += sum(len(run) for run in runs)
                return True
        return False

    def _append_empty(self) -> None:
        """A frame without records that carries the durable LSN (writing lock held). Raises OSError."""
        told = self.durable_lsn
        if self._writer.room_nbytes >= frame_nbytes([]):
            self._writer.append((), self._next_lsn, told)
        self._told_lsn = told  # a segment without room ends, and the next header tells

    # ---- segments ------------------------------------------------------------------------------

    def _latest_checkpoint(self) -> CheckpointRef:
        return self._checkpoints[0] if self._checkpoints else CheckpointRef()

    def _rotate(self, checkpoint: CheckpointRef | None = None) -> None:
        """End the segment, synced with its payloads, and begin the next. Raises OSError.

        Args:
            checkpoint: a new one, which counts from here on. Else the next segment names the one that counts by then:
                a newer segment that named an older one would take the other back.
        """
        self._sync_round()
        with self._writing:
            ref = checkpoint or self._latest_checkpoint()
            try:
                self._append_empty()
            except OSError:  # the next header tells what is durable too
                self._counters.add("log_write_errors")
            try:
                header = self._writer.rotate(
                    open_number=self._open_number, checkpoint=ref, durable_lsn=self.durable_lsn
                )
                self._segments.append(_Segment.of(header))
            except OSError:
                self._repair(ref)
            if checkpoint is not None:
                self._checkpoints.insert(0, checkpoint)

    def _repair(self, checkpoint: CheckpointRef | None = None) -> None:
        """After a failed write or sync: a new segment repeats what is not durable (writing lock held).

        Raises:
            OSError: there is no space, and the next record tries again; or three new segments failed too, and
                the journal is read-only from now on.
        """
        ref = checkpoint or self._latest_checkpoint()
        self._kept += self._writer.abandon()
        while True:
            self._failures += 1
            self._counters.add("log_sync_errors")
            if self._failures > _MAX_FAILURES:
                self.read_only = True
                self.trouble = "the log failed three times in a row: no more records are taken"
                raise OSError(self.trouble)
            try:
                first_lsn = self._kept[0][0] if self._kept else self._next_lsn
                header = self._writer.start(
                    first_lsn, open_number=self._open_number, checkpoint=ref, durable_lsn=self.durable_lsn,
                    repeat=self._kept,
                )  # fmt: skip
                self._segments.append(_Segment.of(header))
                self._kept.clear()
                return
            except OSError as error:
                self.trouble = str(error)
                if error.errno in _NO_SPACE:
                    self._failures = 0
                    raise

    # ---- the sync thread -----------------------------------------------------------------------

    def _sync_loop(self) -> None:
        try:
            due_at = time.monotonic()
            while not self._stop_syncing:
                wanted, checkpoint = self._await_request(due_at)
                due = self._interval_s is not None and self.applied_lsn > self.durable_lsn
                if wanted or (due and time.monotonic() >= due_at):
                    self._sync_and_tell(wanted)
                if checkpoint:
                    with self._unlinking:
                        self._write_checkpoint()
                if self._interval_s is not None and time.monotonic() >= due_at:
                    due_at = time.monotonic() + self._interval_s
                if not self._release(self._is_given_up()) and wanted:
                    self._await_retry()
        except Exception as error:  # as in the committer
            self._end_with("sync thread", error)
        self._release()

    def _await_request(self, due_at: float) -> tuple[bool, bool]:
        """Whether a sync round and a checkpoint are wanted; neither when an interval is over, or at the end."""
        with self._round:
            if not self._is_asked():
                self._asked.wait(_LOOK_S if self._interval_s is None else max(0.0, due_at - time.monotonic()))
            wanted = bool(self._waiting) and self._waiting[0][0] <= self._num_finished
            if wanted:
                self._gather()
            checkpoint, self._checkpoint_wanted = self._checkpoint_wanted, False
            return wanted, checkpoint

    def _is_asked(self) -> bool:
        """Turn held."""
        wanted = bool(self._waiting) and (self.read_only or self._waiting[0][0] <= self._num_finished)
        return wanted or self._checkpoint_wanted or self._stop_syncing

    def _gather(self) -> None:
        """Let those whom the last round woke come back, so that they share this one (turn held)."""
        until = time.monotonic() + min(self._round_s, _MAX_GATHER_S)
        self._num_awaited = self._num_woken
        while len(self._waiting) < self._num_woken or self._waiting[-1][0] > self._num_finished:
            left = until - time.monotonic()
            if left <= 0 or self._checkpoint_wanted or self._stop_syncing or self.read_only:
                break
            self._asked.wait(left)
        self._num_awaited = 1

    def _is_given_up(self) -> bool:
        trouble = self.trouble  # of the last round, for one that succeeds ends it
        return trouble is not None and time.monotonic() - self.troubled_at > _GIVE_UP_S

    def _release(self, is_given_up: bool = False) -> int:
        """Wake those whose entries are durable, or all if nothing will be soon; how many those are."""
        with self._round:
            is_over = self.read_only or self._stop_syncing or is_given_up
            count = bisect_right(self._waiting, self._num_durable, key=lambda waiting: waiting[0])
            count = len(self._waiting) if is_over else count
            released, self._waiting = self._waiting[:count], self._waiting[count:]
            self._num_woken = count or self._num_woken
            self._round.notify_all()
        for _, gate in released:
            gate.open()
        return count

    def _await_retry(self) -> None:
        """A round brought nobody on: the disk may do better in a moment."""
        with self._round:
            if not self._stop_syncing:
                self._asked.wait(_RETRY_S)

    def _sync_and_tell(self, tell: bool) -> None:
        """A sync round; to `tell` is to append a frame that carries what is durable now."""
        began = time.monotonic()
        num_finished, target = self._num_finished, self.applied_lsn  # in this order: applied comes first
        try:
            self._sync_round()
            with self._writing:
                if tell and self._told_lsn < self.durable_lsn:
                    self._tell()
        except OSError:
            self._counters.add("sync_round_errors")
        if min(self.durable_lsn, self._told_lsn) >= target:
            self._num_durable = num_finished
        self._round_s = time.monotonic() - began

    def _tell(self) -> None:
        """Append what is durable now; where that fails, the header of a new segment says it (writing lock held)."""
        try:
            self._append_empty()
        except OSError:
            self._repair()
            self._told_lsn = self.durable_lsn

    def _sync_round(self) -> None:
        """Sync payloads, then the log, then say so. Raises OSError."""
        with self._syncing:
            target = self.applied_lsn
            complete = self._sync_parts()
            synced = self._sync_log()
            if not self.read_only:
                self._failures, self.trouble = 0, None
            if complete:
                self.durable_lsn = max(self.durable_lsn, min(target, synced))
            self._counters.add("syncs")

    def _sync_log(self) -> int:
        """Sync the log; returns the last LSN that is synced now. Raises OSError."""
        if not self._kept:
            with contextlib.suppress(OSError):
                return self._writer.sync()
        with self._writing:
            self._repair()
            return self._next_lsn - 1

    # ---- checkpoints ---------------------------------------------------------------------------

    def _wants_checkpoint(self) -> bool:
        """When the log has outgrown the table, or its share of the budget."""
        table_nbytes = _BYTES_PER_ROW * len(self._state.table)
        outgrown = self._appended_nbytes > max(2 * self._writer.segment_nbytes, 2 * table_nbytes)
        return outgrown or self.log_nbytes > self._log_max_nbytes

    def _write_checkpoint(self) -> None:
        """In this order: sync to LSN c, write table-c, begin the segment that names it, unlink what is old."""
        if self.applied_lsn == self.checkpoint_lsn and self.applied_lsn:
            return
        lsn, arrays = self._snapshot()
        try:
            if self.durable_lsn < lsn:
                self._sync_round()
            if self.durable_lsn < lsn:
                raise OSError(f"LSN {lsn} cannot be made durable")
            ref = write_checkpoint(self._fs, self._dir, lsn, arrays)
            self._rotate(ref)
        except OSError as error:
            # Discarded; the log keeps everything that it would have held.
            self._counters.add("checkpoint_errors")
            self.trouble = str(error)
            self._num_failed_checkpoints += 1
            return
        self._appended_nbytes = 0
        self._counters.add("checkpoints")
        self._try_unlink_old()

    def _snapshot(self) -> tuple[int, Arrays]:
        """The state at the last LSN applied. Between slices of it others have their turn with the lock."""
        with self._lock:
            lsn, (table, catalog) = self.applied_lsn, self._state.begin_snapshot()
        try:
            while not table.is_whole:
                with self._lock:
                    table.copy_next()
                time.sleep(_PAUSE_S)
        finally:
            with self._lock:
                self._state.table.end_snapshot()
        return lsn, {**table.arrays(), **catalog}

    def _try_unlink_old(self, num_kept: int = 2) -> None:
        try:
            self._unlink_old(num_kept)
        except OSError as error:
            self._counters.add("unlink_errors")
            self.trouble = str(error)

    def _unlink_old(self, num_kept: int) -> None:
        """Unlink the checkpoints before the newest `num_kept`, and segments that none of those needs."""
        if len(self._checkpoints) < num_kept:
            return
        del self._checkpoints[num_kept:]
        failures = prune_checkpoints(self._fs, self._dir, {ref.lsn for ref in self._checkpoints})
        self._counters.add("unlink_errors", len(failures))
        needless = self._checkpoints[-1].lsn
        while len(self._segments) > 1 and self.log_nbytes > self._log_keep_nbytes:
            if self._segments[1].first_lsn - 1 > needless:
                break
            self._writer.unlink_segment(self._segments[0].number)
            self._segments.pop(0)
        self._fs.sync_dir(self._wal_dir)
        self._fs.sync_dir(self._dir)


def _pieces(run: Run, limit: int) -> Iterator[Run]:
    """The run in pieces that fit a frame; a blob is never cut."""
    count = len(run)
    step = max(1, count * limit // max(1, frame_nbytes([run])))
    for at in range(0, count, step):
        yield Run(run.kind, run.records[at : at + step])


def _grouped(batch: Sequence[_Entry]) -> Iterator[tuple[Run, list[_Entry]]]:
    """Adjacent entries of one kind, and their records as one run."""
    for kind, group in groupby(batch, key=lambda entry: entry.kind):
        entries = list(group)
        yield merge_runs([Run(kind, entry.records) for entry in entries]), entries
