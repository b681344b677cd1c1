"""Appending, syncing, rotating, and what is kept for a sync that fails."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest
from log_files import NOTHING, SEGMENT_NBYTES, FailingFs, Log, flat, puts, session

from tieredkv.testing.sim_disk import Image
from tieredkv.testing.sim_fs import SimFs
from tieredkv.wal import LogWriter, Run
from tieredkv.wal.format import HEADER_NBYTES, decode_header, frame_nbytes
from tieredkv.wal.reader import End, read_log


def test_a_segment_is_whole_before_its_first_frame(tmp_path: Path) -> None:
    fs = FailingFs()
    log = Log.begin(tmp_path, fs)
    assert fs.calls[-4:] == ["allocate", "write", "sync", "sync_dir"]
    assert log.path(1).stat().st_size == SEGMENT_NBYTES
    assert stat.S_IMODE(log.path(1).stat().st_mode) == 0o600
    header = decode_header(log.path(1).read_bytes()[:HEADER_NBYTES])
    assert (header.number, header.first_lsn, header.previous) == (1, 1, (0, 0, 0))
    assert (log.writer.tail_nbytes, log.writer.room_nbytes) == (HEADER_NBYTES, SEGMENT_NBYTES - HEADER_NBYTES)
    assert log.writer.max_frame_nbytes == log.writer.room_nbytes


def test_appended_bytes_are_what_the_formula_says(tmp_path: Path) -> None:
    log = Log.begin(tmp_path)
    before = log.writer.tail_nbytes
    runs = (puts(1, 3), session(4))
    assert log.writer.append(runs, 1, 0) == frame_nbytes(runs) == log.writer.tail_nbytes - before
    assert log.writer.append((), 5, 0) == 48
    log.writer.check()


def test_frames_are_kept_until_a_sync_covers_them(tmp_path: Path) -> None:
    log = Log.begin(tmp_path)
    log.put(2)
    log.append(session(3))
    kept = log.writer.unsynced()
    assert [first for first, _ in kept] == [1, 3]
    assert flat([(first, run) for first, runs in kept for run in runs]) == log.written
    assert log.writer.sync() == 3 and log.writer.unsynced() == []
    fs_calls = log.writer.sync()
    assert fs_calls == 3


def test_a_sync_beside_appends_forgets_only_what_it_covered(tmp_path: Path) -> None:
    log = Log.begin(tmp_path, segment_nbytes=4 << 20)
    stop = threading.Event()
    failures: list[BaseException] = []

    def sync() -> None:
        try:
            while not stop.is_set():
                log.writer.sync()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=sync)
    thread.start()
    for _ in range(1000):
        log.writer.append([puts(log.next_lsn, 2)], log.next_lsn, 0)
        log.next_lsn += 2
    stop.set()
    thread.join()
    assert not failures and log.writer.sync() == 2000
    log.writer.check()
    records, read = log.read()
    assert len(records) == 2000 and read.end.end is End.CLEAN


def test_rotation_syncs_what_it_leaves(tmp_path: Path) -> None:
    fs = FailingFs()
    log = Log.begin(tmp_path, fs)
    log.put(3)
    fs.calls.clear()
    log.writer.rotate(open_number=1, checkpoint=NOTHING, durable_lsn=0)
    assert fs.calls == ["sync", "allocate", "write", "sync", "sync_dir"]
    assert log.writer.segment_number == 2
    log.put()
    records, _ = log.read()
    assert records == log.written


def test_a_rotation_that_finds_no_space_leaves_the_old_segment_open(tmp_path: Path) -> None:
    fs = FailingFs()
    log = Log.begin(tmp_path, fs)
    log.put()
    for operation in ("allocate", "write", "sync_dir"):
        fs.fail(operation)
        with pytest.raises(OSError, match="injected"):
            log.rotate()
        log.put()
    assert os.listdir(log.wal_dir) == ["0000000001.wal"]
    log.rotate()
    assert log.writer.segment_number == 5  # numbers of failed ones are used up
    log.put()
    assert log.read()[0] == log.written


def test_a_failed_append_ends_the_segment(tmp_path: Path) -> None:
    fs = FailingFs()
    log = Log.begin(tmp_path, fs)
    log.put()
    fs.fail("write")
    with pytest.raises(OSError, match="injected"):
        log.put()
    with pytest.raises(OSError):
        log.put()
    repeat(log)
    log.put()
    assert log.read()[0] == log.written and log.read()[1].end.end is End.CLEAN


def repeat(log: Log, kept: list[tuple[int, tuple[Run, ...]]] | None = None) -> None:
    """What the journal does after a failure: leave the segment, start one that says it all again."""
    frames = (kept or []) + log.writer.abandon()
    log.writer.check()
    first = frames[0][0] if frames else log.next_lsn
    log.writer.start(first, open_number=1, checkpoint=NOTHING, durable_lsn=log.durable_lsn, repeat=frames)
    log.sync()


@pytest.mark.parametrize("synced", [0, 1, 3])
def test_after_a_failed_sync_the_next_segment_says_it_again(tmp_path: Path, synced: int) -> None:
    fs = FailingFs()
    log = Log.begin(tmp_path, fs)
    for _ in range(synced):
        log.put(2)
    log.sync()
    log.put(2)
    log.append(session(log.next_lsn))
    log.append()
    fs.fail("sync")
    with pytest.raises(OSError, match="injected"):
        log.writer.sync()
    with pytest.raises(OSError):
        log.writer.sync()
    log.writer.check()
    repeat(log)
    log.put()
    records, read = log.read()
    assert records == log.written and read.end.end is End.CLEAN and not read.damage
    assert read.durable_lsn == log.durable_lsn


def test_a_process_killed_while_a_segment_repeats_loses_nothing() -> None:
    images: list[Image] = []
    fs = SimFs()
    log = Log.begin(Path("/sim"), fs)
    log.put(2)
    log.sync()
    log.put(3)
    log.append(session(log.next_lsn))
    fs.before_op = lambda _op: images.append(fs.disk.seen())
    repeat(log)
    assert len(images) >= 5
    for image in images:
        read = read_log(SimFs(image), log.wal_dir, 0)
        assert flat(list(read.runs())) == log.written and not read.damage


def test_two_failures_in_a_row_lose_nothing(tmp_path: Path) -> None:
    fs = FailingFs()
    log = Log.begin(tmp_path, fs)
    log.put(2)
    log.sync()
    log.put(3)
    fs.fail("sync")
    with pytest.raises(OSError):
        log.writer.sync()
    kept = log.writer.unsynced()
    for operation in ("sync", "write", "allocate"):
        fs.fail(operation)
        with pytest.raises(OSError):
            repeat(log, [] if operation == "sync" else kept)
    repeat(log, kept)
    log.put()
    records, read = log.read()
    assert records == log.written and not read.damage


def test_programmers_errors_are_asserted(tmp_path: Path) -> None:
    log = Log.begin(tmp_path)
    for first, durable in ((2, 0), (1, 1)):
        with pytest.raises(AssertionError):
            log.writer.append([puts(1, 1)], first, durable)
    with pytest.raises(AssertionError):
        log.put(200)  # does not fit
    with pytest.raises(AssertionError):
        log.writer.unlink_segment(1)
    log.put()
    with pytest.raises(AssertionError, match="not synced"):
        log.start()


def test_a_closed_writer_takes_nothing(tmp_path: Path) -> None:
    log = Log.begin(tmp_path)
    log.put()
    log.writer.close()
    log.writer.close()
    with pytest.raises(OSError):
        log.put()
    with pytest.raises(OSError):
        log.writer.sync()


def test_old_segments_are_unlinked_by_number(tmp_path: Path) -> None:
    log = Log.begin(tmp_path)
    log.rotate()
    log.writer.unlink_segment(1)
    assert os.listdir(log.wal_dir) == ["0000000002.wal"]


def test_a_writer_that_never_started_has_no_room(tmp_path: Path) -> None:
    writer = LogWriter(FailingFs(), str(tmp_path), segment_nbytes=SEGMENT_NBYTES)
    assert writer.room_nbytes == 0 and writer.segment_number == 0
    with pytest.raises(OSError):
        writer.append((), 1, 0)


@pytest.mark.parametrize("segment_nbytes", [SEGMENT_NBYTES, 256 * 1024, 4 << 20])
def test_space_ahead_of_the_tail_is_written_before_it_is_used(tmp_path: Path, segment_nbytes: int) -> None:
    """So that a sync needs no journal of the file system; what lies there reads zeros as before."""
    log = Log.begin(tmp_path, segment_nbytes=segment_nbytes)
    while log.writer.room_nbytes > 2000:
        log.put(min(segment_nbytes >> 13, log.writer.room_nbytes // 300))
        raw, tail = log.path(1).read_bytes(), log.writer.tail_nbytes
        assert len(raw) == segment_nbytes and raw.count(0, tail) == segment_nbytes - tail
    blocks = log.path(1).stat().st_blocks
    log.sync()
    assert log.path(1).stat().st_blocks == blocks
    assert log.read()[1].end.end is End.CLEAN
    log.writer.check()


def test_few_writes_blank_ahead(tmp_path: Path) -> None:
    fs = FailingFs()
    log = Log.begin(tmp_path, fs, segment_nbytes=4 << 20)
    for _ in range(200):
        log.put(5)
    assert fs.calls.count("write") == 201, "one write a frame, the blank space with it"
