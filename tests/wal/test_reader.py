"""The three ends of a log, and which segments count."""

from __future__ import annotations

import os
import random
import resource
import struct
from pathlib import Path

import pytest
import xxhash
from log_files import NOTHING, SEGMENT_NBYTES, FailingFs, Log, flat, puts, rewrite, session

from tieredkv.errors import NewerFormat
from tieredkv.system import OsFs
from tieredkv.wal import CheckpointRef, LogWriter
from tieredkv.wal.format import FRAME_HEADER_NBYTES, HEADER_NBYTES, encode_frame
from tieredkv.wal.reader import End, Head, SegmentReader, read_log, scan_segments


def small_log(root: Path) -> Log:
    """Five frames: two known durable, three after that (one empty), of which the log says nothing more."""
    log = Log.begin(root)
    log.put(2)
    log.append(session(3))
    log.sync()
    log.put()
    log.append()
    log.append(session(5), puts(6, 2))
    return log


def frame_ends(log: Log, number: int = 1) -> list[int]:
    """Offset of each frame's end, the header page's first."""
    ends = [HEADER_NBYTES]
    header = scan_segments(log.fs, log.wal_dir)[number - 1].header
    assert header is not None
    reader = SegmentReader(log.fs, log.wal_dir, header)
    ends += [reader.offset for _ in reader.frames()]
    reader.close()
    return ends


