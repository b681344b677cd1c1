"""The texts of a session's messages, kept in its record as places in its ids: small, and written once."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from ..block.hashing import common_prefix
from ..errors import BadInput
from ..sessions import Session
from ..table.catalog import SessionRow, Turn
from .capture import Tokens
from .template import Message, Template

log = logging.getLogger("tieredkv.hf")

Place = list[int] | str
"""`[start, end, at, length]`: `length` characters from `at` on in the decoded `ids[start:end]`; else the text."""

_KEYS = ("chat", "checks")
_MESSAGE_KEYS = ("role", "content")


class Transcript:
    """The messages of one session.

    Args:
        like: the transcript of the session that this one was forked from: nothing is read again.

    Attributes:
        messages: the conversation, with a system message that may not be recorded yet; None for a session
            that holds ids without messages.
        why_none: why it has none.
    """

    def __init__(self, template: Template, record: Session, like: Transcript | None = None) -> None:
        self._template = template
        self.why_none = "it holds ids without messages"
        self._places: list[Place] = [] if like is None else list(like._places)
        self.messages: list[Message] | None = self._read(record) if like is None else like.messages

    def num_same(self, messages: Sequence[Message]) -> int:
        """How many of the first of these are the messages held."""
        pairs = zip(self.messages or (), messages, strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    def meta(
        self, record: Session, tokens: Tokens, turns: Sequence[Turn], messages: Sequence[Message] | None
    ) -> dict[str, Any]:
        """What the record's meta becomes with these messages, which end in `tokens` as `turns` says.

        `keep` them once that is committed.
        """
        meta = {key: value for key, value in record.meta.items() if key not in _KEYS}
        if messages is None:
            return meta
        shared = common_prefix(tokens, record.tokens)
        old = zip(record.turns, self.messages or (), turns, messages, strict=False)
        num_same = sum(1 for _ in takewhile(lambda row: row[:2] == row[2:] and row[0].end <= shared, old))
        places = self._places[:num_same]
        for i in range(len(places), len(messages)):
            # Some templates write the system message into the first user's: both may lie anywhere up to its end.
            start = turns[i - 1].end if i > 1 or (i and turns[0].role != "system") else 0
            places.append(self._locate(messages[i]["content"], tokens, start, turns[i].end))
        return {**meta, "chat": places, "checks": checks_of(messages)}

    def keep(self, messages: list[Message] | None, meta: Mapping[str, Any]) -> None:
        """These are committed, with the `meta` that was made of them."""
        self._places = list(meta.get("chat", ()))
        self.messages = messages

    def _read(self, record: Session) -> list[Message] | None:
        """What `meta` wrote; None if it is not there, or another tokenizer reads other text from the ids."""
        places = record.meta.get("chat")
        if places is None:
            return None if len(record.tokens) else []
        texts = [self._text_at(place, record.tokens) for place in places]
        messages = [{"role": t.role, "content": text} for t, text in zip(record.turns, texts, strict=False)]
        if checks_of(messages) != record.meta.get("checks"):
            self.why_none = "the tokenizer changed: this one reads other messages from its ids"
            log.warning("session %r: %s", record.name, self.why_none)
            return None
        self._places = list(places)
        return messages

    def _locate(self, content: str, tokens: Tokens, start: int, end: int) -> Place:
        at = self._template.decode(tokens[start:end]).find(content)
        return [start, end, at, len(content)] if at >= 0 else content

    def _text_at(self, place: Place, tokens: Tokens) -> str:
        if isinstance(place, str):
            return place
        start, end, at, length = place
        return self._template.decode(tokens[start:end])[at : at + length]


def as_messages(prompt: Sequence[Any]) -> list[Message]:
    """A prompt's messages, each a role and a text.

    Raises:
        BadInput: naming the first message that is anything else, for what is left out would be silently unsaid.
    """
    for number, message in enumerate(prompt):
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            raise BadInput(f"message {number} has no role and content: {_kinds(message)}")
        more = sorted(
            str(key) for key, value in message.items() if key not in _MESSAGE_KEYS and value is not None
        )
        if more:
            raise BadInput(f"message {number}: a session keeps role and content, not {', '.join(more)}")
        for key in _MESSAGE_KEYS:
            if not isinstance(message[key], str):
                raise BadInput(f"message {number}: its {key} is a {type(message[key]).__name__}, not text")
    return [{key: message[key] for key in _MESSAGE_KEYS} for message in prompt]


def _kinds(message: Any) -> str:
    return (
        f"it has {', '.join(map(str, message))}" if isinstance(message, Mapping) else type(message).__name__
    )


def num_shared_tokens(row: SessionRow, checks: Sequence[str]) -> int:
    """How many tokens a session has of the first messages that it shares with those of `checks`."""
    pairs = zip(row.meta.get("checks", ()), checks, strict=False)
    num_messages = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return row.turns[num_messages - 1].end if num_messages else 0


def checks_of(messages: Sequence[Message]) -> list[str]:
    """For each of `messages` a checksum over it and those before: tells whether what is read is what was written."""
    digest, checks = hashlib.sha256(), list[str]()
    for message in messages:
        digest.update(f"\0{message['role']}\0{message['content']}".encode("utf-8", "surrogatepass"))
        checks.append(digest.hexdigest()[:16])
    return checks
