"""What is logged: records of a few kinds, each with a packed little-endian layout, or a blob of bytes.

Records travel as runs: neighbours of one kind, so that numpy reads and applies many at once. A run lies in
a frame's body as

    | kind u1 | zeros 3 | num_records u4 | nbytes u8 | records, nbytes in all | zeros to a multiple of 8 |

A record of a blob kind is its length (u4) and its bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ..errors import CorruptFormat

PUT, DROP = 1, 2
FIRST_BLOB_KIND = 16
NAMESPACE, SESSION, SESSION_END, REMOVAL, REMOVED, CLOCK = 16, 17, 18, 19, 20, 21

KIND_NAMES = {
    PUT: "put",
    DROP: "drop",
    NAMESPACE: "namespace",
    SESSION: "session",
    SESSION_END: "session end",
    REMOVAL: "removal",
    REMOVED: "removed",
    CLOCK: "clock",
}

PUT_DTYPE = np.dtype(
    [
        ("digest", "u1", (32,)),
        ("parent", "u1", (32,)),  # zeros at the root
        ("namespace", "<u4"),
        ("depth", "<u4"),  # a place for how far from the head; nobody counts it yet
        ("group", "u1"),
        ("flags", "u1"),
        ("num_tokens", "<u2"),
        ("slot", "<u4"),
        ("put_seq", "<u8"),
        ("checksum", "<u8"),  # xxh3_64 of the payload
    ]
)
DROP_DTYPE = np.dtype(
    [
        ("digest", "u1", (32,)),
        ("put_seq", "<u8"),  # of the put that this drop ends
        ("slot", "<u4"),
        ("group", "u1"),
        ("cause", "u1"),
        ("pad", "u1", (2,)),
    ]
)

DTYPES: dict[int, np.dtype[Any]] = {PUT: PUT_DTYPE, DROP: DROP_DTYPE}
assert [dtype.itemsize for dtype in DTYPES.values()] == [96, 48]

_ITEMSIZES = {kind: dtype.itemsize for kind, dtype in DTYPES.items()}

Records: TypeAlias = "np.ndarray[Any, np.dtype[Any]] | tuple[bytes, ...]"

_RUN = struct.Struct("<B3xIQ")
_LENGTH = struct.Struct("<I")
_ALIGN = 8


@dataclass(frozen=True, eq=False)
class Run:
    """Adjacent records of one `kind`: a 1-D array of `DTYPES[kind]`, or for a blob kind a tuple of bytes."""

    kind: int
    records: Records

    def __len__(self) -> int:
        return len(self.records)

    def after(self, count: int) -> Run:
        """The run without its first `count` records."""
        return Run(self.kind, self.records[count:]) if count else self


class PackedRun(NamedTuple):
    """A run as it lies in a frame; `packed` is a view of the frame's buffer."""

    kind: int
    num_records: int
    packed: memoryview


def runs_nbytes(runs: Sequence[Run]) -> int:
    """Bytes of a frame's body that holds `runs`."""
    return sum(_RUN.size + _aligned(_packed_nbytes(run)) for run in runs)


def encode_runs(runs: Sequence[Run], into: memoryview) -> None:
    """Lay `runs` into `into`, which is zeroed and exactly `runs_nbytes(runs)` long."""
    at = 0
    for run in runs:
        nbytes = _packed_nbytes(run)
        _RUN.pack_into(into, at, run.kind, len(run), nbytes)
        at += _RUN.size
        into[at : at + nbytes] = _pack(run)
        at += _aligned(nbytes)
    assert at == len(into), f"runs fill {at} bytes of {len(into)}"


def split_runs(body: memoryview, num_records: int) -> list[PackedRun]:
    """The runs in a frame's body, in order, with lengths that add up to `num_records`.

    Raises:
        CorruptFormat: lengths, kinds or counts that cannot be.
    """
    runs = []
    at, end = 0, len(body)
    while at < end:
        if end - at < _RUN.size:
            raise CorruptFormat(f"a run header is cut off at byte {at} of {end}")
        kind, count, nbytes = _RUN.unpack_from(body, at)
        at += _RUN.size
        itemsize = _ITEMSIZES.get(kind)
        if nbytes > end - at or (nbytes != count * itemsize if itemsize else kind < FIRST_BLOB_KIND):
            raise CorruptFormat(f"a run of kind {kind} claims {count} records in {nbytes} bytes")
        run = PackedRun(kind, count, body[at : at + nbytes])
        if itemsize is None:
            _check_blobs(run)
        runs.append(run)
        num_records -= count
        at += -(-nbytes // _ALIGN) * _ALIGN
    if num_records:
        raise CorruptFormat(f"the runs of a frame hold {-num_records} records more than it counts")
    return runs


def join_runs(packed: Sequence[PackedRun]) -> Run:
    """One run of all records in `packed`, which are of one kind and come from `split_runs`; copied once."""
    kind = packed[0].kind
    if kind in DTYPES:
        return Run(kind, np.frombuffer(b"".join([run.packed for run in packed]), DTYPES[kind]))
    return Run(kind, tuple(bytes(blob) for run in packed for blob in _blobs(run)))


def merge_runs(runs: Sequence[Run]) -> Run:
    """One run of the records of all `runs`, which are of one kind; only several are copied."""
    if len(runs) == 1:
        return runs[0]
    kind = runs[0].kind
    if kind not in DTYPES:
        return Run(kind, tuple(blob for run in runs for blob in run.records))
    # as bytes: numpy would look at every field of every array
    return Run(kind, np.frombuffer(b"".join([_pack(run) for run in runs]), DTYPES[kind]))


def decode_runs(body: memoryview, num_records: int) -> list[Run]:
    """The runs in a frame's body; raises CorruptFormat as `split_runs` does."""
    return [join_runs([packed]) for packed in split_runs(body, num_records)]


def _check_blobs(run: PackedRun) -> None:
    end = sum(_LENGTH.size + len(blob) for blob in _blobs(run))
    if end != len(run.packed):
        raise CorruptFormat(f"blobs of kind {run.kind} fill {end} of {len(run.packed)} bytes")


def _blobs(run: PackedRun) -> Iterator[memoryview]:
    at = 0
    for _ in range(run.num_records):
        if len(run.packed) - at < _LENGTH.size:
            raise CorruptFormat(f"a blob of kind {run.kind} is cut off at byte {at}")
        (nbytes,) = _LENGTH.unpack_from(run.packed, at)
        at += _LENGTH.size
        if nbytes > len(run.packed) - at:
            raise CorruptFormat(f"a blob of kind {run.kind} claims {nbytes} of {len(run.packed) - at} bytes")
        yield run.packed[at : at + nbytes]
        at += nbytes


def _packed_nbytes(run: Run) -> int:
    if isinstance(run.records, tuple):
        return sum(_LENGTH.size + len(blob) for blob in run.records)
    return int(run.records.nbytes)


def _pack(run: Run) -> bytes | memoryview:
    if isinstance(run.records, tuple):
        assert run.kind >= FIRST_BLOB_KIND, f"kind {run.kind} holds columns, not blobs"
        return b"".join(piece for blob in run.records for piece in (_LENGTH.pack(len(blob)), blob))
    expected = DTYPES[run.kind]
    assert run.records.dtype == expected, f"kind {run.kind} is {expected}, not {run.records.dtype}"
    return np.ascontiguousarray(run.records).view(np.uint8).data


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN
