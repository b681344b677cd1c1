"""A model, its tokenizer and an open cache: where conversations come from."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from typing import Any

from ..block.hashing import common_prefix
from ..block.identity import Identity
from ..block.layout import BlockLayout
from ..cache import TieredCache
from ..errors import BadInput, SessionError
from ..table.catalog import SessionRow
from .arguments import check_arguments, is_messages, one_row
from .capture import Tokens
from .live_model import LiveModel
from .rows import Generated, check_rows, generate_rows
from .session import ChatSession
from .template import Template
from .transcript import as_messages, checks_of, num_shared_tokens


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
            SessionError: it is open already in this process; or of another salt.
        """
        self._live.refresh()
        return self._open(name, system=system)

    def resume(self, prompt: Any, name: str | None = None) -> ChatSession:
        """The conversation that `prompt` goes on from, for callers that bring a whole prompt and no name.

        That is the session whose messages, or ids, are all at the prompt's beginning: the longest of them. If there
        is none, or it is open, a new session begins with what `prompt` shares with the one that shares most.

        Args:
            prompt: ids, `[n]` or `[1, n]`, or messages; to be given to `generate` next.
            name: of a new session; one is made up if None.

        Raises:
            BadInput: a message without role or text.
            SessionError: a session of that name exists.
        """
        self._live.refresh()
        kv = self._live.kv
        row, num_shared = self._most_alike(prompt)
        if row is not None and 0 < num_shared == len(row.tokens) and not kv.is_session_open(row.name):
            return self._open(row.name)
        if name is not None and kv.has_session(name):
            raise SessionError(f"a session named {name!r} exists: session() opens it")
        is_worth_it = num_shared >= self._live.block_size
        session = self._open(name or f"chat-{secrets.token_hex(4)}", like=row if is_worth_it else None)
        if num_shared < len(session.tokens):
            session.rollback(num_tokens=num_shared)
        return session

    def generate(self, rows: Sequence[tuple[ChatSession, Any]], **generate_kwargs: Any) -> list[Generated]:
        """Answer prompts of several sessions in one `generate` call, whatever their lengths.

        Args:
            rows: sessions of this model, each with its prompt as for `ChatSession.generate`.

        Raises:
            BadInput: no rows, a session twice, a session of another model; as `ChatSession.generate`.
        """
        if not rows:
            raise BadInput("there are no rows to generate")
        names = [session.name for session, _ in rows]
        for number, (session, _) in enumerate(rows):
            if not session.is_of(self._live):
                raise BadInput(
                    f"row {number}: session {session.name!r} belongs to another ChatModel than this"
                )
            if session.name in names[:number]:
                raise BadInput(f"row {number}: session {session.name!r} is in the batch already")
        check_arguments(generate_kwargs, self._live.model)
        check_rows(self._live, generate_kwargs, len(rows))
        asked = [session.begin_row(prompt, generate_kwargs) for session, prompt in rows]
        return generate_rows(self._live, asked, generate_kwargs)

    def import_(self, path: str | os.PathLike[str], name: str | None = None) -> ChatSession:
        """The session that `ChatSession.export` wrote to `path`, under its own name or another.

        Raises:
            BadInput: no such file, cut or damaged; or of another identity: the field that differs is named.
                Nothing was changed.
            SessionError: a session of that name exists.
        """
        self._live.refresh()
        record = self._live.kv.import_session(path, self._live.space, name)
        return ChatSession.of(self._live, self._template, record)

    def rehash(self) -> None:
        """Hash every weight again: needed after writing a parameter through `.data`."""
        self._live.rehash()

    def _open(self, name: str, system: str | None = None, like: SessionRow | None = None) -> ChatSession:
        record = self._live.kv.session(name, self._live.space, like)
        return ChatSession.of(self._live, self._template, record, system)

    def _most_alike(self, prompt: Any) -> tuple[SessionRow | None, int]:
        """The session that shares most with a prompt, and how many of its tokens are shared."""
        rows = [r for r in self._live.kv.sessions() if r.namespace == self._live.space.row.number]
        if is_messages(prompt):
            # What was generated need not be what its text is cut into: messages are compared as such, too.
            messages = as_messages(prompt)
            checks = checks_of(messages)
            ids: Tokens = self._template.prompt(messages, self._template.encode(""), ()).ids
        else:
            checks, ids = [], one_row(prompt)
        shared = [max(common_prefix(row.tokens, ids), num_shared_tokens(row, checks)) for row in rows]
        best = max(range(len(rows)), key=shared.__getitem__, default=None)
        return (None, 0) if best is None else (rows[best], shared[best])
