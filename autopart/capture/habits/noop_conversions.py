"""What forward() may do while it is traced that changes no number: it is left out, where it changes something refused.

- A module converted to the dtype and device that it has (`self.head.to(torch.float32)`).  torch would put new
  parameters in the places of the old ones.
- The checks of `torch.distributions` that arguments are valid: they can but raise.  Of NaN, which they would have
  stopped, the loss is NaN.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from autopart.capture.source_location import user_line
from autopart.ir.errors import RefusedError


def replacements() -> dict[str, Any]:
    """Patches for a trace: conversions to what is there already do nothing, and distributions check nothing."""

    def same(self: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        for tensor in [*self.parameters(recurse), *self.buffers(recurse)]:
            with torch.no_grad():
                found = fn(tensor)
            if (found.dtype, found.device, found.shape) != (tensor.dtype, tensor.device, tensor.shape):
                raise _refusal(self, tensor, found)
        return self

    return {"Module._apply": same, "Distribution._validate_args": False}


def _refusal(module: nn.Module, before: torch.Tensor, after: torch.Tensor) -> RefusedError:
    def told(tensor: Any) -> str:
        return f"{tensor.dtype} on {tensor.device}"

    return RefusedError(
        f"forward() converts a {type(module).__name__} from {told(before)} to {told(after)}",
        where=user_line(traceback.extract_stack()),
        why="its parameters would be others after the first step, which the optimizer does not know",
        fix="convert it before compile, and in forward() the tensors that go in and come out (x.to(dtype))",
    )
