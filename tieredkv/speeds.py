"""How long a model computes and a store gives back, learned from what was done anyway; kept in the store.

    seconds of a forward of n tokens behind s others   = c + a n + b n (s + n / 2)
    seconds of a restore of nbytes from a tier         = f + g nbytes

The file `speeds` of a store holds samples by namespace and device:

    | magic 8 | version u4 | body nbytes u4 | body xxh3_128 16 | body, JSON |

It is advice: never synced, never believed beyond its checksum, and learned again where it is damaged or absent.
"""

from __future__ import annotations

import contextlib
import json
import math
import struct
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from .block.anchors import needed_parts
from .block.layout import BlockLayout
from .errors import CorruptFormat
from .outcomes import Tier
from .system import Fs

SPEEDS = "speeds"
_MAGIC, _VERSION = b"tkvspeed", 1
_HEAD = struct.Struct("<8sII16s")
_MAX_NBYTES = 64 << 10
_MAX_KEYS = 8
_ENOUGH = 3
"""So many samples are evidence; fewer are shown, and decide nothing."""
_PER_SIZE, _PER_TIER = 3, 5
_LEAST_GAIN_S, _LEAST_GAIN = 0.005, 0.1
_SIMPLER, _ROUNDING = 0.99, 1e-9
_LEAST_S = 1e-6

Floats = npt.NDArray[np.float64]


class Key(NamedTuple):
    """Whose speeds: a namespace's digest and the device that its model runs on."""

    namespace: str
    device: str


class Sample(NamedTuple):
    """One forward of `num_tokens` behind `start` others."""

    start: int
    num_tokens: int
    seconds: float


class PrefillSpeed:
    """Seconds of forwards by length and place. Of each power of two of lengths the last few are remembered.

    Attributes:
        is_warm: whether this process has had its first forward, which pays for what every process pays once: it
            counts only while there is no other.
    """

    def __init__(self, samples: Iterable[Sequence[float]] = ()) -> None:
        self._by_size: dict[int, deque[Sample]] = {}
        self._cold: Sample | None = None
        self.is_warm = False
        self._shares: Floats = np.zeros(3)
        for start, num_tokens, seconds in samples:
            self._keep(Sample(int(start), int(num_tokens), seconds))
        self._fit()

    @property
    def samples(self) -> list[Sample]:
        """Those from after the process was warm."""
        return [sample for kept in self._by_size.values() for sample in kept]

    def note(self, samples: Sequence[Sample]) -> None:
        """Learn from forwards, the earliest first."""
        for sample in samples:
            if self.is_warm:
                self._keep(sample)
            else:
                self.is_warm, self._cold = True, sample
        if samples:
            self._fit()

    def seconds(self, start: int, num_tokens: int) -> float | None:
        """Of a forward of `num_tokens` behind `start` others; None before anything was measured."""
        if not self._shares.any():
            return None
        return float(_terms(start, num_tokens) @ self._shares)

    def is_sure_of(self, num_tokens: int) -> bool:
        """Whether enough was measured, and forwards at least half as long: far beyond them nothing is known."""
        lengths = [sample.num_tokens for sample in self.samples]
        return len(lengths) >= _ENOUGH and num_tokens <= 2 * max(lengths)

    def _keep(self, sample: Sample) -> None:
        self._by_size.setdefault(sample.num_tokens.bit_length(), deque(maxlen=_PER_SIZE)).append(sample)

    def _fit(self) -> None:
        samples = [_middle(kept) for kept in self._by_size.values()] or ([self._cold] if self._cold else [])
        if samples:
            terms = np.array([_terms(sample.start, sample.num_tokens) for sample in samples])
            seconds = np.array([max(sample.seconds, _LEAST_S) for sample in samples])
            self._shares = fit(terms, seconds, prefer=(1, 2, 0))


class RestoreSpeed:
    """Seconds of restores from one tier by bytes. Only the last few are remembered: a disk may change."""

    def __init__(self, samples: Iterable[Sequence[float]] = ()) -> None:
        self._last: deque[tuple[int, float]] = deque(maxlen=_PER_TIER)
        self._shares: Floats = np.zeros(2)
        for nbytes, seconds in samples:
            self.note(int(nbytes), seconds)

    @property
    def samples(self) -> list[tuple[int, float]]:
        """`(bytes, seconds)`, the oldest first."""
        return list(self._last)

    def note(self, nbytes: int, seconds: float) -> None:
        self._last.append((nbytes, max(seconds, _LEAST_S)))
        terms = np.array([[1.0, nbytes] for nbytes, _ in self._last])
        self._shares = fit(terms, np.array([seconds for _, seconds in self._last]), prefer=(1, 0))

    def forget(self) -> None:
        self._last.clear()

    @property
    def fixed_s(self) -> float:
        """What a restore costs however small it is."""
        return float(self._shares[0])

    def moving_s(self, nbytes: float) -> float:
        """What the bytes cost beyond that."""
        return float(self._shares[1] * nbytes)

    def is_sure_of(self, nbytes: float) -> bool:
        """Whether enough was measured, and restores at least half as large."""
        return len(self._last) >= _ENOUGH and nbytes <= 2 * max(n for n, _ in self._last)


