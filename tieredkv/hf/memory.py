"""A session's own KV between its turns: the cache that `generate` goes on from, and what is on its way into it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ..block.hashing import common_prefix
from ..errors import BadInput
from ..namespace import Namespace
from ..outcomes import Lookup, Reason, Stored
from . import anchors
from .arguments import one_row
from .capture import CapturingCache, Tokens
from .explain import Explain
from .gate import Choice
from .live_model import LiveModel
from .prefetch import Prefetch
from .prefill import prefill
from .restore import Restored, restore


class SessionMemory:
    """One cache at a time, of a prefix of the session or of what it was last asked.

    Attributes:
        attached: the prompt that the cache was attached for, until its answer is committed.
        branch: the boundary at which another chain left this prompt and no window parts are; 0 without one.
        is_anew: whether the prompt attached last is to be computed by `generate` from its first token.
    """

    def __init__(self, live: LiveModel) -> None:
        self._live = live
        self._cache: CapturingCache | None = None
        self._prefetch: Prefetch | None = None
        self._num_skipped = 0
        self.attached: Tokens | None = None
        self.branch = 0
        self.is_anew = False

    def attach(
        self,
        tokens: Tokens,
        heads: Sequence[int],
        assisted: bool = False,
        num_new: int = 0,
        readers: Sequence[str] = (),
    ) -> tuple[dict[str, Any], Explain]:
        """Arguments for one `generate` call over `tokens`, and what they cost.

        Args:
            heads: boundaries to keep when the call crosses them.
            assisted: give only the ids behind the cache, with a mask over all.
            num_new: how many tokens the call may generate, if that is known.
            readers: arguments of the call that read the whole prompt: where only the ids behind the cache could
                be given, the cache is empty, so that these are all.
        """
        began = time.perf_counter()
        self.attached = None
        self.is_anew = bool(readers) and (assisted or not self._counts_tokens())
        cache, explain = self._anew(tokens, readers) if self.is_anew else self._cache_for(tokens, num_new)
        explain = replace(explain, restore_s=time.perf_counter() - began)
        cache.forget_wanted()
        cache.want([anchors.boundary(len(tokens), self._live.block_size), self.branch, *heads])
        self._cache, self.attached = cache, tokens
        cache.expect(tokens, num_new)
        if not self.is_anew:
            prefill(self._live.model, cache, tokens)
        self._num_skipped = cache.num_tokens if assisted or not cache.counts_tokens else 0
        cache.new_ids_only = self._num_skipped > 0
        device = self._live.device
        arguments = {
            "input_ids": torch.tensor(tokens[self._num_skipped :], dtype=torch.long, device=device)[None],
            "attention_mask": torch.ones((1, len(tokens)), dtype=torch.long, device=device),
            self._live.cache_name: cache,
            "use_cache": True,  # whatever the model's config says
        }
        return arguments, explain

    def whole(self, out: Any) -> Tokens:
        """The ids of a `generate` call over what was attached, prompt included.

        Raises:
            BadInput: nothing was attached; not one row; not what was forwarded.
        """
        cache, prompt = self._cache, self.attached
        if cache is None or prompt is None:
            raise BadInput("commit keeps what was generated over attached ids: attach first")
        tokens = np.concatenate([prompt[: self._num_skipped], one_row(getattr(out, "sequences", out))])
        if len(tokens) < len(prompt):
            raise BadInput(f"{len(tokens)} ids are fewer than the {len(prompt)} that were attached")
        cache.agree(tokens)
        return tokens

    def store(self, boundaries: Sequence[int]) -> list[Stored]:
        """Store what was computed, anchored at `boundaries`; returns all that was stored since it was asked."""
        assert self._cache is not None, "a turn is committed with its cache"
        self._live.gate.note_forwards(self._cache.forwards.take())
        self._cache.store_blocks(boundaries, again=True)
        return self._cache.take_stored()

    def detach(self) -> None:
        """The answer is committed: nothing more is wanted of the cache than that the next prompt goes on from it."""
        self.attached = None
        if self._cache is not None:
            self._cache.forget_wanted()

    def prefetch(self, tokens: Tokens) -> Prefetch:
        """Bring the KV of `tokens` here in the background."""
        if self._prefetch is None or self._prefetch.cancelled:
            self._prefetch = Prefetch(self._live.new_cache(), tokens, self._cache)
        return self._prefetch

    def num_at_hand(self, space: Namespace, tokens: Tokens) -> int:
        """How many of `tokens` a prompt that goes on from them finds."""
        own = self._cache
        if own is not None and own.is_sound() and own.can_crop(len(tokens)):
            return len(tokens)
        return space.lookup(np.append(tokens, np.int32(0))).num_tokens

    def foretell(self, space: Namespace, tokens: Tokens) -> Explain:
        """What a prompt that goes on from `tokens` would find in the store."""
        asked, gate = np.append(tokens, np.int32(0)), self._live.gate
        hit = space.lookup(asked)
        choice = gate.estimate(asked, hit) if hit.num_tokens else None
        return Explain(
            len(tokens), hit.num_tokens, hit.by_tier, str(hit.reason), hit.detail,
            skipped_s=gate.skipped_s(hit.num_tokens, len(asked)), choice=choice,
        )  # fmt: skip

    @property
    def computed(self) -> Tokens:
        """The ids whose KV is here: their blocks may be stored already, whether they are committed or not."""
        return np.zeros(0, dtype=np.int32) if self._cache is None else self._cache.tokens

    def close(self) -> None:
        """As `drop`; what was learned of speeds is kept."""
        self.drop()
        self._live.gate.save()

    def drop(self) -> None:
        """Let everything go; what is on its way here is waited for."""
        if self._prefetch is not None:
            self._prefetch.cancel(wait=True)
        if self._cache is not None:
            self._live.gate.note_forwards(self._cache.forwards.take())
        self._cache = self.attached = self._prefetch = None

    def _counts_tokens(self) -> bool:
        """Whether `generate` can tell how far a cache of this model reaches."""
        cache = self._live.new_cache() if self._cache is None else self._cache
        return cache.counts_tokens

    def _anew(self, tokens: Tokens, readers: Sequence[str]) -> tuple[CapturingCache, Explain]:
        """An empty cache, for arguments that read what the ids behind another would not tell."""
        self.drop()
        self.branch = 0
        why = f"{', '.join(readers)}; this call takes a whole prompt with an empty cache only"
        skipped_s = self._live.gate.skipped_s(0, len(tokens))
        explain = Explain(len(tokens), 0, reason=str(Reason.WANTED_WHOLE), detail=why, skipped_s=skipped_s)
        return self._live.new_cache(), explain

    def _cache_for(self, tokens: Tokens, num_new: int) -> tuple[CapturingCache, Explain]:
        """A cache of a prefix of `tokens`: this session's own, unless loading what is stored is sooner."""
        self._take_prefetched(tokens)
        gate, own = self._live.gate, self._cache
        hit = self._live.space.lookup(tokens)
        shared = common_prefix(own.tokens, tokens[:-1]) if own is not None and own.is_sound() else 0
        held = shared if own is not None and own.can_crop(shared) else 0
        choice = gate.choose(tokens, hit, held)
        if own is not None and 0 < held >= choice.num_tokens:
            reason = Reason.COMPLETE if held == own.num_tokens else Reason.DIVERGED
            if held < hit.num_tokens:
                reason = Reason.RECOMPUTED
            own.crop(held - own.num_tokens)
            self.branch = 0
            found = Explain(len(tokens), held, {"session": held}, str(reason))
        else:
            self.drop()
            own = self._live.new_cache()
            found = self._restored(own, tokens, num_new, hit, choice)
        skipped_s = gate.skipped_s(found.reused_tokens, len(tokens))
        return own, replace(found, skipped_s=skipped_s, choice=choice if hit.num_tokens > held else None)

    def _restored(
        self, cache: CapturingCache, tokens: Tokens, num_new: int, hit: Lookup, choice: Choice
    ) -> Explain:
        """Fill the empty `cache` as the gate chose."""
        got = Restored(0, {}, str(hit.reason), hit.detail, 0.0)
        if choice.num_tokens:
            at_most = choice.num_tokens if choice.num_tokens < hit.num_tokens else None
            got = restore(self._live.space, cache, tokens, num_new, at_most)
            self._live.gate.note_restore(got, hit, choice)
        reached, reason, detail = got.num_tokens, got.reason, got.detail
        if choice.num_tokens < hit.num_tokens:
            reached, reason, detail = hit.num_tokens, str(Reason.RECOMPUTED), f"{hit.num_tokens:,} are stored"
        # Full parts that reach beyond any anchor: a branch is about to form where they end.
        self.branch = hit.num_full_tokens if hit.num_full_tokens > reached else 0
        return Explain(len(tokens), got.num_tokens, got.by_tier, reason, detail)

    def _take_prefetched(self, tokens: Tokens) -> None:
        """What is on its way is waited for, unless computing it is sooner."""
        coming, self._prefetch = self._prefetch, None
        if coming is None:
            return
        choice = self._live.gate.estimate(tokens, self._live.space.lookup(tokens))
        if not coming.done and choice.is_late(coming.seconds):
            coming.cancel()
            return
        self._cache = coming.take(self._cache)
        if coming.restored is not None:
            self._live.gate.note_restore(coming.restored)