def overwrite(path: Path, offset: int, new: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(new)


def test_a_clean_log_is_read_whole(tmp_path: Path) -> None:
    log = small_log(tmp_path)
    records, read = log.read()
    assert records == log.written and len(records) == 7
    assert read.end.end is End.CLEAN and str(read.end) == "clean" and read.damage == []
    assert (read.last_lsn, read.durable_lsn, read.seen_lsn) == (7, 3, 7)
    assert (read.num_records, read.num_segments) == (7, 1)
    assert read.position.number == 1 and read.position.lsn == 7


@pytest.mark.parametrize("after", range(9))
def test_records_at_or_below_the_checkpoint_are_left_out(tmp_path: Path, after: int) -> None:
    log = small_log(tmp_path)
    records, read = log.read(after)
    assert records == [record for record in log.written if record[0] > after]
    assert read.last_lsn == max(7, after)


def test_a_log_that_is_not_there_is_empty(tmp_path: Path) -> None:
    read = read_log(OsFs(), str(tmp_path / "wal"), 0)
    assert list(read.runs()) == [] and read.end.end is End.CLEAN and read.seen_lsn == 0


def test_torn_at_every_byte(tmp_path: Path) -> None:
    """Zeros or old bytes from any byte on: what is whole before it applies, nothing else does."""
    log = small_log(tmp_path)
    raw = log.path(1).read_bytes()
    ends = frame_ends(log)
    lsns = [0, 2, 3, 4, 4, 7]
    for cut in range(HEADER_NBYTES, ends[-1] + 8):
        rewrite(log.path(1), raw[:cut] + bytes(SEGMENT_NBYTES - cut))
        records, read = log.read()
        # a frame may end in zeros, so that the cut leaves it whole
        frames = max(
            i for i, end in enumerate(ends) if end <= len(raw[:cut].rstrip(b"\0")) or not any(raw[cut:end])
        )
        assert records == log.written[: lsns[frames]], f"cut at {cut}"
        assert read.position.lsn == lsns[frames]
        lost_synced = lsns[frames] < read.durable_lsn
        torn = any(raw[ends[frames] : cut])
        assert read.end.end is (End.CORRUPT if lost_synced else End.TORN if torn else End.CLEAN), (
            f"cut at {cut}"
        )


def test_truncated_at_every_byte(tmp_path: Path) -> None:
    log = small_log(tmp_path)
    raw = log.path(1).read_bytes()
    for cut in (*range(0, HEADER_NBYTES, 97), *range(HEADER_NBYTES, frame_ends(log)[-1] + 9), len(raw) - 1):
        rewrite(log.path(1), raw[:cut])
        records, read = log.read()
        assert records == log.written[: len(records)]
        if cut < HEADER_NBYTES:
            assert records == []
            assert scan_segments(log.fs, log.wal_dir)[0].head is (Head.TORN if cut else Head.BLANK)
        else:
            assert read.end.end is not End.CLEAN, f"cut at {cut}"


def test_one_flipped_bit_in_every_byte(tmp_path: Path) -> None:
    """Never a wrong record; the end is corrupt exactly where a later frame proves that it was synced."""
    log = small_log(tmp_path)
    raw = log.path(1).read_bytes()
    ends = frame_ends(log)
    lsns = [0, 2, 3, 4, 4, 7]
    for at in range(HEADER_NBYTES, ends[-1] + 16):
        damaged = bytearray(raw)
        damaged[at] ^= 1 << (at % 8)
        rewrite(log.path(1), damaged)
        records, read = log.read()
        hit = sum(end <= at for end in ends) - 1
        assert records == log.written[: lsns[hit]], f"byte {at}"
        # frames 3 and later say that LSN 3 is durable
        assert read.end.end is (End.CORRUPT if hit < 2 else End.TORN), f"byte {at}"
        assert read.end.offset == ends[hit] and read.end.number == 1
        assert read.seen_lsn == (7 if hit < 4 else lsns[hit])
        assert bool(read.damage) == (hit < 2)


def test_one_flipped_bit_in_every_byte_of_the_header(tmp_path: Path) -> None:
    log = small_log(tmp_path)
    raw = log.path(1).read_bytes()
    for at in (*range(128), *range(128, HEADER_NBYTES, 61), *range(4080, HEADER_NBYTES)):
        damaged = bytearray(raw)
        damaged[at] ^= 1 << (at % 8)
        rewrite(log.path(1), damaged)
        records, read = log.read()
        assert records == [] and read.end.end is End.CORRUPT and read.damage
        assert read.seen_lsn >= 7  # it cannot tell which LSNs it held, so new ones stay clear of all


def test_good_frames_behind_a_torn_one_are_not_applied_and_push_the_next_lsn_up(tmp_path: Path) -> None:
    log = small_log(tmp_path)
    ends = frame_ends(log)
    overwrite(log.path(1), ends[2], bytes(ends[3] - ends[2]))  # frame 3 never reached the disk, 4 and 5 did
    records, read = log.read()
    assert [lsn for lsn, *_ in records] == [1, 2, 3]
    assert (
        read.end.end is End.TORN and read.end.offset == ends[2] and read.seen_lsn == 7 and read.last_lsn == 3
    )


def test_what_lies_in_the_blank_tail_makes_the_end_torn(tmp_path: Path) -> None:
    log = small_log(tmp_path)
    overwrite(log.path(1), SEGMENT_NBYTES - 1, b"\x01")
    records, read = log.read()
    assert records == log.written and read.end.end is End.TORN
    assert read.end.offset + read.end.nbytes == SEGMENT_NBYTES


def test_a_zeroed_synced_tail_is_corrupt_though_it_looks_like_an_end(tmp_path: Path) -> None:
    log = Log.begin(tmp_path)
    log.put(2)
    log.rotate()
    log.put(2)
    log.sync()
    log.append()
    ends = frame_ends(log, 2)
    overwrite(log.path(2), ends[0], bytes(ends[1] - ends[0]))
    records, read = log.read()
    assert records == log.written[:2] and read.end.end is End.CORRUPT


@pytest.mark.parametrize("field, offset, size", [("nbytes", 40, 4), ("num_records", 44, 4), ("lsn", 24, 8)])
@pytest.mark.parametrize("value", [0, 1, 2**31, 2**32 - 1])
@pytest.mark.parametrize("sealed", [False, True])
def test_absurd_fields_end_the_log(
    tmp_path: Path, field: str, offset: int, size: int, value: int, sealed: bool
) -> None:
    log = small_log(tmp_path)
    ends = frame_ends(log)
    raw = bytearray(log.path(1).read_bytes())
    start, end = ends[1], ends[2]
    raw[start + offset : start + offset + size] = value.to_bytes(size, "little")
    if sealed:
        seed = int.from_bytes(raw[16:24], "little")
        checksum = xxhash.xxh3_64_intdigest(bytes(raw[start + 8 : end]), seed)
        raw[start : start + 8] = struct.pack("<Q", checksum)
    rewrite(log.path(1), raw)
    records, read = log.read()
    if field == "num_records" and value == 1:
        assert records == log.written  # that is what it says anyway
    else:
        assert records == log.written[:2] and read.end.end is End.CORRUPT
    assert read.seen_lsn < 2**33


def test_stale_frames_of_another_salt_are_an_end(tmp_path: Path) -> None:
    """A segment laid over blocks that held another one: its old frames are behind the new ones."""
    (tmp_path / "old").mkdir()
    old = small_log(tmp_path / "old")
    log = Log.begin(tmp_path)
    log.put(2)
    end = frame_ends(log)[-1]
    raw = bytearray(log.path(1).read_bytes())
    old_raw = old.path(1).read_bytes()
    for start in (HEADER_NBYTES, frame_ends(old)[2]):  # once where it would fit by LSN
        raw[end:] = old_raw[start : start + SEGMENT_NBYTES - end].ljust(SEGMENT_NBYTES - end, b"\0")
        rewrite(log.path(1), raw)
        records, read = log.read()
        assert records == log.written and read.end.end is End.TORN and read.seen_lsn == 2


def test_a_frame_moved_or_repeated_is_not_applied(tmp_path: Path) -> None:
    log = small_log(tmp_path)
    ends = frame_ends(log)
    raw = bytearray(log.path(1).read_bytes())
    again = raw[ends[4] : ends[5]]
    raw[ends[5] : ends[5] + len(again)] = again
    rewrite(log.path(1), raw)
    records, read = log.read()
    assert records == log.written and read.end.end is End.TORN


def test_a_frame_that_follows_another_than_the_one_there_is_not_applied(tmp_path: Path) -> None:
    log = small_log(tmp_path)
    header = scan_segments(log.fs, log.wal_dir)[0].header
    assert header is not None
    other, _ = encode_frame(header, header.checksum, 1, 0, [puts(100, 2)])
    overwrite(log.path(1), HEADER_NBYTES, other)
    records, read = log.read()
    assert [lsn for lsn, *_ in records] == [1, 2] and read.end.end is End.CORRUPT


@pytest.mark.parametrize("link", ["whole", "another"])
def test_what_lies_beyond_the_cut_is_not_applied(tmp_path: Path, link: str) -> None:
    """Also where the next segment follows another history than the one that is there."""
    fs = FailingFs()
    log = Log.begin(tmp_path, fs)
    log.put(2)
    log.sync()
    log.append()  # carries the durable LSN, and is itself not synced any more
    log.put(3)
    fs.fail("sync")
    with pytest.raises(OSError):
        log.writer.sync()
    log.writer.abandon()
    log.writer.start(3, open_number=1, checkpoint=NOTHING, durable_lsn=2)
    log.writer.append([session(3)], 3, 2)
    if link == "another":
        page = bytearray(log.path(2).read_bytes()[:HEADER_NBYTES])
        page[72] ^= 1
        page[4088:] = struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(page[:4088])))
        overwrite(log.path(2), 0, bytes(page))
    records, read = log.read()
    if link == "whole":
        assert records == log.written[:2] + flat([(3, session(3))]) and not read.damage
    else:
        assert records == log.written[:2] and read.end.end is End.CORRUPT


