"""Bugs planted from outside the package, one at a time, to see that the campaign catches each.

None has a test written for it: each is caught, or not, by the parts and checks that every run has.
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import xxhash

import tieredkv.mover
import tieredkv.room
import tieredkv.table.checkpoint
import tieredkv.table.journal
import tieredkv.tier.lmdb_store
import tieredkv.tier.slab
import tieredkv.wal.format
import tieredkv.wal.reader
from tieredkv.block.identity import Identity
from tieredkv.cache import TieredCache
from tieredkv.disk import Disk
from tieredkv.prefix import Prefix
from tieredkv.residency import Residency
from tieredkv.spiller import Spiller
from tieredkv.system.fs import OsFile, OsFs
from tieredkv.table.block_table import BlockTable
from tieredkv.table.catalog import Catalog
from tieredkv.table.journal import Journal
from tieredkv.testing.sim_fs import SimFile, SimFs
from tieredkv.tier.base import Verdict
from tieredkv.tier.slab import SlabStore
from tieredkv.tier.slab_piece import Piece
from tieredkv.tier.workers import Batch
from tieredkv.wal.format import (
    FRAME_HEADER_NBYTES,
    Frame,
    LogPosition,
    decode_frame,
    decode_header,
    segment_name,
)
from tieredkv.wal.reader import LogRead, SegmentReader
from tieredkv.wal.writer import LogWriter

Plant = Callable[[], AbstractContextManager[None]]
BUGS: dict[str, Plant] = {}


def bug(name: str) -> Callable[[Callable[[Patch], None]], None]:
    """Register a function that plants one bug through a `Patch`."""

    def register(plant: Callable[[Patch], None]) -> None:
        @contextmanager
        def planted() -> Iterator[None]:
            patch = Patch()
            try:
                plant(patch)
                yield
            finally:
                patch.undo()

        BUGS[name] = planted

    return register


class Patch:
    """Replaces attributes of the package, and puts them back."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> Any:
        """Replace an attribute that must be there; returns what it was."""
        before = vars(owner)[name]
        self._before.append((owner, name, before))
        setattr(owner, name, value)
        return before

    def undo(self) -> None:
        for owner, name, value in reversed(self._before):
            setattr(owner, name, value)


# ---- files ---------------------------------------------------------------------------------------


@bug("skip the directory sync")
def _bug_1(patch: Patch) -> None:
    for fs in (OsFs, SimFs):
        patch.set(fs, "sync_dir", lambda self, path: None)


@bug("retry a failed fsync")
def _bug_2(patch: Patch) -> None:
    for file in (OsFile, SimFile):
        sync = vars(file)["datasync"]

        def retrying(self: Any, sync: Any = sync) -> None:
            try:
                sync(self)
            except OSError:
                self._sync_failed = False
                sync(self)

        patch.set(file, "datasync", retrying)


@bug("ignore a short write")
def _bug_3(patch: Patch) -> None:
    patch.set(OsFile, "pwritev", lambda self, buffers, offset: os.pwritev(self._fd, list(buffers), offset))


@bug("two writers at once")
def _bug_4(patch: Patch) -> None:
    class Nothing:
        def close(self) -> None: ...

    patch.set(OsFs, "lock", lambda self, path: Nothing())


# ---- payloads ------------------------------------------------------------------------------------


@bug("skip the payload checksum")
def _bug_5(patch: Patch) -> None:
    def trusting(headers: Any, expected: Any, checksums: Any, part_nbytes: int) -> list[Verdict]:
        sound = tieredkv.tier.slab_format.valid(headers) & tieredkv.tier.slab_format.matches(
            headers, expected
        )
        return [Verdict.OK if good else Verdict.CORRUPT for good in sound.tolist()]

    patch.set(tieredkv.tier.slab, "judge", trusting)
    patch.set(tieredkv.tier.lmdb_store, "judge", trusting)


