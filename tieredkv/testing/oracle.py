"""Remembers what a store acknowledged, and says what must be true when it is opened again.

A recorder notes *events* while a store is used: intents before they begin, acknowledgements after they
return. Each has a position, and a crash has one too: every event at or before it has happened. From these the
oracle derives which parts must be there after a SIGKILL or a power cut, which may be, which must not, and
which states a session may be in. It knows nothing of how the store works, save that an observed log record
says which part was put or is about to be dropped.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from ..block.hashing import chain
from ..block.layout import BlockLayout, TensorSpec
from ..cache import TieredCache
from ..namespace import Namespace
from ..outcomes import Tier
from ..table.journal import Journal
from ..tier.slab_format import HEADER_DTYPE
from ..wal.records import DROP, PUT

Part: TypeAlias = tuple[str, int]
"""Digest in hex, layer group."""

EVICTED = 1
"""The cause in a DROP record of a block that left for want of space."""

_PARENT_AT = HEADER_DTYPE.fields["parent"][1]  # type: ignore[index]
_MIX_1, _MIX_2, _MIX_3 = (np.uint64(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def payload(spec: TensorSpec, mark: str, block_size: int) -> torch.Tensor:
    """The bytes that this tensor of the block with this mark has, wherever and whenever it is read."""
    nbytes = spec.nbytes(block_size)
    seed = xxhash.xxh3_64_intdigest(f"{mark} {spec.layer} {spec.name}".encode())
    words = (np.arange(-(-nbytes // 8), dtype=np.uint64) + np.uint64(seed)) * _MIX_1
    words = (words ^ (words >> np.uint64(30))) * _MIX_2
    words = (words ^ (words >> np.uint64(27))) * _MIX_3
    raw = (words ^ (words >> np.uint64(31))).view(np.uint8)[:nbytes]
    return torch.from_numpy(raw.copy()).view(spec.torch_dtype).reshape(spec.block_shape(block_size))


@lru_cache(maxsize=4096)
def _cached(spec: TensorSpec, mark: str, block_size: int) -> torch.Tensor:
    return payload(spec, mark, block_size)


def joined(spec: TensorSpec, marks: Sequence[str], block_size: int) -> torch.Tensor:
    """One tensor over consecutive blocks."""
    assert spec.token_axis is not None, "states have no tokens"
    return torch.cat([_cached(spec, mark, block_size) for mark in marks], dim=spec.token_axis)


@dataclass(frozen=True)
class Prompt:
    """A token sequence of a namespace (by its tenant's name), whose payload the oracle knows."""

    tenant: str
    tokens: tuple[int, ...]

    def ids(self) -> npt.NDArray[np.int32]:
        return np.array(self.tokens, dtype=np.int32)

    def digests(self, space: Namespace) -> list[str]:
        return [row.tobytes().hex() for row in space.chain(self.ids())]

    def marks(self, block_size: int) -> list[str]:
        """What tells one whole block from another, by the oracle's own reckoning: tenant and every token so far."""
        state, marks = xxhash.xxh3_128(self.tenant.encode()), []
        for end in range(block_size, len(self.tokens) + 1, block_size):
            state.update(np.array(self.tokens[end - block_size : end], dtype="<i4").tobytes())
            marks.append(state.hexdigest())
        return marks

    def kv(self, space: Namespace) -> dict[int, tuple[torch.Tensor, ...]]:
        """What to store: whole blocks as `payload` says, zeros behind the last."""
        layout = space.layout
        marks = self.marks(layout.block_size)
        layers: dict[int, tuple[torch.Tensor, ...]] = {}
        for group in layout.groups:
            for spec in group.tensors:
                rest = len(self.tokens) - len(marks) * layout.block_size
                tail = torch.zeros([rest if n < 0 else n for n in spec.shape], dtype=spec.torch_dtype)
                assert spec.token_axis is not None, "states have no tokens"
                whole = [_cached(spec, mark, layout.block_size) for mark in marks]
                tensor = torch.cat([*whole, tail], dim=spec.token_axis)
                layers[spec.layer] = (*layers.get(spec.layer, ()), tensor)
        return layers


def differences(space: Namespace, prompt: Prompt, prefix: Any) -> list[str]:
    """Where a loaded prefix is not what was stored: empty for a true hit."""
    layout, size, wrong = space.layout, space.layout.block_size, []
    marks = prompt.marks(size)
    for group in layout.groups:
        for spec in group.tensors if prefix.num_tokens else ():
            first = prefix.first_token(spec.layer, spec.name)
            wanted = joined(spec, marks[first // size : prefix.num_tokens // size], size)
            if not torch.equal(prefix.gather(spec.layer, spec.name), wanted):
                wrong.append(f"layer {spec.layer} {spec.name} of {prefix.num_tokens} tokens")
    return wrong


# ---- events --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Event:
    """Something that is about to happen or has happened, and the position in the run where it was noted."""

    at: int
    what: str
    args: dict[str, Any]

    def line(self) -> bytes:
        return json.dumps([self.at, self.what, self.args], separators=(",", ":")).encode() + b"\n"

    @classmethod
    def parse(cls, line: bytes) -> Event:
        at, what, args = json.loads(line)
        return cls(at, what, args)


class Recorder(Protocol):
    """Takes events, in order."""

    def note(self, what: str, **args: Any) -> None: ...


@contextmanager
def observed(recorder: Recorder) -> Iterator[None]:
    """While this lasts, every part put to or dropped from the log is noted: a put once it is applied, which
    is to say committed, a drop before it is queued."""
    submit = Journal.submit

    def noting(self: Journal, kind: int, records: Any, applied: Any = None, failed: Any = None) -> Any:
        callbacks = {name: f for name, f in (("applied", applied), ("failed", failed)) if f is not None}
        if kind == DROP:
            recorder.note(
                "dropping", parts=_parts(records), cause=int(records["cause"][0]) if len(records) else 0
            )
            callbacks["applied"] = _after(
                applied, lambda _rows: recorder.note("dropped", parts=_parts(records))
            )
        if kind == PUT:
            callbacks["applied"] = _after(
                applied, lambda rows: recorder.note("committed", parts=_parts(records[rows >= 0]))
            )
        return submit(self, kind, records, **callbacks)

    Journal.submit = noting  # type: ignore[method-assign]
    try:
        yield
    finally:
        Journal.submit = submit  # type: ignore[method-assign]


def _after(applied: Any, then: Callable[[npt.NDArray[np.int32]], None]) -> Any:
    """An `applied` callback, the given one if any, followed by `then`."""

    def both(lsn: int, rows: npt.NDArray[np.int32]) -> None:
        if applied is not None:
            applied(lsn, rows)
        then(rows)

    return both


def _parts(records: Any) -> list[Part]:
    digests = np.ascontiguousarray(records["digest"])
    return [(row.tobytes().hex(), int(group)) for row, group in zip(digests, records["group"], strict=True)]


# ---- what is expected ----------------------------------------------------------------------------


@dataclass
class SessionFacts:
    """The states that a session went through; `sure` is the last acknowledged, `durable` the last flushed.

    A state is None where the session is not there.
    """

    states: list[dict[str, Any] | None] = field(default_factory=lambda: [None])
    sure: int = 0
    durable: int = 0

    def allowed(self, power: bool) -> list[dict[str, Any] | None]:
        return self.states[self.durable if power else self.sure :]


@dataclass
class Expectation:
    """What must hold after a crash at one moment.

    `gone` are removed blocks that must not be back, with their marks; `disorders` says which evictions took a
    block before its successor.
    """

    power: bool
    prompts: list[Prompt] = field(default_factory=list)
    required: set[Part] = field(default_factory=set)
    gone: dict[str, str] = field(default_factory=dict)
    sessions: dict[str, SessionFacts] = field(default_factory=dict)
    disorders: list[str] = field(default_factory=list)

    def boundary(self, layout: BlockLayout, digests: Sequence[str]) -> int:
        """The largest restorable boundary that the required parts alone give, in blocks."""
        best, full = 0, [g for g, need in enumerate(layout.num_window_blocks) if not need]
        for end in range(1, len(digests) + 1):
            if any((digests[end - 1], g) not in self.required for g in full):
                break
            needed = (
                (digests[b], g)
                for g, need in enumerate(layout.num_window_blocks)
                if need
                for b in range(max(0, end - need), end)
            )
            if all(part in self.required for part in needed):
                best = end
        return best


class Oracle:
    """Turns events into expectations."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def add(self, events: Iterable[Event]) -> None:
        self.events.extend(events)

    def expect(self, *, power: bool, at: int | None = None, level: str = "group") -> Expectation:
        """What must hold after a crash at position `at` (the end if None): a power cut, or a SIGKILL.

        Args:
            level: the durability level; at `"group"` a pause of many intervals counts as a flush.
        """
        facts = _Facts(level)
        for event in self.events:
            if at is None or event.at <= at:
                facts.apply(event)
        return facts.expectation(power)


class _Facts:
    def __init__(self, level: str) -> None:
        self._level = level
        self._prompts: dict[Prompt, None] = {}
        self._committed: set[Part] = set()
        self._durable: set[Part] = set()
        self._gone: dict[str, str] = {}
        self._marks: dict[str, str] = {}
        self._next: dict[str, set[str]] = {}
        self._disorders: list[str] = []
        self._sessions: dict[str, SessionFacts] = {}
        self._dropped: set[Part] = set()  # since the store under way began
        self._dropping: set[Part] = set()  # queued, not yet applied

    def apply(self, event: Event) -> None:
        getattr(self, f"_on_{event.what}")(**event.args)

    def expectation(self, power: bool) -> Expectation:
        required = self._durable & self._committed if power else set(self._committed)
        prompts = list(self._prompts)
        return Expectation(power, prompts, required, dict(self._gone), self._sessions, self._disorders)

    def _on_storing(self, tenant: str, tokens: list[int], digests: list[str], marks: list[str]) -> None:
        self._prompts[Prompt(tenant, tuple(tokens))] = None
        self._marks.update(zip(digests, marks, strict=True))
        for digest, following in pairwise(digests):
            self._next.setdefault(digest, set()).add(following)
        for digest in digests:
            self._gone.pop(digest, None)
        self._dropped = set(self._dropping)  # a store may still take them for present

    def _on_stored(self, parts: list[Part]) -> None:
        """The caller was told that these are committed; what has been dropped since it asked is not meant."""
        self._committed.update({(d, g) for d, g in parts} - self._dropped)

    def _on_committed(self, parts: list[Part]) -> None:
        """Applied; a drop of it that is queued already follows in the log."""
        self._committed.update({(d, g) for d, g in parts} - self._dropping)

    def _on_dropping(self, parts: list[Part], cause: int) -> None:
        gone = [(d, g) for d, g in parts]
        if cause == EVICTED:
            self._look_for_disorder(gone)
        self._committed.difference_update(gone)
        self._durable.difference_update(gone)
        self._dropped.update(gone)
        self._dropping.update(gone)

    def _look_for_disorder(self, going: list[Part]) -> None:
        """Tails go before heads: no successor may be there, unless it goes in the same step."""
        staying = self._committed.difference(going)
        for digest, group in going:
            behind = {(d, group) for d in self._next.get(digest, ())} & staying
            if group == 0 and behind:
                self._disorders.append(f"block {digest[:8]} is evicted before its successor")

    def _on_dropped(self, parts: list[Part]) -> None:
        self._dropping.difference_update((d, g) for d, g in parts)

    def _on_flushed(self) -> None:
        self._durable = set(self._committed)
        for session in self._sessions.values():
            session.durable = session.sure

    def _on_closed(self) -> None:
        self._on_flushed()

    def _on_settled(self) -> None:
        if self._level == "group":
            self._on_flushed()

    def _on_turning(self, name: str, state: dict[str, Any] | None) -> None:
        self._sessions.setdefault(name, SessionFacts()).states.append(state)

    def _on_turned(self, name: str) -> None:
        facts = self._sessions[name]
        facts.sure = len(facts.states) - 1

    def _on_removing(self, digests: list[str], sessions: list[str], forgets: bool) -> None:
        going = {digest for digest, _ in self._committed} if forgets else set(digests)
        self._committed = {part for part in self._committed if part[0] not in going}
        self._durable = {part for part in self._durable if part[0] not in going}
        for name in sessions:
            self._on_turning(name, None)

    def _on_removed(self, digests: list[str], sessions: list[str]) -> None:
        self._gone.update({digest: self._marks[digest] for digest in digests if digest in self._marks})
        for name in sessions:
            facts = self._sessions[name]
            facts.sure = facts.durable = len(facts.states) - 1

    def _on_reborn(self, sessions: dict[str, dict[str, Any]]) -> None:
        """The store was opened after a power cut: what need not have survived is not promised any more."""
        self._committed &= self._durable
        self._durable = set(self._committed)
        names = set(self._sessions) | set(sessions)
        self._sessions = {name: SessionFacts([sessions.get(name)]) for name in names}

    def _on_phase(self, name: str) -> None:
        """Where the run is; for the reader of a failure."""


# ---- what is found -------------------------------------------------------------------------------


@dataclass
class Findings:
    """What was not as promised; empty is good. Each list holds sentences."""

    wrong_bytes: list[str] = field(default_factory=list)
    lost_committed: list[str] = field(default_factory=list)
    lost_flushed: list[str] = field(default_factory=list)
    resurrected: list[str] = field(default_factory=list)
    open_failures: list[str] = field(default_factory=list)
    dead_processes: list[str] = field(default_factory=list)
    uncounted_failures: list[str] = field(default_factory=list)
    hangs: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)

    def add(self, other: Findings) -> None:
        for name, lines in vars(other).items():
            getattr(self, name).extend(lines)

    def counts(self) -> dict[str, int]:
        return {name: len(lines) for name, lines in vars(self).items()}

    def lines(self) -> list[str]:
        return [f"{name}: {line}" for name, lines in vars(self).items() for line in lines]

    def __bool__(self) -> bool:
        return any(vars(self).values())


Spaces: TypeAlias = Callable[[TieredCache, str], Namespace]
"""The namespace of a tenant in a cache."""


def examine(cache: TieredCache, expected: Expectation, spaces: Spaces, *, lossless: bool = True) -> Findings:
    """Compare an opened store with what is expected of it.

    Args:
        lossless: False after damage or a lying disk: then only what is wrong counts, not what is lost.
    """
    found = Findings()
    _check(cache, found, "after opening")
    for prompt in expected.prompts:
        _examine_prompt(cache, spaces(cache, prompt.tenant), prompt, expected, found, lossless)
    if lossless:
        _examine_sessions(cache, expected, spaces, found)
    _check(cache, found, "after loading")
    if cache.stats().num_pins != sum(_pinned_blocks(cache)):
        found.leaks.append(f"{cache.stats().num_pins} pins, {sum(_pinned_blocks(cache))} are wanted")
    _examine_ledger(cache, found)
    return found


def _check(cache: TieredCache, found: Findings, when: str) -> None:
    try:
        cache.check()
    except AssertionError as error:
        found.broken.append(f"check {when}: {error}")


def _examine_prompt(
    cache: TieredCache,
    space: Namespace,
    prompt: Prompt,
    expected: Expectation,
    found: Findings,
    lossless: bool,
) -> None:
    digests, size = prompt.digests(space), space.layout.block_size
    _examine_gone(cache, digests, expected, found)
    need = expected.boundary(space.layout, digests) * size
    lookup = space.lookup(prompt.ids())
    with space.load(prompt.ids()) as prefix:
        found.wrong_bytes += differences(space, prompt, prefix)
        got = min(lookup.num_tokens, prefix.num_tokens)
        if got < need and lossless:
            lost = found.lost_flushed if expected.power else found.lost_committed
            lost.append(
                f"{prompt.tenant} {digests[0][:8]}: {need} tokens were promised, lookup gives {lookup.num_tokens}"
                f" ({lookup.reason}), load {prefix.num_tokens} ({prefix.reason})"
            )


def _examine_gone(cache: TieredCache, digests: Sequence[str], expected: Expectation, found: Findings) -> None:
    gone = [d for d in digests if d in expected.gone]
    if not gone:
        return
    rows = cache._table.find(np.frombuffer(bytes.fromhex("".join(gone)), np.uint8).reshape(-1, 32))
    for digest, row in zip(gone, rows.tolist(), strict=True):
        if row >= 0 and (cache._table.slot[:, :, row] >= 0).any():
            found.resurrected.append(f"block {digest[:8]} was removed and is back")


def _examine_sessions(cache: TieredCache, expected: Expectation, spaces: Spaces, found: Findings) -> None:
    here = {row.name: row for row in cache.sessions()}
    for name, facts in expected.sessions.items():
        row = here.get(name)
        state = None if row is None else state_of(row)
        allowed = facts.allowed(expected.power)
        if state in allowed:
            continue
        text = f"session {name!r} is {_short(state)}, allowed are {[_short(s) for s in allowed]}"
        if allowed == [None]:
            found.resurrected.append(text)
        else:
            (found.lost_flushed if expected.power else found.lost_committed).append(text)
    unknown = set(here) - set(expected.sessions)
    found.resurrected += [f"session {name!r} was never made" for name in sorted(unknown)]


def traces(contents: Iterable[bytes], gone: Mapping[str, str], layout: BlockLayout) -> list[str]:
    """Which removed blocks left a byte behind in these files: the start of a payload, or their digest.

    A digest may stay as the parent that a block which stays names in its slot header: at byte 128 of it.
    """
    specs = [group.tensors[0] for group in layout.groups]
    marks = {
        digest: [
            *(_cached(s, mark, layout.block_size).contiguous().view(torch.uint8).flatten()[:32].numpy().tobytes()
              for s in specs),
        ]
        for digest, mark in gone.items()
    }  # fmt: skip
    files = list(contents)
    return [
        d
        for d, pieces in marks.items()
        if any(_names(file, bytes.fromhex(d)) or any(piece in file for piece in pieces) for file in files)
    ]


def _names(content: bytes, digest: bytes) -> bool:
    at = content.find(digest)
    while at >= 0:
        if at % 4096 != _PARENT_AT:
            return True
        at = content.find(digest, at + 1)
    return False


def stranded(cache: TieredCache, space: Namespace, prompt: Prompt) -> list[str]:
    """Blocks of a prompt whose full part is there behind one that is not, so that nothing can use it."""
    digests = prompt.digests(space)
    with cache._lock:
        rows = cache._table.find(np.frombuffer(bytes.fromhex("".join(digests)), np.uint8).reshape(-1, 32))
        there = cache._table.present(rows, len(space.layout.groups))
    full = [g for g, need in enumerate(space.layout.num_window_blocks) if not need]
    whole = there[full].all(axis=0) if full else np.ones(len(digests), dtype=np.bool_)
    behind = whole & ~np.logical_and.accumulate(whole)
    return [digest for digest, lost in zip(digests, behind.tolist(), strict=True) if lost]


def state_of(row: Any) -> dict[str, Any]:
    """A session's content as an event tells it."""
    return {
        "tokens": [int(t) for t in row.tokens],
        "turns": [[turn.role, turn.end] for turn in row.turns],
        "pinned": bool(row.pinned),
    }


def states_of(cache: TieredCache) -> dict[str, dict[str, Any]]:
    """Every session's content, by name."""
    return {row.name: state_of(row) for row in cache.sessions()}


def _short(state: dict[str, Any] | None) -> str:
    return "absent" if state is None else f"{len(state['tokens'])} tokens, {len(state['turns'])} turns"


def _pinned_blocks(cache: TieredCache) -> Iterator[int]:
    """How many blocks of each pinned session are there: their pins are the only ones between calls."""
    for row in cache.sessions():
        if row.pinned:
            space = cache._state.catalog.namespaces[row.namespace]
            digests = chain(space.digest, row.tokens, space.layout.block_size)
            yield int((cache._table.find(digests) >= 0).sum())


def recount(cache: TieredCache) -> list[str]:
    """Where the ledger of a tier is not the sum of the slots that the table names; nothing may be moving."""
    wrong, table = [], cache._table
    with cache._lock:
        rows = table.live_rows()
        for tier, resident in cache._residents.items():
            groups, at = np.nonzero(table.slot[tier][:, rows] >= 0)
            nbytes = sum(
                resident.stride_nbytes(int(rows[i]), int(g)) for g, i in zip(groups, at, strict=True)
            )
            if nbytes != resident.arena.live_nbytes:
                wrong.append(
                    f"{tier.name}: {resident.arena.live_nbytes} bytes live, the table names {nbytes}"
                )
    return wrong


def _examine_ledger(cache: TieredCache, found: Findings) -> None:
    stats = cache.stats()
    found.broken += recount(cache)
    for tier in stats.tiers:
        if tier.used_nbytes > tier.budget_nbytes or tier.live_nbytes > tier.used_nbytes:
            found.broken.append(
                f"{tier.name}: {tier.live_nbytes} live of {tier.used_nbytes} used of {tier.budget_nbytes} bytes"
            )
    on_disk = next((t for t in stats.tiers if t.name == Tier.DISK.name.lower()), None)
    if on_disk is not None and stats.disk_nbytes > cache._sizes.disk_nbytes:
        found.broken.append(f"{stats.disk_nbytes} bytes on disk, the budget is {cache._sizes.disk_nbytes}")