class Speeds:
    """What is known of one namespace's model on one device.

    Attributes:
        num_passed_by: times that computing was chosen since a restore was last tried all the same.
    """

    def __init__(
        self,
        prefill: PrefillSpeed | None = None,
        restores: Mapping[str, RestoreSpeed] | None = None,
        num_passed_by: int = 0,
    ) -> None:
        self.prefill = prefill or PrefillSpeed()
        self.restores = {tier.name.lower(): RestoreSpeed() for tier in Tier} | dict(restores or {})
        self.num_passed_by = num_passed_by

    def restore_s(self, nbytes: Mapping[str, float]) -> float | None:
        """Seconds of a restore of `nbytes` by tier; None where too little is known of one of them."""
        if not all(self.restores[tier].is_sure_of(n) for tier, n in nbytes.items()):
            return None
        fixed_s = max((self.restores[tier].fixed_s for tier in nbytes), default=0.0)
        return fixed_s + sum(self.restores[tier].moving_s(n) for tier, n in nbytes.items())

    def compute_s(self, start: int, found: int, end: int) -> float | None:
        """Seconds more that a forward from `start` to `end` takes than one from `found`; None where not known."""
        whole, rest = self.prefill.seconds(start, end - start), self.prefill.seconds(found, end - found)
        if whole is None or rest is None or not self.prefill.is_sure_of(end - start):
            return None
        return whole - rest

    def note_restore(self, nbytes: Mapping[str, float], seconds: float) -> None:
        """A restore of `nbytes` by tier. What faster tiers are known to take, the slowest did not."""
        last = slowest(nbytes)
        seconds -= sum(self.restores[tier].moving_s(n) for tier, n in nbytes.items() if tier != last)
        self.restores[last].note(int(nbytes[last]), seconds)

    def as_json(self) -> dict[str, Any]:
        return {
            "prefill": self.prefill.samples,
            "restores": {tier: speed.samples for tier, speed in self.restores.items() if speed.samples},
            "passed_by": self.num_passed_by,
        }

    @classmethod
    def from_json(cls, values: Any) -> Speeds:
        """Raises CorruptFormat: not what `as_json` gives."""
        try:
            tiers = {tier.name.lower() for tier in Tier} & values["restores"].keys()
            restores = {tier: _checked(values["restores"][tier], 2) for tier in tiers}
            return cls(
                PrefillSpeed(_checked(values["prefill"], 3)),
                {tier: RestoreSpeed(samples) for tier, samples in restores.items()},
                int(values["passed_by"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise CorruptFormat(f"{SPEEDS}: {error}") from error


def is_worth(saved_s: float, restore_s: float) -> bool:
    """Whether computing instead of a restore saves more than anybody notices, and than estimates can tell."""
    return saved_s > max(_LEAST_GAIN_S, _LEAST_GAIN * restore_s)


def slowest(tiers: Iterable[str]) -> str:
    """Of names of tiers that of the lowest."""
    return max(tiers, key=lambda tier: Tier[tier.upper()])


def nbytes_by_tier(layout: BlockLayout, by_tier: Mapping[str, int]) -> dict[str, float]:
    """Bytes that a restore reads from each tier, of tokens by tier: the windows' are shared out among them."""
    num_tokens = sum(by_tier.values())
    needed = needed_parts(layout, num_tokens // layout.block_size)
    nbytes = sum((end - first) * layout.part_nbytes[group] for group, first, end in needed)
    return {tier: nbytes * count / num_tokens for tier, count in by_tier.items() if count}


def fit(terms: Floats, seconds: Floats, prefer: Sequence[int]) -> Floats:
    """Shares `[k]`, none negative, for which `terms @ shares` is off from `seconds` by the least factors.

    What counts is the sum of |log(foretold / seconds)|, so what was slow beside a busy neighbour moves nothing. It is
    least where as many of the `seconds` are met as there are terms: those lines are tried, all of them. A further
    term must explain something, and of as many those that come first in `prefer` are taken.

    Args:
        terms: `[n, k]`.
        seconds: `[n]`, positive.
    """
    scale = terms.max(axis=0) + (terms.max(axis=0) == 0)
    scaled, best, least = terms / scale, np.zeros(terms.shape[1]), math.inf
    for size in range(1, min(len(prefer), len(seconds)) + 1):
        rows = np.array(list(combinations(range(len(seconds)), size)))
        for chosen in map(list, combinations(prefer, size)):
            shares, errors = _lines(scaled[:, chosen], seconds, rows)
            if len(errors) and errors.min() < _SIMPLER * least - _ROUNDING:
                best, least = np.zeros(terms.shape[1]), float(errors.min())
                best[chosen] = shares[errors.argmin()] / scale[chosen]
    return best


def _lines(terms: Floats, seconds: Floats, rows: npt.NDArray[np.int64]) -> tuple[Floats, Floats]:
    """Shares `[m, k]` that meet the seconds of each of `rows` `[m, k]`, if they can, and how far each is off."""
    square = terms[rows]
    good = np.abs(np.linalg.det(square)) > _ROUNDING
    shares = np.linalg.solve(square[good], seconds[rows[good]][:, :, None])[:, :, 0]
    shares = shares[(shares >= 0).all(axis=1)]
    foretold = np.maximum(shares @ terms.T, _LEAST_S)
    return shares, np.abs(np.log(foretold / seconds)).sum(axis=1)


def _terms(start: int, num_tokens: int) -> Floats:
    return np.array([1.0, num_tokens, num_tokens * (start + num_tokens / 2)])


def _middle(samples: Iterable[Sample]) -> Sample:
    """The middle one by seconds a token, the faster of two: the others may have been beside something else."""
    ordered = sorted(samples, key=lambda sample: sample.seconds / sample.num_tokens)
    return ordered[(len(ordered) - 1) // 2]


def _checked(samples: Any, width: int) -> list[Sequence[float]]:
    """Raises ValueError: a sample that nothing can have measured."""
    for sample in samples:
        *counts, seconds = map(float, sample)
        if len(sample) != width or min(counts) < 0 or counts[-1] < 1 or not 0 < seconds < math.inf:
            raise ValueError(f"no sample: {sample}")
    return list(samples)


# The file


def read_speeds(fs: Fs, store_dir: str) -> dict[Key, Speeds]:
    """All that the store at `store_dir` knows; nothing where it has no such file.

    Raises:
        CorruptFormat: damaged, or of another version.
        OSError: it cannot be read.
    """
    path = f"{store_dir}/{SPEEDS}"
    if not fs.exists(path):
        return {}
    with contextlib.closing(fs.open_file(path)) as file:
        raw = bytearray(min(file.nbytes(), _MAX_NBYTES))
        file.preadv([raw], 0)
    return decode(bytes(raw))


def write_speeds(fs: Fs, store_dir: str, raw: bytes) -> None:
    """Replace the file by what `encode` gave. A power loss may take it, a kill does not tear it.

    Raises:
        OSError: the file that was there stays.
    """
    path = f"{store_dir}/{SPEEDS}"
    temporary = f"{path}.tmp"
    with contextlib.suppress(FileNotFoundError):
        fs.unlink(temporary)
    try:
        with contextlib.closing(fs.open_file(temporary, create=True, writable=True)) as file:
            file.pwritev([raw], 0)
        fs.rename(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            fs.unlink(temporary)
        raise


def encode(speeds: Mapping[Key, Speeds]) -> bytes:
    """The file's bytes; it has room for a few keys, the last of `speeds`."""
    rows = [[*key, known.as_json()] for key, known in list(speeds.items())[-_MAX_KEYS:]]
    body = json.dumps(rows, separators=(",", ":")).encode()
    return _HEAD.pack(_MAGIC, _VERSION, len(body), xxhash.xxh3_128_digest(body)) + body


def decode(raw: bytes) -> dict[Key, Speeds]:
    """Raises CorruptFormat: not what `encode` gives."""
    if len(raw) < _HEAD.size:
        raise CorruptFormat(f"{SPEEDS}: {len(raw)} bytes are no header")
    magic, version, nbytes, checksum = _HEAD.unpack_from(raw)
    body = raw[_HEAD.size :]
    if (magic, version, nbytes) != (_MAGIC, _VERSION, len(body)) or xxhash.xxh3_128_digest(body) != checksum:
        raise CorruptFormat(f"{SPEEDS}: damaged, or of another version")
    try:
        rows = [(Key(str(row[0]), str(row[1])), row[2]) for row in json.loads(body)]
    except (ValueError, TypeError, LookupError) as error:
        raise CorruptFormat(f"{SPEEDS}: {error}") from error
    return {key: Speeds.from_json(values) for key, values in rows}
