"""Messages to token ids and back, so that what was generated stays what it was.

A template sees texts, a cache sees ids. Rendering a whole chat again would tokenise old answers anew, trim
them or rewrite them, and lose the prefix. So only what follows the last answer is rendered and tokenised; the
ids before it are kept, as long as the template still puts the same text before that answer.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..block.hashing import as_tokens, common_prefix
from ..errors import BadInput
from .capture import Tokens

log = logging.getLogger("tieredkv.hf")

Message = dict[str, str]
"""`{"role": "system" | "user" | "assistant", "content": text}`."""

PLAIN_TEMPLATE = (
    "{{ bos_token or '' }}{% for message in messages %}{{ message['role'] | capitalize }}:"
    "{{ '' if message['role'] == 'assistant' else ' ' }}{{ message['content'] }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
"""For tokenizers that bring no chat template. An answer brings its own leading space, as it was generated."""

_MARK = "tieredkv-answer-5b1e0c"
"""Stands for a message's content while a template is rendered; no template and no user writes it."""


@dataclass(frozen=True)
class Prompt:
    """The ids of a chat up to where the next answer begins, and where each of its messages ends."""

    ids: Tokens = field(repr=False)
    ends: tuple[int, ...]


class Template:
    """A tokenizer with its chat template.

    Attributes:
        source: which template is used: the caller's, the tokenizer's or the built-in one.
    """

    def __init__(self, tokenizer: Any, template: str | None = None) -> None:
        self.tokenizer = tokenizer
        own = getattr(tokenizer, "chat_template", None)
        self._jinja = template or (None if own else PLAIN_TEMPLATE)
        self.source = "caller" if template else "tokenizer" if own else "built-in"
        if self.source == "built-in":
            log.info("the tokenizer brings no chat template: the plain built-in one is used")

    def prompt(self, messages: Sequence[Message], tokens: Tokens, ends: Sequence[int]) -> Prompt:
        """The ids for `messages`, which end where an answer follows.

        Args:
            tokens: the ids of the first messages, as they were forwarded and generated.
            ends: where each of those messages ends in `tokens`.
        """
        if ends and len(ends) == len(messages):
            return Prompt(tokens[: ends[-1]], tuple(ends))
        full = self.render(messages, answer_follows=True)
        held, at = self._kept(messages, full, tokens, ends)
        tokens, ends = tokens[: ends[held - 1] if held else 0], ends[:held]
        marks = [self._end(messages, i, full) - at for i in range(held, len(messages) - 1)]
        ids, found = self._encode(full[at:], marks)
        ids = np.concatenate([tokens, ids])
        return Prompt(ids, (*ends, *(len(tokens) + end for end in found), len(ids)))

    def render(self, messages: Sequence[Message], answer_follows: bool) -> str:
        """The chat as text; `answer_follows` adds what comes before an answer.

        Raises:
            BadInput: the template refuses these messages.
        """
        try:
            text: str = self.tokenizer.apply_chat_template(
                list(messages),
                chat_template=self._jinja,
                tokenize=False,
                add_generation_prompt=answer_follows,
            )
        except Exception as error:  # whatever the template's author lets it raise
            raise BadInput(f"the chat template refuses these messages: {error}") from error
        return text

    def encode(self, text: str) -> Tokens:
        """Ids of `text`; special tokens written in it count as such, none are added."""
        return self._encode(text, ())[0]

    def _encode(self, text: str, marks: Sequence[int]) -> tuple[Tokens, list[int]]:
        """Ids of `text`, and how many of them end at or before each of `marks` (characters)."""
        fast = bool(marks) and bool(getattr(self.tokenizer, "is_fast", False))
        found = self.tokenizer(
            text, add_special_tokens=False, **({"return_offsets_mapping": True} if fast else {})
        )
        ids = as_tokens(np.array(found["input_ids"], dtype=np.int64))
        if not fast:
            return ids, [common_prefix(ids, self.encode(text[:mark])) for mark in marks]
        ends = np.maximum.accumulate([end for _, end in found["offset_mapping"]] or [0])
        return ids, np.searchsorted(ends, marks, side="right").clip(max=len(ids)).tolist()

    def decode(self, ids: Tokens, keep_special: bool = False) -> str:
        text: str = self.tokenizer.decode(
            ids.tolist(), skip_special_tokens=not keep_special, clean_up_tokenization_spaces=False
        )
        return text

    def _kept(
        self, messages: Sequence[Message], full: str, tokens: Tokens, ends: Sequence[int]
    ) -> tuple[int, int]:
        """How many of the first messages keep their `tokens`, and where in the text what follows them begins.

        Where the template writes the last of them otherwise than it was, those before it are tried.
        """
        for held in range(len(ends), max(0, len(ends) - 2), -1):
            at = self._text_end(messages, full, held) if ends[held - 1] else None
            if at is not None:
                # An answer that ended by itself already holds the token that the template writes after it.
                last = tokens[ends[held - 1] - 1 : ends[held - 1]]
                text = self.decode(last, keep_special=True)
                is_written = int(last[0]) in self.tokenizer.all_special_ids and full.startswith(text, at)
                return held, at + len(text) if is_written else at
        return 0, 0

    def _text_end(self, messages: Sequence[Message], full: str, held: int) -> int | None:
        """Where in the text the first `held` messages end; None if their ids do not stand for it any more.

        So after a system message, whose last ids may merge with what follows.
        """
        role = messages[held - 1]["role"]
        if role == "user":
            head = self.render(messages[:held], answer_follows=True)
            return len(head) if full.startswith(head) else None
        if role != "assistant":
            return None
        said, before, after = messages[held - 1]["content"], messages[: held - 1], messages[held:]
        marked = self.render([*before, {"role": "assistant", "content": _MARK}, *after], answer_follows=True)
        head, mark, rest = marked.partition(_MARK)
        if not mark or head != self.render(before, answer_follows=True):
            return None
        # Trimmed space around an answer is no rewriting; its ids are what the model really said.
        is_same = full in (head + said + rest, head + said.strip() + rest)
        return len(full) - len(rest) if is_same else None

    def _end(self, messages: Sequence[Message], index: int, full: str) -> int:
        """Where in the text of a chat one of its messages ends; a system message, where the next one's begins."""
        role = messages[index]["role"]
        if role == "system":
            marked = [*messages[: index + 1], {**messages[index + 1], "content": _MARK}]
            text = self.render(marked, answer_follows=False).partition(_MARK)[0]
        else:
            text = self.render(messages[: index + 1], answer_follows=role == "user")
        if full.startswith(text):
            return len(text)
        return next(at for at, (one, other) in enumerate(zip(text, full, strict=False)) if one != other)
