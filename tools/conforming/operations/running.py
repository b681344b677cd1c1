"""How the model runs: its attention implementation, its dtype, its layers on two devices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ..fake_devices import FIRST, SECOND, FakeDevices, spread
from ..scene import Scene
from ..verdict import DidNotHappen, Finding
from .resuming import after_restart_here

_FAKES = (
    "fake devices: CPU tensors that say cpu:1 and cpu:2, with calls across devices refused, layers moved by hooks;"
    " each restored tensor lies where the stock cache has it"
)


def with_attention(name: str) -> Callable[[Scene], Finding]:
    """A restart under one attention implementation."""

    def run(scene: Scene) -> Finding:
        use_attention(scene.model, name)
        if (used := _attention(scene.model)) != name:
            raise DidNotHappen(f"the model runs {used}, not {name}")
        return after_restart_here(scene)

    return run


def use_attention(model: Any, name: str) -> None:
    """Raises ValueError: transformers' own, where the model does not support it.

    Some models cannot be switched, of which transformers only warns; so one is built with it from the start.
    """
    model.set_attn_implementation(name)
    if _attention(model) != name:
        type(model)._from_config(model.config, attn_implementation=name)


def _attention(model: Any) -> str:
    used: str = model.config.get_text_config(decoder=True)._attn_implementation
    return used


def with_dtype(dtype: torch.dtype) -> Callable[[Scene], Finding]:
    """A restart in one dtype."""

    def run(scene: Scene) -> Finding:
        scene.model.to(dtype)
        found = after_restart_here(scene)
        if scene.model.dtype != dtype:
            raise DidNotHappen(f"the model runs in {scene.model.dtype}")
        return found

    return run


def on_two_devices(scene: Scene) -> Finding:
    """Half of the layers on one device, half on another, neither of them that of the cache's tiers."""
    with FakeDevices():
        spread(scene.model)
        if {parameter.device for parameter in scene.model.parameters()} != {FIRST, SECOND}:
            raise DidNotHappen("the model does not lie on two devices")
        found = after_restart_here(scene)
    return replace(found, reason="; ".join(filter(None, [found.reason, _FAKES])))
