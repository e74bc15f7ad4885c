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
Compiler = Callable[[fx.GraphModule, Sequence[torch.Tensor], Form], Code | None]
"""(ops, tensors like the arguments, their form) -> code, None if there is none for these ops."""


def form_of(tensors: Sequence[torch.Tensor]) -> Form:
    """Return what code for these tensors is made for."""
    return torch.is_grad_enabled(), *((t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in tensors)


class CompiledSegment(nn.Module):
    """Runs the compiled code of `body`, or `body` itself where no code can be made."""

    def __init__(self, body: fx.GraphModule, compiler: Compiler) -> None:
        super().__init__()
        self.body = body
        self._compiler = compiler
        self._codes: dict[Form, Code | None] = {}

    def prepare(self, inputs: Sequence[torch.Tensor]) -> None:
        """Make the code for tensors like these, unless it is made; they may be fake."""
        form = form_of(inputs)
        if form not in self._codes:
            self._codes[form] = self._compiler(self.body, inputs, form)

    def forward(self, *inputs: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return what `body` returns.  An error is raised as `body` raises it, since that names the op."""
        form = form_of(inputs)
        if form not in self._codes:
            self._codes[form] = self._compiler(self.body, inputs, form)
        code = self._codes[form]
        if code is None:
            return self.body(*inputs)  # type: ignore[no-any-return]
        try:
            return code(*inputs)
        except (
            RuntimeError
        ):  # other exceptions, such as the one that ends a recomputation early, are not of the kernels
            self.body(*inputs)
            raise
