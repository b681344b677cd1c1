"""A turn in a process that has done nothing else, handed back as plain arrays."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..families import FAMILIES
from ..forwards import Forward
from ..scene import Scene, Turn, quiet

_TOOLS = Path(__file__).parents[2]


def say_elsewhere(scene: Scene, store: str, session: str, ids: torch.Tensor) -> Turn:
    """A new process opens the store, resumes the session and goes on with `ids`."""
    scene.close()
    given, answer = scene.folder / "asked.npy", scene.folder / "said.npz"
    np.save(given, ids.numpy(), allow_pickle=False)
    job = [scene.family.name, str(scene.folder), store, session, str(given), str(answer)]
    command = [sys.executable, "-c", "from conforming.operations import new_process as p; p.main()", *job]
    done = subprocess.run(command, capture_output=True, text=True, cwd=_TOOLS)
    if done.returncode:
        raise RuntimeError(f"the new process failed: {done.stderr.strip()[-500:]}")
    return _read(answer)


def main() -> None:
    """The new process."""
    quiet()
    torch.set_num_threads(1)
    name, folder, store, session_name, given, answer = sys.argv[1:]
    family = next(family for family in FAMILIES if family.name == name)
    ids = torch.from_numpy(np.load(given, allow_pickle=False))
    with (
        Scene(family, Path(folder), family.build()) as scene,
        scene.open(store).session(session_name) as session,
    ):
        _write(Path(answer), scene.say(session, ids))


def _write(path: Path, turn: Turn) -> None:
    arrays: dict[str, Any] = {"tokens": turn.tokens.numpy()}
    for number, forward in enumerate(turn.forwards):
        arrays |= {f"ids.{number}": forward.ids.numpy(), f"logits.{number}": forward.logits.numpy()}
    arrays |= {f"state.{layer}.{name}": tensor.numpy() for (layer, name), tensor in turn.attached.items()}
    about = {
        "num_prompt": turn.num_prompt, "num_early": turn.num_early, "reason": turn.reason,
        "by_tier": dict(turn.by_tier),
        "forwards": [[forward.start, forward.num_asked] for forward in turn.forwards],
    }  # fmt: skip
    np.savez(path, about=np.array(json.dumps(about)), **arrays)


def _read(path: Path) -> Turn:
    with np.load(path, allow_pickle=False) as saved:
        arrays = {name: saved[name] for name in saved.files}
    about = json.loads(str(arrays["about"]))
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items() if name != "about"}
    forwards = [
        Forward(start, tensors[f"ids.{number}"], tensors[f"logits.{number}"], asked)
        for number, (start, asked) in enumerate(about["forwards"])
    ]
    states = [name.split(".", 2) for name in tensors if name.startswith("state.")]
    return Turn(
        num_prompt=about["num_prompt"],
        tokens=tensors["tokens"],
        attached={(int(layer), name): tensors[f"state.{layer}.{name}"] for _, layer, name in states},
        num_early=about["num_early"],
        forwards=forwards,
        by_tier=about["by_tier"],
        reason=about["reason"],
    )
