"""tieredkv: a tiered KV cache for LLM chats that survives anything."""

from .block.identity import Identity
from .block.layout import TOKENS, BlockLayout, LayerGroup, TensorSpec
from .cache import TieredCache
from .cache import open_cache as open
from .config import Config
from .namespace import Namespace
from .outcomes import Flushed, Health, Lookup, Reason, RecoveryReport, Stats, Stored, Tier
from .prefix import Prefix
from .sessions import Session
from .span import Span
from .table.catalog import Turn

__all__ = [
    "TOKENS", "BlockLayout", "Config", "Flushed", "Health", "Identity", "LayerGroup", "Lookup", "Namespace",
    "Prefix", "Reason", "RecoveryReport", "Session", "Span", "Stats", "Stored", "TensorSpec", "Tier",
    "TieredCache", "Turn", "open",
]  # fmt: skip
