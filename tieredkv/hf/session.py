"""A conversation with a live model: one owner of ids, mask and cache.

The cache handed to `generate` is always shorter than the ids, holds exactly their prefix, and is used once;
see `capture.py` for what is checked at each forward. The session's own KV stays in memory between turns, so a
second turn in the same process restores nothing.
"""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

import numpy as np
import torch
from transformers.generation.stopping_criteria import StoppingCriteriaList

from ..block.hashing import common_prefix
from ..errors import BadInput, Closed, SessionError
from ..sessions import Session
from ..table.catalog import Turn
from ..units import is_whole
from . import anchors
from .arguments import (
    check_arguments,
    check_one_sequence,
    is_assisted,
    is_messages,
    num_sequences,
    one_row,
    prompt_readers,
)
from .capture import Tokens
from .explain import Divergence, Explain, divergence
from .live_model import LiveModel
from .memory import SessionMemory
from .prefetch import Prefetch
from .rows import Asked, Generated, check_rows, compute_rest, generate_rows
from .stream import Answer, Generation, TextPieces
from .template import Message, Prompt, Template
from .transcript import Transcript, as_messages


class ChatSession:
    """Made by `ChatModel.session`; use it with `with`. One thread at a time may use it.

    A session that is built by `attach` and `commit` holds ids but no messages, and cannot `send`.
    """

    def __init__(
        self,
        live: LiveModel,
        template: Template,
        record: Session,
        system: str | None = None,
        like: Transcript | None = None,
    ) -> None:
        self._live = live
        self._template = template
        self._record = record
        self._memory = SessionMemory(live)
        self._explain: Explain | None = None
        self._running: tuple[float, Generation] | None = None
        self._answer: weakref.ref[Answer] | None = None
        self._transcript = Transcript(template, record, like)
        if system is not None and not record.turns and not len(record.tokens):
            self.system(system)

    @classmethod
    def of(cls, live: LiveModel, template: Template, record: Session, *rest: Any) -> ChatSession:
        """A conversation over an open record, which is closed again where it cannot be one."""
        try:
            return cls(live, template, record, *rest)
        except BaseException:
            record.close()
            raise

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
        """Whether the last message waits for an answer: the process that wrote it was killed."""
        turns = self._record.turns
        return any(turn.role != "system" for turn in turns) and turns[-1].role != "assistant"

    @property
    def pinned(self) -> bool:
        return self._record.pinned

    @property
    def priority(self) -> str:
        """`low`, `normal` or `high`."""
        return self._record.priority

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
        return self._memory.foretell(self._record.space, self.tokens)

    def is_of(self, live: LiveModel) -> bool:
        """Whether it is a conversation with this very model."""
        return self._live is live

    # Talking

    def system(self, text: str) -> None:
        """Set the system message. It is kept with the first user message.

        Raises:
            BadInput: the conversation has begun; or no text.
        """
        if any(turn.role != "system" for turn in self._record.turns) or (
            len(self.tokens) and not self._record.turns
        ):
            raise BadInput(f"session {self.name!r} has begun: its system message cannot change")
        self._transcript.messages = as_messages([{"role": "system", "content": text}])

    def send(self, text: str, max_new_tokens: int = 256, **generate_kwargs: Any) -> Answer:
        """Say something and stream the answer. The user's message is committed when this returns.

        Raises:
            BadInput: no text; the last message has no answer yet; or an argument that the session gives itself.
        """
        began, said = time.perf_counter(), as_messages([{"role": "user", "content": text}])
        self._check_streams(max_new_tokens, generate_kwargs)
        if self.interrupted:
            raise BadInput("the last message has no answer: resume_answer() or rollback(turns=1) first")
        diverged = self._ask([*self._spoken(), *said])
        return self._stream(began, max_new_tokens, generate_kwargs, diverged)

    def resume_answer(self, max_new_tokens: int = 256, **generate_kwargs: Any) -> Answer:
        """Generate the answer of an interrupted turn again, from the message that waits for it."""
        began = time.perf_counter()
        self._check_streams(max_new_tokens, generate_kwargs)
        if not self.interrupted:
            raise BadInput("no message waits for an answer: regenerate() makes another of the last one")
        self._spoken()
        return self._stream(began, max_new_tokens, generate_kwargs, None)

    def regenerate(self, max_new_tokens: int = 256, **generate_kwargs: Any) -> Answer:
        """Take back the last answer, if there is one, and generate it again from the message before it.

        Raises:
            BadInput: nothing was asked yet, or an argument that the session gives itself.
        """
        self._check_streams(max_new_tokens, generate_kwargs)
        before = self._record.turns[:-1]
        if not self.interrupted:
            if all(turn.role == "system" for turn in before):
                raise BadInput("nothing was asked yet")
            self.rollback(num_tokens=before[-1].end)
        return self.resume_answer(max_new_tokens, **generate_kwargs)

    def generate(self, prompt: Any, **generate_kwargs: Any) -> Generated:
        """Answer a prompt at once; what it shares with the session is not computed again.

        Args:
            prompt: ids, `[n]` or `[1, n]`; or all messages of a chat, the last of them not an assistant's.
                Where it leaves what the session holds, the session follows it: `explain` says where.
            generate_kwargs: as `generate` takes them. Of several beams or sequences the first is committed.
                Where the model's cache counts no tokens, or tokens are drafted, `generate` cannot be given a whole
                prompt behind a cache: with arguments that read it (`repetition_penalty`, `max_length`, ...)
                nothing is reused, and `explain` says so.

        Raises:
            BadInput: no prompt, or an argument that the session gives itself.
        """
        model = self._live.model
        self._check_ready(generate_kwargs)
        if num_sequences(generate_kwargs, model) > 1:
            check_rows(self._live, generate_kwargs, 1)
            row = self.begin_row(prompt, generate_kwargs)
            return generate_rows(self._live, [row], generate_kwargs)[0]
        tokens, diverged = self._begin(prompt)
        attached = self._attach(tokens, is_assisted(generate_kwargs, model), diverged, generate_kwargs)
        try:
            out = model.generate(**{**generate_kwargs, **attached})
        except BaseException:
            self._break_off()
            raise
        whole = self._memory.whole(out)
        return Generated(whole, self._keep(whole), torch.from_numpy(whole.astype(np.int64))[None])

    def begin_row(self, prompt: Any, given: Mapping[str, Any]) -> Asked:
        """A prompt of this session as one row of a batch: all but its last token computed, alone and kept.

        Nothing is computed where an argument in `given` reads the whole prompt, which `generate` takes here with
        an empty cache only.

        Raises:
            BadInput: no prompt.
        """
        self._check_ready({})
        tokens, diverged = self._begin(prompt)
        cache = self._attach(tokens, False, diverged, given)[self._live.cache_name]
        if not self._memory.is_anew:
            compute_rest(self._live, cache, tokens[:-1])
        return Asked(tokens, cache, self._keep)

    # For people who call generate themselves

    def attach(self, ids: object, assisted: bool = False) -> dict[str, Any]:
        """Arguments for one `generate` (or `forward`) call over `ids`: ids, mask and a cache of their prefix.

        Args:
            ids: the whole prompt, `[n]` or `[1, n]`.
            assisted: for `assistant_model` or `prompt_lookup_num_tokens`, which would run a whole prompt
                again over its own prefix: only the ids behind the cache are given, with a mask over all. What
                reads or counts a prompt (`repetition_penalty`, `no_repeat_ngram_size`, `max_length`,
                `stop_strings`, processors and criteria of your own, ...) then reads these ids alone. The same
                goes, without it, for a model whose cache counts no tokens, such as Mamba.

        Raises:
            BadInput: no ids, or more than one row.
        """
        self._check_ready({})
        tokens, diverged = self._begin(one_row(ids))
        return self._attach(tokens, assisted, diverged, None)

    def commit(self, out: object) -> None:
        """Keep what a `generate` call over attached ids gave: its sequences, as a tensor or a ModelOutput.

        Raises:
            BadInput: nothing was attached; more than one row, or fewer ids than were attached; an id that
                disagrees with what was forwarded (its index is named), or was never forwarded; foreign
                positions or a mask with holes.
        """
        self._keep(self._memory.whole(out))

    # Changing and keeping

    def rollback(
        self, turns: int | None = None, num_tokens: int | None = None, num_messages: int | None = None
    ) -> int:
        """Take back the last `turns` exchanges, or everything past `num_tokens`, or past `num_messages`.

        The system message stays, unless fewer tokens are asked for than it has.

        Returns:
            How many of the tokens left a next prompt has to compute again.

        Raises:
            BadInput: more than there is, or not exactly one of the three given.
        """
        self._check_ready({})
        if sum(given is not None for given in (turns, num_tokens, num_messages)) != 1:
            raise BadInput("rollback takes one of turns, num_tokens and num_messages")
        for given in (turns, num_tokens, num_messages):
            if given is not None and not is_whole(given):
                raise BadInput(f"rollback to {given!r}: give a whole number")
        end = int(num_tokens or 0)
        if turns is not None:
            end = self._end_before(turns)
        elif num_messages is not None:
            end = self._end_of(num_messages)
        if not 0 <= end <= len(self.tokens):
            raise BadInput(f"cannot roll {len(self.tokens)} tokens back to {end}")
        tokens, held = self.tokens[:end], [a for a in self._record.anchors if a <= end]
        kept = [turn for turn in self._record.turns if turn.end <= end]
        said = None if self._transcript.messages is None else self._transcript.messages[: len(kept)]
        meta = self._transcript.meta(self._record, tokens, kept, said)
        self._record.commit(tokens, kept, anchors=held, meta=meta)
        self._transcript.keep(said, meta)
        return end - self._memory.num_at_hand(self._record.space, self.tokens)

    def fork(self, name: str) -> ChatSession:
        """A new session with the same conversation; blocks are shared, nothing is copied.

        Raises:
            SessionError: a session of that name exists.
        """
        self._check_idle()
        return ChatSession.of(self._live, self._template, self._record.fork(name), None, self._transcript)

    def pin(self) -> None:
        """Hold the session's blocks against eviction, also after a restart."""
        self._record.pin()

    def unpin(self) -> None:
        self._record.unpin()

    def prioritise(self, priority: str) -> None:
        """Let the session's own blocks be evicted before (`"low"`) or after (`"high"`) those of others."""
        self._record.prioritise(priority)

    def expire(self, days: float | None) -> None:
        """Let the session go `days` from now; None: when the store's `expire_days` says so."""
        self._record.expire(days)

    def prefetch(self) -> Prefetch:
        """Bring the session's KV into its own memory in the background, while the user types.

        The next prompt goes on from there; `cancel` lets it be. Asked again while it runs, it is the same.
        """
        self._check_ready({})
        return self._memory.prefetch(self.tokens)

    def export(self, path: str | os.PathLike[str]) -> None:
        """Write the session to one file, which `ChatModel.import_` takes: its tokens and the blocks of its end.

        Raises:
            OSError: it could not be written; nothing is left of it, and an older file of that name stays.
        """
        self._check_ready({})
        self._record.export(path)

    def delete(self) -> None:
        """Remove the session and the blocks that no other session shares; nothing is left on return.

        An answer that streams ends, and what it said is not kept.

        Raises:
            SessionError: the session is closed, or its blocks are in use: nothing was changed.
        """
        self._record.check_open()
        answer = self._answer() if self._answer is not None else None
        if answer is not None:
            answer.abandon()
        self._running = self._answer = None
        self._break_off()
        self._record.delete()

    def close(self) -> None:
        """End a streaming answer, keep what it said, and let the session's memory go."""
        try:
            self._end_answer()
        finally:
            try:
                self._memory.close()
            finally:
                self._record.close()

    # Inside: a turn

    def _begin(self, prompt: Any) -> tuple[Tokens, Divergence | None]:
        """The ids of a prompt, and where they leave the session; messages are committed."""
        if is_messages(prompt):
            messages = as_messages(prompt)
            if messages[-1]["role"] == "assistant":
                raise BadInput("the last message is an assistant's: there is nothing to answer")
            diverged = self._ask(messages)
            return self._said_tokens(), diverged
        tokens = one_row(prompt).copy()  # the caller may write to it again
        if not len(tokens):
            raise BadInput("there is nothing to attach: no ids")
        return tokens, divergence(self._template, self.tokens, tokens, self._record.turns)

    def _ask(self, messages: list[Message]) -> Divergence | None:
        """Commit the prompt that `messages` make, going on from those that the session has."""
        turns = self._record.turns
        held = min(self._transcript.num_same(messages), len(turns))
        prompt = self._template.prompt(messages, self.tokens, [turn.end for turn in turns[:held]])
        diverged = divergence(
            self._template, self.tokens, prompt.ids, turns, self._transcript.messages or (), messages
        )
        self._commit_question(messages, prompt)
        return diverged

    def _stream(
        self,
        began: float,
        max_new_tokens: int,
        given: Mapping[str, Any],
        diverged: Divergence | None,
    ) -> Answer:
        given = {**given, "max_new_tokens": max_new_tokens}
        assisted = is_assisted(given, self._live.model)
        attached = self._attach(self._said_tokens(), assisted, diverged, given)
        arguments = {**given, **attached}
        criteria = list(given.get("stopping_criteria") or ())

        def call(streamer: Any, stop: Any) -> Any:
            ends = StoppingCriteriaList([*criteria, stop])
            return self._live.model.generate(**{**arguments, "streamer": streamer, "stopping_criteria": ends})

        def keep(generation: Generation) -> None:
            """Commit what was generated; after an error leave the turn interrupted."""
            self._explain, self._running, self._answer = self.last_explain, None, None
            if generation.error is not None:
                self._break_off()
                return
            self._keep(self._memory.whole(generation.output))

        generation = Generation(call)
        self._running = began, generation
        pieces = TextPieces(lambda ids: self._template.decode(np.array(ids, dtype=np.int32)))
        answer = Answer(generation, pieces, keep)
        self._answer = weakref.ref(answer)
        try:
            generation.start()
        except BaseException:  # also an interrupt, which comes where the thread is waited for
            answer.abandon()
            self._running = self._answer = None
            self._break_off()
            raise
        return answer

    def _break_off(self) -> None:
        """Keep nothing of a turn. Blocks of it that are stored go with the session when that is deleted."""
        computed, size = self._memory.computed, self._live.block_size
        self._memory.drop()
        if common_prefix(computed, self.tokens) // size < len(computed) // size:
            with contextlib.suppress(
                SessionError, Closed
            ):  # why the turn broke off may be in the way of this too
                self._record.leave(computed)

    def _keep(self, tokens: Tokens) -> str:
        """Commit the answer that ends in `tokens` to what was attached; returns its text."""
        prompt = self._memory.attached
        assert prompt is not None, "an answer ended that was never attached"
        text = self._template.decode(tokens[len(prompt) :])
        messages = self._transcript.messages
        turns = list(self._record.turns)
        is_asked = bool(messages and turns) and turns[-1].role != "assistant"
        if messages and is_asked and np.array_equal(prompt, self._said_tokens()):
            turns.append(Turn("assistant", len(tokens)))
            self._commit_answer(tokens, turns, [*messages, {"role": "assistant", "content": text}])
            return text
        shared = common_prefix(self.tokens, prompt)
        turns = [turn for turn in self._record.turns if turn.end <= shared]
        turns += [Turn("user", len(prompt)), Turn("assistant", len(tokens))]
        self._commit_answer(tokens, turns, None)
        return text

    def _commit_question(self, messages: list[Message], prompt: Prompt) -> None:
        """The user's message, before the first token of its answer."""
        ids, size, shared = prompt.ids, self._live.block_size, common_prefix(prompt.ids, self.tokens)
        turns = [Turn(m["role"], end) for m, end in zip(messages, prompt.ends, strict=True)]
        heads = self._heads()
        if shared < len(self.tokens) or not heads:
            heads = [anchors.system_head(turns[0].end if turns[0].role == "system" else 0, size)]
        held = anchors.at_question(turns, heads, self._record.anchors, shared, size)
        meta = {**self._transcript.meta(self._record, ids, turns, messages), "heads": heads}
        self._record.commit(ids, turns, anchors=held, meta=meta)
        self._transcript.keep(messages, meta)

    def _commit_answer(self, tokens: Tokens, turns: Sequence[Turn], messages: list[Message] | None) -> None:
        """Blocks first, then the session record that names them."""
        heads = anchors.with_branch(self._heads(), self._memory.branch)
        held = anchors.at_answer(turns, heads, len(tokens), self._live.block_size)
        stored = self._memory.store(held)
        meta = {**self._transcript.meta(self._record, tokens, turns, messages), "heads": heads}
        self._record.commit(tokens, turns, anchors=held, stored=stored, meta=meta)
        self._transcript.keep(messages, meta)
        self._memory.detach()

    # Inside: the cache

    def _attach(
        self, tokens: Tokens, assisted: bool, diverged: Divergence | None, given: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """Args: given: the arguments of the call that follows; None for one that the caller makes."""
        readers = [] if given is None else prompt_readers(given, self._live.model, len(tokens))
        num_new = int((given or {}).get("max_new_tokens") or 0)
        attached, explain = self._memory.attach(tokens, self._heads(), assisted, num_new, readers)
        self._explain = replace(explain, divergence=diverged)
        return attached

    def _follow_model(self) -> None:
        """If the model changed, its KV is another namespace's: go on there with the same tokens."""
        self._live.refresh()
        if self._record.space.digest != self._live.space.digest:
            self._memory.drop()
            self._record.follow(self._live.space)

    def _heads(self) -> list[int]:
        """The boundary at the end of the system message (0: none), then those where other chains left this one."""
        heads = map(int, self._record.meta.get("heads", ()))
        return [head for head in heads if head <= len(self.tokens)]

    # Inside: messages

    def _said_tokens(self) -> Tokens:
        """The tokens up to where the last message ends."""
        turns = self._record.turns
        return self.tokens[: turns[-1].end] if turns else self.tokens[:0]

    def _end_before(self, turns: int) -> int:
        """Where the last `turns` exchanges began."""
        asked = [i for i, turn in enumerate(self._record.turns) if turn.role == "user"]
        if not 0 < turns <= len(asked):
            raise BadInput(f"cannot take back {turns} of {len(asked)} exchanges")
        return self._end_of(asked[-turns])

    def _end_of(self, num_messages: int) -> int:
        """Where the first `num_messages` messages end."""
        if not 0 <= num_messages <= len(self._record.turns):
            raise BadInput(f"cannot keep {num_messages} of {len(self._record.turns)} messages")
        return self._record.turns[num_messages - 1].end if num_messages else 0

    def _spoken(self) -> list[Message]:
        if self._transcript.messages is None:
            why = self._transcript.why_none
            raise BadInput(f"session {self.name!r} cannot go on in messages: {why}; use attach and commit")
        return self._transcript.messages

    # Inside: what is allowed now

    def _check_idle(self) -> None:
        answer = self._answer() if self._answer is not None else None
        if answer is not None and not answer.has_ended:
            raise SessionError(f"session {self.name!r} is answering: read the answer to its end or close it")

    def _check_ready(self, arguments: Mapping[str, Any]) -> None:
        self._record.check_open()
        self._check_idle()
        check_arguments(arguments, self._live.model)
        self._follow_model()

    def _check_streams(self, max_new_tokens: int, arguments: Mapping[str, Any]) -> None:
        self._check_idle()
        check_one_sequence(arguments, self._live.model)
        self._check_ready({**arguments, "max_new_tokens": max_new_tokens})

    def _end_answer(self) -> None:
        answer = self._answer() if self._answer is not None else None
        if answer is not None:
            answer.close()
