"""A segment of a stage's code that a compiler has made kernels for; autograd sees it as one op.

The code is made for tensors of given shapes, strides, dtypes and needs for gradients.  For others it is made again, so
a parameter that is frozen later, or an input with other strides, never runs code that was not made for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn

Code = Callable[..., Sequence[torch.Tensor]]
Form = tuple[Any, ...]
"""What code is made for: whether gradients are enabled, and shape, strides, dtype, device and flag of each tensor."""
Compiler = Callable[[fx.GraphModule, Sequence[torch.Tensor]], Code | None]
"""(ops, tensors like the arguments) -> code, kept by the form of the tensors; None if there is none for these ops."""


def form_of(tensors: Sequence[torch.Tensor]) -> Form:
    """Return what code for these tensors is made for."""
    return torch.is_grad_enabled(), *((t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in tensors)


class CompiledSegment(nn.Module):
    """Runs the compiled code of `body`, or `body` itself where no code can be made."""

    def __init__(self, body: fx.GraphModule, compiler: Compiler) -> None:
        super().__init__()
        self.body = body
        self._compiler = compiler

    def prepare(self, inputs: Sequence[torch.Tensor]) -> None:
        """Make the code for tensors like these, unless it is made; they may be fake."""
        self._compiler(self.body, inputs)

    def forward(self, *inputs: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return what `body` returns.  An error of a kernel is raised as `body` raises it, since that names the op."""
        code = self._compiler(self.body, inputs)
        if code is None:
            return self.body(*inputs)  # type: ignore[no-any-return]
        try:
            return code(*inputs)
        except RuntimeError:  # what ends a recomputation early is an exception of another type, and goes through
            self.body(*inputs)
            raise
