"""Buffers that forward() assigns instead of changing them in place.

torch.export puts a module's attributes back after tracing, so an assignment would be lost silently.  The new value is
written into the old buffer, which export carries over.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from autopart.ir.errors import RefusedError


@contextlib.contextmanager
def assignments(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Carry over what the body, a traced forward(), assigns to buffers of these modules."""
    buffers = [
        (part, path, name, tensor)
        for module in modules
        for path, part in module.named_modules()
        for name, tensor in part._buffers.items()
        if tensor is not None
    ]
    yield
    for part, path, name, tensor in buffers:
        _carry_over(part, ".".join(filter(None, (path, name))), name, tensor)


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
