"""The digest of a live model's weights: what its parameters and buffers hold, not where they came from.

SHA-256 tree: chunks of a tensor's bytes are the leaves, hashed in parallel (hashlib lets the GIL go); a
tensor's node covers its dtype, shape and leaves; the root covers every name with its node. Nodes are
remembered by tensor, storage pointer and version, so that only what changed is hashed again. A fused optimizer
writes without counting up the version; its steps are counted here, by the parameters that it was given.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
import weakref
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..block.identity import encode
from ..errors import Unsupported
from ..units import MiB, format_nbytes

log = logging.getLogger("tieredkv.hf")

_CHUNK_NBYTES = 32 * MiB
_PLAIN_CLASSES = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)

_num_steps: dict[int, int] = {}
"""Steps that optimizers of this process took, by the address of the parameter."""


def _count_step(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            address = parameter.data_ptr()
            _num_steps[address] = _num_steps.get(address, 0) + 1


register_optimizer_step_post_hook(_count_step)


class Weights:
    """Hashes named tensors of one model and remembers what it hashed.

    A tensor written through `.data` keeps its version: call `forget()` after doing that.
    """

    def __init__(self) -> None:
        self._nodes: dict[str, tuple[weakref.ref[torch.Tensor], int, int, bytes]] = {}
        self._merged: bytes | None = None

    def expect(self, merged: bytes) -> None:
        """Forget everything if other adapters are merged than before: they are written into the weights unseen."""
        if merged != self._merged:
            self.forget()
        self._merged = merged

    def forget(self) -> None:
        """Hash every tensor again at the next `digest`."""
        self._nodes.clear()

    def digest(self, tensors: Mapping[str, torch.Tensor]) -> str:
        """Hex digest over names, dtypes, shapes and bytes.

        Raises:
            Unsupported: a tensor whose bytes are not in memory, or of a class that hides them.
        """
        new = {name: tensor for name, tensor in tensors.items() if not self._knows(name, tensor)}
        if new:
            self._hash(new)
        root = hashlib.sha256(b"tkvwgt01")
        for name in sorted(tensors):
            root.update(encode([name, self._nodes[name][3]]))
        return root.hexdigest()

    def _knows(self, name: str, tensor: torch.Tensor) -> bool:
        if name not in self._nodes:
            return False
        known, pointer, version, _ = self._nodes[name]
        return known() is tensor and pointer == tensor.data_ptr() and version == version_of(tensor)

    def _hash(self, tensors: Mapping[str, torch.Tensor]) -> None:
        began = time.perf_counter()
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            # Every chunk is submitted before the first result is awaited: the threads stay busy across tensors.
            leaves = {
                name: [pool.submit(_leaf, chunk) for chunk in _chunks(name, t)] for name, t in tensors.items()
            }
            for name, tensor in tensors.items():
                digests = [leaf.result() for leaf in leaves[name]]
                node = hashlib.sha256(encode([str(tensor.dtype), list(tensor.shape), digests])).digest()
                self._nodes[name] = (weakref.ref(tensor), tensor.data_ptr(), version_of(tensor), node)
        nbytes = sum(t.nbytes for t in tensors.values())
        if nbytes >= _CHUNK_NBYTES:
            seconds = time.perf_counter() - began
            log.info("hashed %s of weights in %.2f s", format_nbytes(nbytes), seconds)


def version_of(tensor: torch.Tensor) -> int:
    """How often the tensor was written in place; of inference tensors only an optimizer's steps are counted."""
    version = 0 if tensor.is_inference() else tensor._version
    return version + _num_steps.get(tensor.data_ptr(), 0)


def _chunks(name: str, tensor: torch.Tensor) -> Iterable[torch.Tensor]:
    """The tensor's bytes in order, uint8 `[n]` each at most `_CHUNK_NBYTES`."""
    if type(tensor) not in _PLAIN_CLASSES:
        raise Unsupported(f"{name} is a {type(tensor).__name__}: its bytes alone do not say what it computes")
    if tensor.device.type == "meta":
        raise Unsupported(
            f"{name} is not in memory (device meta): weights that are offloaded cannot be identified"
        )
    flat = tensor.detach().contiguous().view(-1)
    return flat.view(torch.uint8).split(_CHUNK_NBYTES) if flat.numel() else ()


def _leaf(chunk: torch.Tensor) -> bytes:
    return hashlib.sha256(chunk.cpu().numpy().data).digest()
