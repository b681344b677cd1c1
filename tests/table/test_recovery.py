"""Opening whatever is there: new, whole, torn, damaged, foreign, held."""

from __future__ import annotations

import os
import random
import signal
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from log_files import SEGMENT_NBYTES, FailingFs, flat, puts, rewrite

from tieredkv.errors import CorruptFormat, DamagedStore, NewerFormat, NotAStore, PathUnusable, StoreHeld
from tieredkv.system import Fs, OsFs
from tieredkv.table.checkpoint import checkpoint_name, write_checkpoint
from tieredkv.table.recovery import Recovered, claim, recover, survey
from tieredkv.tier.slab_format import SlotHeader, encode_into, slab_name
from tieredkv.wal import CheckpointRef, LogWriter, Run
from tieredkv.wal.format import HEADER_NBYTES


class Table:
    """The simplest recoverable: it remembers every record, and checkpoints are lists of them."""

    def __init__(self) -> None:
        self.records: list[tuple[int, int, bytes]] = [(-1, 0, b"rubbish")]

    def clear(self) -> None:
        self.records = []

    def restore(self, arrays: Any) -> None:
        raw = arrays["records"].reshape(-1, 96)
        self.records = [(int(lsn), 1, row.tobytes()) for lsn, row in zip(arrays["lsns"], raw, strict=True)]

    def apply(self, first_lsn: int, run: Run) -> None:
        assert not self.records or first_lsn > self.records[-1][0], "records come in LSN order"
        self.records += flat([(first_lsn, run)])

    def snapshot(self) -> dict[str, Any]:
        return {
            "lsns": np.array([lsn for lsn, *_ in self.records], np.int64),
            "records": np.frombuffer(b"".join(raw for *_, raw in self.records), np.uint8),
        }


class Store:
    """What a journal does, in the small: open, put, sync, checkpoint, kill."""

    def __init__(self, root: Path, fs: Fs | None = None) -> None:
        self.fs = fs or OsFs()
        self.root = str(root)
        self.table = Table()
        self.checkpoint = CheckpointRef()

    def open(self, **options: Any) -> Recovered:
        recovered = recover(self.fs, self.root, self.table, **options)
        self.next_lsn, self.durable_lsn = recovered.next_lsn, recovered.durable_lsn
        self.open_number, self.checkpoint = recovered.open_number, recovered.checkpoint
        self.writer = LogWriter(
            self.fs,
            f"{self.root}/wal",
            segment_nbytes=SEGMENT_NBYTES,
            next_number=recovered.next_segment,
            position=recovered.position,
        )
        if recovered.must_checkpoint:
            self.checkpoint = write_checkpoint(self.fs, self.root, self.next_lsn - 1, self.table.snapshot())
            self.durable_lsn = self.next_lsn - 1
        self.start()
        return recovered

    def start(self) -> None:
        self.writer.start(
            self.next_lsn,
            open_number=self.open_number,
            checkpoint=self.checkpoint,
            durable_lsn=self.durable_lsn,
        )

    def put(self, count: int = 1) -> None:
        run = puts(self.next_lsn, count)
        self.writer.append([run], self.next_lsn, self.durable_lsn)
        self.table.apply(self.next_lsn, run)
        self.next_lsn += count

    def sync(self) -> None:
        self.durable_lsn = self.writer.sync()
        self.writer.append((), self.next_lsn, self.durable_lsn)

    def take_checkpoint(self) -> CheckpointRef:
        self.sync()
        self.writer.sync()
        self.checkpoint = write_checkpoint(self.fs, self.root, self.durable_lsn, self.table.snapshot())
        self.start()
        return self.checkpoint

    def kill(self) -> list[tuple[int, int, bytes]]:
        """End as a killed process does; returns what it had committed."""
        self.writer.close()
        return self.table.records


def used_store(root: Path) -> list[tuple[int, int, bytes]]:
    """Segments 1 to 3, the checkpoints at 5 (named by 2) and 9 (named by 3), records to 12; all synced."""
    store = Store(root)
    store.open()
    store.put(5)
    store.take_checkpoint()
    store.put(4)
    store.take_checkpoint()
    store.put(3)
    store.sync()
    return store.kill()


