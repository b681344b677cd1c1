"""The simulated disk: what a crash can and cannot take, faults, determinism, shrinking."""

from __future__ import annotations

import errno
import random
from pathlib import Path

import pytest

from tieredkv.errors import StoreHeld
from tieredkv.testing.sim_disk import Image, Item, shrink
from tieredkv.testing.sim_fs import Fault, Op, SimFs

SECTOR = 512


def written(fs: SimFs, path: str, data: bytes, sync: bool = False) -> None:
    file = fs.open_file(path, create=True)
    file.pwritev([data], 0)
    if sync:
        file.datasync()
        fs.sync_dir(path.rpartition("/")[0])
    file.close()


def disk(**options: object) -> SimFs:
    fs = SimFs(direct=False, **options)  # type: ignore[arg-type]
    fs.make_dir("/d")
    return fs


def images(fs: SimFs, count: int = 300, seed: int = 1) -> list[Image]:
    frozen, rng = fs.disk.freeze(), random.Random(seed)
    return [frozen.image(frozen.draw(rng)) for _ in range(count)]


def test_what_is_synced_survives_every_crash() -> None:
    fs = disk()
    written(fs, "/d/a", b"x" * 2000, sync=True)
    assert all(image.files == {"/d/a": b"x" * 2000} for image in images(fs))
    assert list(fs.disk.freeze().items()) == []


def test_unsynced_data_is_lost_torn_kept_and_its_name_apart_from_it() -> None:
    fs = disk()
    written(fs, "/d/a", bytes(range(1, 5)) * SECTOR)  # four sectors
    seen = {image.files.get("/d/a") for image in images(fs)}
    assert None in seen and b"" in seen and bytes(range(1, 5)) * SECTOR in seen
    assert any(data and bytes(SECTOR) in data and any(data) for data in seen if data), "some sectors, not all"
    assert bytes(4 * SECTOR) in seen, "the size without the data"


def test_no_crash_invents_bytes() -> None:
    fs = disk()
    written(fs, "/d/a", b"a" * 4096, sync=True)
    file = fs.open_file("/d/a", writable=True)
    file.pwritev([b"b" * 1024], 512)
    file.pwritev([b"c" * 1024], 1024)
    for image in images(fs):
        data = image.files["/d/a"]
        assert len(data) == 4096
        for at in range(0, 4096, SECTOR):
            sector = data[at : at + SECTOR]
            allowed = (
                {b"a"[0]}
                | ({b"b"[0]} if 512 <= at < 1536 else set())
                | ({b"c"[0]} if 1024 <= at < 2048 else set())
            )
            assert set(sector) <= allowed and len(set(sector)) == 1, f"a torn sector at {at}"


def test_ground_gained_without_data_can_be_stale() -> None:
    fs = disk()
    written(fs, "/d/a", b"x" * 1024)
    frozen = fs.disk.freeze()
    lost = frozenset(item for item in frozen.items() if item.kind == "data")
    assert frozen.image(lost).files["/d/a"] == bytes(1024)
    assert frozen.image(lost, stale=True).files["/d/a"] not in (bytes(1024), b"x" * 1024)


def test_renames_are_whole_and_names_go_one_by_one() -> None:
    fs = disk()
    for name in ("old", "tmp"):
        written(fs, f"/d/{name}", name.encode() * 100, sync=True)
    fs.rename("/d/tmp", "/d/new")
    fs.unlink("/d/old")
    seen = {tuple(sorted(image.files)) for image in images(fs)}
    assert seen == {("/d/old", "/d/tmp"), ("/d/tmp",), ("/d/new", "/d/old"), ("/d/new",)}
    fs.sync_dir("/d")
    assert {tuple(sorted(image.files)) for image in images(fs)} == {("/d/new",)}


@pytest.mark.parametrize("effect, cached", [("keep", b"new!"), ("revert", b"old!")])
def test_a_failed_sync_is_final_and_its_pages_are_never_written(effect: str, cached: bytes) -> None:
    fs = disk()
    written(fs, "/d/a", b"old!", sync=True)
    fs.faults.append(Fault("datasync", effect=effect))
    file = fs.open_file("/d/a", writable=True)
    file.pwritev([b"new!"], 0)
    for _ in range(2):
        with pytest.raises(OSError):
            file.datasync()
    again = fs.open_file("/d/a", writable=True)
    again.datasync()
    buffer = bytearray(4)
    again.preadv([buffer], 0)
    assert bytes(buffer) == cached
    assert {image.files["/d/a"] for image in images(fs)} == {b"old!"}


def test_a_lying_sync_says_yes_and_does_nothing() -> None:
    fs = disk()
    fs.faults.append(Fault("datasync", effect="lie"))
    written(fs, "/d/a", b"x" * 600, sync=True)
    assert b"" in {image.files["/d/a"] for image in images(fs)}


