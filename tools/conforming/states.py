"""The tensors that a cache holds, whatever its layers are, and where two caches differ first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

States = dict[tuple[int, str], torch.Tensor]
"""By layer and name; a tensor in a dict of a layer is named `name.key`."""

TIME_AXIS = {"keys": 2, "values": 2, "indexer_keys": 1, "indexer_position_ids": 2}


def states_of(cache: Any) -> States:
    """Copies of every tensor of every layer."""
    found: States = {}
    for index, layer in enumerate(cache.layers):
        for name, value in vars(layer).items():
            if name.startswith("_"):
                continue
            if isinstance(value, torch.Tensor) and value.numel():
                found[index, name] = value.clone()
            elif isinstance(value, Mapping):
                for key, part in value.items():
                    if isinstance(part, torch.Tensor) and part.numel():
                        found[index, f"{name}.{key}"] = part.clone()
    return found


def first_difference(ours: States, stock: States) -> str:
    """Where ours differ in any bit from the stock cache's, or nothing.

    Of a window layer ours may hold more tokens than the window: the last ones are compared.
    """
    for (layer, name), wanted in stock.items():
        got = ours.get((layer, name))
        if got is None:
            return f"layer {layer} {name} was not restored"
        axis = TIME_AXIS.get(name)
        if axis is not None and got.shape[axis] > wanted.shape[axis]:
            got = got.narrow(axis, got.shape[axis] - wanted.shape[axis], wanted.shape[axis])
        if got.shape != wanted.shape or got.dtype != wanted.dtype:
            return f"layer {layer} {name}: {list(got.shape)} {got.dtype}, not {list(wanted.shape)} {wanted.dtype}"
        if got.device != wanted.device:
            return f"layer {layer} {name}: on {got.device}, not on {wanted.device}"
        if not torch.equal(got, wanted):
            error = (got.double() - wanted.double()).abs().max().item()
            return f"layer {layer} {name}: differs by {error:.1e}"
    return ""
