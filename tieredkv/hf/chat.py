"""A model, its tokenizer and an open cache: where conversations come from."""

from __future__ import annotations

from typing import Any

from ..block.identity import Identity
from ..block.layout import BlockLayout
from ..cache import TieredCache
from .live_model import LiveModel
from .session import ChatSession
from .template import Template


class ChatModel:
    """Conversations of one live `transformers` causal language model.

    Args:
        kv: the open cache.
        model: in eval mode; it is used as it is, and may be used by others.
        tokenizer: of that model.
        template: a Jinja chat template; None takes the tokenizer's, else a plain built-in one.
        salt: the tenant's: what is stored under one salt is never found under another.

    Raises:
        Unsupported: a model whose KV cannot be cut into blocks, with the reason why.
        BadConfig: a tier's budget is smaller than one block of this model.
    """

    def __init__(
        self, kv: TieredCache, model: Any, tokenizer: Any, template: str | None = None, salt: str = ""
    ) -> None:
        self._live = LiveModel(kv, model, salt)
        self._template = Template(tokenizer, template)

    @property
    def identity(self) -> Identity:
        return self._live.facts.identity

    @property
    def layout(self) -> BlockLayout:
        return self._live.facts.layout

    @property
    def template_source(self) -> str:
        """Whose template is used: `caller`, `tokenizer` or `built-in`."""
        return self._template.source

    def session(self, name: str, system: str | None = None) -> ChatSession:
        """Open a conversation, or take it up where it stands.

        Args:
            system: its system message, if it is new.

        Raises:
            SessionError: it is open already in this process.
        """
        self._live.refresh()
        return ChatSession(self._live, self._template, self._live.kv.session(name, self._live.space), system)

    def rehash(self) -> None:
        """Hash every weight again: needed after writing a parameter through `.data`."""
        self._live.rehash()
