"""Checkpoints: whole or refused, and never a dead process."""

from __future__ import annotations

import errno
import os
import random
import stat
from dataclasses import replace
from pathlib import Path

import lmdb
import numpy as np
import pytest
from log_files import FailingFs, rewrite

from tieredkv.errors import CorruptFormat
from tieredkv.system import OsFs
from tieredkv.table import checkpoint as module
from tieredkv.table.checkpoint import (
    checkpoint_name,
    is_lmdb,
    parse_checkpoint_name,
    prune_checkpoints,
    read_checkpoint,
    write_checkpoint,
)
from tieredkv.wal import CheckpointRef
from tieredkv.wal.format import BEFORE_THE_LOG, SegmentHeader
from tieredkv.wal.records import PUT_DTYPE

ARRAYS = {
    "digest": np.arange(3200, dtype=np.uint8).reshape(100, 32),
    "slot": np.arange(300, dtype=np.int64).reshape(3, 100),
    "puts": np.zeros(7, PUT_DTYPE),
    "big_endian": np.arange(5, dtype=">u4"),
    "empty": np.zeros((0, 4), np.float32),
    "strided": np.arange(100, dtype=np.int16)[::3],
    "catalog": b'{"name": "x"}',
    "nothing": b"",
}


def assert_same(found, expected) -> None:  # type: ignore[no-untyped-def]
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, bytes):
            assert found[name] == value
        else:
            assert found[name].dtype == value.dtype.newbyteorder("<") and found[name].shape == value.shape
            assert found[name].tobytes() == value.astype(value.dtype.newbyteorder("<")).tobytes(), name


def test_arrays_come_back(tmp_path: Path) -> None:
    fs, root = OsFs(), str(tmp_path)
    ref = write_checkpoint(fs, root, 42, ARRAYS)
    assert os.listdir(root) == ["table-00000000000000000042.lmdb"]
    path = tmp_path / checkpoint_name(42)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and path.stat().st_size == ref.nbytes
    found = read_checkpoint(fs, root, ref)
    assert_same(found, ARRAYS)
    found["digest"][0, 0] = 9  # its own copy
    assert_same(read_checkpoint(fs, root, ref), ARRAYS)
    assert os.listdir(root) == [path.name]


def test_the_mode_is_ours_whatever_the_umask(tmp_path: Path) -> None:
    for umask in (0, 0o777):
        old = os.umask(umask)
        try:
            write_checkpoint(OsFs(), str(tmp_path), 1, ARRAYS)
        finally:
            os.umask(old)
        assert stat.S_IMODE((tmp_path / checkpoint_name(1)).stat().st_mode) == 0o600


def test_the_empty_table_needs_no_file(tmp_path: Path) -> None:
    assert read_checkpoint(OsFs(), str(tmp_path), CheckpointRef()) == {}


def test_big_arrays_are_cut_into_pieces_that_other_programs_can_map(tmp_path: Path) -> None:
    rows = np.random.default_rng(1).integers(0, 2**60, (1 << 17, 10))
    arrays = {"rows": rows, "tail": b"t" * (module._PIECE_NBYTES + 1)}
    ref = write_checkpoint(OsFs(), str(tmp_path), 7, arrays)
    assert_same(read_checkpoint(OsFs(), str(tmp_path), ref), arrays)
    path = str(tmp_path / checkpoint_name(7))
    with lmdb.open(path, subdir=False, lock=False, readonly=True) as env, env.begin(buffers=True) as txn:
        keys = [bytes(key) for key, _ in txn.cursor()]
        assert keys == [b"rows", b"rows/000", b"rows/001", b"rows/002", b"tail", b"tail/000", b"tail/001"]
        piece = np.frombuffer(txn.get(b"rows/000"), np.int64)
        assert np.array_equal(piece, rows.reshape(-1)[: len(piece)])


def test_a_checkpoint_costs_little_more_than_its_arrays(tmp_path: Path) -> None:
    arrays = {f"column{i}": np.full((100_000, 16), i, np.uint8) for i in range(8)}
    ref = write_checkpoint(OsFs(), str(tmp_path), 7, arrays)
    assert ref.nbytes < 1.05 * sum(a.nbytes for a in arrays.values()) + (64 << 10)


def test_writing_again_replaces(tmp_path: Path) -> None:
    fs, root = OsFs(), str(tmp_path)
    old = write_checkpoint(fs, root, 5, {"a": b"one"})
    (tmp_path / f"{checkpoint_name(5)}.tmp").write_bytes(b"left over")
    new = write_checkpoint(fs, root, 5, {"a": b"another"})
    assert read_checkpoint(fs, root, new) == {"a": b"another"}
    with pytest.raises(CorruptFormat):
        read_checkpoint(fs, root, old)


@pytest.mark.parametrize("where", ["start", "middle", "end"])
def test_damage_anywhere_is_refused_by_plain_reads(tmp_path: Path, where: str) -> None:
    fs, root = OsFs(), str(tmp_path)
    ref = write_checkpoint(fs, root, 3, ARRAYS)
    path = tmp_path / checkpoint_name(3)
    raw = path.read_bytes()
    third = len(raw) // 3
    start = {"start": 0, "middle": third, "end": 2 * third}[where]
    for at in range(start, start + third, 61):
        damaged = bytearray(raw)
        damaged[at] ^= 1 << (at % 8)
        rewrite(path, bytes(damaged))
        with pytest.raises(CorruptFormat):
            read_checkpoint(fs, root, ref)