def files(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def segment(root: Path, number: int) -> Path:
    return root / "wal" / f"{number:010d}.wal"


def flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 0x10
    rewrite(path, bytes(raw))


def test_a_missing_or_empty_directory_is_a_new_store(tmp_path: Path) -> None:
    for name in ("missing", "empty"):
        root = tmp_path / name
        if name == "empty":
            root.mkdir()
        table = Table()
        recovered = recover(OsFs(), str(root), table)
        assert recovered.report.new_store and str(recovered.report) == "a new store"
        assert (recovered.next_lsn, recovered.next_segment, recovered.open_number) == (1, 1, 1)
        assert recovered.position == (0, 0, 0) and not recovered.must_checkpoint and table.records == []
        assert (root / "wal").is_dir()


@pytest.mark.parametrize("stage", range(5))
def test_a_half_made_store_is_a_new_one(tmp_path: Path, stage: int) -> None:
    (tmp_path / "LOCK").write_bytes(b"{}")
    if stage >= 1:
        (tmp_path / "wal").mkdir()
    if stage == 2:
        segment(tmp_path, 1).touch()
    if stage == 3:
        segment(tmp_path, 1).write_bytes(bytes(SEGMENT_NBYTES))
    if stage == 4:
        segment(tmp_path, 1).write_bytes((b"tieredkv" + b"x" * 500).ljust(SEGMENT_NBYTES, b"\0"))
    store = Store(tmp_path)
    recovered = store.open(strict=True)
    assert recovered.report.new_store and not recovered.report.damage
    assert recovered.next_segment == (2 if stage >= 2 else 1)
    assert recovered.open_number == recovered.next_segment
    store.put(3)
    written = store.kill()
    store = Store(tmp_path)
    assert not store.open().report.new_store and store.table.records == written


def test_every_committed_record_comes_back_after_a_kill(tmp_path: Path) -> None:
    written: list[tuple[int, int, bytes]] = []
    for life in range(6):
        store = Store(tmp_path)
        recovered = store.open(strict=True)
        assert store.table.records == written and recovered.report.log_end == "clean"
        assert recovered.open_number == life + 1
        store.put(2)
        if life % 2:
            store.take_checkpoint()
        store.put(1)
        written = store.kill()
    assert [lsn for lsn, *_ in written] == list(range(1, 19))


def test_what_was_replayed_is_durable_only_once_its_payloads_are(tmp_path: Path) -> None:
    """The tail is synced at open, and the next header cuts it there; the slabs may still be in the page cache."""
    store = Store(tmp_path)
    store.open()
    store.put(2)
    store.sync()
    store.put(3)
    store.kill()
    for _ in range(3):
        store = Store(tmp_path)
        recovered = store.open(strict=True)
        assert (recovered.report.last_lsn, recovered.durable_lsn) == (5, 2)
        store.kill()
    rewrite(
        segment(tmp_path, 1), segment(tmp_path, 1).read_bytes()[:-2000]
    )  # the cut is behind it: no matter
    ends = segment(tmp_path, 1).read_bytes().rstrip(b"\0")
    flip(segment(tmp_path, 1), len(ends) - 1)  # but what was synced before the cut is corrupt when it is gone
    assert recover(OsFs(), str(tmp_path), Table()).report.log_end.startswith("corrupt")


def test_the_report_has_the_numbers(tmp_path: Path) -> None:
    used_store(tmp_path)
    report = Store(tmp_path).open().report
    assert (report.checkpoint_lsn, report.num_replayed, report.num_segments) == (9, 3, 1)
    assert (report.last_lsn, report.durable_lsn, report.log_end, report.damage) == (12, 12, "clean", ())
    assert not report.new_store and 0 < report.seconds < 5


def test_recovery_twice_is_recovery_once(tmp_path: Path) -> None:
    written = used_store(tmp_path)
    results = []
    for _ in range(3):
        table = Table()
        recovered = recover(OsFs(), str(tmp_path), table)
        results.append((recovered.next_lsn, recovered.position, recovered.open_number, table.records))
    assert results[0][3] == written and results[0] == results[1] == results[2]


def test_a_torn_end_is_dropped_and_told_even_strictly(tmp_path: Path) -> None:
    written = used_store(tmp_path)
    store = Store(tmp_path)
    store.open()
    store.put(4)
    store.kill()
    flip(segment(tmp_path, 4), HEADER_NBYTES + 100)
    store = Store(tmp_path)
    recovered = store.open(strict=True, salvage=lambda: pytest.fail("a torn end is no damage"))
    assert store.table.records == written
    assert recovered.report.log_end.startswith("torn or damaged in segment 4")
    assert not recovered.must_checkpoint and recovered.next_lsn == 13
    store.put(2)
    written = store.kill()
    store = Store(tmp_path)
    store.open(strict=True)
    assert store.table.records == written


def test_corruption_is_reported_salvaged_and_behind_us_after_one_open(tmp_path: Path) -> None:
    written = used_store(tmp_path)
    flip(segment(tmp_path, 3), HEADER_NBYTES + 60)
    before = files(tmp_path)
    with pytest.raises(DamagedStore, match="corrupt in segment 3"):
        recover(OsFs(), str(tmp_path), Table(), strict=True)
    assert files(tmp_path) == before
    store = Store(tmp_path)
    recovered = store.open(salvage=lambda: 77)
    assert store.table.records == written[:9]
    assert recovered.report.num_salvaged == 77 and recovered.must_checkpoint
    assert recovered.next_lsn == 13, "above every LSN seen"
    store.put(2)
    written = store.kill()
    assert [lsn for lsn, *_ in written] == [*range(1, 10), 13, 14]
    store = Store(tmp_path)
    recovered = store.open(strict=True)
    assert store.table.records == written and recovered.report.damage == ()


def test_a_damaged_checkpoint_falls_back_to_the_one_before_and_its_segments(tmp_path: Path) -> None:
    written = used_store(tmp_path)
    flip(tmp_path / checkpoint_name(9), 5000)
    store = Store(tmp_path)
    recovered = store.open(salvage=lambda: pytest.fail("nothing is lost"))
    assert store.table.records == written
    assert recovered.report.checkpoint_lsn == 5 and len(recovered.report.damage) == 1
    assert recovered.must_checkpoint
    store.kill()
    store = Store(tmp_path)
    assert store.open(strict=True).report.checkpoint_lsn == 12
    assert store.table.records == written


def test_a_checkpoint_written_again_under_its_name_replaces_what_older_headers_say(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.open()
    store.put(5)
    store.take_checkpoint()
    written = store.kill()
    flip(tmp_path / checkpoint_name(5), 5000)
    store = Store(tmp_path)
    assert store.open().must_checkpoint and store.checkpoint.lsn == 5
    store.kill()
    store = Store(tmp_path)
    assert store.open(strict=True).report.damage == ()
    assert store.table.records == written


def test_a_rejected_checkpoint_above_the_newest_header_is_not_tried_again(tmp_path: Path) -> None:
    """Had the checkpoint asked for not been written, the log from the older one on would still recover."""
    written = used_store(tmp_path)
    flip(tmp_path / checkpoint_name(9), 5000)
    store = Store(tmp_path)
    recovered = recover(store.fs, store.root, store.table)
    wal_dir = f"{tmp_path}/wal"
    writer = LogWriter(
        store.fs,
        wal_dir,
        segment_nbytes=SEGMENT_NBYTES,
        next_number=recovered.next_segment,
        position=recovered.position,
    )
    writer.start(
        recovered.next_lsn,
        open_number=recovered.open_number,
        checkpoint=recovered.checkpoint,
        durable_lsn=recovered.durable_lsn,
    )
    store = Store(tmp_path)
    assert store.open(strict=True).report.checkpoint_lsn == 5
    assert store.table.records == written


def test_without_any_checkpoint_the_log_alone_is_enough_if_it_is_all_there(tmp_path: Path) -> None:
    written = used_store(tmp_path)
    for lsn in (5, 9):
        (tmp_path / checkpoint_name(lsn)).unlink()
    store = Store(tmp_path)
    recovered = store.open()
    assert store.table.records == written and len(recovered.report.damage) == 2


def test_without_checkpoints_and_old_segments_salvage_is_all(tmp_path: Path) -> None:
    used_store(tmp_path)
    for lsn in (5, 9):
        flip(tmp_path / checkpoint_name(lsn), 0)
    segment(tmp_path, 1).unlink()
    called = []
    store = Store(tmp_path)
    recovered = store.open(salvage=lambda: called.append(1) or 5)
    assert called == [1] and store.table.records == [] and recovered.report.num_salvaged == 5
    assert recovered.next_lsn == 13 and recovered.open_number == 2 and recovered.must_checkpoint
    assert not recovered.report.new_store
    store.put()
    written = store.kill()
    store = Store(tmp_path)
    store.open(strict=True)
    assert store.table.records == written


def test_the_newest_checkpoint_serves_although_the_log_has_a_hole_behind_it(tmp_path: Path) -> None:
    written = used_store(tmp_path)
    segment(tmp_path, 1).unlink()
    segment(tmp_path, 2).unlink()
    store = Store(tmp_path)
    assert store.open(strict=True).report.damage == ()
    assert store.table.records == written


def test_with_the_log_gone_salvage_is_called(tmp_path: Path) -> None:
    used_store(tmp_path)
    for number in (1, 2, 3):
        flip(segment(tmp_path, number), 100)
    store = Store(tmp_path)
    recovered = store.open(salvage=lambda: 3)
    assert recovered.report.num_salvaged == 3 and store.table.records == []
    assert recovered.open_number == 4 and recovered.next_segment == 4 and recovered.next_lsn > 12
    assert not any(name.startswith("table-0000000000000000000") for name in os.listdir(tmp_path))


@pytest.mark.parametrize("what", ["checkpoint", "slab"])
def test_data_without_a_log_is_a_damaged_store_not_a_new_one(tmp_path: Path, what: str) -> None:
    if what == "checkpoint":
        write_checkpoint(OsFs(), str(tmp_path), 5, {"a": b"b"})
    else:
        (tmp_path / "slabs").mkdir()
        (tmp_path / "slabs" / slab_name(4096, 0)).write_bytes(bytes(8192))
    with pytest.raises(DamagedStore):
        recover(OsFs(), str(tmp_path), Table(), strict=True)
    recovered = Store(tmp_path).open(salvage=lambda: 1)
    assert recovered.report.num_salvaged == 1 and recovered.report.damage


def test_strays_are_removed_and_what_headers_name_is_kept(tmp_path: Path) -> None:
    used_store(tmp_path)
    write_checkpoint(OsFs(), str(tmp_path), 777, {"a": b"b"})
    (tmp_path / f"{checkpoint_name(778)}.tmp").write_bytes(b"half")
    recover(OsFs(), str(tmp_path), Table())
    assert sorted(os.listdir(tmp_path)) == sorted([checkpoint_name(5), checkpoint_name(9), "wal"])


def test_a_folder_of_other_things_is_refused_and_untouched(tmp_path: Path) -> None:
    (tmp_path / "letters").mkdir()
    (tmp_path / "thesis.txt").write_text("...")
    (tmp_path / "wal").mkdir()  # a name of ours is not enough
    (tmp_path / checkpoint_name(5)).write_bytes(b"no checkpoint")
    before = sorted(p.name for p in tmp_path.rglob("*"))
    for refuse in (survey, claim, lambda fs, root: recover(fs, root, Table())):
        with pytest.raises(NotAStore, match="letters"):
            refuse(OsFs(), str(tmp_path))
    assert sorted(p.name for p in tmp_path.rglob("*")) == before


@pytest.mark.parametrize("proof", ["segment", "checkpoint", "slab"])
def test_a_store_with_a_foreign_file_in_it_is_a_store(tmp_path: Path, proof: str) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    if proof == "segment":
        Store(tmp_path / "other").open()
        os.rename(tmp_path / "other" / "wal", tmp_path / "wal")
        os.rmdir(tmp_path / "other")
    elif proof == "checkpoint":
        write_checkpoint(OsFs(), str(tmp_path), 5, {"a": b"b"})
    else:
        raw = bytearray(8192)
        fields: dict[str, Any] = dict.fromkeys(SlotHeader.__dataclass_fields__, 0)
        fields |= dict.fromkeys(("namespace", "digest", "parent"), bytes(32)) | {"tokens": (1, 2)}
        encode_into(raw, SlotHeader(**fields))
        (tmp_path / "slabs").mkdir()
        (tmp_path / "slabs" / slab_name(4096, 0)).write_bytes(raw)
    assert not survey(OsFs(), str(tmp_path)).is_new
    claim(OsFs(), str(tmp_path)).close()
    Store(tmp_path).open()
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_the_root_of_a_fresh_file_system_is_a_new_store(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    assert Store(tmp_path).open().report.new_store


def test_a_newer_format_is_refused_and_untouched(tmp_path: Path) -> None:
    used_store(tmp_path)
    page = bytearray(segment(tmp_path, 2).read_bytes())
    page[8] = 9
    page[4088:4096] = struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(page[:4088])))
    rewrite(segment(tmp_path, 2), bytes(page))
    before = files(tmp_path)
    for refuse in (survey, claim, lambda fs, root: recover(fs, root, Table())):
        with pytest.raises(NewerFormat, match="segment 2"):
            refuse(OsFs(), str(tmp_path))
    assert files(tmp_path) == before


def test_paths_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/nothing/here")):
        with pytest.raises(PathUnusable, match=str(path)):
            claim(OsFs(), str(path))


def test_a_directory_that_may_not_be_written_is_named(tmp_path: Path) -> None:
    """As another user, since permissions do not bind root."""
    (tmp_path / "closed").mkdir(mode=0o700)

    def attempt() -> int:
        os.chdir(tmp_path)  # so that no directory above must be passable
        if os.getuid() == 0:
            os.setuid(65534)
        else:
            os.chmod("closed", 0)
        try:
            claim(OsFs(), "closed")
        except PathUnusable as error:
            return 0 if "closed: Permission denied" in str(error) else 2
        return 3

    assert exit_code(attempt) == 0


def exit_code(work: Callable[[], int]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(work())
        except BaseException:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_claimed_directory_is_claimed_once(tmp_path: Path) -> None:
    root = str(tmp_path / "deep" / "store")
    lock = claim(OsFs(), root)
    with pytest.raises(StoreHeld, match=str(os.getpid())):
        claim(OsFs(), root)
    lock.close()
    claim(OsFs(), root).close()
    assert os.stat(root).st_mode & 0o777 == 0o700


@pytest.mark.parametrize("kind", ["file", "link", "fifo"])
def test_a_wal_that_is_no_directory_is_moved_aside(tmp_path: Path, kind: str) -> None:
    (tmp_path / "LOCK").touch()
    elsewhere = tmp_path.parent / f"elsewhere-{kind}"
    elsewhere.mkdir()
    {
        "file": lambda: (tmp_path / "wal").write_bytes(b"x"),
        "link": lambda: (tmp_path / "wal").symlink_to(elsewhere),
        "fifo": lambda: os.mkfifo(tmp_path / "wal"),
    }[kind]()
    store = Store(tmp_path)
    store.open()
    store.put()
    written = store.kill()
    assert list(elsewhere.iterdir()) == [] and "wal.broken" in os.listdir(tmp_path)
    store = Store(tmp_path)
    store.open()
    assert store.table.records == written


def test_a_tail_that_cannot_be_synced_asks_for_a_checkpoint(tmp_path: Path) -> None:
    written = used_store(tmp_path)
    fs = FailingFs()
    fs.fail("sync")
    store = Store(tmp_path, fs)
    recovered = store.open()
    assert recovered.must_checkpoint
    (said,) = recovered.report.damage
    assert "could not be synced" in said
    assert store.checkpoint.lsn == 12 and store.table.records == written
    rewrite(segment(tmp_path, 3), bytes(SEGMENT_NBYTES))  # as if the power failed now
    store.kill()
    store = Store(tmp_path)
    store.open(strict=True)
    assert store.table.records == written


def test_a_state_that_refuses_a_checkpoint_gets_the_one_before(tmp_path: Path) -> None:
    written = used_store(tmp_path)

    class Picky(Table):
        def restore(self, arrays: Any) -> None:
            super().restore(arrays)
            if len(self.records) == 9:
                raise CorruptFormat("nine rows make no sense")

    table = Picky()
    recovered = recover(OsFs(), str(tmp_path), table)
    assert table.records == written and recovered.report.damage == ("nine rows make no sense",)


def test_absurdly_named_segments_do_not_push_numbers_up(tmp_path: Path) -> None:
    used_store(tmp_path)
    (tmp_path / "wal" / "999999999999999.wal").write_bytes(b"stray")
    segment(tmp_path, 4).mkdir()
    store = Store(tmp_path)
    recovered = store.open()
    assert recovered.next_segment == 5 and recovered.open_number == 4
    store.put()
    written = store.kill()
    store = Store(tmp_path)
    store.open()
    assert store.table.records == written


def test_killed_at_any_step_of_recovery_it_recovers_the_same(tmp_path: Path) -> None:
    """A child dies at the k-th operation that changes something, for every k; then twice in a row."""
    written = used_store(tmp_path)
    flip(tmp_path / checkpoint_name(9), 5000)
    write_checkpoint(OsFs(), str(tmp_path), 777, {"a": b"b"})

    class Dying(OsFs):
        left = 0

        def _step(self) -> None:
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            self.left -= 1

        def open_file(self, path: str, **options: Any) -> Any:  # type: ignore[override]
            if options.get("writable") or options.get("create"):
                self._step()
            return super().open_file(path, **options)

        def unlink(self, path: str) -> None:
            self._step()
            super().unlink(path)

        def rename(self, old: str, new: str) -> None:
            self._step()
            super().rename(old, new)

        def sync_dir(self, path: str) -> None:
            self._step()
            super().sync_dir(path)

    for left in range(20):

        def life(left: int = left) -> int:
            fs = Dying()
            fs.left = left
            store = Store(tmp_path, fs)
            store.open()
            return int(store.table.records != written)

        codes = [exit_code(life) for _ in range(2)]
        assert set(codes) <= {0, -signal.SIGKILL}, f"step {left}: {codes}"
        table = Table()
        assert recover(OsFs(), str(tmp_path), table).report.last_lsn >= 12
        assert table.records == written
    assert codes == [0, 0]


def test_random_damage_opens_and_never_invents_a_record(tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    written = used_store(tmp_path)
    whole = files(tmp_path)
    for _ in range(60):
        for path in tmp_path.rglob("*"):
            if path.is_file() and str(path.relative_to(tmp_path)) not in whole:
                path.unlink()
        for name, raw in whole.items():
            (tmp_path / name).touch()
            rewrite(tmp_path / name, raw)
        for _ in range(rng.randrange(1, 4)):
            path = tmp_path / rng.choice(sorted(whole))
            raw = bytearray(path.read_bytes())
            at = rng.randrange(len(raw)) if raw else 0
            raw[at : at + 8] = rng.choice([b"", rng.randbytes(8), bytes(8)])
            rewrite(path, bytes(raw))
        store = Store(tmp_path)
        store.open()
        records = store.table.records
        assert records == written[: len(records)]
        store.put(1)
        again = store.kill()
        store = Store(tmp_path)
        store.open()
        assert store.table.records == again


def test_little_anonymous_memory_is_used_for_a_large_store(tmp_path: Path) -> None:
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("needs /proc")

    def anonymous() -> int:
        line = next(line for line in status.read_text().splitlines() if line.startswith("RssAnon"))
        return int(line.split()[1]) << 10

    class Keeper(Table):
        def restore(self, arrays: Any) -> None:
            self.kept = arrays

        def apply(self, first_lsn: int, run: Run) -> None:
            pass

    arrays = {"rows": np.ones((100_000, 120), np.uint8)}
    store = Store(tmp_path)
    store.open()
    store.put(2)
    store.sync()
    store.checkpoint = write_checkpoint(store.fs, store.root, 2, arrays)
    store.writer.sync()
    store.start()
    store.kill()
    keeper = Keeper()
    before = anonymous()
    recovered = recover(OsFs(), str(tmp_path), keeper)
    grown = anonymous() - before
    assert recovered.report.checkpoint_lsn == 2 and keeper.kept["rows"].shape == (100_000, 120)
    assert grown < 24 << 20, f"{grown >> 20} MiB"
