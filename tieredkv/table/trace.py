"""The advisory trace: every allocation, touch, promote, demote, spill and eviction, in files of its own.

Never read by recovery and never synced: after a crash it may lack its end. Events are taken down with the
metadata lock held, as arrays of rows; a thread of its own looks up whose rows they are, and writes that. Before
a row is given back, the table has it looked up. Where the thread cannot follow, or the disk does not take them,
events are left out, and a LOST record says how many.

    <store>/trace/0000000001.trace: a header of 64 bytes, then records (`RECORD_DTYPE`), 96 bytes each

    0   magic "tieredkv trace\\r\\n"  16
    16  version                     u4
    20  bytes of a record           u4
    24  file number                 u8
    32  zeros                       24
    56  checksum                    u8   xxh3_64 of all before it

The oldest file goes when a new one would take the folder above its bound.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from ..block.hashing import DIGEST_NBYTES
from ..outcomes import Counters, Tier
from ..system import Clock, File, Fs, OsFs, SystemClock, path_of
from .block_table import BlockTable
from .key_index import Rows
from .recovery import TRACE

HEADER_NBYTES = 64
EVERY_GROUP = 255
NUM_FILES = 4

_MAGIC = b"tieredkv trace\r\n"
_VERSION = 1
_HEADER = struct.Struct("<16sIIQ24x")
_NAME = re.compile(r"(\d{10,15})\.trace")
_DRAIN_S = 0.25
_CLOSE_S = 5.0
_MAX_QUEUED = 1 << 18
_MAX_AT_ONCE = 1 << 10


class Event(IntEnum):
    """What happened to a part, or with TOUCH to a block."""

    OPEN = 1
    ALLOCATE = 2
    TOUCH = 3
    PROMOTE = 4
    DEMOTE = 5
    SPILL = 6
    EVICT = 7
    LEAVE = 8
    LOST = 9


RECORD_DTYPE = np.dtype(
    [
        ("time_us", "<u8"),  # wall clock, since 1970
        ("lsn", "<u8"),  # applied when it happened
        ("count", "<u8"),  # of LOST
        ("digest", "u1", (DIGEST_NBYTES,)),
        ("parent", "u1", (DIGEST_NBYTES,)),  # zeros at the root, or where it is not known
        ("event", "u1"),
        ("tier", "u1"),
        ("group", "u1"),  # EVERY_GROUP: of the block as a whole
        ("pad", "u1", (5,)),
    ]
)
assert RECORD_DTYPE.itemsize == 96

Records = npt.NDArray[Any]


class _Noted(NamedTuple):
    event: Event
    tier: Tier
    group: int | npt.NDArray[np.int64]
    time_s: float
    lsn: int
    rows: Rows


class NoTrace:
    """Takes nothing down: the default."""

    def note(
        self, event: Event, tier: Tier, rows: Rows, group: int | npt.NDArray[np.int64] = EVERY_GROUP
    ) -> None:
        """Something happened to the parts of `rows` (metadata lock held)."""

    def start(self) -> None:
        """Begin to write."""

    @property
    def nbytes(self) -> int:
        """What its files take."""
        return 0

    def forget(self) -> None:
        """Nothing noted so far stays anywhere; durable on return. Raises OSError."""

    def close(self) -> None:
        """Write what is noted, and stop."""


NO_TRACE = NoTrace()


class Trace(NoTrace):
    """The trace of one opening of a store.

    Args:
        path: the store's directory.
        lock: the metadata lock.
        max_nbytes: of all its files.
        lsn: the last LSN applied.
    """

    def __init__(
        self,
        fs: Fs,
        path: str,
        table: BlockTable,
        *,
        lock: threading.Condition,
        max_nbytes: int,
        lsn: Callable[[], int],
        counters: Counters,
        clock: Clock | None = None,
    ) -> None:
        self._fs = fs
        self._dir = f"{path}/{TRACE}"
        self._table = table
        self._lock = lock
        self._file_nbytes = max(HEADER_NBYTES + RECORD_DTYPE.itemsize, max_nbytes // NUM_FILES)
        self._max_nbytes = max_nbytes
        self._lsn = lsn
        self._counters = counters
        self._clock = clock or SystemClock()
        self._noted: deque[_Noted] = deque()
        self._records: deque[Records] = deque()  # of what was noted before that
        self._num_queued = 0
        self._num_lost = 0
        self._file: File | None = None
        self._offset = 0
        self._writing = threading.Lock()  # held while files change
        self._sizes: dict[int, int] = {}
        self._next_number = 1
        self._wake = threading.Event()
        self._closing = False
        with contextlib.suppress(OSError):
            self._find_files()
        self._records.append(_record(Event.OPEN, int(self._clock.wall() * 1e6), lsn()))
        table.before_rows_go = self._look_up_all
        self._thread = threading.Thread(target=self._work, name="tieredkv-trace", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def nbytes(self) -> int:
        return sum(self._sizes.values())

    def note(
        self, event: Event, tier: Tier, rows: Rows, group: int | npt.NDArray[np.int64] = EVERY_GROUP
    ) -> None:
        count = len(rows)
        if not count:
            return
        if self._num_queued + count > _MAX_QUEUED:
            self._num_lost += count
            return
        self._num_queued += count
        self._noted.append(_Noted(event, tier, group, self._clock.wall(), self._lsn(), rows.copy()))

    def forget(self) -> None:
        with self._writing:
            with self._lock:
                self._noted.clear()
                self._records.clear()
                self._num_queued = 0
            self._close_file()
            self._sizes.clear()
            unlink_traces(self._fs, self._dir)

    def close(self) -> None:
        self._closing = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(_CLOSE_S)

    # ---- the thread ----------------------------------------------------------------------------

    def _work(self) -> None:
        while not self._closing:
            self._wake.wait(_DRAIN_S)
            with self._writing:
                self._drain()
        with self._writing:
            self._drain()
            self._close_file()

    def _drain(self) -> None:
        """Write everything noted (writing lock held)."""
        while self._noted:
            with self._lock:
                self._look_up_some()
        with self._lock:
            ready = [self._records.popleft() for _ in range(len(self._records))]
            self._num_queued = max(0, self._num_queued - sum(map(len, ready)))
        if not ready:
            return
        lost, self._num_lost = self._num_lost, 0
        if lost:
            self._counters.add("trace_lost_events", lost)
            last = ready[-1][-1]
            ready.append(_record(Event.LOST, last["time_us"], last["lsn"], count=lost))
        records = np.concatenate(ready)
        try:
            self._write(records)
        except OSError:
            self._counters.add("trace_write_errors")
            self._num_lost += len(records)
            self._close_file()

    def _look_up_all(self) -> None:
        """Whatever was noted names its blocks from now on (metadata lock held)."""
        while self._noted:
            self._look_up_some()

    def _look_up_some(self) -> None:
        """As many as nobody minds to wait for, the oldest (metadata lock held)."""
        noted, num_events = list[_Noted](), 0
        while self._noted and num_events < _MAX_AT_ONCE:
            noted.append(self._noted.popleft())
            num_events += len(noted[-1].rows)
        if noted:
            self._records.append(_encode(noted, self._table))

    def _write(self, records: Records) -> None:
        while len(records):
            if self._file is None or self._file_nbytes - self._offset < RECORD_DTYPE.itemsize:
                self._begin_file()
            assert self._file is not None, "a file was begun"
            count = (self._file_nbytes - self._offset) // RECORD_DTYPE.itemsize
            piece = np.ascontiguousarray(records[:count]).view(np.uint8).data
            self._file.pwritev([piece], self._offset)
            self._offset += len(piece)
            self._sizes[self._next_number - 1] = self._offset
            records = records[count:]

    def _begin_file(self) -> None:
        self._close_file()
        self._fs.make_dir(self._dir)
        if not self._fs.is_dir(self._dir):
            raise OSError(errno.ENOTDIR, "no directory of its own", self._dir)
        while self._sizes and self.nbytes + self._file_nbytes > self._max_nbytes:
            oldest = min(self._sizes)
            self._fs.unlink(f"{self._dir}/{trace_name(oldest)}")
            del self._sizes[oldest]
        number = self._next_number
        self._next_number += 1
        self._file = self._fs.open_file(f"{self._dir}/{trace_name(number)}", create=True)
        self._file.pwritev([encode_header(number)], 0)
        self._offset = self._sizes[number] = HEADER_NBYTES

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None

    def _find_files(self) -> None:
        for number in list_traces(self._fs, self._dir):
            self._sizes[number] = self._fs.file_nbytes(f"{self._dir}/{trace_name(number)}")
        self._next_number = 1 + max(self._sizes, default=0)
        while self._sizes and self.nbytes > self._max_nbytes:
            oldest = min(self._sizes)
            self._fs.unlink(f"{self._dir}/{trace_name(oldest)}")
            del self._sizes[oldest]


# ---- bytes ---------------------------------------------------------------------------------------


def _encode(noted: list[_Noted], table: BlockTable) -> Records:
    """What was noted as records, in order."""
    counts = [len(n.rows) for n in noted]
    heads = np.zeros(len(noted), dtype=RECORD_DTYPE)
    heads["time_us"] = [int(n.time_s * 1e6) for n in noted]
    heads["lsn"] = [n.lsn for n in noted]
    heads["event"] = [n.event for n in noted]
    heads["tier"] = [n.tier for n in noted]
    heads["group"] = [n.group if isinstance(n.group, int) else EVERY_GROUP for n in noted]
    records = heads.repeat(counts)
    for n, end in zip(noted, accumulate(counts), strict=True):
        if not isinstance(n.group, int):
            records["group"][end - len(n.group) : end] = n.group
    rows = np.concatenate([n.rows for n in noted])
    parents = table.parent.take(rows)
    records["digest"] = table.digest.take(rows, axis=0)
    records["parent"] = table.digest.take(parents, axis=0, mode="clip")
    records["parent"][np.flatnonzero(parents < 0)] = 0
    return records


def _record(event: Event, time_us: int, lsn: int, count: int = 0) -> Records:
    """One record that is of no block."""
    record = np.zeros(1, dtype=RECORD_DTYPE)
    record["time_us"], record["lsn"], record["event"], record["count"] = time_us, lsn, event, count
    record["group"] = EVERY_GROUP
    return record


def encode_header(number: int) -> bytes:
    raw = _HEADER.pack(_MAGIC, _VERSION, RECORD_DTYPE.itemsize, number)
    return raw + xxhash.xxh3_64_intdigest(raw).to_bytes(8, "little")


def trace_name(number: int) -> str:
    return f"{number:010d}.trace"


def list_traces(fs: Fs, trace_dir: str) -> list[int]:
    """Numbers of the trace files there, in order."""
    if not fs.is_dir(trace_dir):
        return []
    matches = (_NAME.fullmatch(name) for name in fs.list_names(trace_dir))
    return sorted(int(match.group(1)) for match in matches if match)


def traces_nbytes(fs: Fs, path: str) -> int:
    """What the trace files of the store at `path` take."""
    trace_dir = f"{path}/{TRACE}"
    return sum(fs.file_nbytes(f"{trace_dir}/{trace_name(n)}") for n in list_traces(fs, trace_dir))


def unlink_traces(fs: Fs, trace_dir: str) -> None:
    """Remove every trace file; durable on return. Raises OSError."""
    numbers = list_traces(fs, trace_dir)
    for number in numbers:
        fs.unlink(f"{trace_dir}/{trace_name(number)}")
    if numbers:
        fs.sync_dir(trace_dir)


# ---- reading -------------------------------------------------------------------------------------


def read_trace(path: str | os.PathLike[str], fs: Fs | None = None) -> Iterator[Records]:
    """The records of the store's trace, oldest first, a file at a time; what is no record is left out."""
    fs = fs or OsFs()
    trace_dir = f"{path_of(path)}/{TRACE}"
    for number in list_traces(fs, trace_dir):
        with contextlib.suppress(OSError):
            records = _read_file(fs, f"{trace_dir}/{trace_name(number)}", number)
            known = (records["event"] >= min(Event)) & (records["event"] <= max(Event))
            yield records[known & (records["tier"] < len(Tier))]


