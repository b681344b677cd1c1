"""The text the demo chats about: our own, or a file of the user's, checked before anything heavy starts."""

from __future__ import annotations

import unicodedata
from pathlib import Path
from typing import Any

from ..errors import BadInput

MIN_TOKENS = 3000
"""Shorter prompts say little about what a cache saves."""


def own_document() -> str:
    return (Path(__file__).parent / "document.txt").read_text(encoding="utf-8")


def read_document(path: Path) -> str:
    """The text of `path`.

    Raises:
        BadInput: no readable file, or not UTF-8 text; names the file and the reason.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BadInput(f"document {path}: {error.strerror}") from None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInput(
            f"document {path}: not UTF-8 text (byte {data[error.start]:#04x} at {error.start})"
        ) from None
    odd = next(
        (i for i, c in enumerate(text) if unicodedata.category(c) == "Cc" and c not in "\t\n\r\f"), None
    )
    if odd is not None:
        raise BadInput(
            f"document {path}: not text (control character {ord(text[odd]):#04x} at position {odd})"
        )
    if not text.strip():
        raise BadInput(f"document {path}: empty")
    return text


def check_num_tokens(name: str, text: str, tokenizer: Any, num_positions: int | None, num_spare: int) -> int:
    """How many tokens the document has; `num_spare` of the model's positions are kept for the chat.

    Raises:
        BadInput: too short to show anything, or too long for the model.
    """
    num_tokens = len(tokenizer(text)["input_ids"])
    if num_tokens < MIN_TOKENS:
        raise BadInput(
            f"document {name}: too short, {num_tokens} tokens; the demo needs at least {MIN_TOKENS}"
        )
    if num_positions is not None and num_tokens + num_spare > num_positions:
        raise BadInput(
            f"document {name}: too long, {num_tokens} tokens; the model has {num_positions} positions"
        )
    return num_tokens