def three_segments(root: Path) -> Log:
    log = Log.begin(root)
    for _ in range(3):
        log.put(3)
        log.append(session(log.next_lsn))
        log.rotate()
    log.put(2)
    log.sync()
    log.append()
    return log


def test_segments_form_one_log(tmp_path: Path) -> None:
    log = three_segments(tmp_path)
    records, read = log.read()
    assert records == log.written and read.num_segments == 4 and read.end.end is End.CLEAN
    records, read = log.read(8)
    assert records == log.written[8:] and read.num_segments == 2  # wholly vouched ones are not read


@pytest.mark.parametrize("missing, left", [(1, 0), (2, 4), (3, 8)])
@pytest.mark.parametrize("how", ["gone", "header", "empty"])
def test_a_hole_between_segments_stops_the_log(tmp_path: Path, missing: int, left: int, how: str) -> None:
    log = three_segments(tmp_path)
    if how == "gone":
        log.path(missing).unlink()
    elif how == "header":
        overwrite(log.path(missing), 200, b"rot")
    else:
        rewrite(log.path(missing), b"")
    records, read = log.read()
    assert records == log.written[:left]
    assert read.end.end is End.CORRUPT and any("missing" in line for line in read.damage)
    assert read.seen_lsn == 14 and read.durable_lsn == 14
    # vouched for by a checkpoint, it is not needed
    records, read = log.read(missing * 4)
    assert records == log.written[missing * 4 :] and read.damage == []


