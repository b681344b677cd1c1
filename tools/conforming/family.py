"""A family: which classes of transformers it is, and how a tiny model of it is built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from .tokenizer import byte_tokenizer

ATTENTION, HYBRID, RECURRENT = "attention", "hybrid", "recurrent"
VOCABULARY = 264


@dataclass(frozen=True)
class Family:
    """One row of the table.

    Attributes:
        prefix: what its classes in transformers are called by.
        settings: of the configuration.
        kind: attention alone, recurrent layers alone, or both.
        step: at most so many tokens a forward behind a cache, where the family itself ignores its recurrent
            state in longer ones (0: any number).
        config, model: how its two classes end.
        weights: a folder of real weights and their tokenizer, instead of random ones and bytes.
        words: the ids that prompts are made of.
        num_more: so many tokens more have its longest prompts where the window matters: it is a real one.
        in_new_process: whether a restart is also one of the process.
        vision: settings of a configuration whose text part `settings` are.
    """

    name: str
    prefix: str
    settings: Mapping[str, Any]
    kind: str = ATTENTION
    step: int = 0
    config: str = "Config"
    model: str = "ForCausalLM"
    weights: Path | None = None
    words: range = range(8, 240)
    num_more: int = 0
    in_new_process: bool = False
    vision: Mapping[str, Any] | None = None

    def missing(self) -> str:
        """Why it cannot be built here, or nothing."""
        import transformers

        if not all(hasattr(transformers, self.prefix + end) for end in (self.config, self.model)):
            return f"transformers {transformers.__version__} does not have it"
        if self.weights is not None and not self.weights.is_dir():
            return "its weights are not here: `tieredkv demo` unpacks them"
        return ""

    def build(self, dtype: torch.dtype = torch.float32) -> Any:
        """A model in eval mode, always with the same weights."""
        import transformers

        if self.weights is not None:
            model = getattr(transformers, self.prefix + self.model).from_pretrained(self.weights, dtype=dtype)
            model.generation_config = transformers.GenerationConfig(pad_token_id=0)
            return model.eval()
        kind = getattr(transformers, self.prefix + self.config)
        torch.manual_seed(0)
        if self.vision is None:
            config = kind(**self.settings)
        else:
            config = kind(text_config=dict(self.settings), **self.vision)
        model = getattr(transformers, self.prefix + self.model)(config).eval()
        with torch.no_grad():  # random weights as they come give flat logits, which would hide errors
            for parameter in model.parameters():
                if parameter.dim() >= 2:
                    parameter.mul_(2.0 if self.kind == RECURRENT else 4.0)  # so the largest is about 2
        model.generation_config.eos_token_id = None
        return model.to(dtype)

    def tokenizer(self) -> Any:
        return byte_tokenizer() if self.weights is None else _saved_tokenizer(self.weights)

    def random_ids(self, num_tokens: int, seed: int) -> torch.Tensor:
        """`[1, num_tokens]`, none of them special."""
        shuffle = torch.Generator().manual_seed(seed)
        return torch.randint(self.words.start, self.words.stop, (1, num_tokens), generator=shuffle)


@cache
def _saved_tokenizer(folder: Path) -> Any:
    import transformers

    return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