@bug("index before payload")
def _bug_6(patch: Patch) -> None:
    write, commit, waiting = SlabStore.write, Journal._commit, []

    def later(self: Any, part_nbytes: int, slots: Any, headers: Any, payloads: Any) -> Any:
        copies = [memoryview(bytearray(part)) for part in payloads]
        headers["checksum"] = [xxhash.xxh3_64_intdigest(part) for part in copies]
        waiting.append((self, part_nbytes, slots, headers, copies))
        return headers["checksum"].copy()

    def commit_first(self: Any, batch: Any) -> None:
        commit(self, batch)
        while waiting:
            write(*waiting.pop())

    patch.set(SlabStore, "write", later)
    patch.set(Journal, "_commit", commit_first)


@bug("a flush does not sync payloads")
def _bug_7(patch: Patch) -> None:
    patch.set(SlabStore, "sync", lambda self: None)


@bug("removed slots are not blanked")
def _bug_8(patch: Patch) -> None:
    patch.set(SlabStore, "blank", lambda self, part_nbytes, slots: None)
    patch.set(SlabStore, "release", lambda self, part_nbytes, chunks: None)


@bug("closing leaves the slabs open")
def _bug_9(patch: Patch) -> None:
    patch.set(SlabStore, "close", lambda self: None)


@bug("a wait for the disk has no bound")
def _bug_10(patch: Patch) -> None:
    wait = Batch.wait
    patch.set(Batch, "wait", lambda self, timeout_s=None: wait(self, None))


# ---- the log -------------------------------------------------------------------------------------


@bug("a sync of the log does nothing")
def _bug_11(patch: Patch) -> None:
    def pretend(self: Any) -> int:
        with self._sync_lock:
            self._synced = self._tail
            self._unsynced.clear()
            return int(self._tail.lsn)

    patch.set(LogWriter, "sync", pretend)


@bug("skip the frame checksum")
def _bug_12(patch: Patch) -> None:
    def trusting(header: Any, raw: memoryview) -> Any:
        frame = decode_frame(header, raw)
        if frame is not None or len(raw) < FRAME_HEADER_NBYTES:
            return frame
        checksum, marker, previous, first_lsn, durable_lsn, nbytes, count = struct.unpack_from(
            "<Q8sQQQII", raw
        )
        if marker != header.marker or FRAME_HEADER_NBYTES + nbytes > len(raw):
            return None
        body = raw[FRAME_HEADER_NBYTES : FRAME_HEADER_NBYTES + nbytes]
        return Frame(checksum, previous, first_lsn, durable_lsn, count, body)

    patch.set(tieredkv.wal.reader, "decode_frame", trusting)


