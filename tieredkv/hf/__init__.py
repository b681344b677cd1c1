"""Plain `transformers`: sessions over `generate` whose KV outlives the process."""

from .chat import ChatModel
from .identity import describe_model, layout_of
from .session import ChatSession, Explain
from .stream import Answer

__all__ = ["Answer", "ChatModel", "ChatSession", "Explain", "describe_model", "layout_of"]
