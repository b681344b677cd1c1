"""How the model runs: its attention implementation, its dtype, its layers on two devices."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..scene import Scene
from ..verdict import DidNotHappen, Finding, worst
from .resuming import after_restart, fork


def with_attention(name: str) -> Callable[[Scene], Finding]:
    """A restart under one attention implementation."""

    def run(scene: Scene) -> Finding:
        scene.model.set_attn_implementation(name)
        used = scene.model.config.get_text_config(decoder=True)._attn_implementation
        if used != name:
            raise DidNotHappen(f"the model runs {used}, not {name}")
        return after_restart(scene)

    return run


def with_dtype(dtype: torch.dtype) -> Callable[[Scene], Finding]:
    """A restart, then a fork, in one dtype."""

    def run(scene: Scene) -> Finding:
        scene.model.to(dtype)
        found = worst([after_restart(scene), fork(scene)])
        if scene.model.dtype != dtype:
            raise DidNotHappen(f"the model runs in {scene.model.dtype}")
        return found

    return run