@bug("append after a torn end")
def _bug_13(patch: Patch) -> None:
    start = LogWriter.start

    def reuse(self: Any, first_lsn: int, **rest: Any) -> Any:
        if self._header is not None or self._tail.number == 0:
            return start(self, first_lsn, **rest)
        file = self._fs.open_file(f"{self._dir}/{segment_name(self._tail.number)}", writable=True)
        raw = bytearray(file.nbytes())
        file.preadv([raw], 0)
        used = -(-len(bytes(raw).rstrip(b"\0")) // 8) * 8
        if used > self._segment_nbytes // 2 or used < 4096:
            file.close()
            return start(self, first_lsn, **rest)
        self._header, self._file, self._tail_nbytes = decode_header(bytes(raw[:4096])), file, used
        self._tail = self._synced = LogPosition(self._tail.number, first_lsn - 1, self._tail.chain)
        return self._header

    patch.set(LogWriter, "start", reuse)


@bug("replay out of LSN order")
def _bug_14(patch: Patch) -> None:
    gathered = LogRead.gathered
    patch.set(LogRead, "gathered", lambda self: reversed(list(gathered(self))))


@bug("replay goes on behind a hole")
def _bug_15(patch: Patch) -> None:
    peek = SegmentReader.peek

    def hopeful(self: Any) -> Any:
        frame = peek(self)
        if frame is None:
            self.offset, frame = next(iter(self.stray_frames()), (self.offset, None))
        return frame

    patch.set(SegmentReader, "peek", hopeful)


@bug("unlink segments too early")
def _bug_16(patch: Patch) -> None:
    write = Journal._write_checkpoint

    def hasty(self: Any) -> None:
        for segment in self._segments[:-1]:
            self._writer.unlink_segment(segment.number)
        del self._segments[:-1]
        write(self)

    patch.set(Journal, "_write_checkpoint", hasty)


@bug("keep a purged checkpoint")
def _bug_17(patch: Patch) -> None:
    patch.set(tieredkv.table.journal, "prune_checkpoints", lambda fs, path, keep: [])


@bug("believe a checkpoint unseen")
def _bug_18(patch: Patch) -> None:
    patch.set(tieredkv.table.checkpoint, "_verify", lambda fs, path, ref: None)


@bug("acknowledge before the record")
def _bug_19(patch: Patch) -> None:
    commit = Journal._commit

    def eager(self: Any, batch: Any) -> None:
        for entry in batch:
            entry.ticket.finish(self._next_lsn)
        threading.Event().wait(0.02)
        commit(self, batch)

    patch.set(Journal, "_commit", eager)


@bug("read a newer format as if it were ours")
def _bug_20(patch: Patch) -> None:
    patch.set(tieredkv.wal.format, "VERSION", 99)


# ---- table, sessions, tiers ----------------------------------------------------------------------


@bug("drop one identity field")
def _bug_21(patch: Patch) -> None:
    fingerprint = Identity.fingerprint
    patch.set(Identity, "fingerprint", lambda self: {**fingerprint(self), "salt": ""})


@bug("evict heads first")
def _bug_22(patch: Patch) -> None:
    def head_in_tier(table: Any, tier: Any, row: int, gone: Any, ways: Any) -> int:
        above = int(table.parent[row])
        while above >= 0 and not gone[above] and (table.slot[tier, :, above] >= 0).any():
            row, above = above, int(table.parent[above])
        return row

    patch.set(tieredkv.room, "tail_in_tier", head_in_tier)
    patch.set(tieredkv.room, "num_leaving_whole", lambda table, layout_of, tier, rows, gone: 0)


@bug("forget an unpin on cancel")
def _bug_23(patch: Patch) -> None:
    def leave(self: Any, kind: Any, error: Any, trace: Any) -> None:
        if kind is None:
            self.close()

    patch.set(Prefix, "__exit__", leave)


@bug("evict what is pinned")
def _bug_24(patch: Patch) -> None:
    patch.set(BlockTable, "is_held", lambda self, row: False)


@bug("do not wait for copies")
def _bug_25(patch: Patch) -> None:
    for module in (tieredkv.room, tieredkv.mover):
        patch.set(module, "await_copies", lambda device, deadline_s, counters: None)


@bug("freed slots are not given back")
def _bug_26(patch: Patch) -> None:
    free = Residency.free

    def lossy(self: Any, stride_nbytes: int, slots: Any) -> None:
        if self.tier != 2:
            free(self, stride_nbytes, slots)

    patch.set(Residency, "free", lossy)


@bug("a delete forgets the session")
def _bug_27(patch: Patch) -> None:
    patch.set(Catalog, "_begin_removal", lambda self, removal: self.removals.append(removal))


@bug("a failed write is not counted")
def _bug_28(patch: Patch) -> None:
    patch.set(Spiller, "_failed", lambda self, error: None)
    patch.set(Journal, "_commit_failed", _fail_quietly)


def _fail_quietly(self: Any, batch: Any, error: Exception) -> None:
    with self._lock:
        for entry in batch:
            entry.failed(error)
        self._lock.notify_all()
    for entry in batch:
        entry.ticket.finish(0, error)


@bug("a child may use its parent's cache")
def _bug_29(patch: Patch) -> None:
    patch.set(TieredCache, "check_open", lambda self: None)


@bug("an unfinished removal is taken for finished")
def _bug_30(patch: Patch) -> None:
    patch.set(Disk, "erase", lambda self, until: True)


@bug("a read error raises out of load")
def _bug_31(patch: Patch) -> None:
    read = Piece.read

    def raising(self: Any, headers: Any, into: Any) -> Any:
        checksums = read(self, headers, into)
        if None in checksums:
            raise OSError("unreadable")
        return checksums

    patch.set(Piece, "read", raising)
