"""Messages to token ids and back, so that what was generated stays what it was.

A template sees texts, a cache sees ids. Rendering a whole chat again would tokenise old answers anew, trim
them or rewrite them, and lose the prefix. So only what follows the last answer is rendered and tokenised; the
ids before it are kept, as long as the template still puts the same text before that answer.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
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

    ids: Tokens
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
        """The ids for `messages`, which end with a user's.

        Args:
            tokens: ids of all messages but the last, as they were forwarded and generated.
            ends: where each of those messages ends in `tokens`.
        """
        rest = self._rest(messages, tokens) if len(tokens) else None
        if rest is not None:
            ids = np.concatenate([tokens, self.encode(rest)])
            return Prompt(ids, (*ends, len(ids)))
        ids = self.encode(self.render(messages, answer_follows=True))
        found = [self._end(messages, i, ids) for i in range(len(messages) - 1)]
        return Prompt(ids, (*found, len(ids)))

    def system_end(self, messages: Sequence[Message], ids: Tokens) -> int:
        """Where in `ids` everything before the first user's text ends; 0 without a system message."""
        if len(messages) < 2 or messages[0]["role"] != "system":
            return 0
        text = self.render([messages[0], {**messages[1], "content": _MARK}], answer_follows=False)
        head, mark, _ = text.partition(_MARK)
        return common_prefix(self.encode(head), ids) if mark else 0

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
        return as_tokens(
            np.array(self.tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int64)
        )

    def decode(self, ids: Tokens, keep_special: bool = False) -> str:
        text: str = self.tokenizer.decode(
            ids.tolist(), skip_special_tokens=not keep_special, clean_up_tokenization_spaces=False
        )
        return text

    def _rest(self, messages: Sequence[Message], tokens: Tokens) -> str | None:
        """The text behind the last answer; None if the template rewrites that answer or what is before it."""
        if len(messages) < 2 or messages[-2]["role"] != "assistant":
            return None
        said = messages[-2]["content"]
        marked = [*messages[:-2], {"role": "assistant", "content": _MARK}, messages[-1]]
        head, mark, rest = self.render(marked, answer_follows=True).partition(_MARK)
        if not mark or head != self.render(messages[:-2], answer_follows=True):
            return None
        # Trimmed space around an answer is no rewriting; its ids are what the model really said.
        if self.render(messages, answer_follows=True) not in (head + said + rest, head + said.strip() + rest):
            return None
        # An answer that ended by itself already holds the token that the template writes after it.
        last = self.decode(tokens[-1:], keep_special=True)
        is_special = int(tokens[-1]) in self.tokenizer.all_special_ids
        return rest.removeprefix(last) if is_special else rest

    def _end(self, messages: Sequence[Message], index: int, ids: Tokens) -> int:
        """Where a message ends in `ids`."""
        role = messages[index]["role"]
        if role == "system":
            return self.system_end(messages, ids)
        text = self.render(messages[: index + 1], answer_follows=role == "user")
        return common_prefix(self.encode(text), ids)
