"""An answer as it is generated: `generate` in a thread of its own, its text an iterator."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers.generation.stopping_criteria import StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from ..errors import Forked
from .exit import end_at_exit, has_exit_begun

_REPLACEMENT = "\ufffd"
_MOST_HELD = 8
"""Ids that wait for the rest of a character: no character has as many, so the text is broken by itself."""


class Generation(BaseStreamer):  # type: ignore[misc]
    """One call of `generate`, running from `start` on.

    Args:
        call: calls `generate` with the streamer and stopping criterion that it is given.

    Attributes:
        first_token_at: `time.perf_counter()` when the first token came, or None.
        output, error: what the call returned or raised, once it ended.
    """

    def __init__(self, call: Callable[[BaseStreamer, StoppingCriteria], Any]) -> None:
        self.first_token_at: float | None = None
        self.output: Any = None
        self.error: BaseException | None = None
        self._ids: queue.SimpleQueue[list[int] | None] = queue.SimpleQueue()
        self._prompt_seen = False
        self._stop = _Stop()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, args=(call,), name="tieredkv-generate", daemon=True)
        self._ended = threading.Event()
        self._ended.set()

    def start(self) -> None:
        """Whoever is interrupted in here owns a call that may be running: `stop` and `join` end it."""
        self._ended.clear()
        try:
            self._thread.start()
        except RuntimeError:  # no thread could be had
            self._ended.set()
            raise

    def put(self, value: torch.Tensor) -> None:
        """Called by `generate`: first with the prompt, then with each token or accepted run of tokens."""
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        if self.first_token_at is None:
            self.first_token_at = time.perf_counter()
        self._ids.put(value.flatten().tolist())

    def end(self) -> None:
        """Called by `generate`; the end is told when the call has returned."""

    @property
    def is_here(self) -> bool:
        """Not so in a forked child, where its thread is not."""
        return os.getpid() == self._pid

    def next_ids(self) -> list[int] | None:
        """The next ids, waiting for them; None at the end.

        Raises:
            Forked: it runs in the parent of this process.
        """
        if not self.is_here:
            raise Forked(f"this answer is generated in process {self._pid}")
        return self._ids.get()

    def stop(self) -> None:
        """Ask `generate` to end after the token it is at."""
        self._stop.asked.set()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the call to end; False if it has not, within `timeout_s`."""
        return self._ended.wait(timeout_s)

    def _run(self, call: Callable[[BaseStreamer, StoppingCriteria], Any]) -> None:
        try:
            self.output = call(self, self._stop)
        except BaseException as error:  # it belongs to whoever reads the answer
            self.error = error
        finally:
            self._ended.set()
            self._ids.put(None)


class _Stop(StoppingCriteria):  # type: ignore[misc]
    def __init__(self) -> None:
        self.asked = threading.Event()

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full(
            (input_ids.shape[0],), self.asked.is_set(), dtype=torch.bool, device=input_ids.device
        )


class TextPieces:
    """Ids to text piece by piece: a piece is given out once no later token can change it."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._start = 0
        self._given = 0

    def push(self, ids: list[int]) -> str:
        """The text that `ids` complete; empty while a character is only partly there."""
        self._ids += ids
        before = self._decode(self._ids[self._start : self._given])
        now = self._decode(self._ids[self._start :])
        is_partial = now.endswith(_REPLACEMENT) and len(self._ids) - self._given < _MOST_HELD
        if len(now) <= len(before) or is_partial:
            return ""
        # The last ids given out stay as context: some tokenizers join or space a word by the one before it.
        self._start, self._given = self._given, len(self._ids)
        return now[len(before) :]

    def finish(self) -> str:
        """What is left, however incomplete."""
        before = self._decode(self._ids[self._start : self._given])
        return self._decode(self._ids[self._start :])[len(before) :]


class Answer(Iterator[str]):
    """The pieces of an answer. Reaching the end, `close`, letting go of it, or the end of the process ends the turn.

    Args:
        on_end: called once, when `generate` has ended, in the thread that reads or closes.
    """

    def __init__(
        self, generation: Generation, pieces: TextPieces, on_end: Callable[[Generation], None]
    ) -> None:
        self._generation = generation
        self._pieces = pieces
        self._on_end: Callable[[Generation], None] | None = on_end
        self._ending = threading.Lock()
        end_at_exit(self)

    def __next__(self) -> str:
        while self._on_end is not None:
            ids = self._generation.next_ids()
            if ids is not None:
                piece = self._pieces.push(ids)
            else:
                self._finish()
                piece = self._pieces.finish()
            if piece:
                return piece
        raise StopIteration

    @property
    def has_ended(self) -> bool:
        """Whether its turn is over: nothing more will be kept of it."""
        return self._on_end is None

    def stop(self) -> None:
        """Stop generating, after the token that it is at."""
        self._generation.stop()

    def wait(self, timeout_s: float) -> bool:
        """Wait until nothing is generated any more; False if it still is after `timeout_s`."""
        return self._generation.join(timeout_s)

    def close(self) -> None:
        """Stop generating, keep what was generated, and end the turn. Harmless when it has ended."""
        if self._on_end is not None and self._generation.is_here:
            self._generation.stop()
            self._finish()

    def abandon(self) -> None:
        """Stop generating, and keep nothing: the turn stays without an answer. Harmless when it has ended."""
        with self._ending:
            on_end, self._on_end = self._on_end, None
        if on_end is not None and self._generation.is_here:
            self._generation.stop()
            self._generation.join()

    def __del__(self) -> None:
        if not has_exit_begun():
            self.close()

    def _finish(self) -> None:
        """The first to come ends the turn, the reader or the end of the process; who comes second waits for that."""
        self._generation.join()
        with self._ending:
            on_end = self._on_end
            try:
                if on_end is not None:
                    on_end(self._generation)
            finally:
                self._on_end = None
        if on_end is not None and self._generation.error is not None:
            raise self._generation.error
