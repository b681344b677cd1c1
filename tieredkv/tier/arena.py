"""The bookkeeping of one tier: a byte budget cut into chunks, chunks cut into the slots of a pool.

    budget   |  chunk 0  |  chunk 1  |  chunk 2  | ...      one size for the whole tier
    pool A     [s][s][s]               [s][s][s]            slots of one stride
    pool B                 [ s ][ s ]                       slots of another

A pool takes whole chunks and gives a chunk back when its last slot is freed. Nothing here touches a byte of
payload: the owner of the memory or of the files turns slots into addresses with `Geometry`.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import CorruptFormat
from ..units import PAGE_NBYTES, MiB, align_up

Slots = npt.NDArray[np.int64]

DISK_CHUNK_NBYTES = 4 * MiB
"""What disk pools take from the budget at a time, unless told otherwise."""

_MAX_CHUNK_NBYTES = 64 * MiB
_MAX_CHUNKS = 1 << 24
"""No store is larger; a claim beyond is damage, not a size to make tables for."""

_OPEN, _SEALED, _RETIRED = 0, 1, 2

_MAX_LOOKS = 8
"""How often one `take` looks for a longer run elsewhere before it accepts what it has found."""


def default_chunk_nbytes(budget_nbytes: int, min_chunk_nbytes: int = PAGE_NBYTES) -> int:
    """The least of 64 MiB and a sixteenth of the budget, never less than `min_chunk_nbytes`.

    Rounded down to a multiple of `min_chunk_nbytes` (itself a multiple of 4096), so that the largest part
    leaves no tail.
    """
    unit = align_up(max(min_chunk_nbytes, PAGE_NBYTES))
    return max(unit, min(_MAX_CHUNK_NBYTES, budget_nbytes // 16) // unit * unit)


@dataclass(frozen=True)
class Geometry:
    """Where a slot lies: `slot = chunk * slots_per_chunk + i`, at `chunk * chunk_span + i * stride_nbytes`.

    In one allocation (`packed=False`) every chunk has `chunk_nbytes`, whatever lies in it, and may end in a
    tail that no slot covers. In files of its own (`packed=True`) a pool's chunks are as many whole slots as
    fit into `chunk_nbytes`, one at least, so that slot `n` lies at `n * stride_nbytes` for any `chunk_nbytes`.
    """

    chunk_nbytes: int
    packed: bool

    def slots_per_chunk(self, stride_nbytes: int) -> int:
        """0 when a chunk is too small for this size; such a size gets no slots."""
        count = self.chunk_nbytes // stride_nbytes
        return max(1, count) if self.packed else count

    def chunk_span(self, stride_nbytes: int) -> int:
        """Bytes from one chunk of this pool to the next, which is what a chunk takes of the budget."""
        return self.slots_per_chunk(stride_nbytes) * stride_nbytes if self.packed else self.chunk_nbytes

    def offset(self, stride_nbytes: int, slot: int) -> int:
        return int(self.offsets(stride_nbytes, np.array(slot)))

    def offsets(self, stride_nbytes: int, slots: Slots) -> npt.NDArray[np.int64]:
        """The byte at which each slot begins."""
        chunks, indices = np.divmod(slots, self.slots_per_chunk(stride_nbytes))
        begins: npt.NDArray[np.int64] = chunks * self.chunk_span(stride_nbytes) + indices * stride_nbytes
        return begins

    def runs(self, stride_nbytes: int, slots: npt.ArrayLike) -> list[tuple[int, int, int]]:
        """`(first slot, count, byte offset)` of each stretch of `slots`, in their order, lying end to end."""
        numbers = np.asarray(slots, np.int64)
        if numbers.size == 0:
            return []
        per_chunk, span = self.slots_per_chunk(stride_nbytes), self.chunk_span(stride_nbytes)
        breaks = np.diff(numbers) != 1
        if span % stride_nbytes:
            breaks |= numbers[1:] % per_chunk == 0
        starts = np.concatenate(([0], np.flatnonzero(breaks) + 1, [numbers.size]))
        firsts = numbers[starts[:-1]]
        offsets = self.offsets(stride_nbytes, firsts)
        return list(zip(firsts.tolist(), np.diff(starts).tolist(), offsets.tolist(), strict=True))


class Arena:
    """Which slots of a tier are live, within a byte budget. Not thread-safe: the metadata lock guards it.

    Args:
        budget_nbytes: what all chunks together may take.
        chunk_nbytes: a multiple of 4096; None takes `default_chunk_nbytes`.
        min_chunk_nbytes: the largest stride that must fit into a chunk.
        shared: True numbers chunks in one space, as one allocation has it, and the budget cannot grow past
            its first value; False lets every pool number its own from 0, packed, as files of its own have it.
            An empty chunk goes back to the budget at once if shared. Otherwise its pool keeps it, for its
            file space must be punched first: `retire_spare`, punch, `reinstate`.
    """

    def __init__(
        self,
        budget_nbytes: int,
        *,
        chunk_nbytes: int | None = None,
        min_chunk_nbytes: int = PAGE_NBYTES,
        shared: bool,
    ) -> None:
        chunk_nbytes = chunk_nbytes or default_chunk_nbytes(budget_nbytes, min_chunk_nbytes)
        assert chunk_nbytes % PAGE_NBYTES == 0, (
            f"chunk of {chunk_nbytes} bytes is no multiple of {PAGE_NBYTES}"
        )
        self.geometry = Geometry(chunk_nbytes, packed=not shared)
        self.capacity_nbytes = budget_nbytes // chunk_nbytes * chunk_nbytes
        self._budget_nbytes = budget_nbytes
        self._used_nbytes = 0
        self._pools: dict[int, _Pool] = {}
        self._kept: set[tuple[int, int]] = set()
        self._shared = _ChunkNumbers() if shared else None

    @property
    def chunk_nbytes(self) -> int:
        return self.geometry.chunk_nbytes

    @property
    def budget_nbytes(self) -> int:
        return self._budget_nbytes

    @budget_nbytes.setter
    def budget_nbytes(self, nbytes: int) -> None:
        """A smaller budget frees nothing by itself: `over_budget_nbytes` says what must go."""
        assert (
            self._shared is None or nbytes // self.chunk_nbytes * self.chunk_nbytes <= self.capacity_nbytes
        ), f"a shared arena of {self.capacity_nbytes} bytes cannot grow to {nbytes}"
        self._budget_nbytes = nbytes

    @property
    def used_nbytes(self) -> int:
        """What the chunks that are held or retired take."""
        return self._used_nbytes

    @property
    def reached_nbytes(self) -> int:
        """Of one allocation: no chunk beyond this was ever taken."""
        assert self._shared is not None, "pools that number their own chunks share no bytes"
        return self._shared.reached * self.chunk_nbytes

    @property
    def over_budget_nbytes(self) -> int:
        return max(0, self.used_nbytes - self._budget_nbytes)

    @property
    def live_nbytes(self) -> int:
        return sum(pool.num_live * stride for stride, pool in self._pools.items())

    @property
    def strides(self) -> tuple[int, ...]:
        """The slot sizes that hold a chunk now."""
        return tuple(stride for stride, pool in self._pools.items() if pool.num_chunks)

    def num_live(self, stride_nbytes: int) -> int:
        pool = self._pools.get(stride_nbytes)
        return pool.num_live if pool else 0

    def num_free(self, stride_nbytes: int) -> int:
        """Slots that `allocate` could give now, those of chunks not yet taken included."""
        pool = self._pools.get(stride_nbytes)
        fresh = self._num_free_chunks(stride_nbytes) * self.slots_per_chunk(stride_nbytes)
        return fresh + (pool.num_free if pool else 0)

    def slots_per_chunk(self, stride_nbytes: int) -> int:
        return self.geometry.slots_per_chunk(stride_nbytes)

    def chunk_span(self, stride_nbytes: int) -> int:
        return self.geometry.chunk_span(stride_nbytes)

    def offset(self, stride_nbytes: int, slot: int) -> int:
        return self.geometry.offset(stride_nbytes, slot)

    def runs(self, stride_nbytes: int, slots: npt.ArrayLike) -> list[tuple[int, int, int]]:
        return self.geometry.runs(stride_nbytes, slots)

    def live_slots(self, stride_nbytes: int) -> Slots:
        """Every live slot of one size, ascending."""
        pool = self._pools.get(stride_nbytes)
        return pool.live_slots() if pool else np.empty(0, np.int64)

    def free_slots(self, stride_nbytes: int) -> Slots:
        """Slots without a part in the chunks of one size that serve, ascending."""
        pool = self._pools.get(stride_nbytes)
        return pool.free_slots() if pool else np.empty(0, np.int64)

    def allocate(self, stride_nbytes: int, count: int) -> Slots:
        """Up to `count` slots, now live, ascending, in few and long runs; fewer when the budget is out.

        The pool's own free slots come first, then free chunks.
        """
        if count <= 0 or self.slots_per_chunk(stride_nbytes) == 0:
            return np.empty(0, np.int64)
        self.take_chunks(stride_nbytes, count)
        return self._pool(stride_nbytes).take(count)

    def take_chunks(self, stride_nbytes: int, num_free: int) -> list[int]:
        """Chunks for a pool until it has so many free slots, as far as the budget goes; returns the new ones."""
        per_chunk, pool = self.slots_per_chunk(stride_nbytes), self._pool(stride_nbytes)
        num_chunks = -(-max(0, num_free - pool.num_free) // per_chunk)
        chunks = pool.numbers.take_lowest(min(num_chunks, self._num_free_chunks(stride_nbytes)))
        for chunk in chunks:
            self._add(pool, stride_nbytes, chunk)
        return chunks

    def free(self, stride_nbytes: int, slots: npt.ArrayLike) -> list[tuple[int, int]]:
        """These slots are free again. Returns the `(stride, chunk)` pairs that went back to the budget."""
        numbers = np.asarray(slots, np.int64)
        if numbers.size == 0:
            return []
        pool = self._pools.get(stride_nbytes)
        assert pool is not None, f"no pool of stride {stride_nbytes} to free {numbers.size} slots of"
        chunks = pool.give_back(numbers)
        self._used_nbytes -= len(chunks) * self.chunk_span(stride_nbytes)
        return [(stride_nbytes, chunk) for chunk in chunks]

    def claim(self, stride_nbytes: int, slots: npt.ArrayLike) -> None:
        """Recovery says that these slots are live. May exceed the budget; see `over_budget_nbytes`.

        Raises:
            CorruptFormat: a slot is claimed twice, or cannot exist; nothing is claimed then.
        """
        numbers = np.sort(np.asarray(slots, np.int64))
        if numbers.size == 0:
            return
        per_chunk = self.slots_per_chunk(stride_nbytes)
        if per_chunk == 0:
            raise CorruptFormat(
                f"a slot of {stride_nbytes} bytes does not fit a chunk of {self.chunk_nbytes}"
            )
        if numbers[0] < 0 or numbers[-1] // per_chunk >= _MAX_CHUNKS:
            raise CorruptFormat(f"slots {numbers[0]} to {numbers[-1]} of stride {stride_nbytes} cannot exist")
        pool = self._pool(stride_nbytes)
        self._refuse_claimed(pool, stride_nbytes, numbers)
        for chunk in pool.missing_chunks(numbers):
            pool.numbers.take_this(chunk)
            self._add(pool, stride_nbytes, chunk)
        pool.mark(numbers)

    def sparsest_chunk(
        self, except_stride: int, skip: Container[tuple[int, int]] = ()
    ) -> tuple[int, int, Slots] | None:
        """`(stride, chunk, live slots)` of the chunk of another size with the fewest live slots.

        Sealed and retired chunks and the `(stride, chunk)` pairs in `skip` are passed over; None when there
        is no other.
        """
        best: tuple[int, int, int, int] | None = None
        for stride, pool in self._pools.items():
            if stride == except_stride:
                continue
            chunk = pool.sparsest(stride, skip)
            if chunk is not None:
                num_live = pool.live_slots_of(chunk).size
                found = (num_live, num_live * stride, stride, chunk)
                best = min(best, found) if best else found
        if best is None:
            return None
        _, _, stride, chunk = best
        return stride, chunk, self._pools[stride].live_slots_of(chunk)

    def seal(self, stride_nbytes: int, chunk: int) -> None:
        """While a chunk is emptied nothing new may come in: its free slots are not allocated."""
        self._pools[stride_nbytes].close(chunk, _SEALED)

    def unseal(self, stride_nbytes: int, chunk: int) -> None:
        """Emptying was given up. Does nothing for a chunk that went back to the budget."""
        self._pools[stride_nbytes].open(chunk, _SEALED)

    def keep(self, stride_nbytes: int, chunks: Iterable[int]) -> None:
        """`retire_spare` passes these chunks over until `unkeep`: space for them is on its way."""
        self._kept.update((stride_nbytes, chunk) for chunk in chunks)

    def unkeep(self, stride_nbytes: int, chunks: Iterable[int]) -> None:
        self._kept.difference_update((stride_nbytes, chunk) for chunk in chunks)

    def retire_spare(self, except_stride: int) -> list[tuple[int, int]]:
        """Retire every open chunk of another size that has no live slot; returns their `(stride, chunk)`."""
        spare = [
            (stride, chunk)
            for stride, pool in self._pools.items()
            if stride != except_stride and pool.keeps_empty
            for chunk in pool.empty_chunks()
            if (stride, chunk) not in self._kept
        ]
        for stride, chunk in spare:
            self._pools[stride].close(chunk, _RETIRED)
        return spare

    def retire(self, stride_nbytes: int, chunks: Iterable[int]) -> None:
        """These chunks give no slots until `reinstate`; those that are held count against the budget still.

        So it is with the chunks of a failed slab, the ones it never came to among them. Slots that are live
        in them stay so; a retired chunk does not go back to the budget with its last slot.
        """
        pool = self._pool(stride_nbytes)
        for chunk in chunks:
            if pool.holds(chunk):
                pool.close(chunk, _RETIRED)
            elif not pool.numbers.is_taken(chunk):
                pool.numbers.take_this(chunk)

    def reinstate(self, stride_nbytes: int, chunks: Iterable[int]) -> None:
        """Retired chunks serve again: those with live slots at once, the others from the budget."""
        pool = self._pools[stride_nbytes]
        for chunk in chunks:
            if not pool.holds(chunk):
                pool.numbers.give_back(chunk)
                continue
            num_gone = pool.open(chunk, _RETIRED)
            self._used_nbytes -= num_gone * self.chunk_span(stride_nbytes)

    def not_taken(self, stride_nbytes: int, chunks: Iterable[int]) -> list[int]:
        """Those of `chunks` that no pool of this size has, nor are they retired."""
        pool = self._pool(stride_nbytes)
        return [c for c in chunks if not pool.holds(c) and not pool.numbers.is_taken(c)]

    def num_live_in(self, stride_nbytes: int, chunks: Iterable[int]) -> int:
        """Live slots in these chunks."""
        pool = self._pools.get(stride_nbytes)
        return sum(pool.live_slots_of(chunk).size for chunk in chunks if pool.holds(chunk)) if pool else 0

    def check(self) -> None:
        """Conservation: every count equals a recount, no chunk has two owners."""
        owned = [(stride, chunk) for stride, pool in self._pools.items() for chunk in pool.check()]
        nbytes = sum(self.chunk_span(stride) for stride, _ in owned)
        assert nbytes == self._used_nbytes, f"{nbytes} bytes in chunks, {self._used_nbytes} counted"
        chunks = [chunk for _, chunk in owned]
        if self._shared is not None:
            assert len(set(chunks)) == len(chunks), f"{len(chunks) - len(set(chunks))} chunks have two owners"
            assert self._shared.num_taken == len(chunks), (
                f"{self._shared.num_taken} taken, {len(chunks)} held"
            )

    def _pool(self, stride_nbytes: int) -> _Pool:
        pool = self._pools.get(stride_nbytes)
        if pool is None:
            assert stride_nbytes % PAGE_NBYTES == 0 and stride_nbytes > 0, f"stride of {stride_nbytes} bytes"
            numbers = self._shared or _ChunkNumbers()
            per_chunk, keeps = self.slots_per_chunk(stride_nbytes), self._shared is None
            pool = self._pools[stride_nbytes] = _Pool(per_chunk, numbers, keeps_empty=keeps)
        return pool

    def _num_free_chunks(self, stride_nbytes: int) -> int:
        return max(0, self._budget_nbytes - self._used_nbytes) // self.chunk_span(stride_nbytes)

    def _add(self, pool: _Pool, stride_nbytes: int, chunk: int) -> None:
        pool.add(chunk)
        self._used_nbytes += self.chunk_span(stride_nbytes)

    def _refuse_claimed(self, pool: _Pool, stride_nbytes: int, numbers: Slots) -> None:
        twice = numbers[1:][np.diff(numbers) == 0]
        if twice.size == 0:
            twice = numbers[pool.is_live(numbers)]
        if twice.size:
            raise CorruptFormat(f"slot {twice[0]} of stride {stride_nbytes} is claimed twice")
        for chunk in pool.missing_chunks(numbers):
            if pool.numbers.is_taken(chunk):
                raise CorruptFormat(f"chunk {chunk} is claimed for stride {stride_nbytes} and for another")


class _ChunkNumbers:
    """Which chunk numbers of one space are taken; the lowest free ones go first."""

    def __init__(self) -> None:
        self._taken = np.zeros(16, bool)
        self.num_taken = 0
        self.reached = 0

    def take_lowest(self, count: int) -> list[int]:
        if count <= 0:
            return []
        self._taken = _grown(self._taken, self.num_taken + count)
        chunks = np.flatnonzero(~self._taken)[:count]
        self._taken[chunks] = True
        self.num_taken += count
        self.reached = max(self.reached, int(chunks[-1]) + 1)
        return [int(chunk) for chunk in chunks]

    def take_this(self, chunk: int) -> None:
        assert not self.is_taken(chunk), f"chunk {chunk} is taken already"
        self._taken = _grown(self._taken, chunk + 1)
        self._taken[chunk] = True
        self.num_taken += 1
        self.reached = max(self.reached, chunk + 1)

    def give_back(self, chunk: int) -> None:
        self._taken[chunk] = False
        self.num_taken -= 1

    def is_taken(self, chunk: int) -> bool:
        return chunk < self._taken.size and bool(self._taken[chunk])


class _Pool:
    """The slots of one size: one row for each chunk held, `live[row, i]` for slot i of it.

    `_longest[row]` bounds the row's longest free run from above; it is 0 for rows that give no slots. A scan
    makes it exact, a free raises it by what that free can join, so that `take` rarely looks at a row in vain.
    """

    def __init__(self, slots_per_chunk: int, numbers: _ChunkNumbers, *, keeps_empty: bool) -> None:
        self.slots_per_chunk = slots_per_chunk
        self.keeps_empty = keeps_empty
        self.numbers = numbers
        self.num_chunks = 0
        self.num_live = 0
        self.num_free = 0
        self._row_of = np.full(16, -1, np.int32)
        self._chunk_of = np.full(4, -1, np.int64)
        self._live = np.zeros((4, slots_per_chunk), bool)
        self._num_free = np.zeros(4, np.int64)
        self._longest = np.zeros(4, np.int64)
        self._state = np.zeros(4, np.int8)
        self._spare_rows = [3, 2, 1, 0]

    def add(self, chunk: int) -> None:
        """A chunk of free slots joins the pool."""
        if not self._spare_rows:
            self._grow_rows()
        row = self._spare_rows.pop()
        self._row_of = _grown(self._row_of, chunk + 1, fill=-1)
        self._row_of[chunk], self._chunk_of[row] = row, chunk
        self._num_free[row] = self._longest[row] = self.slots_per_chunk
        self.num_chunks += 1
        self.num_free += self.slots_per_chunk

    def take(self, count: int) -> Slots:
        """Up to `count` free slots, now live: one run that fits best, else the longest runs there are."""
        taken = [self._take_whole(count // self.slots_per_chunk)]
        count -= taken[0].size
        num_looks = _MAX_LOOKS
        while count > 0 and (row := self._row_for(count)) is not None:
            starts, lengths = self._free_runs(row)
            longest = int(lengths.max(initial=0))
            hoped, self._longest[row] = min(count, int(self._longest[row])), longest
            if longest == 0 or (longest < hoped and num_looks > 0):
                num_looks -= 1
                continue  # the bound was too high: another row may do better
            if longest >= count:
                best = int(np.argmin(np.where(lengths >= count, lengths, self.slots_per_chunk + 1)))
                starts, lengths = starts[best : best + 1], np.asarray([count])
            else:
                starts, lengths = _long_runs(starts, lengths, count)
            slots = _expand(starts, lengths)
            self._occupy(row, slots)
            taken.append(slots + self._chunk_of[row] * self.slots_per_chunk)
            count -= slots.size
        return np.sort(np.concatenate(taken))

    def mark(self, numbers: Slots) -> None:
        """These free slots of chunks that the pool holds are live."""
        rows, index = self._locate(numbers)
        self._live[rows, index] = True
        counts = np.bincount(rows, minlength=self._num_free.size)
        self._num_free -= counts
        np.minimum(self._longest, self._num_free, out=self._longest)
        self.num_live += numbers.size
        self.num_free -= int(counts[self._state == _OPEN].sum())

    def give_back(self, numbers: Slots) -> list[int]:
        """These live slots are free. Returns the chunks left without a live slot that leave the pool."""
        assert self.is_live(numbers).all(), f"slot {numbers[~self.is_live(numbers)][0]} freed but not live"
        rows, index = self._locate(numbers)
        self._live[rows, index] = False
        assert not numbers.size > 1 or np.unique(numbers).size == numbers.size, (
            "a slot is freed twice in one call"
        )
        counts = np.bincount(rows, minlength=self._num_free.size)
        self._num_free += counts
        self.num_live -= numbers.size
        self.num_free += int(counts[self._state == _OPEN].sum())
        touched = np.flatnonzero(counts)
        joined = (counts[touched] + 1) * self._longest[touched] + counts[touched]
        bounds = np.minimum(joined, self._num_free[touched])
        self._longest[touched] = np.where(self._state[touched] == _OPEN, bounds, 0)
        if self.keeps_empty:
            return []
        empty = touched[
            (self._num_free[touched] == self.slots_per_chunk) & (self._state[touched] != _RETIRED)
        ]
        return [self._drop(int(row)) for row in empty]

    def is_live(self, numbers: Slots) -> npt.NDArray[np.bool_]:
        chunks = numbers // self.slots_per_chunk
        known = (numbers >= 0) & (chunks < self._row_of.size)
        rows = np.where(known, self._row_of[np.where(known, chunks, 0)], -1)
        live: npt.NDArray[np.bool_] = self._live[rows, numbers % self.slots_per_chunk] & (rows >= 0)
        return live

    def missing_chunks(self, numbers: Slots) -> list[int]:
        """The chunks of these slots that the pool does not hold, ascending."""
        chunks = np.unique(numbers // self.slots_per_chunk).tolist()
        return [chunk for chunk in chunks if chunk >= self._row_of.size or self._row_of[chunk] < 0]

    def live_slots(self) -> Slots:
        rows, index = np.nonzero(self._live)
        return np.sort(self._chunk_of[rows] * self.slots_per_chunk + index)

    def free_slots(self) -> Slots:
        serving = (self._chunk_of >= 0) & (self._state == _OPEN)
        rows, index = np.nonzero(~self._live & serving[:, None])
        return np.sort(self._chunk_of[rows] * self.slots_per_chunk + index)

    def live_slots_of(self, chunk: int) -> Slots:
        return np.flatnonzero(self._live[self._row_of[chunk]]) + chunk * self.slots_per_chunk

    def sparsest(self, stride_nbytes: int, skip: Container[tuple[int, int]]) -> int | None:
        """The chunk with the fewest live slots that may be emptied."""
        rows = np.flatnonzero((self._chunk_of >= 0) & (self._state == _OPEN))
        for row in rows[np.argsort(-self._num_free[rows], kind="stable")]:
            chunk = int(self._chunk_of[row])
            if (stride_nbytes, chunk) not in skip:
                return chunk
        return None

    def empty_chunks(self) -> list[int]:
        """Open chunks without a live slot."""
        rows = (self._chunk_of >= 0) & (self._state == _OPEN) & (self._num_free == self.slots_per_chunk)
        return [int(chunk) for chunk in self._chunk_of[rows]]

    def holds(self, chunk: int) -> bool:
        return chunk < self._row_of.size and bool(self._row_of[chunk] >= 0)

    def close(self, chunk: int, state: int) -> None:
        """A chunk that the pool holds gives no slots from now on."""
        row = int(self._row_of[chunk])
        assert row >= 0, f"chunk {chunk} is not held"
        if self._state[row] == _OPEN:
            self.num_free -= int(self._num_free[row])
        self._state[row], self._longest[row] = max(int(self._state[row]), state), 0

    def open(self, chunk: int, state: int) -> int:
        """Undo `close` to `state`; returns the number of chunks that left the pool by it, being empty."""
        row = int(self._row_of[chunk]) if self.holds(chunk) else -1
        if row < 0 or self._state[row] != state:
            return 0
        self._state[row], self._longest[row] = _OPEN, self._num_free[row]
        self.num_free += int(self._num_free[row])
        kept = state != _RETIRED and self.keeps_empty  # its file space is not punched yet
        if self._num_free[row] < self.slots_per_chunk or kept:
            return 0
        self._drop(row)
        return 1

    def check(self) -> list[int]:
        """Recount this pool; returns the chunks it holds."""
        rows = np.flatnonzero(self._chunk_of >= 0)
        free = np.where(self._chunk_of >= 0, self.slots_per_chunk - self._live.sum(axis=1), 0)
        assert (free == self._num_free).all(), (
            f"free slots by row {self._num_free.tolist()}, recount {free.tolist()}"
        )
        assert int(self._live.sum()) == self.num_live, (
            f"{int(self._live.sum())} live, {self.num_live} counted"
        )
        open_free = int(free[self._state == _OPEN].sum())
        assert open_free == self.num_free, f"{open_free} free, {self.num_free} counted"
        assert rows.size == self.num_chunks, f"{rows.size} rows, {self.num_chunks} chunks"
        for row in rows.tolist():
            longest = self._free_runs(row)[1].max(initial=0)
            assert self._state[row] != _OPEN or longest <= self._longest[row], (
                f"run of {longest} over its bound"
            )
            kept = self.keeps_empty or self._state[row] == _RETIRED
            assert kept or free[row] < self.slots_per_chunk, "an empty chunk is held"
            assert self._row_of[self._chunk_of[row]] == row, f"row {row} is not where its chunk points"
        assert not self._longest[self._chunk_of < 0].any(), "a row without a chunk offers slots"
        return [int(chunk) for chunk in self._chunk_of[rows]]

    def _take_whole(self, count: int) -> Slots:
        """The slots of up to `count` chunks that are free from end to end."""
        rows = np.flatnonzero(self._longest == self.slots_per_chunk)[:count]
        self._live[rows] = True
        self._num_free[rows] = self._longest[rows] = 0
        num_slots = rows.size * self.slots_per_chunk
        self.num_live += num_slots
        self.num_free -= num_slots
        return _expand(self._chunk_of[rows] * self.slots_per_chunk, np.full(rows.size, self.slots_per_chunk))

    def _row_for(self, count: int) -> int | None:
        """The tightest row that may hold a run of `count`, else the row with the longest run."""
        fitting = np.flatnonzero(self._longest >= count)
        if fitting.size:
            return int(fitting[np.argmin(self._longest[fitting])])
        row = int(np.argmax(self._longest))
        return row if self._longest[row] > 0 else None

    def _free_runs(self, row: int) -> tuple[Slots, Slots]:
        """Starts and lengths of the row's free runs; empty for a full row."""
        padded = np.ones(self.slots_per_chunk + 2, bool)
        padded[1:-1] = self._live[row]
        edges = np.flatnonzero(padded[1:] != padded[:-1])
        return edges[::2], edges[1::2] - edges[::2]

    def _occupy(self, row: int, index: Slots) -> None:
        self._live[row, index] = True
        self._num_free[row] -= index.size
        self._longest[row] = min(self._longest[row], self._num_free[row])
        self.num_live += index.size
        self.num_free -= index.size

    def _locate(self, numbers: Slots) -> tuple[npt.NDArray[np.int32], Slots]:
        return self._row_of[numbers // self.slots_per_chunk], numbers % self.slots_per_chunk

    def _drop(self, row: int) -> int:
        chunk = int(self._chunk_of[row])
        if self._state[row] == _OPEN:
            self.num_free -= self.slots_per_chunk
        self._row_of[chunk] = self._chunk_of[row] = -1
        self._num_free[row] = self._longest[row] = 0
        self._state[row] = _OPEN
        self._spare_rows.append(row)
        self.numbers.give_back(chunk)
        self.num_chunks -= 1
        return chunk

    def _grow_rows(self) -> None:
        num_rows = self._chunk_of.size
        self._spare_rows = list(range(2 * num_rows - 1, num_rows - 1, -1))
        self._chunk_of = _grown(self._chunk_of, 2 * num_rows, fill=-1)
        self._num_free = _grown(self._num_free, 2 * num_rows)
        self._longest = _grown(self._longest, 2 * num_rows)
        self._state = _grown(self._state, 2 * num_rows)
        live = np.zeros((2 * num_rows, self.slots_per_chunk), bool)
        live[:num_rows] = self._live
        self._live = live


def _long_runs(starts: Slots, lengths: Slots, count: int) -> tuple[Slots, Slots]:
    """The longest runs first, whole, while they fit into `count` and are at least half the longest."""
    order = np.argsort(-lengths, kind="stable")
    order = order[2 * lengths[order] >= lengths[order[0]]]
    order = order[: int(np.searchsorted(np.cumsum(lengths[order]), count, side="right"))]
    return starts[order], lengths[order]


def _expand(starts: Slots, lengths: Slots) -> Slots:
    """The numbers of all runs, one after another."""
    ends = np.cumsum(lengths)
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(lengths.sum())


def _grown(array: npt.NDArray[Any], size: int, fill: int = 0) -> npt.NDArray[Any]:
    """The array itself if it has `size` items, else a copy at least twice as long."""
    if size <= array.size:
        return array
    longer = np.full(max(size, 2 * array.size), fill, array.dtype)
    longer[: array.size] = array
    return longer
