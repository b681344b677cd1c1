"""One slab: a file of slots of one size, with the descriptor that serves it and the state it is in."""

from __future__ import annotations

import contextlib
import errno
import mmap
import threading
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from ..outcomes import Counters
from ..system.fs import NO_FILE, File, Fs
from .base import FailedPlace, StoreFailed
from .slab_format import SLOT_HEADER_NBYTES, Buffer

_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)
"""What opening for writing says when reading may still work."""


class SlabFile:
    """A slab, opened when first used. `use()` holds it open; the owner closes idle ones.

    Its pool is one long row of slots, cut into slabs and, elsewhere, into chunks: a chunk may end in one slab
    and the next begin in another.

    Args:
        directory, name: where it lies; messages say the name.
        start, end: the bytes of the pool that it holds.
        chunk_span: bytes of a chunk; space is taken and given back by chunks.
        disk_io: `"direct"`, `"buffered"` or `"mmap"`, see `Config`.
    """

    def __init__(
        self,
        fs: Fs,
        directory: str,
        name: str,
        part_nbytes: int,
        start: int,
        end: int,
        chunk_span: int,
        disk_io: str,
        read_only: bool,
        counters: Counters,
    ) -> None:
        self._fs = fs
        self._directory = directory
        self._path = f"{directory}/{name}"
        self.name = name
        self.part_nbytes = part_nbytes
        self.start = start
        self.end = end
        self._chunk_span = chunk_span
        self._counters = counters
        self._wants_direct = disk_io == "direct"
        self.is_mapped = disk_io == "mmap"
        self._lock = threading.Lock()
        self._space_lock = threading.Lock()
        self._num_users = 0
        self._file: File | None = None
        self._past_cache: File | None = None
        self._map: mmap.mmap | None = None
        self._read_only = self._stays_read_only = read_only
        self.chunks: frozenset[int] = frozenset()
        self.dirty = False
        self.inherited = False  # an earlier process may have left it without a sync
        self.failed: OSError | None = None
        self.trouble: OSError | None = None

    # ---- open and closed -----------------------------------------------------------------------

    @contextlib.contextmanager
    def use(self) -> Iterator[File]:
        """The slab's main file, open for as long as this lasts.

        Raises:
            OSError: it cannot be opened.
        """
        with self._lock:
            file = self._opened(create=False)
            self._num_users += 1
        try:
            yield file
        finally:
            with self._lock:
                self._num_users -= 1

    @property
    def slot_nbytes(self) -> int:
        return SLOT_HEADER_NBYTES + self.part_nbytes

    @property
    def is_open(self) -> bool:
        return self._file is not None

    @property
    def refuses_direct(self) -> bool:
        """Direct transfers were asked for, and the file system does not have them."""
        return self._wants_direct and self._file is not None and not self._file.direct

    def close_if_idle(self) -> bool:
        """Close the descriptors unless someone uses them, or a sync is due that must go through them."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if self._num_users or self.dirty:
                return False
            self._close()
            return True
        finally:
            self._lock.release()

    def close(self) -> None:
        """Close whatever no thread is using; those in use are left to the end of the process."""
        with self._lock:
            if not self._num_users:
                self._close()

    def note_existing(self) -> None:
        """Take the chunks of a file left by an earlier process as holding bytes."""
        nbytes = min(self._fs.file_nbytes(self._path), self.end - self.start)
        self.chunks = frozenset(self.chunks_of(0, nbytes))
        self.inherited = True

    # ---- bytes ---------------------------------------------------------------------------------

    def chunks_of(self, offset: int, nbytes: int) -> range:
        """The chunks of the pool that a range of this file touches."""
        first = self.start + offset
        return range(first // self._chunk_span, -(-(first + nbytes) // self._chunk_span) if nbytes else 0)

    def portion(self, chunk: int) -> tuple[int, int]:
        """`(offset, nbytes)` in this file of what it holds of a chunk."""
        first = max(self.start, chunk * self._chunk_span)
        return first - self.start, max(0, min(self.end, (chunk + 1) * self._chunk_span) - first)

    @property
    def allocated_nbytes(self) -> int:
        return sum(self.portion(chunk)[1] for chunk in self.chunks)

    def reserve(self, chunks: Iterable[int]) -> None:
        """Real space for these chunks of the pool, the file made and its directory synced.

        Raises:
            StoreFailed: this slab takes no more writes.
            OSError: there is no space; nothing is changed but an empty file.
        """
        self.refuse_if_failed()
        wanted = set(chunks)
        with self._lock:
            file = self._opened_for_writing()
            if wanted <= self.chunks:
                return
            self._num_users += 1
        try:
            with self._space_lock:  # finding space can take long, and who reads does not wait for it
                for run in _runs(sorted(wanted - self.chunks)):
                    (first, _), (last, nbytes) = self.portion(run[0]), self.portion(run[-1])
                    file.allocate(first, last + nbytes - first)
                    self.chunks |= set(run)
                    self.dirty = True
        finally:
            with self._lock:
                self._num_users -= 1

    def write(self, file: File, buffers: Sequence[Buffer], offset: int, nbytes: int) -> None:
        """Write through `file` (from `use`). Counts as written only if the slab has not failed meanwhile."""
        self.refuse_if_failed()
        if file.direct:
            file.drop_cached(offset, nbytes)
        try:
            file.pwritev(buffers, offset)
        finally:
            self.dirty = True
        self.refuse_if_failed()

    def past_cache(self, file: File) -> File:
        """What reads past the page cache that `file` (from `use`) goes through; `file` itself if nothing does."""
        with self._lock:
            if self._past_cache is None:
                try:
                    self._past_cache = self._fs.open_file(self._path, direct=True)
                except OSError as error:
                    self.note_read_error(error)
            return self._past_cache or file

    def mapped(self, file: File, end: int) -> mmap.mmap | None:
        """The file mapped for reading, up to `end` at least if it is that long; None when it is empty."""
        with self._lock:
            if self._map is None or len(self._map) < end:
                # a slab is never shortened, so the old map stays good for whoever reads from it
                nbytes = file.nbytes()
                if nbytes and (self._map is None or nbytes > len(self._map)):
                    self._map = file.map_read()
            return self._map

    def punch(self, chunk: int) -> None:
        """Give back the space of what lies here of a chunk of the pool."""
        with self._space_lock, self.use() as file:
            offset, nbytes = self.portion(chunk)
            nbytes = min(nbytes, file.nbytes() - offset)
            if nbytes > 0:
                self.dirty = True
                file.punch(offset, nbytes)
            self.chunks -= {chunk}

    def sync(self) -> bool:
        """Make what was written durable; False if that failed, which is final."""
        self.dirty = self.inherited = False
        try:
            with self.use() as file:
                file.datasync()
        except OSError as error:
            self.fail(error)
        return self.failed is None

    def unlink(self) -> None:
        """Remove the file, durably. Nothing in it may be wanted any more."""
        with contextlib.suppress(FileNotFoundError):
            self._fs.unlink(self._path)
        self._fs.sync_dir(self._directory)

    # ---- failure -------------------------------------------------------------------------------

    @property
    def place(self) -> FailedPlace:
        return FailedPlace(self.name, self.part_nbytes, self.chunks_of(0, self.end - self.start))

    def note_read_error(self, error: OSError) -> None:
        """A read failed; what is asked for again, slot by slot, may still come."""
        self._counters.add("disk_read_errors")
        self.trouble = error

    def fail(self, error: OSError) -> None:
        """No more writes from now on."""
        self.failed = self.failed or error
        self.trouble = error

    def refuse_if_failed(self) -> None:
        if self.failed is not None:
            raise StoreFailed(self.failed.errno or errno.EIO, [self.place])

    def _opened_for_writing(self) -> File:
        if self._stays_read_only:
            raise OSError(errno.EROFS, "opened for reading", self.name)
        if self._read_only and not self._num_users:
            self._close()  # it may be writable by now
        try:
            file = self._opened(create=True)
        except OSError as error:
            if error.errno in NO_FILE:
                self.fail(error)
            self.refuse_if_failed()
            raise
        if self._read_only:
            raise OSError(errno.EROFS, "cannot be opened for writing", self.name)
        return file

    def _opened(self, create: bool) -> File:
        if self._file is None:
            if create and not self._fs.exists(self._path):
                self._file = self._create()
            else:
                self._file = self._open()
        return self._file

    def _create(self) -> File:
        file = self._fs.open_file(self._path, create=True, writable=True, direct=self._wants_direct)
        try:
            self._fs.sync_dir(self._directory)
        except OSError as error:
            file.close()
            self.fail(error)  # whether the name is durable is not known, and no other sync would tell
            raise
        self._read_only = False
        return file

    def _open(self) -> File:
        if not self._stays_read_only:
            try:
                file = self._fs.open_file(self._path, writable=True, direct=self._wants_direct)
                self._read_only = False
                return file
            except OSError as error:
                if error.errno not in _READ_ONLY:
                    raise
        self._read_only = True
        return self._fs.open_file(self._path, direct=self._wants_direct)

    def _close(self) -> None:
        for file in (self._file, self._past_cache):
            if file is not None:
                file.close()
        self._file = self._past_cache = self._map = None


def _runs(numbers: Sequence[int]) -> list[Sequence[int]]:
    """Ascending numbers in stretches without a gap, so that one call makes room for each."""
    cuts = [at for at in range(1, len(numbers)) if numbers[at] != numbers[at - 1] + 1]
    return [numbers[at:end] for at, end in pairwise([0, *cuts, len(numbers)]) if at < end]
