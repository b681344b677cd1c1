"""A checkpoint: the table written out at an LSN, as one LMDB file that never changes again.

Under an array's name lies its description (JSON behind its own checksum: dtype, shape, and an xxh3_64 of each
piece); under `name/000`, `name/001` ... its raw little-endian bytes in pieces. Tools may map the file and
read it by name; the store itself first checks its length and xxh3_128 by plain reads, against the log segment
header that names it, for LMDB has no checksums of its own and a damaged page under its map kills the process.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, TypeAlias

import lmdb
import numpy as np
import xxhash

from ..errors import CorruptFormat
from ..system import NO_FILE, File, Fs
from ..units import KiB, MiB, align_up
from ..wal.format import CheckpointRef

Arrays: TypeAlias = Mapping[str, "np.ndarray[Any, np.dtype[Any]] | bytes"]

_PIECE_NBYTES = 4 * MiB
_READ_NBYTES = MiB
_CHECKSUM_NBYTES = 8
_LMDB_MAGIC, _LMDB_MAGIC_AT = (0xBEEFC0DE).to_bytes(4, "little"), 16
_NAME = re.compile(r"table-(\d{20})\.lmdb")
_TEMPORARY = re.compile(r"table-\d{20}\.lmdb\.tmp")


class CheckpointUnread(CorruptFormat):
    """The system did not give a checkpoint's bytes."""


def checkpoint_name(lsn: int) -> str:
    return f"table-{lsn:020d}.lmdb"


def parse_checkpoint_name(name: str) -> int | None:
    """The LSN in a checkpoint's file name, None for any other name."""
    match = _NAME.fullmatch(name)
    return int(match.group(1)) if match else None


def is_temporary_name(name: str) -> bool:
    """Whether a checkpoint that was never finished has this name."""
    return _TEMPORARY.fullmatch(name) is not None


def is_lmdb(fs: Fs, path: str) -> bool:
    """Whether the file begins as LMDB files do; no more is looked at."""
    raw = bytearray(len(_LMDB_MAGIC))
    try:
        with contextlib.closing(fs.open_file(path)) as file:
            file.preadv([raw], _LMDB_MAGIC_AT)
    except OSError:
        return False
    return bytes(raw) == _LMDB_MAGIC


def write_checkpoint(fs: Fs, store_dir: str, lsn: int, arrays: Arrays) -> CheckpointRef:
    """Write `arrays` as the checkpoint at `lsn`; it and its name are durable on return.

    The arrays must not change meanwhile. About one piece of a few MiB is held in memory.

    Raises:
        OSError: nothing is left of it.
    """
    path = f"{store_dir}/{checkpoint_name(lsn)}"
    temporary = f"{path}.tmp"
    with contextlib.suppress(FileNotFoundError):
        fs.unlink(temporary)
    try:
        fs.open_file(temporary, create=True).close()  # with our mode; LMDB fills an empty file
        with fs.as_real_file(temporary) as real:
            _fill(real, arrays)
        ref = _sync_and_digest(fs, temporary, lsn)
        fs.rename(temporary, path)
        fs.sync_dir(store_dir)
    except OSError:
        with contextlib.suppress(OSError):
            fs.unlink(temporary)
        raise
    return ref


def read_checkpoint(fs: Fs, store_dir: str, ref: CheckpointRef) -> dict[str, Any]:
    """The arrays of the checkpoint that `ref` vouches for, as own copies; at LSN 0 there are none.

    Raises:
        CheckpointUnread: the system does not give it, so it may be as good as ever.
        CorruptFormat: it is not there, is no file, or not what was written.
    """
    if ref.lsn == 0:
        return {}
    name = checkpoint_name(ref.lsn)
    path = f"{store_dir}/{name}"
    try:
        _verify(fs, path, ref)
        with fs.as_real_file(path) as real:
            return _read_all(real, fs.file_nbytes(path))
    except OSError as error:
        kind = CorruptFormat if error.errno in (errno.ENOENT, *NO_FILE) else CheckpointUnread
        raise kind(f"{name} cannot be read: {error.strerror}") from error
    except (CorruptFormat, lmdb.Error, ValueError, TypeError, KeyError, OverflowError, MemoryError) as error:
        raise CorruptFormat(f"{name}: {error}") from error


def prune_checkpoints(fs: Fs, store_dir: str, keep: Collection[int]) -> list[str]:
    """Unlink every checkpoint whose LSN is not in `keep`, and unfinished ones; returns what would not go.

    Gone for good after the next `Fs.sync_dir`.
    """
    failures = []
    for name in fs.list_names(store_dir):
        lsn = parse_checkpoint_name(name)
        if is_temporary_name(name) or (lsn is not None and lsn not in keep):
            try:
                fs.unlink(f"{store_dir}/{name}")
            except OSError as error:
                failures.append(f"{name} cannot be removed: {error.strerror}")
    return failures


