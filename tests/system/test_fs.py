"""The operating system's files behind `Fs`."""

from __future__ import annotations

import errno
import mmap
import os
import stat
from pathlib import Path

import pytest

from tieredkv.errors import PathUnusable
from tieredkv.system import OsFs, path_of
from tieredkv.system import fs as fs_module
from tieredkv.system.fs import OsFile

PAGE = 4096


def mode_of(path: str) -> int:
    return stat.S_IMODE(os.lstat(path).st_mode)


@pytest.fixture
def root(tmp_path: Path) -> str:
    return str(tmp_path)


@pytest.fixture(params=[0o000, 0o077, 0o777])
def umask(request: pytest.FixtureRequest):
    old = os.umask(request.param)
    yield request.param
    os.umask(old)


def test_a_path_of_any_kind_is_the_same_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/of-one")
    for given in ("~/store", b"~/store", Path("~/store")):
        assert path_of(given) == "/home/of-one/store"
    assert os.fsencode(path_of(b"no \xff text")) == b"no \xff text"
    for given in ("a\0b", b"a\0b"):
        with pytest.raises(PathUnusable, match="null byte"):
            path_of(given)


def test_directories_and_files_are_private_whatever_the_umask(root: str, umask: int) -> None:
    fs = OsFs()
    fs.make_dir(f"{root}/a/b/c")
    file = fs.open_file(f"{root}/a/b/c/f", create=True)
    assert [mode_of(f"{root}/{p}") for p in ("a", "a/b", "a/b/c")] == [0o700] * 3
    assert mode_of(f"{root}/a/b/c/f") == 0o600
    file.close()


def test_making_a_directory_again_changes_nothing_and_a_file_is_none(root: str) -> None:
    fs = OsFs()
    os.mkdir(f"{root}/d", 0o755)
    fs.make_dir(f"{root}/d")
    assert mode_of(f"{root}/d") == 0o755
    Path(root, "f").touch()
    with pytest.raises(NotADirectoryError):
        fs.make_dir(f"{root}/f")


def test_names_and_moves(root: str) -> None:
    fs = OsFs()
    for name in ("b", "a"):
        fs.open_file(f"{root}/{name}", create=True).close()
    assert fs.list_names(root) == ["a", "b"]
    fs.rename(f"{root}/a", f"{root}/b")
    fs.sync_dir(root)
    assert fs.list_names(root) == ["b"] and not fs.exists(f"{root}/a")
    fs.unlink(f"{root}/b")
    assert fs.list_names(root) == []
    assert fs.free_nbytes(root) > 0


def test_creation_is_exclusive(root: str) -> None:
    fs = OsFs()
    fs.open_file(f"{root}/f", create=True).close()
    for direct in (False, True):
        with pytest.raises(FileExistsError):
            fs.open_file(f"{root}/f", create=True, direct=direct)


def test_only_regular_files_are_opened(root: str) -> None:
    fs = OsFs()
    os.mkfifo(f"{root}/fifo")
    os.mkdir(f"{root}/dir")
    Path(root, "f").write_bytes(b"x")
    os.symlink(f"{root}/f", f"{root}/link")
    os.symlink(f"{root}/dir", f"{root}/dirlink")
    for name in ("fifo", "dir", "link", "missing"):
        for writable in (False, True):
            with pytest.raises(OSError):
                fs.open_file(f"{root}/{name}", writable=writable)
    assert fs.is_dir(f"{root}/dir") and not fs.is_dir(f"{root}/dirlink") and not fs.is_dir(f"{root}/f")
    assert fs.exists(f"{root}/link")


def test_scattered_buffers_arrive_whole(root: str) -> None:
    file = OsFs().open_file(f"{root}/f", create=True)
    parts = [bytes([i % 251]) * (i % 7) for i in range(3000)]  # above IOV_MAX, some empty
    file.pwritev(parts, 10)
    assert file.nbytes() == 10 + sum(map(len, parts))
    into = [bytearray(len(part)) for part in parts]
    assert file.preadv(into, 10) == sum(map(len, parts))
    assert b"".join(into) == b"".join(parts)
    short = bytearray(100)
    assert file.preadv([short], file.nbytes() - 3) == 3
    file.close()


