"""Follows the log of a living store: its records as they are committed, across rotations, kills and openings.

A frame is given out when it verifies, whole; what a kill leaves half written never is. The next segment's header
says where its writer found the end of the log: records given out above that place were lost in a power cut or
with a failed sync, and a `cut` says so before the log goes on.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from ..errors import CorruptFormat
from ..system import Fs, OsFs, path_of
from ..table.recovery import WAL
from ..wal.format import LogPosition, SegmentHeader
from ..wal.reader import SegmentReader, refuse_newer, scan_segments
from ..wal.records import join_runs
from .kept_log import describe
from .report import survey_store


class Follower:
    """One reader of a log that somebody else writes. `poll` as often as you like; it changes nothing.

    Attributes:
        last_lsn: of the last record given out.
        num_records, num_segments, num_cuts, num_jumps: given out, read, and met so far.
    """

    def __init__(self, path: str | os.PathLike[str], fs: Fs | None = None) -> None:
        """Begins at the oldest kept segment.

        Raises:
            NotAStore, NewerFormat, PathUnusable: as `audit.read`.
        """
        self._fs = fs or OsFs()
        self.path = path_of(path)
        self._dir = f"{self.path}/{WAL}"
        survey_store(self._fs, self.path)
        self._reader: SegmentReader | None = None
        self._open_number = 0
        self.last_lsn = 0
        self.num_records = self.num_segments = self.num_cuts = self.num_jumps = 0

    def poll(self) -> Iterator[dict[str, Any]]:
        """What is new since the last poll, as plain values with `event`: record, segment, cut, jump."""
        while True:
            yield from self._frames(None)
            following = self._following()
            if following is None:
                return
            yield from self._frames(following.previous)  # what came just before it was begun
            yield from self._leave(following)
            yield from self._enter(following)

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    # ---- frames --------------------------------------------------------------------------------

    def _frames(self, cut: LogPosition | None) -> Iterator[dict[str, Any]]:
        """New frames of the segment in hand, up to where the next one cuts it."""
        reader = self._reader
        if reader is None:
            return
        reader.refresh()
        while (frame := reader.peek()) is not None and (cut is None or frame.last_lsn <= cut.lsn):
            try:
                runs = frame.runs()
            except CorruptFormat:
                return
            reader.accept(frame)
            lsn = frame.first_lsn
            for run in map(join_runs, ([packed] for packed in runs)):
                for record in run.records:
                    yield {
                        "event": "record",
                        "lsn": lsn,
                        "segment": reader.header.number,
                        **describe(run.kind, record),
                    }
                    self.num_records += 1
                    self.last_lsn = lsn
                    lsn += 1

    # ---- segments ------------------------------------------------------------------------------

    def _following(self) -> SegmentHeader | None:
        """The next segment on the chain that ends in the newest, None while ours is the newest.

        Where ours is off that chain, or was unlinked, it is the first of the chain that is newer than ours.
        """
        chain = self._chain()
        if self._reader is None or not chain:
            return chain[0] if chain else None
        ours = self._reader.header
        if ours in chain[:-1]:
            return chain[chain.index(ours) + 1]
        if chain[-1] == ours:
            return None
        return next((header for header in chain if header.number > ours.number), chain[0])

    def _chain(self) -> list[SegmentHeader]:
        """From the oldest kept segment to the newest; empty where the directory changes under us."""
        try:
            segments = scan_segments(self._fs, self._dir)
        except OSError:
            return []
        refuse_newer(segments)
        by_number = {s.number: s.header for s in segments if s.header is not None}
        header = by_number.get(max(by_number, default=0))
        chain: list[SegmentHeader] = []
        while header is not None:
            chain.append(header)
            before = by_number.get(header.previous.number)
            header = before if before is not None and before.number < header.number else None
        return chain[::-1]

    def _enter(self, header: SegmentHeader) -> Iterator[dict[str, Any]]:
        try:
            reader = SegmentReader(self._fs, self._dir, header)
        except FileNotFoundError:
            return  # unlinked meanwhile: the next look finds what follows it
        self.close()
        self._reader = reader
        self.num_segments += 1
        opened = header.open_number != self._open_number
        self._open_number = header.open_number
        yield {
            "event": "segment", "segment": header.number, "first_lsn": header.first_lsn,
            "open_number": header.open_number, "opened": opened, "checkpoint_lsn": header.checkpoint.lsn,
            "durable_lsn": header.durable_lsn,
        }  # fmt: skip

    def _leave(self, following: SegmentHeader) -> Iterator[dict[str, Any]]:
        """What the segment in hand leaves behind when the following one takes over."""
        reader = self._reader
        if reader is None:
            return
        reader.refresh()
        torn_nbytes, after_lsn = reader.rest_nbytes(), following.previous.lsn
        kept_lsn = max(after_lsn, reader.header.first_lsn - 1)  # LSNs may leave gaps between segments
        num_lost, num_missed = max(0, reader.last_lsn - kept_lsn), max(0, after_lsn - reader.last_lsn)
        if num_lost or torn_nbytes:
            self.num_cuts += 1
            yield {
                "event": "cut", "segment": reader.header.number, "after_lsn": after_lsn,
                "num_records": num_lost, "torn_nbytes": torn_nbytes,
            }  # fmt: skip
        if num_missed:
            self.num_jumps += 1
            yield {
                "event": "jump", "from_segment": reader.header.number, "to_segment": following.number,
                "after_lsn": reader.last_lsn, "num_records": num_missed,
                "why": "segments between were unlinked: a removal, or the log outgrew what is kept of it",
            }  # fmt: skip
