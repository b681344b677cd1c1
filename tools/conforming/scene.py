"""Where a cell takes place: a tiny model, an open store, and conversations of random ids in it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import transformers

import tieredkv
from tieredkv.hf import ChatModel

from .family import Family
from .forwards import Forward, Recorder, cache_of
from .states import States, states_of
from .tokenizer import byte_tokenizer

BLOCK_SIZE = 16
NUM_PROMPT, NUM_SAID, NUM_NEW = 53, 20, 8
"""Tokens of a first prompt, of what a user says later, and of an answer."""
GREEDY: Mapping[str, Any] = {"max_new_tokens": NUM_NEW, "do_sample": False}
_BUDGETS: Mapping[str, Any] = {
    "device_nbytes": "16MiB", "host_nbytes": "8MiB", "disk_nbytes": "256MiB", "block_size": BLOCK_SIZE,
    "device": "cpu",
}  # fmt: skip
_LARGE_BUDGETS = {**_BUDGETS, "device_nbytes": "512MiB", "host_nbytes": "256MiB", "disk_nbytes": "4GiB"}


@dataclass(frozen=True)
class Turn:
    """One attached prompt and what came of it.

    Attributes:
        tokens: `[1, n]`: the prompt and its answer.
        attached: the tensors in the cache that was handed over, after `num_early` of the forwards: a recurrent family
            computes part of a prompt before, so that it can keep a state there.
        forwards: all of the turn's.
        by_tier, reason: where what was reused came from, and why it was not more.
    """

    num_prompt: int
    tokens: torch.Tensor
    attached: States
    num_early: int
    forwards: list[Forward]
    by_tier: Mapping[str, int]
    reason: str

    @property
    def num_reused(self) -> int:
        return self.forwards[0].start


@dataclass(frozen=True)
class Row:
    """One prompt of a `generate` call over several rows.

    Attributes:
        prompt: `[1, n]`.
        forwards: those that computed it alone, up to its last token.
        sequences: `[returned, m]`, prompt included.
    """

    prompt: torch.Tensor
    forwards: list[Forward]
    sequences: torch.Tensor


class Scene:
    """Made anew for each cell; use it with `with`, which closes what it opened."""

    def __init__(self, family: Family, folder: Path, model: Any) -> None:
        self.family = family
        self.folder = folder
        self.model = model
        self.recorder = Recorder(model)
        self._tokenizer = byte_tokenizer()
        self._opened: list[Any] = []

    def __enter__(self) -> Scene:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.recorder.__exit__(kind, error, trace)
        self.close()

    def open(self, name: str = "store", **budgets: Any) -> ChatModel:
        """The model over the store of that name, in a cache object of its own; any earlier one is closed."""
        self.close()
        chosen = {**(_LARGE_BUDGETS if self.family.num_more else _BUDGETS), **budgets}
        self._opened.append(tieredkv.open(self.folder / name, tieredkv.Config(**chosen)))
        return ChatModel(self._opened[-1], self.model, self._tokenizer)

    def close(self) -> None:
        """Close whatever store is open."""
        for kv in self._opened:
            kv.close()

    def settle(self) -> None:
        """Wait until all that was stored lies on disk too, and see that the cache is sound."""
        flushed = self._opened[-1].flush()
        if not flushed.ok:
            raise RuntimeError(f"not flushed: {flushed.failures}")
        self._opened[-1].check()

    def say(self, session: Any, ids: torch.Tensor, num_new: int = NUM_NEW, **options: Any) -> Turn:
        """Attach a whole prompt `[1, n]`, generate greedily, commit."""
        self.recorder.take()
        given = session.attach(ids, assisted=_is_assisted(options))
        forwards, attached = self.recorder.take(), states_of(cache_of(given))
        out = self.model.generate(**given, max_new_tokens=num_new, do_sample=False, **options)
        session.commit(out)
        tokens = torch.from_numpy(session.tokens.astype("int64"))[None]
        if not torch.equal(tokens[:, : ids.shape[1]], ids.cpu()):
            raise AssertionError("the session does not hold the prompt that was attached")
        explain = session.last_explain
        return Turn(
            num_prompt=ids.shape[1],
            tokens=tokens,
            attached=attached,
            num_early=len(forwards),
            forwards=[*forwards, *self.recorder.take()],
            by_tier=dict(explain.by_tier),
            reason=explain.reason,
        )

    def say_in_rows(
        self, chat: ChatModel, asked: Sequence[tuple[Any, torch.Tensor]], **options: Any
    ) -> tuple[list[Row], list[Forward]]:
        """One `generate` call over sessions with their prompts; the rows, and the forwards over all of them."""
        self.recorder.take()
        if len(asked) == 1:
            given = [asked[0][0].generate(asked[0][1], **GREEDY, **options)]
        else:
            given = chat.generate(asked, **GREEDY, **options)
        forwards = self.recorder.take()
        alone = [forward for forward in forwards if forward.ids.shape[0] == 1]
        rows = []
        for (session, prompt), got in zip(asked, given, strict=True):
            own = alone[: 1 + next(i for i, f in enumerate(alone) if f.end == prompt.shape[1] - 1)]
            alone = alone[len(own) :]
            if session.tokens.tolist() != got.ids.tolist() or got.ids.tolist() != got.sequences[0].tolist():
                raise AssertionError("the session does not hold the first sequence of its row")
            rows.append(Row(prompt, own, got.sequences))
        return rows, forwards[-len(forwards) + sum(len(row.forwards) for row in rows) :]

    def converse(self, session: Any, num_turns: int = 3, seed: int = 1, **options: Any) -> list[Turn]:
        """A conversation of random ids, each prompt going on from all that was said; the third is long again."""
        turns: list[Turn] = []
        ids = random_ids(NUM_PROMPT + self.family.num_more, seed)
        for number in range(num_turns):
            turns.append(self.say(session, ids, **options))
            num_said = NUM_SAID + (self.family.num_more if number == 1 else 0)
            ids = following(turns[-1].tokens, num_said, seed * 100 + number)
        return turns


def quiet() -> None:
    """Only what a cell finds is to be seen."""
    transformers.logging.set_verbosity_error()
    logging.getLogger("tieredkv").setLevel(logging.CRITICAL)


def random_ids(num_tokens: int, seed: int) -> torch.Tensor:
    """`[1, num_tokens]`, none of them special."""
    return torch.randint(8, 240, (1, num_tokens), generator=torch.Generator().manual_seed(seed))


def following(tokens: torch.Tensor, num_tokens: int, seed: int) -> torch.Tensor:
    """`tokens`, and so many more."""
    return torch.cat([tokens, random_ids(num_tokens, seed)], dim=1)


def all_forwards(turns: list[Turn]) -> list[Forward]:
    return [forward for turn in turns for forward in turn.forwards]


def _is_assisted(options: Mapping[str, Any]) -> bool:
    return "prompt_lookup_num_tokens" in options or "assistant_model" in options
