"""What is asked in the demo, in which order, and in how little memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..block.layout import BlockLayout
from ..config import Config
from ..units import KiB, MiB, align_up

_OWN_QUESTIONS = {
    "anna": (
        "Who is the keeper of the lighthouse?",
        "How many steps does the tower have?",
        "When may visitors climb it?",
    ),
    "bruno": (
        "What is the ferry called?",
        "Who is the captain of the ferry?",
        "What travels free on the ferry?",
    ),
    "clara": (
        "What is the town's reservoir called?",
        "Who runs the bakery?",
        "What is the bakery known for?",
    ),
}
_ANY_QUESTIONS = {
    "anna": ("What is the text about?", "Which name comes first in it?", "How does it begin?"),
    "bruno": ("Which numbers does the text give?", "What do they count?", "Which is the largest?"),
    "clara": ("How does the text end?", "Who is in it?", "What would be a good title?"),
}

PLAIN_TEMPLATE = (
    "{{ bos_token or '' }}{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ message['content'] }}\n\n"
    "{% elif message['role'] == 'user' %}Question: {{ message['content'] }}\n"
    "{% else %}Answer:{{ message['content'] }}\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}Answer:{% endif %}"
)
"""For models that were not trained to chat: questions and answers, each on a line."""


@dataclass(frozen=True)
class Turn:
    """One question of one session; `index` counts the session's turns from 0."""

    session: str
    index: int
    question: str


@dataclass(frozen=True)
class Script:
    """Sessions that share `document` as their system message and take turns, one question each."""

    document_name: str
    document: str
    questions: Mapping[str, tuple[str, ...]]
    num_answer_tokens: int = 32

    @classmethod
    def about(cls, document: str, document_name: str | None) -> Script:
        """The script for our own document (`document_name` is None), or for a file of the user's."""
        questions = _OWN_QUESTIONS if document_name is None else _ANY_QUESTIONS
        return cls(document_name or "our own", document, questions)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Script:
        questions = {name: tuple(asked) for name, asked in values["questions"].items()}
        return cls(**{**values, "questions": questions})

    def turns(self) -> Iterator[Turn]:
        """Round by round, so that every session has to make room for the others."""
        for index in range(max(map(len, self.questions.values()))):
            for session, questions in self.questions.items():
                if index < len(questions):
                    yield Turn(session, index, questions[index])

    @property
    def num_spare_tokens(self) -> int:
        """Positions that questions and answers may take beyond the document, at most."""
        longest = max(map(len, self.questions.values()))
        return longest * (self.num_answer_tokens + 64)


def small_config(layout: BlockLayout, num_tokens: int) -> Config:
    """Budgets below what the chat needs, so that the policy has to choose.

    Device and host hold about two fifths each of what restoring the document alone takes: its full parts and
    the window parts of one anchor. The disk holds that sixteen times over, beside the log's own needs.
    """
    num_blocks = -(-num_tokens // layout.block_size)
    parts = zip(layout.groups, layout.part_nbytes, layout.num_window_blocks, strict=True)
    nbytes = sum(
        part * (num_blocks if group.kind == "full" else min(window, num_blocks))
        for group, part, window in parts
    )
    unit = 4 * MiB if nbytes > 16 * MiB else 64 * KiB
    memory = max(align_up(nbytes * 2 // 5, unit), 2 * layout.block_nbytes)
    return Config(
        device_nbytes=memory,
        host_nbytes=memory,
        disk_nbytes=align_up(128 * MiB + 16 * nbytes, 64 * MiB),
        block_size=layout.block_size,
        policy="arc",
        device="cpu",
    )
