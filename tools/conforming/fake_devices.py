"""Two devices on a machine that has none: tensors in CPU memory that say they lie elsewhere.

They are called `cpu:1` and `cpu:2`, beside the real `cpu`. Every torch call of the thread passes through
`FakeDevices`: a call whose tensors lie on several devices is refused as torch refuses it, a result lies where its
arguments do, `to` and `copy_` move, and `numpy` is refused off the CPU. So code that works here makes no
assumption that all layers, or the cache's tiers, share one device. What is not shown is that a real device
computes the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

CPU = torch.device("cpu")
FIRST, SECOND = torch.device("cpu:1"), torch.device("cpu:2")
_MARK = "fake_device"
_MOVES = (torch.Tensor.copy_, torch.Tensor.__setitem__, torch.Tensor.set_)
_INDEXES = (torch.Tensor.__getitem__, torch.Tensor.index_select)
_TO_PYTHON = (torch.Tensor.numpy, torch.Tensor.__array__)


class FakeDevices(TorchFunctionMode):
    """While it is entered, tensors can be made on and moved to the fake devices; of this thread alone."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        return _call(func, args, kwargs or {})


def device_of(tensor: torch.Tensor) -> torch.device:
    device: torch.device = vars(tensor).get(_MARK, CPU)
    return device


def spread(model: Any) -> None:
    """Put the first half of `model`'s layers on the first device, the others on the second.

    As accelerate's hooks do: what a module is given is moved to where its weights are.
    """
    name, layers = max(_lists(model), key=lambda found: len(found[1]))
    _place(model, FIRST)
    for index, layer in enumerate(layers):
        device = FIRST if index < len(layers) // 2 else SECOND
        _place(layer, device)
        _align(layer, device)
    above = [name.rsplit(".", depth)[0] for depth in range(1, name.count(".") + 1)]
    for parent in ["", *above]:
        for child_name, child in model.get_submodule(parent).named_children():
            path = f"{parent}.{child_name}".lstrip(".")
            if path not in above and child is not layers:
                for part in child if isinstance(child, torch.nn.ModuleList) else [child]:
                    _align(part, FIRST)


def _lists(model: Any) -> list[tuple[str, Any]]:
    return [(n, module) for n, module in model.named_modules() if isinstance(module, torch.nn.ModuleList)]


def _call(func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
    if func == torch.Tensor.device.__get__:  # type: ignore[attr-defined]
        return device_of(args[0])
    tensors = [leaf for leaf in tree_leaves((args, dict(kwargs))) if isinstance(leaf, torch.Tensor)]
    if func is torch.Tensor.__deepcopy__:
        tensors = tensors[:1]  # what else was copied before lies where it may
    own = device_of(tensors[0]) if tensors else CPU
    if func in _TO_PYTHON and own != CPU:
        raise TypeError(f"a tensor on {own} is no numpy array: copy it to the CPU first")
    # a number in CPU memory goes with tensors on any device
    found = {device_of(tensor) for tensor in tensors if tensor.ndim or device_of(tensor) != CPU}
    if len(found) > 1 and func not in _MOVES and not (func in _INDEXES and found <= {own, CPU}):
        name = getattr(func, "__name__", func)
        raise RuntimeError(f"Expected all tensors to be on the same device, but found {found} in {name}")
    target, args, kwargs = _on_cpu(func, args, kwargs)
    result = func(*args, **kwargs)
    where = target or (own if func in _INDEXES or func in _MOVES else next(iter(found), CPU))
    moved = bool(tensors) and where != own
    return tree_map(lambda leaf: _tagged(leaf, where, moved, tensors), result)


def _on_cpu(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[torch.device | None, tuple[Any, ...], dict[str, Any]]:
    """The device a call asks for, and the call as the CPU can do it."""
    given = dict(kwargs)
    target: torch.device | None = None
    if given.get("device") is not None:
        target = torch.device(given.pop("device"))
        given["device"] = CPU
    elif func is torch.Tensor.to and len(args) > 1 and isinstance(args[1], (str, torch.device)):
        target, args = torch.device(args[1]), (args[0], CPU, *args[2:])
    elif func is torch.Tensor.to and len(args) > 1 and isinstance(args[1], torch.Tensor):
        target, args = device_of(args[1]), (args[0], args[1].dtype, *args[2:])
    elif func is torch.Tensor.cpu:
        target = CPU
    return target, args, given


def _tagged(leaf: Any, where: torch.device, moved: bool, inputs: list[torch.Tensor]) -> Any:
    """A result as a tensor of its device; one that came from another device shares no memory with it."""
    if not isinstance(leaf, torch.Tensor) or (any(leaf is tensor for tensor in inputs) and not moved):
        return leaf
    if moved:
        leaf = leaf.clone()
    setattr(leaf, _MARK, where)
    return leaf


def _place(module: Any, device: torch.device) -> None:
    """Its parameters and buffers, and those of all below it."""
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            moved = torch.nn.Parameter(parameter.detach().to(device), requires_grad=False)
            setattr(moved, _MARK, device)
            part._parameters[name] = moved
        for name, buffer in list(part.named_buffers(recurse=False)):
            part._buffers[name] = buffer.to(device)


def _align(module: Any, device: torch.device) -> None:
    def moved(leaf: Any) -> Any:
        is_cache = hasattr(leaf, "layers")
        return leaf.to(device) if hasattr(leaf, "to") and not is_cache else leaf

    module.register_forward_pre_hook(
        lambda _, args, kwargs: tree_map(moved, (args, kwargs)), with_kwargs=True
    )
