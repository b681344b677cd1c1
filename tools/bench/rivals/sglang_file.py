"""SGLang's file backend, `HiCacheFile`: through the page cache, never synced.

Its package cannot be imported without CUDA. The module itself can, once the packages around it are there in
name: nothing of them is used but a function that prints sizes.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from .contestant import Load
from .files import Files

_PACKAGES = ("", ".srt", ".srt.mem_cache", ".srt.mem_cache.storage", ".srt.mem_cache.storage.file")


class SglangFile(Files):
    def __init__(self, path: str, load: Load) -> None:
        self._backend = _backend(path)
        super().__init__(path, load)

    def holds(self, key: str) -> bool:
        return bool(self._backend.exists(key))

    def put(self, keys: Sequence[str], blocks: torch.Tensor) -> None:
        if not self._backend.batch_set(list(keys), list(blocks)):
            raise OSError(f"{self.path}: a page was not taken")

    def get(self, keys: Sequence[str], out: torch.Tensor) -> None:
        if any(page is None for page in self._backend.batch_get(list(keys), list(out))):
            raise OSError(f"{self.path}: a page is not there")

    def file(self, key: str) -> Path:
        return Path(self.path, f"{key}_bench_0_1.bin")  # the model's name, rank 0 of 1


def _backend(path: str) -> Any:
    found = importlib.util.find_spec("sglang")
    assert found is not None and found.origin is not None, "sglang is installed here"
    home = Path(found.origin).parent
    for name in _PACKAGES:
        _stand_in(f"sglang{name}", home.joinpath(*name.split(".")))
    _stand_in("sglang.srt.utils", home / "none")
    _stand_in("sglang.srt.utils.common", home / "none").__dict__["human_readable_int"] = int
    from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig

    config = HiCacheStorageConfig(
        tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=False,
        enable_storage_metrics=False, is_page_first_layout=True, model_name="bench",
    )  # fmt: skip
    return HiCacheFile(config, path)


def _stand_in(name: str, folder: Path) -> ModuleType:
    module = sys.modules[name] = ModuleType(name)
    module.__path__ = [str(folder)]
    return module
