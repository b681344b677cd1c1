"""A tiny random model with a tokenizer of single letters, saved as transformers saves one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def run_command(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs `tieredkv` with arguments, in a cache folder of its own."""
    home = tmp_path_factory.mktemp("home")
    root = Path(__file__).parents[2]

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        source = "from tieredkv.cli import main; main()"
        environment = {"XDG_CACHE_HOME": str(home), "PATH": "/usr/bin:/bin", "HOME": str(home)}
        return subprocess.run(
            [sys.executable, "-c", source, *arguments],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
            cwd=root,
            env=environment,
        )

    return run


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Gemma 3 of three layers: two with a window of 64, one with full attention."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, Gemma3TextConfig, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny")
    letters = ["<end>", "Ċ", "Ġ", *map(chr, range(33, 127))]
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder)
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=len(letters), hidden_size=32, intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, sliding_window=64,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        max_position_embeddings=8192, eos_token_id=0, bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def small_document(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """3,300 letters, so 3,300 tokens for the tiny model."""
    from tieredkv.cli.document import own_document

    path = tmp_path_factory.mktemp("document") / "handbook.txt"
    path.write_text(own_document()[:3300])
    return path


@pytest.fixture
def tiny_script() -> dict[str, object]:
    """A script as a job carries it."""
    return {"document_name": "d", "document": "text", "questions": {"anna": ["Who?"]}, "num_answer_tokens": 4}
