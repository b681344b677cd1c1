"""The advisory trace: every allocation, touch, promote, demote, spill and eviction, in files of its own.

Never read by recovery and never synced: after a crash it may lack its end. Events are taken down with the
metadata lock held, as arrays of digests; a thread of its own turns them into records and writes them. Where it
cannot follow, or the disk does not take them, events are left out, and a LOST record says how many.

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

from ..block.hashing import DIGEST_NBYTES, Digests
from ..outcomes import Counters, Tier
from ..system import Clock, File, Fs, OsFs, SystemClock
from .block_table import BlockTable
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
    digests: Digests
    parents: Digests
    has_parent: npt.NDArray[np.bool_]


class NoTrace:
    """Takes nothing down: the default."""

    def note(
        self, event: Event, tier: Tier, rows: Any, group: int | npt.NDArray[np.int64] = EVERY_GROUP
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
        max_nbytes: of all its files.
        lsn: the last LSN applied.
    """

    def __init__(
        self,
        fs: Fs,
        path: str,
        table: BlockTable,
        *,
        max_nbytes: int,
        lsn: Callable[[], int],
        counters: Counters,
        clock: Clock | None = None,
    ) -> None:
        self._fs = fs
        self._dir = f"{path}/{TRACE}"
        self._table = table
        self._file_nbytes = max(HEADER_NBYTES + RECORD_DTYPE.itemsize, max_nbytes // NUM_FILES)
        self._max_nbytes = max_nbytes
        self._lsn = lsn
        self._counters = counters
        self._clock = clock or SystemClock()
        self._queue: deque[_Noted] = deque()
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
        self._queue.append(
            _Noted(Event.OPEN, Tier.DEVICE, EVERY_GROUP, self._clock.wall(), lsn(), *_one_blank())
        )
        self._thread = threading.Thread(target=self._work, name="tieredkv-trace", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def nbytes(self) -> int:
        return sum(self._sizes.values())

    def note(
        self, event: Event, tier: Tier, rows: Any, group: int | npt.NDArray[np.int64] = EVERY_GROUP
    ) -> None:
        count = len(rows)
        if not count:
            return
        if self._num_queued + count > _MAX_QUEUED:
            self._num_lost += count
            return
        table = self._table
        parents = table.parent.take(rows)
        self._num_queued += count
        self._queue.append(
            _Noted(
                event,
                tier,
                group,
                self._clock.wall(),
                self._lsn(),
                table.digest.take(rows, axis=0),
                table.digest.take(parents, axis=0, mode="clip"),
                parents >= 0,
            )
        )

    def forget(self) -> None:
        with self._writing:
            self._queue.clear()
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
        """Write everything queued (writing lock held)."""
        noted = [self._queue.popleft() for _ in range(len(self._queue))]
        if not noted:
            return
        records = encode(noted)
        self._num_queued = max(0, self._num_queued - len(records))
        lost, self._num_lost = self._num_lost, 0
        if lost:
            self._counters.add("trace_lost_events", lost)
            records = np.concatenate((records, _lost(records[-1:], lost)))
        try:
            self._write(records)
        except OSError:
            self._counters.add("trace_write_errors")
            self._num_lost += len(records)
            self._close_file()

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


def encode(noted: list[_Noted]) -> Records:
    """What was noted as records, in order."""
    counts = [len(n.digests) for n in noted]
    records = np.zeros(sum(counts), dtype=RECORD_DTYPE)
    for name, values in (
        ("time_us", [int(n.time_s * 1e6) for n in noted]),
        ("lsn", [n.lsn for n in noted]),
        ("event", [n.event for n in noted]),
        ("tier", [n.tier for n in noted]),
        ("group", [n.group if isinstance(n.group, int) else EVERY_GROUP for n in noted]),
    ):
        records[name] = np.repeat(np.array(values, dtype=np.uint64), counts)
    for n, end in zip(noted, accumulate(counts), strict=True):
        if not isinstance(n.group, int):
            records["group"][end - len(n.group) : end] = n.group
    records["digest"] = np.concatenate([n.digests for n in noted])
    records["parent"] = np.concatenate([n.parents for n in noted])
    records["parent"][~np.concatenate([n.has_parent for n in noted])] = 0
    return records


def _one_blank() -> tuple[Digests, Digests, npt.NDArray[np.bool_]]:
    blank = np.zeros((1, DIGEST_NBYTES), dtype=np.uint8)
    return blank, blank, np.zeros(1, dtype=np.bool_)


def _lost(last: Records, count: int) -> Records:
    record = np.zeros(1, dtype=RECORD_DTYPE)
    record["time_us"], record["lsn"] = last["time_us"], last["lsn"]
    record["event"], record["count"] = Event.LOST, count
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
    trace_dir = f"{os.path.expanduser(os.fspath(path))}/{TRACE}"
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
