"""One identity's blocks: look up a prompt, load its prefix, store what is new."""

from __future__ import annotations

import operator
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from .block.anchors import kept_window_blocks, longest_restorable, num_full_blocks
from .block.hashing import Digests, Tokens, as_tokens, chain
from .block.layout import BlockLayout
from .errors import BadInput, Closed
from .mover import Failure, Mover
from .outcomes import Counters, Lookup, Reason, Stored, Tier
from .pace import Pace
from .plan import restorable
from .prefix import Prefix, Segment
from .residency import Residency
from .span import GroupKV, LayerKV, spans_by_group
from .spiller import Cause, Spiller, Spilling
from .table.block_table import BlockTable
from .table.catalog import NamespaceRow
from .table.key_index import Rows
from .tier.copier import Pair


@dataclass
class _Found:
    """What the table knows of a prompt: its chain's rows and the boundary to restore at, in blocks."""

    digests: Digests
    rows: Rows
    boundary: int
    limit: int
    num_full: int


@dataclass(frozen=True)
class Core:
    """What a namespace works with; one for the whole cache."""

    lock: threading.Condition
    table: BlockTable
    residents: dict[Tier, Residency]
    mover: Mover
    spiller: Spiller | None
    eager: bool
    pace: Pace
    counters: Counters
    deadline_s: float
    drop_failed: Callable[[Sequence[tuple[int, int]], Cause], None]
    drop_stranded: Callable[[Sequence[int]], object]
    look_again: Callable[[], None]
    identity_differences: Callable[[NamespaceRow], list[str]]
    copy: Callable[[Sequence[Pair]], None]
    check_open: Callable[[], None]


