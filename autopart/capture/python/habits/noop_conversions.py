"""What forward() may do that changes no number, but that tracing would refuse: it is skipped.

- A module converted to the dtype and device that it has (`self.head.to(torch.float32)`).  torch would put new
  parameters in the places of the old ones.
- The checks of `torch.distributions` that arguments are valid.  They can only raise; where they would have stopped at a
  NaN, the loss is NaN.
- The look of torch's transformers into a mask, to see whether it is causal.  The mask is used as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from autopart.capture.source_location import user_line
from autopart.ir.errors import RefusedError


def apply_to_module(
    original: Any, module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
) -> nn.Module:
    """Leave a module as it is; refuse a conversion that would change a tensor of it."""
    for tensor in [*module.parameters(recurse), *module.buffers(recurse)]:
        with torch.no_grad():
            found = fn(tensor)
        if (found.dtype, found.device, found.shape) != (tensor.dtype, tensor.device, tensor.shape):
            raise RefusedError(
                f"forward() converts a {type(module).__name__} from {tensor.dtype} on {tensor.device} to "
                f"{found.dtype} on {found.device}",
                where=user_line(),
                why="it would have new parameters after the first step, which the optimizer does not know",
                fix="convert it before compile, and in forward() the tensors that go in and come out (x.to(dtype))",
            )
    return module


def causal_as_hinted(original: Any, mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
    """Return the hint that the caller gave, without looking into the mask."""
    return is_causal is True
