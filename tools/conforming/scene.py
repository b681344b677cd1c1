"""Where a cell takes place: a tiny model, an open store, and conversations of random ids in it."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import transformers
from packaging.version import Version

import tieredkv
from tieredkv import speeds
from tieredkv.hf import ChatModel

from .family import Family
from .forwards import Forward, Recorder, cache_of
from .states import States, states_of

BLOCK_SIZE = 16
NUM_PROMPT, NUM_SAID, NUM_NEW = 53, 20, 8
"""Tokens of a first prompt, of what a user says later, and of an answer."""
GREEDY: Mapping[str, Any] = {"max_new_tokens": NUM_NEW, "do_sample": False}
_IDS_BEHIND = ["prompt_lookup_num_tokens", "assistant_model"]
if Version(transformers.__version__) < Version("5.24"):
    _IDS_BEHIND.append("prefill_chunk_size")
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
    """Made anew for each cell; use it with `with`, which closes what it opened.

    Args:
        num_more: so many tokens more have first prompts and third ones.
    """

    def __init__(self, family: Family, folder: Path, model: Any, num_more: int = 0) -> None:
        self.family = family
        self.folder = folder
        self.model = model
        self.num_more = num_more
        self.recorder = Recorder(model)
        self._tokenizer = family.tokenizer()
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
        speeds._LEAST_GAIN_S = math.inf  # load, always: a cell is not to depend on how busy the machine is
        chosen = {**(_LARGE_BUDGETS if self.family.weights else _BUDGETS), **budgets}
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
        given = session.attach(ids, assisted=takes_ids_behind(options))
        forwards, attached = self.recorder.take(), states_of(cache_of(given))
        out = self.model.generate(**given, max_new_tokens=num_new, do_sample=False, **options)
        session.commit(out)
        return self._turn(session, ids, forwards, attached)

    def ask(self, session: Any, messages: Sequence[Mapping[str, str]]) -> Turn:
        """The same through the session's own `generate`, over all messages of a chat."""
        self.recorder.take()
        handed: list[tuple[torch.Tensor, list[Forward], States]] = []
        generate = self.model.generate

        def generate_seen(**given: Any) -> Any:
            handed.append((given["input_ids"], self.recorder.take(), states_of(cache_of(given))))
            return generate(**given)

        self.model.generate = generate_seen
        try:
            session.generate(messages, **GREEDY)
        finally:
            del self.model.generate  # that of its class is seen again
        behind, forwards, attached = handed[
            0
        ]  # a cache that knows no length was given only the ids behind it
        num_prompt = session.last_explain.prompt_tokens
        held = torch.from_numpy(session.tokens[:num_prompt].astype("int64"))[None]
        if not torch.equal(held[:, -behind.shape[1] :], behind.cpu()):
            raise AssertionError("the session does not hold the ids that it gave to generate")
        return self._turn(session, held, forwards, attached)

    def _turn(self, session: Any, ids: torch.Tensor, forwards: list[Forward], attached: States) -> Turn:
        """What a session holds after a prompt `[1, n]` that `forwards` came before."""
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
        ids = self.family.random_ids(NUM_PROMPT + self.num_more, seed)
        for number in range(num_turns):
            turns.append(self.say(session, ids, **options))
            num_said = NUM_SAID + (self.num_more if number == 1 else 0)
            ids = self.following(turns[-1].tokens, num_said, seed * 100 + number)
        return turns

    def converse_in_messages(self, session: Any) -> list[Turn]:
        """Three questions of random letters with their answers, through the session's own `generate`."""
        turns: list[Turn] = []
        for number, num_said in enumerate([NUM_PROMPT, NUM_SAID, NUM_SAID]):
            question = {"role": "user", "content": self.text(num_said, seed=500 + number)}
            turns.append(self.ask(session, [*session.messages, question]))
        return turns

    def text(self, num_letters: int, seed: int) -> str:
        letters = torch.randint(97, 123, (num_letters,), generator=torch.Generator().manual_seed(seed))
        return bytes(letters.tolist()).decode()

    def following(self, tokens: torch.Tensor, num_tokens: int, seed: int) -> torch.Tensor:
        """`tokens`, and so many more."""
        return torch.cat([tokens, self.family.random_ids(num_tokens, seed)], dim=1)


def quiet() -> None:
    """Only what a cell finds is to be seen."""
    transformers.logging.set_verbosity_error()
    logging.getLogger("tieredkv").setLevel(logging.CRITICAL)


def all_forwards(turns: list[Turn]) -> list[Forward]:
    return [forward for turn in turns for forward in turn.forwards]


def takes_ids_behind(options: Mapping[str, Any]) -> bool:
    """Whether `generate` with these would run a whole prompt over its own prefix, so is given only what is behind."""
    return any(name in options for name in _IDS_BEHIND)