def test_a_segment_cut_short_inside_stops_the_log_there(tmp_path: Path) -> None:
    log = three_segments(tmp_path)
    ends = frame_ends(log, 2)
    for cut in (ends[1], ends[1] + 5):
        os.truncate(log.path(2), cut)
        records, read = log.read()
        assert records == log.written[:7] and read.end.end is End.CORRUPT and read.end.number == 2
        assert read.position.number == 2 and read.position.lsn == 7


def test_the_newest_segment_without_its_header_is_corruption_only_if_it_held_frames(tmp_path: Path) -> None:
    log = three_segments(tmp_path)
    raw = log.path(4).read_bytes()
    rewrite(log.path(4), raw[:2000] + bytes(SEGMENT_NBYTES - 2000))
    records, read = log.read()
    assert records == log.written[:12] and read.end.end is End.TORN and not read.damage
    rewrite(log.path(4), bytes(SEGMENT_NBYTES))
    records, read = log.read()
    assert records == log.written[:12] and read.end.end is End.CLEAN and not read.damage
    rewrite(log.path(4), bytes(2000) + raw[2000:])
    records, read = log.read()
    assert records == log.written[:12] and read.end.end is End.CORRUPT and read.end.number == 4


def test_a_segment_given_up_is_passed_over(tmp_path: Path) -> None:
    """An earlier recovery stopped in segment 2 and began segment 5 from there."""
    log = three_segments(tmp_path)
    overwrite(log.path(2), frame_ends(log, 2)[1] + 50, b"rot")
    records, read = log.read()
    assert len(records) == 7
    writer = LogWriter(
        log.fs, log.wal_dir, segment_nbytes=SEGMENT_NBYTES, next_number=5, position=read.position
    )
    first = read.seen_lsn + 1
    writer.start(first, open_number=2, checkpoint=NOTHING, durable_lsn=7)
    writer.append([puts(first, 2)], first, 7)
    records, read = log.read()
    assert records == log.written[:7] + flat([(first, puts(first, 2))])
    assert read.damage == [] and read.end.end is End.CLEAN and read.num_segments == 3
    assert read.last_lsn == first + 1


def test_newer_is_refused_and_a_misnamed_segment_is_damaged(tmp_path: Path) -> None:
    log = three_segments(tmp_path)
    os.rename(log.path(4), log.path(9))
    assert [s.head for s in scan_segments(log.fs, log.wal_dir)] == [Head.GOOD] * 3 + [Head.DAMAGED]
    page = bytearray(log.path(3).read_bytes()[:HEADER_NBYTES])
    page[8] = 9
    page[4088:] = struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(page[:4088])))
    overwrite(log.path(3), 0, bytes(page))
    with pytest.raises(NewerFormat, match="segment 3"):
        log.read()