def test_short_transfers_are_continued(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = OsFs().open_file(f"{root}/f", create=True)
    write, read = os.pwritev, os.preadv
    monkeypatch.setattr(os, "pwritev", lambda fd, views, at: write(fd, [views[0][:3]], at))
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: read(fd, [views[0][:2]], at))
    file.pwritev([b"abcdefg", b"hijk"], 0)
    into = [bytearray(4), bytearray(7)]
    assert file.preadv(into, 0) == 11
    assert b"".join(into) == b"abcdefghijk"
    monkeypatch.setattr(os, "pwritev", lambda fd, views, at: 0)
    with pytest.raises(OSError):
        file.pwritev([b"x"], 0)
    file.close()


def test_a_true_short_write_ends_in_the_systems_error(root: str) -> None:
    resource = pytest.importorskip("resource")
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
            OsFs().open_file(f"{root}/f", create=True).pwritev([b"x" * 20000], 0)
        except OSError as error:
            code = 0 if error.errno == errno.EFBIG else 2
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert os.path.getsize(f"{root}/f") == 8192


def test_a_file_that_was_removed_is_not_synced(root: str) -> None:
    file = OsFs().open_file(f"{root}/f", create=True)
    file.datasync()
    os.rename(f"{root}/f", f"{root}/g")
    file.datasync()
    os.unlink(f"{root}/g")
    for _ in range(2):
        with pytest.raises(OSError, match=r"removed|final"):
            file.datasync()
    file.close()


