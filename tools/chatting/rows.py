"""Every group of rows by name, in the order in which they are measured."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from bench.figures import Figure

from . import breaking_even, conversations, decoding, long_session, restart, restoring, shared_prompt, tiers
from .conversations import NUM_CONVERSATIONS
from .setting import Setting

ALL: Mapping[str, Callable[[Setting], Iterator[Figure]]] = {
    "restore": restoring.figures,
    "tiers": tiers.figures,
    "even": breaking_even.figures,
    "decode": decoding.figures,
    "shared": shared_prompt.figures,
    "long": long_session.figures,
    "restart": restart.figures,
    "conversations": conversations.figures,
}
QUICK = ("restore", "tiers", "shared")

__all__ = ["ALL", "NUM_CONVERSATIONS", "QUICK", "measure"]


def measure(name: str, setting: Setting) -> Iterator[Figure]:
    """The figures of one group, in a folder of its own that is gone afterwards."""
    root = setting.root / name
    root.mkdir()
    try:
        yield from ALL[name](replace(setting, root=root))
    finally:
        shutil.rmtree(root, ignore_errors=True)
