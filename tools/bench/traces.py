"""Named workloads: requests as sequences of block numbers, from real traces or made from a seed."""

from __future__ import annotations

import gzip
import hashlib
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

SEED = 20260

Request = tuple[int, ...]
"""Numbers of a prompt's blocks, head first; two prompts share what begins with the same numbers."""

MOONCAKE = ("mooncake_conversation_first3000.jsonl.gz", "mooncake_conversation.jsonl.gz")


TIERS = ("device", "host", "disk")


@dataclass(frozen=True)
class Workload:
    """A name, where it comes from, its requests in order; each tier's budget as a share of its distinct blocks."""

    name: str
    source: str
    requests: tuple[Request, ...]
    shares: tuple[float, float, float] = (0.03, 0.06, 0.3)

    @property
    def num_distinct(self) -> int:
        return len({block for request in self.requests for block in request})

    def ideal(self) -> float:
        """The share of blocks that a cache without bounds would have."""
        total = sum(map(len, self.requests))
        return 1 - self.num_distinct / total


def all_workloads(trace: Path | None, quick: bool) -> list[Workload]:
    """The four that a run shows, one of them small with `quick`; chats are real ones where `trace` has them."""
    if quick:
        return [chats(trace, 250)]
    return [one_long_chat(360), chats(trace, 1500), shared_system_prompt(900), scan(750)]


def one_long_chat(num_turns: int) -> Workload:
    """Each turn begins with all the turns before it; the disk holds all of it, device and host memory do not."""
    rng, blocks, requests = random.Random(SEED), list(range(8)), []
    for _ in range(num_turns):
        blocks += range(len(blocks), len(blocks) + rng.randint(1, 5))
        requests.append(tuple(blocks))
    return Workload("one long chat", f"{num_turns} turns, seed {SEED}", tuple(requests), (0.1, 0.3, 1.1))


def chats(trace: Path | None, num_requests: int) -> Workload:
    """Many chats that come back after a pause in which others went on."""
    name = "many chats with idle gaps"
    path = find(trace)
    if path is None:
        requests = _made_chats(num_requests, num_open=40, shared=4)
        return Workload(name, f"{num_requests} requests made from seed {SEED}", requests)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    source = f"{path.name} (SHA-256 {digest}), the first {num_requests} requests"
    return Workload(name, source, read_mooncake(path, num_requests))


def find(trace: Path | None) -> Path | None:
    """A trace file: `trace` itself, or the one that lies in that folder.

    Raises:
        FileNotFoundError: it is neither.
    """
    if trace is None or trace.is_file():
        return trace
    found = [trace / name for name in MOONCAKE if (trace / name).is_file()]
    if not found:
        raise FileNotFoundError(
            f"{trace} has no {MOONCAKE[0]}: give the trace file, or the folder it lies in"
        )
    return found[0]


def read_mooncake(path: Path, num_requests: int) -> tuple[Request, ...]:
    """`hash_ids` of each line, in the order of arrival."""
    opened: Callable[..., object] = gzip.open if path.suffix == ".gz" else open
    requests: list[Request] = []
    with opened(path, "rt") as lines:  # type: ignore[attr-defined]
        for line in lines:
            if len(requests) == num_requests:
                break
            requests.append(tuple(json.loads(line)["hash_ids"]))
    return tuple(requests)


def shared_system_prompt(num_requests: int) -> Workload:
    """Short questions that all begin with one of three long system messages."""
    rng, made = random.Random(SEED), _Numbers()
    prompts = [made.take(24) for _ in range(3)]
    requests = tuple(
        prompts[min(2, int(rng.expovariate(1.2)))] + made.take(rng.randint(1, 6)) for _ in range(num_requests)
    )
    return Workload("shared system prompt", f"{num_requests} questions, seed {SEED}", requests)


def scan(num_requests: int) -> Workload:
    """Chats, and between them long prompts that nobody asks for again."""
    rng, made = random.Random(SEED + 1), _Numbers(1 << 24)
    chat = iter(_made_chats(num_requests, num_open=20, shared=4))
    requests: list[Request] = []
    for request in chat:
        requests.append(request)
        if rng.random() < 0.15:
            requests.append(made.take(rng.randint(60, 160)))
    return Workload("scan", f"chats and {len(requests) - num_requests} scans, seed {SEED}", tuple(requests))


def _made_chats(num_requests: int, num_open: int, shared: int) -> tuple[Request, ...]:
    """Chats that share a head; one that rested is the less likely to go on the longer ago it last did."""
    rng, made = random.Random(SEED), _Numbers()
    head = made.take(shared)
    open_chats: list[Request] = []
    requests: list[Request] = []
    for _ in range(num_requests):
        if open_chats and rng.random() < 0.7:
            at = len(open_chats) - 1 - min(len(open_chats) - 1, int(rng.expovariate(4 / num_open)))
            chat = open_chats.pop(at)
        else:
            chat = head
        chat = (*chat, *made.take(rng.randint(2, 16)))
        requests.append(chat)
        open_chats = [*open_chats, chat][-num_open:]
    return tuple(requests)


class _Numbers:
    """Block numbers that were not used before."""

    def __init__(self, first: int = 0) -> None:
        self._next = first

    def take(self, count: int) -> Request:
        self._next += count
        return tuple(range(self._next - count, self._next))