def _fill(path: str, arrays: Arrays) -> None:
    nbytes = sum(len(_raw_bytes(array)) for array in arrays.values())
    pieces = nbytes // _PIECE_NBYTES + len(arrays)
    map_size = align_up(nbytes + nbytes // 8 + pieces * 16 * KiB + MiB)
    try:
        with _environment(path, map_size=map_size) as env:
            for batch in _batches(_values(arrays)):
                with env.begin(write=True) as txn:
                    for key, value in batch:
                        txn.put(key, value)
    except lmdb.Error as error:
        code = getattr(error, "code", 0) or 0  # LMDB's own codes are negative
        raise OSError(code if code > 0 else errno.EIO, f"LMDB: {error}", path) from error


def _environment(path: str, **options: Any) -> contextlib.AbstractContextManager[Any]:
    """An LMDB environment in one plain file; closed at the end of the scope."""
    env = lmdb.open(
        path, subdir=False, lock=False, max_dbs=0, sync=True, writemap=False, meminit=True, **options
    )
    return contextlib.closing(env)


def _values(arrays: Arrays) -> Iterator[tuple[bytes, Any]]:
    """Every key and value of the file, pieces before their description."""
    for name, array in arrays.items():
        assert name and "/" not in name, f"not a name for an array: {name!r}"
        raw = _raw_bytes(array)
        checksums = []
        for number, start in enumerate(range(0, len(raw), _PIECE_NBYTES)):
            piece = raw[start : start + _PIECE_NBYTES]
            checksums.append(xxhash.xxh3_64_hexdigest(piece))
            yield f"{name}/{number:03d}".encode(), piece
        description = json.dumps({**_shape_of(array), "xxh3_64": checksums}, sort_keys=True).encode()
        yield name.encode(), xxhash.xxh3_64_digest(description) + description


def _batches(values: Iterator[tuple[bytes, Any]]) -> Iterator[list[tuple[bytes, Any]]]:
    """Lists of values of about a piece in all: a transaction keeps what it writes in memory."""
    batch: list[tuple[bytes, Any]] = []
    nbytes = 0
    for key, value in values:
        batch.append((key, value))
        nbytes += len(value)
        if nbytes >= _PIECE_NBYTES:
            yield batch
            batch, nbytes = [], 0
    yield batch


def _raw_bytes(array: np.ndarray[Any, np.dtype[Any]] | bytes) -> memoryview:
    if isinstance(array, bytes):
        return memoryview(array)
    assert not array.dtype.hasobject, f"{array.dtype} is no plain data"
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return np.ascontiguousarray(little).reshape(-1).view(np.uint8).data


def _shape_of(array: np.ndarray[Any, np.dtype[Any]] | bytes) -> dict[str, Any]:
    if isinstance(array, bytes):
        return {"dtype": "bytes", "shape": [len(array)]}
    dtype = np.lib.format.dtype_to_descr(array.dtype.newbyteorder("<"))
    return {"dtype": dtype, "shape": list(array.shape)}


def _sync_and_digest(fs: Fs, path: str, lsn: int) -> CheckpointRef:
    with contextlib.closing(fs.open_file(path, writable=True)) as file:
        file.datasync()
        return _digest(file, lsn)


def _digest(file: File, lsn: int) -> CheckpointRef:
    """What would vouch for the file as it is, by plain reads."""
    digest = xxhash.xxh3_128()
    buffer = memoryview(bytearray(_READ_NBYTES))
    nbytes = 0
    while done := file.preadv([buffer], nbytes):
        digest.update(buffer[:done])
        nbytes += done
    return CheckpointRef(lsn, nbytes, digest.digest())


def _verify(fs: Fs, path: str, ref: CheckpointRef) -> None:
    with contextlib.closing(fs.open_file(path)) as file:
        if file.nbytes() != ref.nbytes or _digest(file, ref.lsn) != ref:
            raise CorruptFormat("it is not the file that was written")


def _read_all(path: str, nbytes: int) -> dict[str, Any]:
    with _environment(path, readonly=True, map_size=align_up(nbytes)) as env, env.begin(buffers=True) as txn:
        keys = [bytes(key) for key in txn.cursor().iternext(values=False)]
        return {key.decode(): _read(txn, key, nbytes) for key in keys if b"/" not in key}


def _read(txn: Any, name: bytes, limit_nbytes: int) -> np.ndarray[Any, np.dtype[Any]] | bytes:
    sealed = bytes(txn.get(name))
    description = sealed[_CHECKSUM_NBYTES:]
    if xxhash.xxh3_64_digest(description) != sealed[:_CHECKSUM_NBYTES]:
        raise CorruptFormat(f"the checksum of {name!r} differs")
    shape = json.loads(description)
    array = _allocate(shape["dtype"], shape["shape"], limit_nbytes)
    into = array.reshape(-1).view(np.uint8).data
    for number, checksum in enumerate(shape["xxh3_64"]):
        piece = txn.get(b"%s/%03d" % (name, number))
        if xxhash.xxh3_64_hexdigest(piece) != checksum:
            raise CorruptFormat(f"the checksum of piece {number} of {name!r} differs")
        start = number * _PIECE_NBYTES
        into[start : start + _PIECE_NBYTES] = piece
    return array.tobytes() if shape["dtype"] == "bytes" else array


def _allocate(dtype: Any, shape: list[int], limit_nbytes: int) -> np.ndarray[Any, np.dtype[Any]]:
    columns = dtype if isinstance(dtype, str) else [tuple(map(_as_tuple, column)) for column in dtype]
    kind = np.dtype("u1" if columns == "bytes" else columns)
    nbytes = math.prod(shape) * kind.itemsize
    if kind.hasobject or nbytes > limit_nbytes:
        raise CorruptFormat(f"{nbytes} bytes of {kind} cannot be in {limit_nbytes}")
    return np.empty(shape, kind)


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
