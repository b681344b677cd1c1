"""A conversation with a live model: one owner of ids, mask and cache.

The cache handed to `generate` is always shorter than the ids, holds exactly their prefix, and is used once;
see `capture.py` for what is checked at each forward. The session's own KV stays in memory between turns, so a
second turn in the same process restores nothing.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

import numpy as np
import torch
from transformers.generation.stopping_criteria import StoppingCriteriaList

from ..block.hashing import as_tokens, common_prefix
from ..errors import BadInput, SessionError
from ..outcomes import Reason
from ..sessions import Session
from ..table.catalog import Turn
from .capture import CapturingCache, Tokens
from .live_model import LiveModel
from .restore import restore
from .stream import Answer, Generation, TextPieces
from .template import Message, Prompt, Template
from .transcript import Transcript

_OURS = {
    "inputs",
    "input_ids",
    "inputs_embeds",
    "attention_mask",
    "position_ids",
    "streamer",
    "use_cache",
} | {
    "cache",
    "past_key_values",
}
"""Arguments of `generate` that the session gives itself."""
_ASSISTED = ("assistant_model", "prompt_lookup_num_tokens")
_NUM_TURN_ENDS = 3
"""A session keeps its end and its last two turn ends."""
_NUM_BRANCHES = 2
"""And the last places where other chains left its own."""


@dataclass(frozen=True)
class Explain:
    """What the last prompt cost.

    Attributes:
        prompt_tokens, reused_tokens: tokens of the prompt, and how many of them were not computed.
        by_tier: the reused tokens by where they were: `session` is this session's own memory.
        reason, detail: why not more.
        diverged_at: the token at which the prompt left what the session held, or None.
        restore_s: seconds spent on finding and reading the prefix.
        ttft_s: seconds from `send` to the first token; None before it.
    """

    prompt_tokens: int
    reused_tokens: int
    by_tier: Mapping[str, int] = field(default_factory=dict)
    reason: str = str(Reason.COMPLETE)
    detail: str = ""
    diverged_at: int | None = None
    restore_s: float = 0.0
    ttft_s: float | None = None


class ChatSession:
    """Made by `ChatModel.session`; use it with `with`. One thread at a time may use it.

    A session that is built by `attach` and `commit` holds ids but no messages, and cannot `send`.
    """

    def __init__(
        self, live: LiveModel, template: Template, record: Session, system: str | None = None
    ) -> None:
        self._live = live
        self._template = template
        self._record = record
        self._cache: CapturingCache | None = None
        self._attached: Tokens | None = None
        self._branch = 0
        self._num_skipped = 0
        self._explain: Explain | None = None
        self._running: tuple[float, Generation] | None = None
        self._answer: weakref.ref[Answer] | None = None
        self._transcript = Transcript(template, record)
        if system is not None and not len(self.tokens):
            self.system(system)

    def __enter__(self) -> ChatSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # What it holds

    @property
    def name(self) -> str:
        return self._record.name

    @property
    def tokens(self) -> Tokens:
        """int32 `[n]`: every committed token, generated ones included."""
        return self._record.tokens

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation as texts; empty for a session of `attach` and `commit`."""
        return tuple(self._transcript.messages or ())

    @property
    def interrupted(self) -> bool:
        """Whether the last message is a user's and has no answer: the process that wrote it was killed."""
        return bool(self._record.turns) and self._record.turns[-1].role == "user"

    @property
    def last_explain(self) -> Explain | None:
        """What the last prompt cost."""
        if self._explain is None or self._running is None:
            return self._explain
        began, generation = self._running
        first = generation.first_token_at
        return replace(self._explain, ttft_s=None if first is None else first - began)

    def explain(self) -> Explain:
        """What the last prompt cost; before any, what the next would find of the session's tokens."""
        if self._explain is not None:
            return self.last_explain or self._explain
        hit = self._record.space.lookup(self.tokens)
        return Explain(len(self.tokens), hit.num_tokens, hit.by_tier, str(hit.reason), hit.detail)

    # Talking

    def system(self, text: str) -> None:
        """Set the system message. It is kept with the first user message.

        Raises:
            BadInput: the conversation has begun.
        """
        if len(self.tokens):
            raise BadInput(f"session {self.name!r} has begun: its system message cannot change")
        self._transcript.messages = [{"role": "system", "content": text}]

    def send(self, text: str, max_new_tokens: int = 256, **generate_kwargs: Any) -> Answer:
        """Say something and stream the answer. The user's message is committed when this returns.

        Raises:
            BadInput: the last message has no answer yet, or an argument that the session gives itself.
        """
        began = time.perf_counter()
        self._check_ready(generate_kwargs)
        if self.interrupted:
            raise BadInput("the last message has no answer: resume_answer() or rollback(turns=1) first")
        messages: list[Message] = [*self._spoken(), {"role": "user", "content": text}]
        ends = [turn.end for turn in self._record.turns]
        prompt = self._template.prompt(messages, self._said_tokens(), ends)
        diverged_at = _divergence(prompt.ids, self.tokens)
        self._commit_question(messages, prompt)
        return self._generate(began, max_new_tokens, generate_kwargs, diverged_at)

    def resume_answer(self, max_new_tokens: int = 256, **generate_kwargs: Any) -> Answer:
        """Generate the answer of an interrupted turn again, from its user message."""
        began = time.perf_counter()
        self._check_ready(generate_kwargs)
        if not self.interrupted:
            raise BadInput("no message waits for an answer: regenerate() makes another of the last one")
        self._spoken()
        return self._generate(began, max_new_tokens, generate_kwargs, None)

    def regenerate(self, max_new_tokens: int = 256, **generate_kwargs: Any) -> Answer:
        """Take back the last answer, if there is one, and generate it again from its user message."""
        self._check_ready(generate_kwargs)
        asked = [turn.end for turn in self._record.turns if turn.role == "user"]
        if not asked:
            raise BadInput("nothing was asked yet")
        if not self.interrupted:
            self.rollback(num_tokens=asked[-1])
        return self.resume_answer(max_new_tokens, **generate_kwargs)

    # For people who call generate themselves

    def attach(self, ids: object, assisted: bool = False) -> dict[str, Any]:
        """Arguments for one `generate` (or `forward`) call over `ids`: ids, mask and a cache of their prefix.

        Args:
            ids: the whole prompt, `[n]` or `[1, n]`.
            assisted: for `assistant_model` or `prompt_lookup_num_tokens`, which would run a whole prompt
                again over its own prefix: only the ids behind the cache are given, with a mask over all.

        Raises:
            BadInput: no ids, or more than one row.
        """
        self._check_ready({})
        tokens = _one_row(ids)
        if not len(tokens):
            raise BadInput("there is nothing to attach: no ids")
        return self._attach(tokens, assisted, _divergence(tokens, self.tokens))

    def commit(self, out: object) -> None:
        """Keep what a `generate` call over attached ids gave: its sequences, as a tensor or a ModelOutput.

        Raises:
            BadInput: nothing was attached; more than one row; an id that disagrees with what was forwarded
                (its index is named), or was never forwarded; foreign positions or a mask with holes.
        """
        cache, prompt = self._cache, self._attached
        if cache is None or prompt is None:
            raise BadInput("commit keeps what was generated over attached ids: attach first")
        tokens = np.concatenate([prompt[: self._num_skipped], _one_row(getattr(out, "sequences", out))])
        cache.agree(tokens)
        shared = common_prefix(self.tokens, prompt)
        turns = [turn for turn in self._record.turns if turn.end <= shared]
        turns.append(Turn("user", min(len(prompt), len(tokens))))
        turns.append(Turn("assistant", len(tokens)))
        self._commit_answer(tokens, turns, None)

    # Changing and keeping

    def rollback(self, turns: int | None = None, num_tokens: int | None = None) -> int:
        """Take back the last `turns` exchanges, or everything past `num_tokens`.

        Returns:
            How many of the tokens left a next prompt has to compute again.

        Raises:
            BadInput: more than there is, or neither or both given.
        """
        self._check_ready({})
        if (turns is None) == (num_tokens is None):
            raise BadInput("rollback takes either turns or num_tokens")
        end = self._end_before(turns) if turns is not None else int(num_tokens or 0)
        if not 0 <= end <= len(self.tokens):
            raise BadInput(f"cannot roll {len(self.tokens)} tokens back to {end}")
        tokens, anchors = self.tokens[:end], [a for a in self._record.anchors if a <= end]
        kept = [turn for turn in self._record.turns if turn.end <= end]
        said = None if self._transcript.messages is None else self._transcript.messages[: len(kept)]
        self._record.commit(
            tokens, kept, anchors=anchors, meta=self._transcript.meta(self._record, tokens, kept, said)
        )
        if said is not None and self._transcript.messages:
            system = [m for m in self._transcript.messages[:1] if m["role"] == "system"]
            self._transcript.messages = said or system
        return end - self._num_at_hand(end)

    def fork(self, name: str) -> ChatSession:
        """A new session with the same conversation; blocks are shared.

        Raises:
            SessionError: a session of that name exists.
        """
        self._check_ready({})
        return ChatSession(self._live, self._template, self._record.fork(name))

    def pin(self) -> None:
        """Hold the session's blocks against eviction, also after a restart."""
        self._record.pin()

    def unpin(self) -> None:
        self._record.unpin()

    def expire(self, days: float) -> None:
        """Let the session go `days` from now."""
        self._record.expire(days)

    def delete(self) -> None:
        """Remove the session and the blocks that no other session shares; nothing is left on return."""
        self._end_answer()
        self._drop_cache()
        self._record.delete()

    def close(self) -> None:
        """End a streaming answer, keep what it said, and let the session's memory go."""
        try:
            self._end_answer()
        finally:
            self._drop_cache()
            self._record.close()

    # Inside: a turn

    def _generate(
        self, began: float, max_new_tokens: int, given: Mapping[str, Any], diverged_at: int | None
    ) -> Answer:
        assisted = _is_assisted(self._live.model, given)
        attached = self._attach(self._said_tokens(), assisted, diverged_at, max_new_tokens)
        arguments = {**given, **attached, "max_new_tokens": max_new_tokens}
        criteria = list(given.get("stopping_criteria") or ())

        def call(streamer: Any, stop: Any) -> Any:
            ends = StoppingCriteriaList([*criteria, stop])
            return self._live.model.generate(**{**arguments, "streamer": streamer, "stopping_criteria": ends})

        generation = Generation(call)
        self._running = began, generation
        pieces = TextPieces(lambda ids: self._template.decode(np.array(ids, dtype=np.int32)))
        answer = Answer(generation, pieces, self._keep_answer)
        self._answer = weakref.ref(answer)
        return answer

    def _keep_answer(self, generation: Generation) -> None:
        """Commit what was generated; after an error leave the turn interrupted."""
        self._explain, self._running, self._answer = self.last_explain, None, None
        prompt = self._attached
        assert prompt is not None, "an answer ended that was never attached"
        if generation.error is not None:
            self._drop_cache()
            return
        tokens = _one_row(getattr(generation.output, "sequences", generation.output))
        tokens = np.concatenate([prompt[: self._num_skipped], tokens])
        text = self._template.decode(tokens[len(prompt) :])
        messages: list[Message] = [*self._spoken(), {"role": "assistant", "content": text}]
        self._commit_answer(tokens, [*self._record.turns, Turn("assistant", len(tokens))], messages)

    def _commit_question(self, messages: list[Message], prompt: Prompt) -> None:
        """The user's message, before the first token of its answer."""
        ids, shared = prompt.ids, common_prefix(prompt.ids, self.tokens)
        turns = [Turn(m["role"], end) for m, end in zip(messages, prompt.ends, strict=True)]
        heads = self._heads()
        if shared < len(self.tokens) or not heads:
            heads = [self._boundary(self._template.system_end(messages, ids) + 1)]
        # The prompt's end is the running end: held before it is there, so that a broken turn can be made again.
        kept = self._lasting(turns, heads).intersection(self._record.anchors)
        anchors = sorted({a for a in kept if a <= shared} | {*heads, self._boundary(len(ids))} - {0})
        meta = {**self._transcript.meta(self._record, ids, turns, messages), "heads": heads}
        self._record.commit(ids, turns, anchors=anchors, meta=meta)
        self._transcript.messages = messages

    def _commit_answer(self, tokens: Tokens, turns: Sequence[Turn], messages: list[Message] | None) -> None:
        """Blocks first, then the session record that names them."""
        cache = self._cache
        assert cache is not None, "a turn is committed with its cache"
        heads = self._heads() or [0]
        if self._branch and self._branch not in heads:
            heads = [heads[0], *[*heads[1:], self._branch][-_NUM_BRANCHES:]]
        prompt_end = next((turn.end for turn in reversed(turns) if turn.role == "user"), 0)
        named = self._lasting(turns, heads) | {self._boundary(prompt_end)}
        anchors = sorted(b for b in named if 0 < b <= len(tokens))
        cache.store_blocks(anchors, again=True)
        meta = {**self._transcript.meta(self._record, tokens, turns, messages), "heads": heads}
        self._record.commit(tokens, turns, anchors=anchors, stored=cache.take_stored(), meta=meta)
        self._transcript.messages, self._attached = messages, None
        cache.forget_wanted()

    def _lasting(self, turns: Sequence[Turn], heads: Sequence[int]) -> set[int]:
        """The boundaries that a session keeps from turn to turn."""
        ends = [turn.end for turn in turns if turn.role == "assistant"][-_NUM_TURN_ENDS:]
        return {*heads, *map(self._boundary, ends)}

    # Inside: the cache

    def _attach(
        self, tokens: Tokens, assisted: bool, diverged_at: int | None, num_new: int = 0
    ) -> dict[str, Any]:
        began = time.perf_counter()
        self._attached = None
        cache, explain = self._cache_for(tokens, num_new)
        cache.forget_wanted()
        cache.want([self._boundary(len(tokens)), self._branch, *self._heads()])
        self._cache, self._attached = cache, tokens
        self._num_skipped = cache.num_tokens if assisted else 0
        cache.expect(tokens, num_new, new_ids_only=self._num_skipped > 0)
        self._explain = replace(explain, diverged_at=diverged_at, restore_s=time.perf_counter() - began)
        device = self._live.device
        return {
            "input_ids": torch.tensor(tokens[self._num_skipped :], dtype=torch.long, device=device)[None],
            "attention_mask": torch.ones((1, len(tokens)), dtype=torch.long, device=device),
            self._live.cache_name: cache,
        }

    def _cache_for(self, tokens: Tokens, num_new: int) -> tuple[CapturingCache, Explain]:
        """A cache of a prefix of `tokens`: this session's own if that reaches as far as what is stored."""
        space, own = self._live.space, self._cache
        hit = space.lookup(tokens)
        shared = common_prefix(own.tokens, tokens[:-1]) if own is not None and own.is_sound() else 0
        if own is not None and 0 < shared >= hit.num_tokens and own.can_crop(shared):
            reason = Reason.COMPLETE if shared == own.num_tokens else Reason.DIVERGED
            own.crop(shared - own.num_tokens)
            self._branch = 0
            return own, Explain(len(tokens), shared, {"session": shared}, str(reason))
        self._drop_cache()
        cache = self._live.new_cache()
        got = restore(space, cache, tokens, num_new)
        # Full parts that reach beyond any anchor: a branch is about to form where they end.
        self._branch = hit.num_full_tokens if hit.num_full_tokens > got.num_tokens else 0
        return cache, Explain(len(tokens), got.num_tokens, got.by_tier, got.reason, got.detail)

    def _follow_model(self) -> None:
        """If the model changed, its KV is another namespace's: go on there with the same tokens."""
        self._live.refresh()
        before = self._record
        if before.space.digest == self._live.space.digest:
            return
        self._drop_cache()
        before.close()
        self._record = self._live.kv.session(before.name, self._live.space)
        if len(before.tokens):
            self._record.commit(before.tokens, before.turns, meta=before.meta)

    def _drop_cache(self) -> None:
        self._cache = self._attached = None

    def _boundary(self, num_tokens: int) -> int:
        """The last boundary that a sequence of `num_tokens` can be restored at: one token is left to compute."""
        size = self._live.block_size
        return max(0, num_tokens - 1) // size * size

    def _heads(self) -> list[int]:
        """The boundary at the end of the system message (0: none), then those where other chains left this one."""
        return [int(boundary) for boundary in self._record.meta.get("heads", ())]

    def _num_at_hand(self, end: int) -> int:
        """How many of the first `end` tokens a next prompt finds."""
        own = self._cache
        if own is not None and own.is_sound() and own.can_crop(end):
            return end
        following = np.append(self.tokens[:end], np.int32(0))
        return self._record.space.lookup(following).num_tokens

    # Inside: messages

    def _said_tokens(self) -> Tokens:
        """The tokens up to where the last message ends."""
        turns = self._record.turns
        return self.tokens[: turns[-1].end] if turns else self.tokens[:0]

    def _end_before(self, turns: int) -> int:
        asked = [i for i, turn in enumerate(self._record.turns) if turn.role == "user"]
        if not 0 < turns <= len(asked):
            raise BadInput(f"cannot take back {turns} of {len(asked)} exchanges")
        before = self._record.turns[: asked[-turns]]
        return before[-1].end if any(turn.role != "system" for turn in before) else 0

    def _spoken(self) -> list[Message]:
        if self._transcript.messages is None:
            raise BadInput(f"session {self.name!r} holds ids without messages: go on with attach and commit")
        return self._transcript.messages

    # Inside: the answer that streams

    def _check_ready(self, arguments: Mapping[str, Any]) -> None:
        if self._answer is not None and self._answer() is not None:
            raise SessionError(f"session {self.name!r} is answering: read the answer to its end or close it")
        own = sorted(_OURS & arguments.keys())
        if own:
            raise BadInput(
                f"{', '.join(own)}: the session gives these itself; attach(ids) is for your own calls"
            )
        for name in ("num_beams", "num_return_sequences"):
            if (arguments.get(name) or 1) > 1:
                raise BadInput(
                    f"{name}={arguments[name]}: an answer is one sequence; use attach(ids) for more"
                )
        self._follow_model()

    def _end_answer(self) -> None:
        answer = self._answer() if self._answer is not None else None
        if answer is not None:
            answer.close()


def _is_assisted(model: Any, given: Mapping[str, Any]) -> bool:
    """Whether `generate` will draft tokens, by its arguments or its configurations."""
    configs = (given.get("generation_config"), getattr(model, "generation_config", None))
    return any(given.get(name) is not None for name in _ASSISTED) or any(
        getattr(config, "prompt_lookup_num_tokens", None) is not None for config in configs
    )


def _divergence(ids: Tokens, held: Tokens) -> int | None:
    """The token at which `ids` leave what is held, or None if they go on from it."""
    shared = common_prefix(ids, held)
    return shared if shared < len(held) else None


def _one_row(ids: Any) -> Tokens:
    """Ids `[n]` or `[1, n]`, as a tensor, array or list.

    Raises:
        BadInput: several rows, or no ids.
    """
    array = ids.detach().cpu().numpy() if isinstance(ids, torch.Tensor) else np.asarray(ids)
    if array.ndim == 2:
        if array.shape[0] != 1:
            raise BadInput(f"a session is one sequence, not {array.shape[0]} rows: choose one")
        array = array[0]
    return as_tokens(array)
