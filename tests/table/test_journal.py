"""Log, then apply: one order for all, callbacks once, and after any failure what was durable is there again."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_helpers import IDENTITY, MIXED, HookedFs, comes_true

from tieredkv.outcomes import Counters
from tieredkv.system import OsFs
from tieredkv.table.catalog import NamespaceRow, SessionRow
from tieredkv.table.journal import Journal
from tieredkv.table.recovery import recover
from tieredkv.table.state import State
from tieredkv.wal.records import NAMESPACE, PUT, PUT_DTYPE, SESSION
from tieredkv.wal.writer import LogWriter

SEGMENT = 256 * 1024


class Bench:
    """A journal over a directory, and the state it keeps."""

    def __init__(
        self, path: Path, fs: Any = None, *, interval_s: float | None = None, sync_parts: Any = None
    ) -> None:
        fs = fs or OsFs()
        self.state, self.counters = State(), Counters()
        self.lock = threading.Condition(threading.RLock())
        found = recover(fs, str(path), self.state)
        self.report = found.report
        self.state.settle()
        writer = LogWriter(
            fs, f"{path}/wal", segment_nbytes=SEGMENT, next_number=found.next_segment, position=found.position
        )
        self.journal = Journal(
            fs=fs, store_dir=str(path), wal_dir=f"{path}/wal", writer=writer, state=self.state, lock=self.lock,
            sync_parts=sync_parts or (lambda: True), interval_s=interval_s, open_number=found.open_number,
            next_lsn=found.next_lsn, durable_lsn=found.durable_lsn, segments=found.segments,
            checkpoints=[found.checkpoint], log_keep_nbytes=0, log_max_nbytes=2 * SEGMENT, counters=self.counters,
        )  # fmt: skip
        self.journal.start(must_checkpoint=found.must_checkpoint)

    def put(self, first: int, count: int, **callbacks: Any) -> Any:
        records = np.zeros(count, dtype=PUT_DTYPE)
        numbers = np.arange(first, first + count, dtype="<u8")
        records["digest"] = np.repeat(numbers.view(np.uint8).reshape(count, 8), 4, axis=1)
        records["namespace"], records["slot"], records["put_seq"] = 1, numbers, numbers
        return self.journal.submit(PUT, records, **callbacks)

    def close(self) -> bool:
        return self.journal.close(time.monotonic() + 10)


def until(seconds: float = 60.0) -> float:
    return time.monotonic() + seconds


def durable(state: State) -> dict[str, Any]:
    snapshot = state.snapshot()
    order = np.argsort(snapshot["put_seq"][0])
    arrays = {n: v.tobytes() if v.ndim < 1 else v[..., order].tolist() for n, v in snapshot.items()
              if not isinstance(v, bytes) and n in ("slot", "put_seq", "lsn", "checksum")}  # fmt: skip
    return arrays | {n: v for n, v in snapshot.items() if isinstance(v, bytes)}


def test_records_apply_in_order_and_are_called_back_once(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    calls: list[tuple[int, int]] = []

    def submit(number: int) -> None:
        for at in range(50):
            first = number * 10_000 + at * 10
            bench.put(first, 3, applied=lambda lsn, rows: calls.append((lsn, len(rows))))

    threads = [threading.Thread(target=submit, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert bench.put(99_999, 3).wait(60)
    assert bench.journal.flush(until())
    assert [lsn for lsn, _ in calls] == list(range(1, 601, 3)) and {n for _, n in calls} == {3}
    assert bench.journal.applied_lsn == bench.journal.durable_lsn == 603
    assert bench.close()
    again = Bench(tmp_path)
    assert durable(again.state) == durable(bench.state)
    again.state.table.check()
    assert again.close()


def test_checkpoint_and_replay_give_the_same_state(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.journal.submit(
        NAMESPACE, (NamespaceRow(1, b"\1" * 32, IDENTITY.fingerprint(), MIXED).encode(),)
    ).wait(60)
    for number in range(40):
        bench.put(number * 500, 400)
        row = SessionRow("a", 1, np.arange(number * 30, dtype=np.int32))
        ticket = bench.journal.submit(SESSION, (row.encode(),))
        if number % 13 == 12:
            assert bench.journal.flush(until()) and bench.journal.checkpoint(until(30))
    assert ticket.wait(60) and bench.journal.flush(until())
    assert bench.journal.checkpoint_lsn > 0
    before = durable(bench.state)
    assert bench.close()
    again = Bench(tmp_path)
    assert again.report.log_end == "clean" and not again.report.damage
    assert durable(again.state) == before
    again.state.table.check()
    assert len(list(tmp_path.glob("table-*.lmdb"))) <= 2
    assert again.close()


def test_the_log_never_outgrows_its_cap(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    worst = 0
    for number in range(24):
        ticket = bench.put(number * 1000, 900)
        if number % 4 == 3:
            assert ticket.wait(60)
        worst = max(worst, sum(p.stat().st_size for p in (tmp_path / "wal").iterdir()))
    assert ticket.wait(60) and bench.journal.flush(until())
    assert worst <= 3 * SEGMENT, f"{worst / SEGMENT} segments"
    assert bench.counters.get("checkpoints") >= 3
    assert bench.close()


def test_a_run_larger_than_a_frame_is_cut(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    seen: list[np.ndarray] = []
    assert bench.put(0, 9000, applied=lambda _lsn, rows: seen.append(rows)).wait(60)
    assert len(seen) == 1 and len(seen[0]) == 9000 and len(bench.state.table) == 9000
    assert bench.close()
    again = Bench(tmp_path)
    assert len(again.state.table) == 9000
    assert again.close()


def test_a_record_that_fits_no_segment_is_refused_alone(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    failures: list[Exception] = []
    row = SessionRow("big", 1, np.zeros(SEGMENT // 4, dtype=np.int32))
    ticket = bench.journal.submit(SESSION, (row.encode(),), failed=failures.append)
    assert not ticket.wait(5) and ticket.error is failures[0]
    assert bench.put(0, 3).wait(60)
    assert bench.close()


class Once:
    """Fails the n-th call of an operation in `wal`."""

    def __init__(self, operation: str, nth: int, code: int = errno.EIO) -> None:
        self.operation, self.nth, self.code, self.calls = operation, nth, code, 0

    def __call__(self, operation: str, path: str) -> None:
        if operation == self.operation and "/wal/" in path:
            self.calls += 1
            if self.calls == self.nth:
                raise OSError(self.code, os.strerror(self.code), path)


@pytest.mark.parametrize("operation", ["datasync", "pwritev", "allocate", "create"])
@pytest.mark.parametrize(("nth", "interval_s"), [(2, None), (3, 0.001), (5, None)])
def test_one_failure_of_the_log_loses_nothing_flushed(
    tmp_path: Path, operation: str, nth: int, interval_s: float | None
) -> None:
    """P7: also when the segment is nearly full of what must be repeated."""
    bench = Bench(tmp_path, HookedFs(Once(operation, nth)), interval_s=interval_s)
    acknowledged = 0
    for number in range(6):
        taken = bench.put(number * 1000, 900).wait(60)
        if taken and bench.journal.flush(until()):
            acknowledged = number + 1
    assert acknowledged == 6 and not bench.journal.read_only
    before = durable(bench.state)
    assert bench.close()
    again = Bench(tmp_path)
    assert durable(again.state) == before
    assert not again.report.damage
    assert again.close()


def test_a_last_frame_that_cannot_be_appended_is_counted(tmp_path: Path) -> None:
    """P17: the next segment's header tells what it would have told, and it is no secret."""
    once = Once("pwritev", 0, errno.ENOSPC)
    bench = Bench(tmp_path, HookedFs(once))
    assert bench.put(0, 900).wait(60) and bench.journal.flush(until())
    once.nth = once.calls + 1
    assert bench.journal.checkpoint(until())
    assert bench.counters.get("log_write_errors") == 1
    before = durable(bench.state)
    assert bench.close()
    again = Bench(tmp_path)
    assert durable(again.state) == before and not again.report.damage
    assert again.close()