def test_every_truncation_and_growth_is_refused_and_kills_nobody(tmp_path: Path) -> None:
    """In a child, so that a SIGBUS would show as one."""
    fs, root = OsFs(), str(tmp_path)
    ref = write_checkpoint(fs, root, 3, ARRAYS)
    path = tmp_path / checkpoint_name(3)
    raw = path.read_bytes()
    pid = os.fork()
    if pid == 0:
        code = 0
        for nbytes in (*range(0, len(raw), 509), len(raw) - 1, len(raw) + 1, len(raw) + 4096):
            rewrite(path, raw[:nbytes].ljust(nbytes, b"\0"))
            try:
                read_checkpoint(fs, root, ref)
                code = 1
            except CorruptFormat:
                continue
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_odd_things_with_its_name_are_refused(tmp_path: Path) -> None:
    fs, root = OsFs(), str(tmp_path)
    ref = write_checkpoint(fs, root, 3, ARRAYS)
    path = tmp_path / checkpoint_name(3)
    os.rename(path, tmp_path / "elsewhere")
    with pytest.raises(CorruptFormat, match="No such file"):
        read_checkpoint(fs, root, ref)
    makers = (
        lambda: os.symlink(tmp_path / "elsewhere", path),
        lambda: os.mkfifo(path),
        lambda: path.write_bytes(b""),
    )
    for make in makers:
        make()
        with pytest.raises(CorruptFormat):
            read_checkpoint(fs, root, ref)
        assert not is_lmdb(fs, f"{root}/{checkpoint_name(3)}")
        os.unlink(path)
    with open(path, "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(CorruptFormat):
        read_checkpoint(fs, root, ref)


def test_a_file_that_verifies_but_makes_no_sense_is_corrupt(tmp_path: Path) -> None:
    """Written by something else, and vouched for: still no exception but ours, and no absurd allocation."""
    fs, root = OsFs(), str(tmp_path)
    descriptions = [
        b"",
        b"x" * 30,
        b"{}",
        b'{"dtype":"<u8","shape":[1000000000000],"xxh3_64":[]}',
        b'{"dtype":"|O","shape":[1],"xxh3_64":[]}',
        b'{"dtype":"<u8","shape":[1],"xxh3_64":["00"]}',
    ]
    for lsn, text in enumerate(descriptions, 1):
        path = str(tmp_path / checkpoint_name(lsn))
        with lmdb.open(path, subdir=False, lock=False) as env, env.begin(write=True) as txn:
            txn.put(b"a", module.xxhash.xxh3_64_digest(text) + text if len(text) != 30 else text)
        ref = module._digest(fs.open_file(path), lsn)
        with pytest.raises(CorruptFormat):
            read_checkpoint(fs, root, ref)
    path = str(tmp_path / checkpoint_name(99))
    Path(path).write_bytes(b"no lmdb at all" * 1000)
    with pytest.raises(CorruptFormat):
        read_checkpoint(fs, root, module._digest(fs.open_file(path), 99))


@pytest.mark.parametrize("operation", ["sync", "sync_dir"])
def test_a_failed_write_leaves_nothing_unfinished(tmp_path: Path, operation: str) -> None:
    fs, root = FailingFs(), str(tmp_path)
    fs.fail(operation)
    with pytest.raises(OSError, match="injected"):
        write_checkpoint(fs, root, 3, ARRAYS)
    assert [name for name in os.listdir(root) if name.endswith(".tmp")] == []
    write_checkpoint(fs, root, 3, ARRAYS)


def test_lmdbs_own_errors_become_the_systems(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))
            write_checkpoint(OsFs(), str(tmp_path), 3, {"a": b"x" * 100_000})
        except OSError as error:
            code = 0 if error.errno in (errno.EFBIG, errno.EIO) else 2
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert os.listdir(tmp_path) == []


def test_names_listing_and_pruning(tmp_path: Path) -> None:
    fs, root = OsFs(), str(tmp_path)
    for lsn in (9, 10, 2**63):
        (tmp_path / checkpoint_name(lsn)).touch()
    (tmp_path / f"{checkpoint_name(11)}.tmp").touch()
    (tmp_path / "table-1.lmdb").touch()
    (tmp_path / checkpoint_name(12)).mkdir()
    assert {parse_checkpoint_name(name) for name in fs.list_names(root)} == {9, 10, 12, 2**63, None}
    assert parse_checkpoint_name("table-1.lmdb") is None
    failures = prune_checkpoints(fs, root, {10})
    assert len(failures) == 1 and checkpoint_name(12) in failures[0]
    assert sorted(os.listdir(root)) == sorted([checkpoint_name(10), checkpoint_name(12), "table-1.lmdb"])


def test_no_descriptor_and_little_memory_is_left_behind(tmp_path: Path) -> None:
    fs, root = OsFs(), str(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    for lsn in range(1, 20):
        ref = write_checkpoint(fs, root, lsn, ARRAYS)
        read_checkpoint(fs, root, ref)
        with pytest.raises(CorruptFormat):
            read_checkpoint(fs, root, CheckpointRef(lsn, ref.nbytes, random.randbytes(16)))
    assert len(os.listdir("/proc/self/fd")) == before


def test_an_absurd_length_in_a_header_is_no_header(tmp_path: Path) -> None:
    header = SegmentHeader(1, 1, 0, 1, BEFORE_THE_LOG, CheckpointRef(1, 1 << 60), 1 << 20)
    assert not header.is_plausible
    assert replace(header, checkpoint=CheckpointRef(1, 1 << 30)).is_plausible


def test_a_length_that_nobody_checked_maps_no_more_than_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fs, root = OsFs(), str(tmp_path)
    ref = write_checkpoint(fs, root, 3, {"a": np.arange(100)})
    monkeypatch.setattr("tieredkv.table.checkpoint._verify", lambda *_: None)
    found = read_checkpoint(fs, root, replace(ref, nbytes=1 << 62))
    assert found["a"].tolist() == list(range(100))