def _read_file(fs: Fs, path: str, number: int) -> Records:
    with contextlib.closing(fs.open_file(path)) as file:
        raw = bytearray(file.nbytes())
        raw = raw[: file.preadv([raw], 0)]
    if bytes(raw[:HEADER_NBYTES]) != encode_header(number):
        return np.zeros(0, dtype=RECORD_DTYPE)
    count = (len(raw) - HEADER_NBYTES) // RECORD_DTYPE.itemsize
    return np.frombuffer(raw, dtype=RECORD_DTYPE, count=count, offset=HEADER_NBYTES)


@dataclass(frozen=True)
class TiersAt:
    """Which parts sat in memory at an LSN, by the trace: `(digest, group)` by tier. `note` says what it lacks."""

    first_lsn: int
    last_lsn: int
    num_parts: dict[str, int]
    parts: dict[str, tuple[tuple[str, int], ...]]
    note: str


def tiers_at(path: str | os.PathLike[str], lsn: int, fs: Fs | None = None) -> TiersAt | None:
    """Where parts sat when `lsn` had just been applied; None where there is no trace."""
    held: dict[int, dict[tuple[bytes, int], None]] = {Tier.DEVICE: {}, Tier.HOST: {}}
    first = last = -1
    num_lost, opened = 0, False
    for records in read_trace(path, fs):
        for record in records[records["lsn"] <= lsn]:
            first = int(record["lsn"]) if first < 0 else first
            last = int(record["lsn"])
            event = int(record["event"])
            if event == Event.OPEN:
                num_lost, opened = 0, True
                for parts in held.values():
                    parts.clear()
            num_lost += int(record["count"])
            _follow(held, record, event)
    if first < 0:
        return None
    notes = [] if opened else [f"it begins at LSN {first}: parts placed before that are not known"]
    notes += [f"{num_lost} events are missing"] if num_lost else []
    named = {Tier(tier).name.lower(): parts for tier, parts in held.items()}
    return TiersAt(
        first, last, {name: len(parts) for name, parts in named.items()},
        {name: tuple((digest.hex(), group) for digest, group in parts) for name, parts in named.items()},
        "; ".join(notes),
    )  # fmt: skip


