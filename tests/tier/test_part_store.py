"""One contract for every place that parts lie in on disk."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
from faulty_fs import FaultyFs

from tieredkv.system.fs import OsFs
from tieredkv.testing.sim_fs import SimFs
from tieredkv.tier import lmdb_store
from tieredkv.tier.base import PartStore, StoreFailed, Verdict
from tieredkv.tier.lmdb_store import LmdbStore
from tieredkv.tier.slab import SlabStore
from tieredkv.tier.slab_format import SLOT_HEADER_NBYTES, aligned_bytes, expected_of, new_headers
from tieredkv.units import KiB, MiB

PAGE = 4096
KINDS = ("direct", "buffered", "mmap", "lmdb")


class Bench:
    """A store of one kind in a directory, and what was put into it."""

    def __init__(self, kind: str, path: Path) -> None:
        self.kind, self.path, self.fs = kind, str(path / "slabs"), FaultyFs()
        self.seed = random.randrange(1 << 30)
        self.chance = np.random.default_rng(self.seed)
        self.num_puts = 0
        self.store = self.opened()

    def opened(self) -> PartStore:
        if self.kind == "lmdb":
            return LmdbStore(self.fs, self.path, map_nbytes=32 * MiB, chunk_nbytes=64 * KiB)
        return SlabStore(self.fs, self.path, chunk_nbytes=64 * KiB, disk_io=self.kind)

    def reopen(self) -> None:
        self.store.close()
        self.store = self.opened()

    def put(self, part_nbytes: int, slots: Sequence[int], aligned: bool = True) -> tuple[Any, list[bytes]]:
        """Random payloads with headers of their own in `slots`; what a read should expect, and the bytes."""
        buffers = memory(len(slots), part_nbytes, aligned)
        headers = new_headers(len(slots))
        for buffer, header in zip(buffers, headers, strict=True):
            buffer[:] = self.chance.bytes(part_nbytes)
            for name in ("digest", "parent", "namespace"):
                header[name] = np.frombuffer(self.chance.bytes(32), np.uint8)
        headers["put_seq"] = np.arange(self.num_puts, self.num_puts + len(slots))
        headers["group"] = 1
        self.num_puts += len(slots)
        checksums = self.store.write(part_nbytes, slots, headers, buffers)
        assert (checksums == headers["checksum"]).all()
        return expected_of(headers), [bytes(buffer) for buffer in buffers]

    def get(
        self, part_nbytes: int, slots: Sequence[int], expected: Any, aligned: bool = True
    ) -> tuple[list[Verdict], list[bytes]]:
        into = memory(len(slots), part_nbytes, aligned)
        verdicts = self.store.read(part_nbytes, slots, expected, into, 20.0)
        return verdicts, [bytes(buffer) for buffer in into]

    def edit(self, part_nbytes: int, change: Callable[[Callable[[int], bytearray]], None]) -> None:
        """Close, let `change` alter whole slots (header and payload) behind the store's back, open again."""
        self.store.sync()
        self.store.close()
        size = SLOT_HEADER_NBYTES + part_nbytes
        touched: dict[int, bytearray] = {}
        if self.kind == "lmdb":
            with lmdb.open(f"{self.path}/{lmdb_store.PAYLOAD_NAME}", subdir=False, map_size=32 * MiB) as env:
                with env.begin() as txn:
                    key = lmdb_store._KEY.pack
                    change(lambda n: touched.setdefault(n, bytearray(txn.get(key(part_nbytes, n)))))
                with env.begin(write=True) as txn:
                    for slot, body in touched.items():
                        txn.put(key(part_nbytes, slot), bytes(body))
        else:
            with open(f"{self.path}/{part_nbytes}-000.slab", "r+b") as file:

                def load(slot: int) -> bytearray:
                    file.seek(slot * size)
                    return touched.setdefault(slot, bytearray(file.read(size)))

                change(load)
                for slot, body in touched.items():
                    file.seek(slot * size)
                    file.write(body)
        self.store = self.opened()