class Namespace:
    """All blocks of one identity. Made by `TieredCache.namespace`; any thread may call."""

    def __init__(self, row: NamespaceRow, core: Core) -> None:
        self.row = row
        self.layout: BlockLayout = row.layout
        self.digest = row.digest
        self._core = core
        self.pace = core.pace
        self.counters = core.counters
        self._pid = os.getpid()
        self._purged = False

    def retire(self) -> None:
        """It is being purged: every later call is refused (lock held)."""
        self._purged = True

    def revive(self) -> None:
        """Its purge was refused, and nothing of it was removed (lock held)."""
        self._purged = False

    def check_open(self) -> None:
        """Raises Closed: its cache is closed, or it was purged."""
        self._core.check_open()
        if self._purged:
            raise Closed("this namespace was purged; ask the cache for it again")

    # ---- lookup --------------------------------------------------------------------------------

    def lookup(self, tokens: object) -> Lookup:
        """How much of a prompt is there. Pure: nothing is pinned, moved or counted as a hit.

        Args:
            tokens: 1-D integers; one of them is always left to compute.
        """
        self.check_open()
        ids = as_tokens(tokens)
        digests = self.chain(ids)
        with self._core.lock:
            found = self._find(ids, digests)
            return self._describe(found)

    def chain(self, tokens: Tokens) -> Digests:
        """Digests of every whole block of `tokens`."""
        return chain(self.digest, tokens, self.layout.block_size)

    def _find(
        self, tokens: Tokens, digests: Digests, absent: frozenset[tuple[int, int]] = frozenset()
    ) -> _Found:
        rows = self._core.table.find(digests)
        limit = max(0, len(tokens) - 1) // self.layout.block_size
        present = self._core.table.present(rows, len(self.layout.groups))
        for row, group in absent:
            present[group, rows == row] = False
        boundary = longest_restorable(self.layout, present, limit)
        # Without full parts a chain is known as far as it has rows: a branch may form where they end.
        known = np.logical_and.accumulate(rows >= 0).sum() if self.layout.full_group is None else 0
        reached = max(int(known), num_full_blocks(self.layout, present))
        return _Found(digests, rows, boundary, limit, min(reached, limit))

    def _describe(self, found: _Found) -> Lookup:
        size = self.layout.block_size
        reason, detail = self._why(found)
        by_tier = self._by_tier(found.rows[: found.boundary])
        return Lookup(found.boundary * size, by_tier, reason, detail, found.num_full * size)

    def _by_tier(self, rows: Rows) -> dict[str, int]:
        """Tokens by the tier they would be read from: for each block the slowest of what it needs."""
        if not len(rows):
            return {}
        slots = self._core.table.slot[:, : len(self.layout.groups), rows] >= 0
        best = np.argmax(slots, axis=0)
        for group, need in enumerate(self.layout.num_window_blocks):
            if need:
                best[group, : max(0, len(rows) - need)] = 0
        slowest = best.max(axis=0)
        if self.layout.full_group is None:  # blocks before every window cost nothing: they go with the rest
            slowest[: -max(self.layout.num_window_blocks)] = slowest.max()
        counts = np.bincount(slowest, minlength=len(Tier)) * self.layout.block_size
        return {tier.name.lower(): int(counts[tier]) for tier in Tier if counts[tier]}

    def _why(self, found: _Found) -> tuple[Reason, str]:
        """Why the boundary is not larger."""
        table, size = self._core.table, self.layout.block_size
        if found.limit == 0:
            return Reason.TOO_SHORT, f"a block is {size} tokens and one token is left to compute"
        if found.boundary == found.limit:
            return Reason.COMPLETE, ""
        if found.num_full > found.boundary:
            what = "full parts reach" if self.layout.full_group is not None else "the chain is known to"
            return Reason.NO_ANCHOR, f"{what} token {found.num_full * size}, no anchor after this"
        block = found.boundary if self.layout.full_group is None else found.num_full
        if table.was_here(found.digests[block].tobytes()):
            return Reason.EVICTED, f"from token {block * size}"
        if block and found.rows[block - 1] >= 0 and table.first_child[found.rows[block - 1]] >= 0:
            return Reason.DIVERGED, f"within the block at token {block * size}"
        if block == 0:
            differs = self._core.identity_differences(self.row)
            if differs:
                return Reason.IDENTITY, ", ".join(differs)
        return Reason.NEVER_STORED, f"from token {block * size}"

    # ---- load ----------------------------------------------------------------------------------

    def load(self, tokens: object, timeout_s: float | None = None) -> Prefix:
        """Pin and bring up the longest restorable prefix; close the result, or use it with `with`.

        Never raises for what the tiers do: a part that fails its check, or takes too long, shortens the
        prefix, and the reason says so.

        Args:
            timeout_s: the longest to wait for the disk; the configured deadline if None.
        """
        core = self._core
        self.check_open()
        ids = as_tokens(tokens)
        digests = self.chain(ids)
        until = time.monotonic() + (core.deadline_s if timeout_s is None else timeout_s)
        failures: list[Failure] = []
        while True:
            absent = frozenset((f.row, f.group) for f in failures)
            pinned: list[Rows] = []
            try:
                with core.lock:
                    self.check_open()
                    found = self._find(ids, digests, absent)
                    lookup = self._describe(found)
                    rows = found.rows[: found.boundary]
                    held = rows[rows >= 0]  # with windows alone the head of a chain may be gone
                    was = {tier: resident.has(held) for tier, resident in core.residents.items()}
                    core.table.pins[held] += 1
                    pinned.append(held)
                segments, failed = self._bring_up_used(rows, held, until)
                if not failed:
                    self._hit(held, was, lookup)
                    reason, detail = (failures[0].reason, "") if failures else (lookup.reason, lookup.detail)
                    return Prefix(
                        self.layout, lookup.num_tokens, segments, lookup.by_tier, reason, detail,
                        partial(self._unpin, pinned), core.copy,
                    )  # fmt: skip
            except BaseException:
                self._unpin(pinned)
                raise
            self._unpin(pinned)
            failures += failed
            self._report(failed)

    def _bring_up_used(
        self, rows: Rows, held: Rows, until: float
    ) -> tuple[list[list[Segment]], list[Failure]]:
        """As `_bring_up`; meanwhile no removal takes what it brings."""
        core, is_used = self._core, False
        try:
            with core.lock:
                core.table.uses[held] += 1
                is_used = True
            return self._bring_up(rows, until)
        finally:
            if is_used:
                with core.lock:
                    core.table.uses[held] -= 1

    def _bring_up(self, rows: Rows, until: float) -> tuple[list[list[Segment]], list[Failure]]:
        segments: list[list[Segment]] = []
        failures: list[Failure] = []
        for group, need in enumerate(self.layout.num_window_blocks):
            first = max(0, len(rows) - need) if need else 0
            found, failed = (
                ([], [])
                if not len(rows)
                else self._core.mover.promote(self.layout, group, rows[first:], first, until)
            )
            segments.append(found)
            failures += failed
        return segments, failures

    def _report(self, failures: Sequence[Failure]) -> None:
        """Count what failed and drop what is provably useless; a time-out proves nothing."""
        for failure in failures:
            self._core.counters.add(f"{failure.reason.name.lower()}_parts")
        bad = [(f.row, f.group) for f in failures if f.reason is not Reason.TIMED_OUT]
        if bad:
            self._core.drop_failed(bad, Cause.DAMAGED)

    def _hit(self, rows: Rows, was: Mapping[Tier, npt.NDArray[np.bool_]], lookup: Lookup) -> None:
        """Args: was: which of the rows lay in each tier before."""
        with self._core.lock:
            for tier, resident in self._core.residents.items():
                resident.touch(rows, was[tier])
                resident.hit_tokens += lookup.by_tier.get(tier.name.lower(), 0)

    def _unpin(self, pinned: list[Rows]) -> None:
        """Let go of what is pinned, once: an interrupted call may be made again."""
        if os.getpid() != self._pid:
            return  # in a forked child nothing is pinned, and the lock may be held for ever
        with self._core.lock:
            if not pinned:
                return
            rows = pinned[0]
            self._core.table.pins[rows] -= 1
            pinned.clear()  # no signal is looked at between these two
            assert not (self._core.table.pins[rows] < 0).any(), "a prefix was unpinned twice"
            self._core.table.free_if_empty(rows)
            self._core.look_again()
            self._core.lock.notify_all()

    # ---- store ---------------------------------------------------------------------------------

    def store(self, tokens: object, kv: LayerKV, anchors: Sequence[int] = ()) -> Stored:
        """Register the whole blocks of `tokens` that are not there yet; tensors are copied before return.

        Args:
            tokens: 1-D integers, from the first token of the sequence.
            kv: for each layer either its tensors over all of `tokens`, in the layout's order and shape, or
                `Span`s. Full layers need every new block; window layers and states only what `anchors` need. An
                empty sequence says that a layer brings nothing new.
            anchors: boundaries, in tokens, whose window and recurrent parts are kept so that a prefix can end there.

        Raises:
            BadInput: an anchor that is no boundary, a layer that is missing, or tensors that are not as the
                layout says.
        """
        core = self._core
        self.check_open()
        ids = as_tokens(tokens)
        digests = self.chain(ids)
        boundaries = self._boundaries(anchors, len(digests))
        spans = spans_by_group(self.layout, kv, len(ids), anchored=bool(boundaries))
        covered = self._covered(spans, len(digests))
        taken, is_used = 0, False
        try:
            with core.lock:
                self.check_open()
                rows = core.table.register(self.row.number, digests)
                rows = rows[: int(np.argmax(rows < 0)) if (rows < 0).any() else len(rows)]
                missing, num_storable = self._missing(rows, covered, boundaries)
                self._remember_tokens(ids, rows, missing)
                core.table.uses[rows] += 1
                is_used = True
            taken = core.mover.store(self.layout, rows, missing, spans, time.monotonic() + core.deadline_s)
        finally:
            if is_used:
                stored = self._stored(rows, missing, taken, num_storable, len(digests), boundaries)
        return stored

    def _remember_tokens(self, ids: Tokens, rows: Rows, missing: npt.NDArray[np.bool_]) -> None:
        """For the slot headers of blocks that will be spilled (lock held)."""
        if self._core.spiller is not None:
            body, size = ids.astype("<i4").tobytes(), 4 * self.layout.block_size
            new = np.flatnonzero(missing.any(axis=0))
            ids_of = [body[at : at + size] for at in (new * size).tolist()]
            self._core.table.tokens.update(zip(rows[new].tolist(), ids_of, strict=True))

    def _missing(
        self, rows: Rows, covered: npt.NDArray[np.bool_], boundaries: Sequence[int]
    ) -> tuple[npt.NDArray[np.bool_], int]:
        """Parts to store, and up to which block all full parts are there or come (lock held)."""
        present = self._core.table.present(rows, len(self.layout.groups))
        missing = ~present
        for group, need in enumerate(self.layout.num_window_blocks):
            if need:
                missing[group] &= kept_window_blocks(self.layout, group, boundaries, len(rows))
        missing &= covered[:, : len(rows)]
        end, full = len(rows), self.layout.full_group
        if full is not None:
            gaps = np.flatnonzero(~present[full] & ~missing[full])
            end = int(gaps[0]) if gaps.size else end
        missing[:, end:] = False
        return missing, end

    def _stored(
        self,
        rows: Rows,
        missing: npt.NDArray[np.bool_],
        taken: int,
        num_storable: int,
        num_blocks: int,
        boundaries: Sequence[int],
    ) -> Stored:
        core = self._core
        with core.lock:
            taken = min(taken, num_storable, self._whole(rows))
            missing[:, taken:] = False
            new = rows[missing.any(axis=0)]
            for resident in core.residents.values():
                resident.settle(new)
            digests = core.table.digest[rows[:taken]]
            core.table.uses[rows] -= 1
            if taken < len(rows):
                core.drop_stranded(rows[taken:][::-1].tolist())
            self._drop_broken(rows[:taken], boundaries)
            core.table.free_if_empty(rows)
            core.look_again()
            spilling = self._spill(rows[:taken]) if core.eager else None
            core.lock.notify_all()

        def commit_now(timeout_s: float | None = None) -> bool:
            """Write-back spills nothing by itself: whoever waits for the blocks asks for it."""
            with core.lock:
                there = core.table.find(digests)
                asked = self._spill(there[there >= 0])
            return asked.wait(timeout_s)

        wait = spilling.wait if spilling is not None else commit_now
        num_new = int(missing.any(axis=0).sum())
        refused = num_blocks - taken
        core.counters.add("stored_blocks", num_new)
        reason = Reason.COMPLETE
        if refused:
            core.counters.add("refused_blocks", refused)
            if taken == len(rows):
                reason = Reason.KEY_TAKEN
            else:
                reason = Reason.NOT_GIVEN if taken == num_storable else Reason.NO_SPACE
        return Stored(num_new, taken - num_new, refused, reason, wait=wait)

    def _drop_broken(self, rows: Rows, boundaries: Sequence[int]) -> None:
        """Where room for one part of an anchor was found by evicting another, what led to it goes (lock held)."""
        ends = rows[[boundary - 1 for boundary in boundaries if 0 < boundary <= len(rows)]]
        broken = ends[~restorable(self._core.table, self.layout, ends)]
        self._core.drop_stranded(broken.tolist())

    def _whole(self, rows: Rows) -> int:
        """How many blocks from the head have their full part: some may have left meanwhile (lock held)."""
        full = self.layout.full_group
        if full is None:
            return len(rows)
        return int(np.logical_and.accumulate(self._core.table.present(rows, full + 1)[full]).sum())

    def _spill(self, rows: Rows) -> Spilling:
        """Send on whatever of a stored chain is not committed yet, also from earlier calls (lock held)."""
        core = self._core
        if core.spiller is not None and len(rows):
            in_memory = (core.table.slot[: Tier.DISK, :, rows] >= 0).any(axis=0)
            groups, blocks = np.nonzero(in_memory & ~core.table.on_disk(rows))
            if len(blocks):
                return core.spiller.enqueue(rows[blocks], groups)
        spilling = Spilling()
        spilling.ended()
        return spilling

    def _boundaries(self, anchors: Sequence[int], num_blocks: int) -> list[int]:
        size = self.layout.block_size
        try:
            ends = [operator.index(anchor) for anchor in anchors]
        except TypeError as error:
            raise BadInput(
                f"anchors={anchors!r}: a sequence of whole token counts, as [{size}], or () for none"
            ) from error
        for end in ends:
            if end % size or not 0 <= end <= num_blocks * size:
                raise BadInput(f"anchor {end} is no boundary of {num_blocks} blocks of {size} tokens")
        return [end // size for end in ends]

    def _covered(self, spans: GroupKV, num_blocks: int) -> npt.NDArray[np.bool_]:
        """For each group and block, whether every layer brought its tokens."""
        covered = np.ones((len(self.layout.groups), num_blocks), dtype=np.bool_)
        for number, group in enumerate(self.layout.groups):
            for spec in group.tensors:
                here = np.zeros(num_blocks, dtype=np.bool_)
                for span in spans[number, spec.layer]:
                    here[span.blocks(spec, self.layout.block_size)] = True
                covered[number] &= here
        return covered