def test_a_failed_sync_is_final(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = OsFs().open_file(f"{root}/f", create=True)
    file.datasync()

    def fail(fd: int) -> None:
        raise OSError(errno.EIO, "injected")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", fail)
        with pytest.raises(OSError, match="injected"):
            file.datasync()
    for _ in range(2):
        with pytest.raises(OSError, match="final"):
            file.datasync()
    file.close()


def test_space_is_reserved_for_real_and_reads_zeros(root: str) -> None:
    file = OsFs().open_file(f"{root}/f", create=True)
    file.pwritev([b"x" * 10], 0)
    file.allocate(0, 1 << 20)
    assert file.nbytes() == 1 << 20
    assert os.stat(f"{root}/f").st_blocks * 512 >= 1 << 20
    data = bytearray(1 << 20)
    file.preadv([data], 0)
    assert data[:10] == b"x" * 10 and not any(data[10:])
    file.close()


@pytest.mark.parametrize("failure", [0, errno.EOPNOTSUPP, errno.ENOSPC])
def test_a_punched_range_reads_zeros_and_keeps_the_length(
    root: str, monkeypatch: pytest.MonkeyPatch, failure: int
) -> None:
    file = OsFs().open_file(f"{root}/f", create=True)
    file.pwritev([b"x" * (6 * PAGE)], 0)
    if failure:
        monkeypatch.setattr(fs_module, "_fallocate", lambda *_: failure)
    if failure == errno.ENOSPC:
        with pytest.raises(OSError):
            file.punch(PAGE, 2 * PAGE)
    else:
        file.punch(PAGE, 2 * PAGE)
        file.punch(5 * PAGE, 100 * PAGE)
        data = Path(root, "f").read_bytes()
        assert data == b"x" * PAGE + bytes(2 * PAGE) + b"x" * (2 * PAGE) + bytes(PAGE)
    file.close()


def test_allocation_without_the_system_call_keeps_what_is_there(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "posix_fallocate")
    file = OsFs().open_file(f"{root}/f", create=True)
    file.pwritev([b"x" * 10], 0)
    file.allocate(0, 3 << 20)
    assert Path(root, "f").read_bytes() == b"x" * 10 + bytes((3 << 20) - 10)
    file.close()


def test_direct_moves_pages_and_leaves_the_file_as_it_was(root: str) -> None:
    fs = OsFs()
    file = fs.open_file(f"{root}/f", create=True, direct=True)
    assert file.nbytes() == 0
    page = mmap.mmap(-1, 2 * PAGE)
    page[:] = b"d" * (2 * PAGE)
    file.pwritev([page], 0)
    again = fs.open_file(f"{root}/f", writable=True, direct=True)
    assert again.direct == file.direct
    into = mmap.mmap(-1, 4 * PAGE)
    assert again.preadv([into], 0) == 2 * PAGE
    assert into[: 2 * PAGE] == page[:] and Path(root, "f").read_bytes() == page[:]
    Path(root, "short").write_bytes(b"abc")
    short = fs.open_file(f"{root}/short", writable=True, direct=True)
    assert short.preadv([into], 0) == 3
    assert Path(root, "short").read_bytes() == b"abc"
    for opened in (file, again, short):
        opened.close()


@pytest.mark.parametrize("stage", ["open", "write"])
def test_direct_falls_back_where_it_is_refused(
    root: str, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    if stage == "open":
        opened = os.open

        def refuse(path: str, flags: int, mode: int = 0o777) -> int:
            fd = opened(path, flags & ~os.O_DIRECT, mode)
            if flags & os.O_DIRECT:
                os.close(fd)
                raise OSError(errno.EINVAL, "no O_DIRECT here")
            return fd

        monkeypatch.setattr(os, "open", refuse)
    else:

        def refuse_probe(fd: int, writable: bool) -> None:
            raise OSError(errno.EINVAL, "no direct write here")

        monkeypatch.setattr(fs_module, "_probe_direct", refuse_probe)
    file = OsFs().open_file(f"{root}/f", create=True, direct=True)
    assert not file.direct
    file.pwritev([b"unaligned"], 1)
    file.close()


def test_reading_without_waiting_gives_what_is_there(root: str) -> None:
    file = OsFs().open_file(f"{root}/f", create=True)
    file.pwritev([b"w" * PAGE], 0)
    into = bytearray(PAGE)
    assert file.preadv([into], 0, nowait=True) in (0, PAGE)
    file.datasync()
    file.drop_cached(0, PAGE)
    done = file.preadv([into], 0, nowait=True)
    assert done in (0, PAGE)
    assert file.preadv([into], 0) == PAGE and into == b"w" * PAGE
    file.close()


def test_reading_without_waiting_where_it_is_unknown(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = OsFs().open_file(f"{root}/f", create=True)
    file.pwritev([b"w"], 0)
    for code in (errno.EAGAIN, errno.EOPNOTSUPP):
        with monkeypatch.context() as patch:

            def refuse(fd: int, views: object, at: int, flags: int = 0, code: int = code) -> int:
                raise OSError(code, "no")

            patch.setattr(os, "preadv", refuse)
            assert file.preadv([bytearray(1)], 0, nowait=True) == 0
            with pytest.raises(OSError):
                file.preadv([bytearray(1)], 0)
    monkeypatch.setattr(fs_module, "_NOWAIT", 0)
    assert file.preadv([bytearray(1)], 0, nowait=True) == 0
    file.close()


def test_a_map_shows_the_file(root: str) -> None:
    file = OsFs().open_file(f"{root}/f", create=True)
    file.pwritev([b"m" * PAGE], 0)
    with file.map_read() as view:
        assert view[:] == b"m" * PAGE
        with pytest.raises(TypeError):
            view[0] = 1
    file.close()


def test_a_closed_file_touches_no_other_descriptor(root: str) -> None:
    fs = OsFs()
    file = fs.open_file(f"{root}/f", create=True)
    file.close()
    file.close()
    other = fs.open_file(f"{root}/g", create=True)
    with pytest.raises(OSError):
        file.pwritev([b"x"], 0)
    assert other.nbytes() == 0
    other.close()


def test_a_forked_child_has_no_descriptor_of_ours(root: str) -> None:
    file = OsFs().open_file(f"{root}/f", create=True)
    assert isinstance(file, OsFile)
    number = file._fd
    pid = os.fork()
    if pid == 0:
        code = 0
        try:
            os.fstat(number)
            code = 1
        except OSError:
            pass
        try:
            file.pwritev([b"child"], 0)
            code = 2
        except OSError:
            pass
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    file.pwritev([b"parent"], 0)
    assert Path(root, "f").read_bytes() == b"parent"
    file.close()


def test_many_files_opened_and_closed_leak_nothing(root: str) -> None:
    fs = OsFs()
    before = len(os.listdir("/proc/self/fd"))
    for number in range(200):
        fs.open_file(f"{root}/{number}", create=True, direct=bool(number % 2)).close()
    assert len(os.listdir("/proc/self/fd")) == before