def _follow(held: dict[int, dict[tuple[bytes, int], None]], record: Any, event: int) -> None:
    parts = held.get(int(record["tier"]))
    if parts is None:
        return
    part = record["digest"].tobytes(), int(record["group"])
    if event in (Event.ALLOCATE, Event.PROMOTE, Event.DEMOTE):
        parts[part] = None
    elif event in (Event.EVICT, Event.LEAVE):
        parts.pop(part, None)


def accesses(path: str | os.PathLike[str], fs: Fs | None = None) -> Iterator[dict[str, Any]]:
    """The trace as plain values, in order, for replay through a policy: time, digest, parent, event, and where."""
    for records in read_trace(path, fs):
        for record in records:
            yield _plain(record)


def moves_of(path: str | os.PathLike[str], digest: str, fs: Fs | None = None) -> Iterator[dict[str, Any]]:
    """What the trace saw of one block, by its whole digest in hex."""
    if len(digest) != 2 * DIGEST_NBYTES:
        return
    wanted = np.frombuffer(bytes.fromhex(digest), dtype=np.uint8)
    for records in read_trace(path, fs):
        for record in records[(records["digest"] == wanted).all(axis=1)]:
            yield _plain(record)


def _plain(record: Any) -> dict[str, Any]:
    parent, group = record["parent"].tobytes(), int(record["group"])
    values: dict[str, Any] = {
        "time": int(record["time_us"]) / 1e6,
        "digest": record["digest"].tobytes().hex(),
        "parent": parent.hex() if any(parent) else None,
        "event": Event(int(record["event"])).name.lower(),
        "tier": Tier(int(record["tier"])).name.lower(),
        "group": None if group == EVERY_GROUP else group,
        "lsn": int(record["lsn"]),
    }
    return values | ({"count": int(record["count"])} if record["count"] else {})