def memory(count: int, part_nbytes: int, aligned: bool) -> list[memoryview]:
    step = part_nbytes if aligned else part_nbytes + 64
    whole = aligned_bytes(count * step + 64).data[0 if aligned else 8 :]
    return [whole[n * step : n * step + part_nbytes] for n in range(count)]


@pytest.fixture(params=KINDS)
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(request.param, tmp_path)
    print(f"seed {bench.seed}")
    yield bench
    bench.store.check()
    bench.store.close()


@pytest.fixture(params=KINDS[:3])
def slabs(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(request.param, tmp_path)
    yield bench
    bench.fs.heal()
    bench.store.check()
    bench.store.close()


@pytest.mark.parametrize("part_nbytes", [PAGE, 5 * PAGE, 9 * MiB])
@pytest.mark.parametrize("aligned", [True, False])
def test_what_was_put_comes_back_bit_for_bit(bench: Bench, part_nbytes: int, aligned: bool) -> None:
    slots = [0, 1] if part_nbytes > MiB else [3, 4, 5, 40, 0, 1, 19, 18]
    expected, payloads = bench.put(part_nbytes, slots, aligned)
    for _ in range(2):
        verdicts, found = bench.get(part_nbytes, slots, expected, not aligned)
        assert verdicts == [Verdict.OK] * len(slots) and found == payloads
        bench.store.sync()
        bench.reopen()
    order = list(reversed(range(len(slots))))
    verdicts, found = bench.get(part_nbytes, [slots[i] for i in order], expected[order])
    assert verdicts == [Verdict.OK] * len(slots) and found == [payloads[i] for i in order]


def test_an_empty_batch_is_nothing(bench: Bench) -> None:
    expected, _ = bench.put(PAGE, [])
    assert bench.get(PAGE, [], expected) == ([], [])
    assert bench.store.num_chunks() == {}


def test_a_slot_that_was_used_again_is_not_what_it_was(bench: Bench) -> None:
    old, _ = bench.put(PAGE, [0, 1, 2])
    new, payloads = bench.put(PAGE, [1])
    assert bench.get(PAGE, [0, 1, 2], old)[0] == [Verdict.OK, Verdict.OTHER, Verdict.OK]
    assert bench.get(PAGE, [1], new) == ([Verdict.OK], payloads)


@pytest.mark.parametrize("field", ["namespace", "digest", "group", "put_seq"])
def test_every_field_of_the_identity_counts(bench: Bench, field: str) -> None:
    expected, _ = bench.put(PAGE, [0])
    expected[field] += 1
    assert bench.get(PAGE, [0], expected)[0] == [Verdict.OTHER]


def test_another_checksum_in_the_table_is_corruption(bench: Bench) -> None:
    expected, _ = bench.put(PAGE, [0])
    expected["checksum"] += 1
    assert bench.get(PAGE, [0], expected)[0] == [Verdict.CORRUPT]


def test_damage_and_swaps_are_seen_and_stay_where_they_are(bench: Bench) -> None:
    part = 2 * PAGE
    expected, payloads = bench.put(part, range(8))

    def change(slot: Callable[[int], bytearray]) -> None:
        slot(1)[SLOT_HEADER_NBYTES + part - 1] ^= 1  # the payload's last bit
        slot(2)[2000] ^= 16  # a token in the header
        slot(3)[:] = bytes(len(slot(3)))
        slot(4)[:], slot(5)[:] = bytes(slot(5)), bytes(slot(4))
        slot(6)[SLOT_HEADER_NBYTES:] = slot(7)[SLOT_HEADER_NBYTES:]

    bench.edit(part, change)
    verdicts, found = bench.get(part, range(8), expected)
    ok, corrupt, other = Verdict.OK, Verdict.CORRUPT, Verdict.OTHER
    assert verdicts == [ok, corrupt, corrupt, corrupt, other, other, corrupt, ok]
    assert (found[0], found[7]) == (payloads[0], payloads[7])


def test_slots_that_were_never_written_hold_nothing(bench: Bench) -> None:
    expected, _ = bench.put(PAGE, [0])
    verdicts, _ = bench.get(PAGE, [0, 5, 900], np.repeat(expected, 3))
    assert verdicts[0] is Verdict.OK and Verdict.OK not in verdicts[1:] and Verdict.OTHER not in verdicts[1:]
    assert bench.get(3 * PAGE, [0], expected)[0][0] in (Verdict.CORRUPT, Verdict.UNREADABLE)


def test_headers_can_be_read_without_payloads(bench: Bench) -> None:
    small, _ = bench.put(PAGE, [2, 600, 7])
    large, _ = bench.put(100 * PAGE, [1])

    def change(slot: Callable[[int], bytearray]) -> None:
        slot(7)[100] ^= 1

    bench.edit(PAGE, change)
    batch = bench.store.read_headers(PAGE, [600, 7, 2, 3])
    assert batch.sound.tolist() == [True, False, True, False]
    assert batch.headers["digest"][0].tobytes() == small["digest"][1].tobytes()
    found: dict[tuple[int, int], tuple[bool, bytes]] = {}
    for batch in bench.store.iter_headers():
        for slot, header, sound in zip(
            batch.slots.tolist(), batch.headers, batch.sound.tolist(), strict=True
        ):
            found[batch.part_nbytes, slot] = (sound, header["digest"].tobytes())
    assert set(found) == {(PAGE, 2), (PAGE, 7), (PAGE, 600), (100 * PAGE, 1)}
    assert found[PAGE, 2] == (True, small["digest"][0].tobytes()) and not found[PAGE, 7][0]
    assert found[100 * PAGE, 1] == (True, large["digest"][0].tobytes())
    assert bench.store.num_chunks() == {PAGE: 600 // 8 + 1, 100 * PAGE: 2}


def test_released_chunks_are_gone_and_their_neighbours_are_not(bench: Bench) -> None:
    expected, _ = bench.put(PAGE, range(24))  # 8 slots a chunk
    before = bench.store.allocated_nbytes
    bench.store.release(PAGE, [1, 77])
    bench.store.release(5 * PAGE, [0])
    bench.store.sync()
    verdicts, _ = bench.get(PAGE, range(24), expected)
    assert verdicts == [Verdict.OK] * 8 + [Verdict.CORRUPT] * 8 + [Verdict.OK] * 8
    if bench.kind != "lmdb":
        assert before == 3 * 64 * KiB and bench.store.allocated_nbytes == 2 * 64 * KiB
    expected, payloads = bench.put(PAGE, range(8, 16))
    assert bench.get(PAGE, range(8, 16), expected) == ([Verdict.OK] * 8, payloads)


def test_space_found_before_is_written_to(bench: Bench) -> None:
    bench.store.reserve(PAGE, [0, 1, 3])  # 8 slots a chunk
    if bench.kind != "lmdb":
        assert bench.store.allocated_nbytes == 3 * 64 * KiB
    expected, payloads = bench.put(PAGE, [2, 9, 25])
    assert bench.get(PAGE, [2, 9, 25], expected) == ([Verdict.OK] * 3, payloads)
    if bench.kind != "lmdb":
        assert bench.store.allocated_nbytes == 3 * 64 * KiB


def test_blanked_slots_hold_no_old_byte(bench: Bench) -> None:
    expected, payloads = bench.put(300 * PAGE, range(3))
    bench.store.blank(300 * PAGE, [1, 50])
    bench.store.sync()
    verdicts, _ = bench.get(300 * PAGE, range(3), expected)
    keeps = Verdict.CORRUPT if bench.store.blank_drops_all else Verdict.OK
    assert verdicts == [keeps, Verdict.CORRUPT, keeps]
    on_disk = b"".join((Path(bench.path) / name).read_bytes() for name in os.listdir(bench.path))
    assert payloads[1][:64] not in on_disk
    expected, payloads = bench.put(300 * PAGE, [1])
    assert bench.get(300 * PAGE, [1], expected) == ([Verdict.OK], payloads)


def test_a_full_disk_refuses_the_put_and_keeps_the_rest(bench: Bench) -> None:
    expected, _ = bench.put(PAGE, range(4))
    if bench.kind == "lmdb":
        with pytest.raises(OSError) as caught:
            bench.put(8 * MiB, range(4))
        assert caught.value.errno == 28
    else:
        bench.fs.fail("allocate", 28)
        with pytest.raises(OSError) as caught:
            bench.put(PAGE, range(4, 40))
        assert caught.value.errno == 28
        bench.fs.heal()
    assert bench.get(PAGE, range(4), expected)[0] == [Verdict.OK] * 4
    new, payloads = bench.put(PAGE, range(4, 12))
    assert bench.get(PAGE, range(4, 12), new) == ([Verdict.OK] * 8, payloads)
    bench.store.sync()


def test_threads_share_a_store(bench: Bench) -> None:
    failures: list[str] = []

    def work(mine: Bench, first: int) -> None:
        slots = range(first, first + 6)
        for _ in range(6):
            expected, payloads = mine.put(2 * PAGE, slots)
            if mine.get(2 * PAGE, slots, expected) != ([Verdict.OK] * 6, payloads):
                failures.append(f"slots from {first}")
            bench.store.sync()

    threads = []
    for number in range(4):
        mine = object.__new__(Bench)
        mine.__dict__.update(bench.__dict__, chance=np.random.default_rng(bench.seed + number))
        threads.append(threading.Thread(target=work, args=(mine, 7 * number)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_closed_store_refuses_and_leaves_no_threads(bench: Bench) -> None:
    expected, _ = bench.put(PAGE, [0])
    assert bench.get(PAGE, [0], expected)[0] == [Verdict.OK]
    bench.store.close()
    bench.store.close()
    with pytest.raises(OSError):
        bench.put(PAGE, [0])
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tieredkv-")]
    bench.store = bench.opened()


def test_a_tool_reads_and_changes_nothing(bench: Bench) -> None:
    expected, payloads = bench.put(PAGE, range(3))
    bench.store.sync()
    bench.store.close()
    before = {name: os.stat(f"{bench.path}/{name}").st_mtime_ns for name in os.listdir(bench.path)}
    if bench.kind == "lmdb":
        bench.store = LmdbStore(bench.fs, bench.path, map_nbytes=MiB, read_only=True)
    else:
        bench.store = SlabStore(bench.fs, bench.path, disk_io=bench.kind, read_only=True)
    assert bench.get(PAGE, range(3), expected) == ([Verdict.OK] * 3, payloads)
    with pytest.raises(OSError) as caught:
        bench.put(PAGE, [0])
    assert caught.value.errno == 30
    assert sum(batch.slots.size for batch in bench.store.iter_headers()) == 3
    assert before == {name: os.stat(f"{bench.path}/{name}").st_mtime_ns for name in os.listdir(bench.path)}


# ---- what only slabs promise -----------------------------------------------------------------------


def test_a_short_file_loses_only_what_it_lacks(slabs: Bench) -> None:
    expected, _ = slabs.put(PAGE, range(6))
    slabs.store.close()
    os.truncate(f"{slabs.path}/{PAGE}-000.slab", 4 * 2 * PAGE + 100)
    slabs.store = slabs.opened()
    verdicts, _ = slabs.get(PAGE, range(6), expected)
    assert verdicts == [Verdict.OK] * 4 + [Verdict.UNREADABLE] * 2
    assert "ends before" in str(slabs.store.troubles()[f"{PAGE}-000.slab"])
    expected, payloads = slabs.put(PAGE, [5])
    assert slabs.get(PAGE, [5], expected) == ([Verdict.OK], payloads)


def test_a_missing_file_is_a_miss(slabs: Bench) -> None:
    expected, _ = slabs.put(PAGE, [0])
    slabs.store.close()
    os.unlink(f"{slabs.path}/{PAGE}-000.slab")
    slabs.store = slabs.opened()
    assert slabs.get(PAGE, [0], expected)[0] == [Verdict.UNREADABLE]
    expected, payloads = slabs.put(PAGE, [0])
    assert slabs.get(PAGE, [0], expected) == ([Verdict.OK], payloads)


def test_something_else_in_a_slabs_place_takes_no_writes(slabs: Bench) -> None:
    os.mkdir(f"{slabs.path}/{PAGE}-000.slab")
    slabs.reopen()
    with pytest.raises(StoreFailed) as caught:
        slabs.put(PAGE, [0])
    assert caught.value.failed[0].name == f"{PAGE}-000.slab"
    expected, payloads = slabs.put(2 * PAGE, [0])
    assert slabs.get(2 * PAGE, [0], expected) == ([Verdict.OK], payloads)


def test_adjacent_slots_are_one_write_and_one_read(slabs: Bench) -> None:
    slabs.put(PAGE, [0])
    slabs.fs.calls.clear()
    expected, _ = slabs.put(PAGE, [8, 9, 10, 11, 20, 2])
    assert slabs.fs.calls["pwritev"] == 3
    slabs.get(PAGE, [8, 9, 10, 11, 20, 2], expected)
    once = {"direct": 1, "buffered": 2, "mmap": 0}  # through the page cache, one page is asked for first
    assert slabs.fs.calls["preadv"] == 3 * once[slabs.kind]


def are_cached(path: str, nbytes: int) -> bool:
    """Whether the page cache has the first `nbytes` of a file; asked by mincore(2), which fetches nothing."""
    pages = (ctypes.c_ubyte * (nbytes // PAGE))()
    with open(path, "rb") as file, mmap.mmap(file.fileno(), nbytes, access=mmap.ACCESS_COPY) as mapped:
        start = ctypes.c_char.from_buffer(mapped)
        failed = ctypes.CDLL(None).mincore(
            ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(nbytes), pages
        )
        del start
    assert not failed
    return all(page & 1 for page in pages)


def read_ahead_of_none(bench: Bench, part_nbytes: int) -> None:
    """The system may have fetched what it lacks by the time that it is asked for, if the first page told it to."""
    with bench.store._slabs[part_nbytes, 0].use() as file:  # type: ignore[attr-defined]
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file._file._fd, 0, 0, os.POSIX_FADV_RANDOM)


@pytest.mark.parametrize("part_nbytes", [PAGE, MiB])
@pytest.mark.parametrize("aligned", [True, False])
def test_what_the_page_cache_lacks_is_read_past_it(tmp_path: Path, part_nbytes: int, aligned: bool) -> None:
    bench = Bench("buffered", tmp_path)
    expected, payloads = bench.put(part_nbytes, range(4))
    bench.store.sync()
    assert bench.get(part_nbytes, range(4), expected, aligned) == ([Verdict.OK] * 4, payloads)
    assert bench.fs.calls["open"] == 0, "all of it is in the page cache"
    slot_nbytes = SLOT_HEADER_NBYTES + part_nbytes
    path = f"{bench.path}/{part_nbytes}-000.slab"
    read_ahead_of_none(bench, part_nbytes)
    with contextlib.closing(OsFs().open_file(path)) as file:
        file.drop_cached(2 * slot_nbytes - PAGE, 4 * slot_nbytes)  # the end of slot 1, and all of 2 and 3
    is_dropped = not are_cached(path, 4 * slot_nbytes)
    assert bench.get(part_nbytes, range(4), expected, aligned) == ([Verdict.OK] * 4, payloads)
    assert bench.fs.calls["open"] == is_dropped, "some file systems keep it"
    bench.store.close()


def test_one_bad_sector_costs_one_part(slabs: Bench) -> None:
    if slabs.kind == "mmap":
        pytest.skip("a bad sector under a map is SIGBUS, and said")
    expected, _ = slabs.put(PAGE, range(5))
    slabs.fs.calls.clear()
    # the read of all five at once meets the sector, and so does the one of slot 2 alone
    slabs.fs.fail("preadv", 5, lambda _name, at: slabs.fs.calls["preadv"] == 1 or at == 2 * 2 * PAGE)
    verdicts, _ = slabs.get(PAGE, range(5), expected)
    assert verdicts == [Verdict.OK, Verdict.OK, Verdict.UNREADABLE, Verdict.OK, Verdict.OK]
    assert slabs.store.troubles()[f"{PAGE}-000.slab"].errno == 5


def test_a_write_that_fails_is_told(slabs: Bench) -> None:
    expected, _ = slabs.put(PAGE, [0])
    slabs.fs.fail("pwritev", 5)
    with pytest.raises(OSError):
        slabs.put(PAGE, [1, 5])
    slabs.fs.heal()
    assert slabs.get(PAGE, [0], expected)[0] == [Verdict.OK]
    expected, payloads = slabs.put(PAGE, [1, 5])
    assert slabs.get(PAGE, [1, 5], expected) == ([Verdict.OK] * 2, payloads)


def test_a_failed_sync_is_final_for_its_slab_alone(slabs: Bench) -> None:
    expected, payloads = slabs.put(PAGE, range(9))
    slabs.store.sync()
    slabs.put(PAGE, [9])
    good, _ = slabs.put(2 * PAGE, [0])
    slabs.fs.fail("datasync", 5, lambda name, _at: name.startswith(f"{PAGE}-"))
    with pytest.raises(StoreFailed) as caught:
        slabs.store.sync()
    (place,) = caught.value.failed
    assert place.name == f"{PAGE}-000.slab" and place.part_nbytes == PAGE and 1 in place.chunks
    assert place.name in str(caught.value)
    slabs.fs.heal()
    for _ in range(2):
        with pytest.raises(StoreFailed):
            slabs.put(PAGE, [3])
    assert slabs.get(PAGE, range(9), expected) == ([Verdict.OK] * 9, payloads)
    assert slabs.get(2 * PAGE, [0], good)[0] == [Verdict.OK]
    slabs.put(2 * PAGE, [1])
    slabs.store.sync()
    slabs.store.release(PAGE, [0])
    assert slabs.get(PAGE, [0], expected[:1])[0] == [Verdict.OK]
    slabs.store.discard(place)
    assert not os.path.exists(f"{slabs.path}/{place.name}")
    expected, payloads = slabs.put(PAGE, [3])
    assert slabs.get(PAGE, [3], expected) == ([Verdict.OK], payloads)
    slabs.store.sync()


def test_the_first_sync_covers_what_an_earlier_process_left(slabs: Bench) -> None:
    slabs.put(PAGE, [0])
    slabs.reopen()  # as after a SIGKILL: written, never synced
    before = slabs.fs.calls["datasync"]
    slabs.store.sync()
    assert slabs.fs.calls["datasync"] == before + 1
    slabs.store.sync()
    assert slabs.fs.calls["datasync"] == before + 1, "once is enough"


def test_a_name_that_may_not_be_durable_is_no_place_to_write_to(slabs: Bench) -> None:
    slabs.fs.fail("sync_dir", 5)
    with pytest.raises(OSError):
        slabs.put(PAGE, [0])
    slabs.fs.heal()
    with pytest.raises(StoreFailed):
        slabs.put(PAGE, [0])


def test_a_file_system_that_turns_read_only_and_back(slabs: Bench) -> None:
    expected, _ = slabs.put(PAGE, [0])
    slabs.store.sync()
    slabs.fs.fail("open_writable", 30)
    slabs.reopen()
    assert slabs.get(PAGE, [0], expected)[0] == [Verdict.OK]
    with pytest.raises(OSError) as caught:
        slabs.put(PAGE, [1])
    assert caught.value.errno == 30 and not isinstance(caught.value, StoreFailed)
    slabs.fs.heal()
    expected, payloads = slabs.put(PAGE, [1])
    assert slabs.get(PAGE, [1], expected) == ([Verdict.OK], payloads)


def test_a_hung_disk_costs_the_deadline_and_the_buffer_is_told_of(slabs: Bench) -> None:
    if slabs.kind == "mmap":
        pytest.skip("a map is not read through the door")
    slots = list(range(0, 40, 2))
    expected, payloads = slabs.put(PAGE, slots)
    gate = slabs.fs.gates["preadv"] = threading.Event()
    into = memory(len(slots), PAGE, aligned=True)
    late: list[int] = []
    verdicts = slabs.store.read(PAGE, slots, expected, into, 0.05, late.append)
    assert verdicts == [Verdict.TIMED_OUT] * len(slots)
    never_began = sorted(late)
    assert 0 < len(never_began) < len(slots)
    gate.set()
    del slabs.fs.gates["preadv"]
    assert slabs.get(PAGE, slots, expected) == ([Verdict.OK] * len(slots), payloads)
    deadline = threading.Event()
    while len(late) < len(slots) and not deadline.wait(0.01):
        pass
    assert sorted(late) == list(range(len(slots)))
    assert all(bytes(into[n]) == bytes(PAGE) for n in never_began)


def test_direct_io_that_is_refused_is_said(tmp_path: Path) -> None:
    bench = Bench("direct", tmp_path)
    bench.fs.no_direct = True
    expected, payloads = bench.put(PAGE, [0, 1], aligned=False)
    assert bench.get(PAGE, [0, 1], expected, aligned=False) == ([Verdict.OK] * 2, payloads)
    assert isinstance(bench.store, SlabStore) and bench.store.direct_refused
    bench.store.close()


def test_slots_and_chunks_go_on_over_the_end_of_a_slab(slabs: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tieredkv.tier.slab.GiB", 88 * KiB)  # 11 slots a slab, 8 a chunk
    slabs.reopen()
    expected, payloads = slabs.put(PAGE, range(30))
    assert sorted(os.listdir(slabs.path)) == [f"{PAGE}-{n:03d}.slab" for n in range(3)]
    assert slabs.get(PAGE, range(30), expected) == ([Verdict.OK] * 30, payloads)
    assert slabs.store.allocated_nbytes == 4 * 64 * KiB or slabs.store.num_chunks() == {PAGE: 4}
    slabs.store.release(PAGE, [1])  # slots 8 to 15, in two slabs
    verdicts, _ = slabs.get(PAGE, range(30), expected)
    assert [n for n, verdict in enumerate(verdicts) if verdict is not Verdict.OK] == list(range(8, 16))
    assert sum(batch.slots.size for batch in slabs.store.iter_headers()) == 22
    slabs.store.sync()
    slabs.reopen()
    assert slabs.store.num_chunks() == {PAGE: 4}
    assert sum(batch.slots.size for batch in slabs.store.iter_headers()) == 22


def test_open_files_stay_few(slabs: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tieredkv.tier.slab._MAX_OPEN", 3)
    puts = {}
    for pages in range(1, 12):
        puts[pages] = slabs.put(pages * PAGE, [0])
        slabs.store.sync()
    num_open = len([name for name in open_files() if name.endswith(".slab") and name.startswith(slabs.path)])
    assert num_open <= (6 if slabs.kind == "mmap" else 3)
    for pages, (expected, payloads) in puts.items():
        assert slabs.get(pages * PAGE, [0], expected) == ([Verdict.OK], payloads)


def open_files() -> list[str]:
    names = []
    for number in os.listdir("/proc/self/fd"):
        try:
            names.append(os.readlink(f"/proc/self/fd/{number}"))
        except FileNotFoundError:
            continue
    return names


@pytest.mark.parametrize("disk_io", ["direct", "buffered"])
def test_after_a_power_cut_what_was_synced_is_there_and_nothing_is_wrong(disk_io: str) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    for number in range(12):
        bench = object.__new__(Bench)
        bench.__dict__.update(kind=disk_io, path="/s/slabs", fs=SimFs(), num_puts=0)
        bench.chance = np.random.default_rng(seed + number)
        bench.store = bench.opened()
        synced, old = bench.put(2 * PAGE, range(8))
        bench.store.sync()
        later, new = bench.put(2 * PAGE, [6, 7, 8, 9, 40])
        frozen = bench.fs.disk.freeze()
        bench.store.close()
        bench.fs = SimFs(frozen.image(frozen.draw(random.Random(seed + number)), stale=number % 2 == 0))
        bench.store = bench.opened()
        verdicts, found = bench.get(2 * PAGE, range(8), synced)
        assert verdicts[:6] == [Verdict.OK] * 6
        assert all(found[n] == old[n] for n in range(8) if verdicts[n] is Verdict.OK)
        verdicts, found = bench.get(2 * PAGE, [6, 7, 8, 9, 40], later)
        assert all(found[n] == new[n] for n in range(5) if verdicts[n] is Verdict.OK)
        assert {slot for batch in bench.store.iter_headers() for slot in batch.slots.tolist()} >= set(
            range(6)
        )
        again, payloads = bench.put(2 * PAGE, [7, 8, 40])
        assert bench.get(2 * PAGE, [7, 8, 40], again) == ([Verdict.OK] * 3, payloads)
        bench.store.sync()
        bench.store.check()
        bench.store.close()


# ---- what only LMDB does ---------------------------------------------------------------------------


def test_a_payload_file_that_lmdb_cannot_use_begins_anew(tmp_path: Path) -> None:
    bench = Bench("lmdb", tmp_path)
    bench.put(PAGE, [0])
    bench.store.close()
    Path(bench.path, lmdb_store.PAYLOAD_NAME).write_bytes(b"something else" * 1000)
    bench.store = bench.opened()
    assert lmdb_store.PAYLOAD_NAME in bench.store.troubles()
    expected, payloads = bench.put(PAGE, [0])
    assert bench.get(PAGE, [0], expected) == ([Verdict.OK], payloads)
    bench.store.close()


def test_a_payload_file_cut_short_gives_misses_and_no_signal(tmp_path: Path) -> None:
    bench = Bench("lmdb", tmp_path)
    expected, _ = bench.put(4 * PAGE, range(20))
    bench.store.close()
    file_path = Path(bench.path, lmdb_store.PAYLOAD_NAME)
    for nbytes in range(file_path.stat().st_size - PAGE, 2 * PAGE, -7 * PAGE):
        os.truncate(file_path, nbytes)
        bench.store = bench.opened()
        verdicts, _ = bench.get(4 * PAGE, range(20), expected)
        assert verdicts != [Verdict.OK] * 20
        bench.store.close()


def test_a_failed_commit_closes_the_file_for_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench("lmdb", tmp_path)
    expected, payloads = bench.put(PAGE, [0])
    with pytest.raises(StoreFailed), bench.store._writing():  # type: ignore[attr-defined]
        raise lmdb.DiskError("made to fail")
    with pytest.raises(StoreFailed) as caught:
        bench.put(PAGE, [1])
    assert bench.get(PAGE, [0], expected) == ([Verdict.OK], payloads)
    bench.store.discard(caught.value.failed[0])
    expected, payloads = bench.put(PAGE, [1])
    assert bench.get(PAGE, [1], expected) == ([Verdict.OK], payloads)
    bench.store.close()


def test_a_plain_file_system_serves_too(tmp_path: Path) -> None:
    store = SlabStore(OsFs(), str(tmp_path / "a" / "slabs"))
    assert store.allocated_nbytes == 0 and not store.direct_refused
    store.close()