def test_odd_things_with_a_segments_name(tmp_path: Path) -> None:
    log = three_segments(tmp_path)
    log.path(5).mkdir()
    os.mkfifo(log.path(6))
    os.symlink(log.path(1), log.path(7))
    with open(log.path(8), "wb") as file:
        file.truncate(1 << 40)
    Path(log.wal_dir, "notes.txt").write_text("not ours")
    heads = {s.number: s.head for s in scan_segments(log.fs, log.wal_dir)}
    good, odd = dict.fromkeys((1, 2, 3, 4), Head.GOOD), dict.fromkeys((5, 6, 7, 8), Head.DAMAGED)
    assert heads == good | odd
    assert log.read()[0] == log.written


@pytest.mark.parametrize("after", [3, 4])
def test_damage_that_the_checkpoint_vouches_for_costs_nothing(tmp_path: Path, after: int) -> None:
    log = small_log(tmp_path)
    overwrite(log.path(1), frame_ends(log)[0] + 60, b"rot")
    records, read = log.read(after)
    assert records == log.written[after:] and read.end.end is End.CLEAN
    assert len(read.damage) == 1 and "nothing lost" in read.damage[0]
    assert log.read(1)[1].end.end is End.CORRUPT


def test_bytes_that_cannot_be_read_are_damage(tmp_path: Path) -> None:
    fs = FailingFs()
    log = Log.begin(tmp_path, fs)
    for _ in range(10):
        log.put(8)
    log.sync()
    log.append()
    fs.unreadable = [(2 * 4096 + 100, 1)]
    records, read = log.read()
    assert records == log.written[: len(records)] and 0 < len(records) < 80
    assert read.end.end is End.CORRUPT and read.seen_lsn == 80


def test_tiny_and_huge_frames_merge_into_bounded_runs(tmp_path: Path) -> None:
    log = Log.begin(tmp_path, segment_nbytes=8 << 20)
    for count in (1, 1, 1, 40000, 1, 5):
        log.put(count)
    log.append(session(1), session(2))
    log.put(3)
    runs = list(read_log(log.fs, log.wal_dir, 0).runs())
    assert [(first, len(run)) for first, run in runs] == [(1, 40003), (40004, 6), (40010, 2), (40012, 3)]
    assert flat(runs) == log.written


def test_memory_stays_bounded(tmp_path: Path) -> None:
    log = Log.begin(tmp_path, segment_nbytes=32 << 20)
    for _ in range(300):
        log.writer.append([puts(log.next_lsn, 1000)], log.next_lsn, 0)
        log.next_lsn += 1000
    before = anonymous_nbytes()
    read = read_log(log.fs, log.wal_dir, 0)
    peak = 0
    for _ in read.runs():
        peak = max(peak, anonymous_nbytes() - before)
    assert read.num_records == 300_000
    assert peak < 24 << 20, f"{peak >> 20} MiB"


def anonymous_nbytes() -> int:
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    line = next(line for line in status.read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def test_random_damage_never_applies_a_wrong_record(tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    log = three_segments(tmp_path)
    whole = {number: log.path(number).read_bytes() for number in range(1, 5)}
    for _ in range(300):
        for number, raw in whole.items():
            rewrite(log.path(number), raw)
        for _ in range(rng.randrange(1, 4)):
            path = log.path(rng.randrange(1, 5))
            raw = bytearray(path.read_bytes())
            at, size = rng.randrange(len(raw)), rng.choice([1, 8, 48, 512, 4096])
            source = rng.choice([bytes(size), rng.randbytes(size), raw[:size], raw[4096 : 4096 + size]])
            raw[at : at + size] = source[: len(raw) - at]
            rewrite(path, raw)
        records, read = log.read()
        assert records == log.written[: len(records)]
        assert read.seen_lsn >= read.last_lsn >= len(records)
        if len(records) < 8:  # what later headers vouch for
            assert read.end.end is not End.CLEAN


def test_a_checkpoint_reference_travels_in_the_header(tmp_path: Path) -> None:
    log = Log.begin(tmp_path)
    log.put(2)
    ref = CheckpointRef(2, 4096, b"x" * 16)
    log.rotate(ref)
    headers = [s.header for s in scan_segments(log.fs, log.wal_dir)]
    assert [h.checkpoint for h in headers if h] == [NOTHING, ref]
    assert FRAME_HEADER_NBYTES == 48
