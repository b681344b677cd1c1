"""Plain `transformers`: sessions over `generate` whose KV outlives the process."""

from .chat import ChatModel
from .explain import Divergence, Explain
from .identity import describe_model, layout_of
from .prefetch import Prefetch
from .rows import Generated
from .session import ChatSession
from .stream import Answer

__all__ = [
    "Answer", "ChatModel", "ChatSession", "Divergence", "Explain", "Generated", "Prefetch", "describe_model",
    "layout_of",
]  # fmt: skip
