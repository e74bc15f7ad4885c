"""Buffers that forward() assigns instead of changing them in place.

torch.export puts a module's attributes back after tracing, so an assignment would be lost without a word.  The new
value is written into the old buffer, which export carries over.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from autopart.ir.errors import RefusedError


@contextlib.contextmanager
def assignments(model: nn.Module) -> Iterator[None]:
    """While a model's forward is traced: carry over what it assigns to buffers."""
    buffers = [
        (module, path, name, tensor)
        for path, module in model.named_modules()
        for name, tensor in module._buffers.items()
        if tensor is not None
    ]
    yield
    for module, path, name, tensor in buffers:
        _carry_over(module, ".".join(filter(None, (path, name))), name, tensor)


def _carry_over(module: nn.Module, full: str, name: str, old: torch.Tensor) -> None:
    new = module._buffers.get(name)
    if new is old:
        return
    if new is None or new.shape != old.shape or new.dtype != old.dtype:
        raise RefusedError(
            f"forward() replaces buffer {full} by another kind of tensor",
            why=f"{_kind(old)} becomes {_kind(new)}, and every micro-batch runs the same program",
            fix="keep its shape and dtype, or compute it where it is used",
        )
    old.copy_(new.detach())
    module._buffers[name] = old


def _kind(tensor: torch.Tensor | None) -> str:
    return "nothing" if tensor is None else f"{tuple(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}"