def test_nothing_is_durable_while_payloads_are_not(tmp_path: Path) -> None:
    good = threading.Event()
    bench = Bench(tmp_path, sync_parts=good.is_set)
    assert bench.put(0, 5).wait(60)
    assert not bench.journal.flush(until(0.3)) and bench.journal.durable_lsn == 0
    assert not bench.journal.checkpoint(until(2)), "a checkpoint of parts that are not durable"
    good.set()
    assert bench.journal.flush(until()) and bench.journal.durable_lsn == 5
    assert bench.close()


def test_after_closing_nothing_is_taken(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    assert bench.close()
    failures: list[Exception] = []
    assert not bench.put(0, 1, failed=failures.append).wait(1)
    assert len(failures) == 1


def test_those_who_wait_share_a_round(tmp_path: Path) -> None:
    """However many wait: the one that runs, and one more for all who came meanwhile."""
    running, go = threading.Event(), threading.Event()

    def sync_parts() -> bool:
        running.set()
        return go.wait(60)

    bench = Bench(tmp_path, sync_parts=sync_parts)
    flushed: list[bool] = []

    def commit(number: int) -> None:
        bench.put(number, 1)
        flushed.append(bench.journal.flush(until()))

    threads = [threading.Thread(target=commit, args=(number,)) for number in range(20)]
    threads[0].start()
    assert running.wait(60)
    for thread in threads[1:]:
        thread.start()
    assert comes_true(lambda: len(bench.journal._waiting) == 20), "not all of them wait for the next round"
    go.set()
    for thread in threads:
        thread.join()
    assert flushed == [True] * 20 and bench.counters.get("syncs") <= 3
    began = time.monotonic()
    assert bench.put(99, 1) and bench.journal.flush(until()), "one alone after many"
    assert time.monotonic() - began < 2
    assert bench.journal._waiting == [] and bench.close()


def test_flush_covers_what_is_still_queued(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    with bench.lock:  # nothing is applied meanwhile
        tickets = [bench.put(number * 10, 3) for number in range(5)]
        assert not bench.journal.flush(until(0.1))
    assert bench.journal.flush(until()) and bench.journal.durable_lsn == 15
    assert all(ticket.wait(0) for ticket in tickets) and bench.close()


def test_a_fault_in_the_committer_ends_the_journal_and_wakes_everybody(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    assert bench.put(0, 3).wait(60) and bench.journal.flush(until())

    def broken(_lsn: int, _rows: Any) -> None:
        raise RuntimeError("a bug in a callback")

    failures: list[Exception] = []
    began = time.monotonic()
    with bench.lock:
        bad, behind = bench.put(10, 3, applied=broken), bench.put(20, 3, failed=failures.append)
    assert not bad.wait(10) and isinstance(bad.error, RuntimeError)
    assert not behind.wait(10) and len(failures) <= 1
    assert not bench.journal.flush(until()), "what was not applied is not durable"
    assert not bench.put(30, 3, failed=failures.append).wait(60) and failures
    assert not bench.journal.checkpoint(until())
    assert time.monotonic() - began < 5, "nobody waits for a thread that is gone"
    assert bench.journal.read_only and "a bug in a callback" in str(bench.journal.trouble)
    assert bench.counters.get("journal_faults") == 1
    bench.close()
    again = Bench(tmp_path)
    assert len(again.state.table) >= 3 and not again.report.damage
    assert again.close()


def test_a_fault_in_the_committer_fails_also_what_it_has_taken_and_not_begun(tmp_path: Path) -> None:
    """More was queued than one frame takes: nobody waits for the rest."""
    bench = Bench(tmp_path)
    entered, go = threading.Event(), threading.Event()

    def hold(_lsn: int, _rows: Any) -> None:
        entered.set()
        assert go.wait(60)

    def broken(_lsn: int, _rows: Any) -> None:
        raise RuntimeError("a bug in a callback")

    bench.put(0, 3, applied=hold)
    assert entered.wait(60)
    failures: list[Exception] = []
    tickets = [bench.put(10, 900, applied=broken, failed=failures.append)]
    tickets += [bench.put(10_000 * n, 900, failed=failures.append) for n in range(1, 8)]
    go.set()
    for ticket in tickets:
        assert not ticket.wait(10) and ticket.error is not None
    assert len(failures) >= 7
    bench.close()


def test_a_fault_in_the_sync_thread_ends_the_journal_and_wakes_everybody(tmp_path: Path) -> None:
    faulty = threading.Event()

    def sync_parts() -> bool:
        if faulty.is_set():
            raise ValueError("a bug in a sync")
        return True

    bench = Bench(tmp_path, sync_parts=sync_parts)
    assert bench.put(0, 3).wait(60) and bench.journal.flush(until())
    faulty.set()
    began = time.monotonic()
    assert bench.put(10, 3).wait(60)
    assert not bench.journal.flush(until()) and bench.journal.durable_lsn == 3
    assert not bench.put(20, 3).wait(60) and not bench.journal.checkpoint(until())
    assert time.monotonic() - began < 5, "nobody waits for a thread that is gone"
    assert bench.journal.read_only and "a bug in a sync" in str(bench.journal.trouble)
    bench.close()
    again = Bench(tmp_path)
    assert len(again.state.table) == 6 and not again.report.damage
    assert again.close()


def test_an_unreadable_segment_is_counted_also_where_recovery_does_not_need_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    assert bench.put(0, 3).wait(60) and bench.close()
    bench = Bench(tmp_path)
    assert bench.put(10, 3).wait(60) and bench.journal.flush(until()) and bench.journal.checkpoint(until())
    assert bench.put(20, 3).wait(60) and bench.close()
    segments = sorted((tmp_path / "wal").iterdir())
    assert len(segments) > 1, "the oldest lies below the checkpoint"
    with open(segments[0], "r+b") as file:
        file.write(b"\xff" * 10_000)
    again = Bench(tmp_path)
    assert len(again.state.table) == 9 and not again.report.damage
    assert again.counters.get("unreadable_segments") == 1
    assert again.close()
