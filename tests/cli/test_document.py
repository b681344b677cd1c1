"""Which files the demo chats about, and why it refuses others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tieredkv.cli.document import MIN_TOKENS, check_num_tokens, own_document, read_document
from tieredkv.errors import BadInput


def words(text: str) -> dict[str, list[str]]:
    """A tokenizer of one token a word."""
    return {"input_ids": text.split()}


def test_our_own_is_long_enough() -> None:
    assert len(own_document().split()) > 2300


def test_reads_utf8_with_or_without_mark(tmp_path: Path) -> None:
    for name, encoding in (("plain", "utf-8"), ("marked", "utf-8-sig")):
        path = tmp_path / name
        path.write_text("Grüße\taus\r\nSkarrel\f", encoding=encoding, newline="")
        assert read_document(path) == "Grüße\taus\r\nSkarrel\f"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty"),
        (b" \n\t ", "empty"),
        (b"\xff\xfe\x00", "not UTF-8 text (byte 0xff at 0)"),
        (b"text and \xe9", "not UTF-8 text (byte 0xe9 at 9)"),
        (b"text\x00more", "not text (control character 0x00 at position 4)"),
        (b"\x1b[31mred", "not text (control character 0x1b at position 0)"),
    ],
)
def test_refuses_what_is_no_text(tmp_path: Path, data: bytes, reason: str) -> None:
    path = tmp_path / "document"
    path.write_bytes(data)
    with pytest.raises(BadInput) as caught:
        read_document(path)
    assert str(path) in str(caught.value) and reason in str(caught.value)


def test_refuses_what_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="No such file"):
        read_document(tmp_path / "missing")
    with pytest.raises(BadInput, match="Is a directory"):
        read_document(tmp_path)


def test_counts_tokens() -> None:
    text = "word " * MIN_TOKENS
    assert check_num_tokens("d", text, words, MIN_TOKENS + 10, 10) == MIN_TOKENS
    assert check_num_tokens("d", text, words, None, 10) == MIN_TOKENS
    with pytest.raises(BadInput, match="document d: too short, 2999 tokens"):
        check_num_tokens("d", "word " * 2999, words, None, 10)
    with pytest.raises(BadInput, match="document d: too long, 3000 tokens"):
        check_num_tokens("d", text, words, MIN_TOKENS + 9, 10)
