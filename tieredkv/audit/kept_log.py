"""Every record that a store's log still holds, checkpoints or not, as plain values. Reads only.

Of tokens only numbers come out of here, and of a session's `meta` nothing.
"""

from __future__ import annotations

import bisect
import contextlib
import json
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from ..errors import CorruptFormat
from ..system import Fs
from ..table.recovery import WAL, Survey
from ..wal.format import SegmentHeader
from ..wal.reader import End, LogRead, SegmentReader
from ..wal.records import (
    CLOCK,
    DROP,
    KIND_NAMES,
    NAMESPACE,
    PUT,
    REMOVAL,
    SESSION,
    SESSION_END,
    Run,
    join_runs,
)

DROP_CAUSES = {1: "evicted", 2: "released", 3: "damaged", 4: "removed", 5: "failed sync"}

_LENGTH = struct.Struct("<I")
_SESSION_FIELDS = ("name", "base", "namespace", "anchors", "pinned", "expires_at", "priority")


class KeptLog:
    """The log from its oldest kept segment on.

    Attributes:
        first_lsn: the first that any kept segment could hold.
        gaps: `(first, last)` LSNs that damage took, final once `runs` is exhausted.
    """

    def __init__(self, fs: Fs, path: str, found: Survey, checkpoint_lsn: int) -> None:
        self._fs = fs
        self._dir = f"{path}/{WAL}"
        self._found = found
        self._checkpoint_lsn = checkpoint_lsn
        before = oldest_kept_lsn(found.headers)
        self.first_lsn = before + 1
        self.line = LogRead(fs, self._dir, found.segments, before).line
        self._firsts = [header.first_lsn for header in self.line]
        self.gaps: list[tuple[int, int]] = []
        self._log = LogRead(fs, self._dir, found.segments, before)

    def runs(self) -> Iterator[tuple[int, Run]]:
        """First LSN and run, in LSN order; damage that a checkpoint makes up for is passed over."""
        yield from self._log.runs()
        if self._log.last_lsn < self._checkpoint_lsn:
            self.gaps.append((self._log.last_lsn + 1, self._checkpoint_lsn))
            self._log = LogRead(self._fs, self._dir, self._found.segments, self._checkpoint_lsn)
            yield from self._log.runs()

    def segment_of(self, lsn: int) -> int:
        """The number of the segment that holds the record, 0 for none."""
        at = bisect.bisect_right(self._firsts, lsn) - 1
        return self.line[at].number if at >= 0 else 0

    def stray_runs(self) -> Iterator[tuple[int, Run]]:
        """Records behind the end of the log that verify all the same; they do not count."""
        return stray_runs(self._fs, self._dir, self._found, self._log)


def oldest_kept_lsn(headers: list[SegmentHeader]) -> int:
    """The LSN behind which the chain of segments that ends in the newest is whole."""
    if not headers:
        return 0
    by_number, header = {h.number: h for h in headers}, headers[-1]
    while (before := by_number.get(header.previous.number)) is not None and before.number < header.number:
        header = before
    return header.previous.lsn


def stray_runs(fs: Fs, wal_dir: str, found: Survey, log: LogRead) -> Iterator[tuple[int, Run]]:
    """As `KeptLog.stray_runs`, behind the end that `log` came to."""
    header = next((h for h in found.headers if h.number == log.end.number), None)
    if log.end.end is End.CLEAN or header is None or not log.end.offset:
        return
    with contextlib.suppress(OSError), contextlib.closing(SegmentReader(fs, wal_dir, header)) as reader:
        reader.offset = log.end.offset
        for _, frame in reader.stray_frames():
            with contextlib.suppress(CorruptFormat):
                lsn = frame.first_lsn
                for packed in frame.runs():
                    yield lsn, join_runs([packed])
                    lsn += packed.num_records


def kind_name(kind: int) -> str:
    return KIND_NAMES.get(kind, f"kind {kind}")


def count_kinds(counts: Counter[str], run: Run) -> None:
    counts[kind_name(run.kind)] += len(run)


def describe(kind: int, record: Any) -> dict[str, Any]:
    """One record as plain values: digests in hex, of tokens only how many."""
    values: dict[str, Any] = {"kind": kind_name(kind)}
    if kind == PUT:
        return values | _describe_put(record)
    if kind == DROP:
        values["digest"] = record["digest"].tobytes().hex()
        cause = int(record["cause"])
        values |= {name: int(record[name]) for name in ("group", "slot", "put_seq")}
        return values | {"cause": DROP_CAUSES.get(cause, str(cause))}
    return values | _describe_blob(kind, bytes(record))


def _describe_put(record: Any) -> dict[str, Any]:
    parent = record["parent"].tobytes()
    values: dict[str, Any] = {"digest": record["digest"].tobytes().hex()}
    values["parent"] = parent.hex() if any(parent) else None
    for name in ("namespace", "group", "num_tokens", "slot", "put_seq"):
        values[name] = int(record[name])
    values["checksum"] = f"{int(record['checksum']):016x}"
    return values


def _describe_blob(kind: int, blob: bytes) -> dict[str, Any]:
    """A record of a blob kind; one of a kind or form unknown here is described by its length alone."""
    try:
        if kind == SESSION:
            return session_head(blob)
        if kind == NAMESPACE:
            values = json.loads(blob)
            groups = [g["kind"] for g in values["layout"]["groups"]]
            return {"namespace": values["number"], "digest": values["digest"], "groups": groups}
        if kind in (SESSION_END, REMOVAL, CLOCK):
            values = json.loads(blob)
            allowed = ("name", "sessions", "namespace", "clock_s", "wall_s")
            return {name: values[name] for name in allowed if name in values}
    except (ValueError, KeyError, TypeError, struct.error):
        return {"nbytes": len(blob), "trouble": "not what its kind promises"}
    return {"nbytes": len(blob)}


def session_head(blob: bytes) -> dict[str, Any]:
    """What a SESSION record says, but for its tokens and its `meta`.

    `num_kept` tokens of `base`, the session before it or the one it was forked from, stay; `num_added` follow
    them. What a record does not name is as it was there.
    """
    (length,) = _LENGTH.unpack_from(blob)
    head: Mapping[str, Any] = json.loads(blob[_LENGTH.size : _LENGTH.size + length])
    added = (len(blob) - _LENGTH.size - length) // 4
    kept = head.get("kept", 0)
    values = {name: head[name] for name in _SESSION_FIELDS if name in head}
    values |= {"num_kept": kept, "num_added": added, "num_tokens": kept + added}
    if "turns" in head:
        values |= {"num_turns": len(head["turns"]), "turn_ends": [end for _, end in head["turns"]]}
    return values