def test_a_short_write_leaves_whole_sectors_and_an_error() -> None:
    fs = disk()
    fs.faults.append(Fault("pwritev", effect="short", error=errno.ENOSPC))
    with pytest.raises(OSError) as caught:
        written(fs, "/d/a", b"x" * 4096)
    assert caught.value.errno == errno.ENOSPC
    assert fs.file_nbytes("/d/a") % SECTOR == 0 and fs.file_nbytes("/d/a") < 4096


def test_the_nth_call_fails_once_or_from_there_on() -> None:
    fs = disk()
    fs.faults += [Fault("create", nth=2, error=errno.ENOSPC), Fault("unlink", nth=1, again=True)]
    written(fs, "/d/a", b"")
    with pytest.raises(OSError):
        written(fs, "/d/b", b"")
    written(fs, "/d/b", b"")
    for _ in range(2):
        with pytest.raises(OSError):
            fs.unlink("/d/a")
    assert [fault.num_fired for fault in fs.faults] == [1, 2]


def test_space_runs_out_and_comes_back_by_punching() -> None:
    fs = disk(capacity_nbytes=3 * 4096)
    file = fs.open_file("/d/a", create=True)
    file.allocate(0, 3 * 4096)
    assert fs.free_nbytes("/d") == 0
    with pytest.raises(OSError) as caught:
        file.allocate(3 * 4096, 4096)
    assert caught.value.errno == errno.ENOSPC
    file.punch(0, 4096)
    file.allocate(3 * 4096, 4096)


def test_direct_transfers_must_be_aligned() -> None:
    fs = SimFs(direct=True)
    fs.make_dir("/d")
    file = fs.open_file("/d/a", create=True, direct=True)
    with pytest.raises(OSError):
        file.pwritev([b"x" * 100], 0)
    file.pwritev([b"x" * 4096], 4096)


def test_a_powered_off_disk_answers_nothing() -> None:
    fs = disk()
    fs.power_off()
    with pytest.raises(OSError):
        fs.list_names("/d")


def test_a_library_writes_through_a_real_file_that_nothing_has_synced() -> None:
    fs = disk()
    written(fs, "/d/a", b"", sync=True)
    with fs.as_real_file("/d/a") as real, open(real, "wb") as out:
        out.write(b"by a library")
    assert fs.disk.seen().files["/d/a"] == b"by a library"
    assert b"" in {image.files["/d/a"] for image in images(fs)}
    with fs.as_real_file("/d/a") as real, open(real, "rb") as file:
        assert file.read() == b"by a library"


def test_one_holder_of_the_lock() -> None:
    fs = disk()
    held = fs.lock("/d/LOCK")
    with pytest.raises(StoreHeld):
        fs.lock("/d/LOCK")
    held.close()
    fs.lock("/d/LOCK")


def test_the_same_seed_gives_the_same_crashes_and_equal_images_have_one_digest() -> None:
    digests = []
    for _ in range(2):
        fs = disk()
        written(fs, "/d/a", b"x" * 30_000)
        digests.append([image.digest() for image in images(fs, 50, seed=7)])
    assert digests[0] == digests[1] and 5 < len(set(digests[0])) < 50


def test_a_hook_sees_every_change_before_it_happens() -> None:
    fs = disk()
    ops: list[tuple[Op, int]] = []
    fs.before_op = lambda op: ops.append((op, len(fs.disk.dirs["/d"].seen)))
    written(fs, "/d/a", b"x", sync=True)
    assert [op.call for op, _ in ops] == ["create", "pwritev", "datasync", "sync_dir"]
    assert [number for _, number in ops] == [0, 1, 1, 1]


def test_a_failing_crash_shrinks_to_the_loss_that_matters() -> None:
    fs = disk()
    written(fs, "/d/a", b"x" * 8192)
    frozen = fs.disk.freeze()
    bad = Item("data", next(iter(frozen.inodes)), 0, 5)
    lost = shrink(frozenset(frozen.items()), lambda items: bad in items)
    assert lost == {bad}


def test_an_image_changes_by_bit_and_comes_back_as_a_disk() -> None:
    fs = disk()
    written(fs, "/d/a", b"\x00\x01", sync=True)
    image = fs.disk.seen().with_bit_flipped("/d/a", 8)
    assert SimFs(image).disk.seen().files == {"/d/a": b"\x00\x00"}
    assert image.with_file("/d/a", None).files == {}


def test_an_image_is_laid_out_as_real_files_and_read_back(tmp_path: Path) -> None:
    fs = disk()
    fs.make_dir("/d/sub")
    written(fs, "/d/sub/a", b"x" * 700, sync=True)
    image = fs.disk.seen()
    image.write_to(tmp_path / "out", "/d")
    assert (tmp_path / "out/sub/a").read_bytes() == b"x" * 700
    assert Image.read_from(tmp_path / "out", "/d").digest() == image.digest()
