"""Slices such as mask[:, :, :T, :T] of a parameter or a buffer that has just T elements there.

Torch returns the tensor itself then, so that captures of longer and shorter sequences would be different programs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

_SIMPLE = (int, slice, type(None), type(...))


class KeptSlices(TorchFunctionMode):
    """Records every slice [:n] of a parameter, of a buffer and of a plain tensor as an op, and before other indices."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        """modules: the traced ones, which hold fake tensors by now; plain tensors are real."""
        super().__init__()
        self._own = {id(t) for module in modules for t in (*module.parameters(), *module.buffers())}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.__getitem__ and (id(args[0]) in self._own or type(args[0]) is torch.Tensor):
            args = _sliced(*args)
        return func(*args, **(kwargs or {}))


def _sliced(tensor: torch.Tensor, index: Any) -> tuple[torch.Tensor, Any]:
    """Return the tensor cut by the slices [:n] of an index, and the index without them."""
    items = list(index) if isinstance(index, tuple) else [index]
    if not all(type(item) in _SIMPLE for item in items):
        return tensor, index
    axis, missing = 0, tensor.dim() - sum(item is not None and item is not ... for item in items)
    for place, item in enumerate(items):
        if isinstance(item, slice) and type(item.stop) is int and item.start in (None, 0) and item.step in (None, 1):
            tensor = torch.ops.aten.slice.Tensor(tensor, axis, 0, item.stop)
            items[place] = slice(None)
        axis += missing if item is ... else item is not None
    return tensor, tuple(items)
