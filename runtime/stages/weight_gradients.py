"""Products with a weight that add the weight's gradient into `.grad` by themselves.

Autograd makes the gradient of every micro-batch as a new tensor and adds it to `.grad` afterwards.  A matrix product
can add to what is there already, which saves a pass over memory as large as the weight.  Autograd still knows that the
weight is used, though its gradient does not flow: when all uses in a backward have had their turn, it runs the hooks
of the weight, which tell the buckets of replicas that its gradient is complete.

A product that makes the gradient of a weight needs nothing but two tensors, and nothing but the weight waits for it, so
it can run later than the backward of its use (Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 2).
Then the sum that a gradient is has the same addends in another order: what autograd adds in a backward comes before the
products of that micro-batch, and they may come behind those of later micro-batches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from autopart.runtime.masters import gradient_dtype
from autopart.runtime.stages.products import multiply, takes_onednn, times
from autopart.runtime.stages.stage_module import trained_leaf

_PIECE_BYTES = 4 << 20
"""Of a product that is made before it is added: a piece of it is still in the cache then, and no plan counts it."""


@dataclass(slots=True)
class WeightGradient:
    """What one use of a weight contributes to its gradient, before it is computed: left^T @ right.

    It holds all that the product needs, so the product may run at any time after the backward of its use.  parameter:
    whose `.grad` gets it; it may be in another precision than the factors.  left: (rows of the micro-batch, rows of the
    weight).  right: (rows of the micro-batch, columns of the weight).  A factor that is a view of a
    gradient holds that gradient, so that autograd does not take its memory for another one that it adds to.
    """

    parameter: torch.Tensor
    left: torch.Tensor
    right: torch.Tensor

    def add(self) -> None:
        """Compute the product and add it to the parameter's `.grad`; without one it becomes the `.grad`."""
        parameter, left = self.parameter, self.left.t()
        total = parameter.grad
        if total is not None and total.layout == torch.strided:
            if total.dtype != left.dtype:  # half precision: rounded as autograd would, and added in fp32
                total.add_(multiply(left, self.right))
            elif takes_onednn(left, self.right):  # a few rows at a time, as it cannot add to what is there
                rows = max(1, _PIECE_BYTES // total[:1].nbytes)
                for part, own in zip(torch.split(total, rows), torch.split(left, rows), strict=True):
                    part.add_(multiply(own, self.right))
            else:
                total.addmm_(left, self.right)
            return
        made = multiply(left, self.right).to(gradient_dtype(parameter))
        parameter.grad = made if total is None else made + total  # a sparse one is that of an embedding


_later: list[WeightGradient] | None = None
"""Where backwards put what they do not compute; not local to a thread, since autograd has threads of its own."""


@contextmanager
def deferring(into: list[WeightGradient]) -> Iterator[None]:
    """Let the backwards inside put their products with weights into a list (`add_all`) instead of computing them."""
    global _later
    _later = into
    try:
        yield
    finally:
        _later = None


def add_all(gradients: list[WeightGradient], complete: Callable[[torch.Tensor], None] | None = None) -> None:
    """Compute products in the order in which they were deferred, and empty the list, so that each frees its memory.

    complete: called with each parameter after its last product in the list.
    """
    left = Counter(id(gradient.parameter) for gradient in gradients)
    gradients.reverse()
    with torch.no_grad():
        while gradients:
            gradient = gradients.pop()
            gradient.add()
            left[id(gradient.parameter)] -= 1
            if complete is not None and not left[id(gradient.parameter)]:
                complete(gradient.parameter)


class _Product(torch.autograd.Function):
    """A product whose backward adds the weight's gradient to `.grad`.  The tuple hides the parameter from autograd."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        parameter: tuple[torch.Tensor],
        transposed: bool,
    ) -> torch.Tensor:
        ctx.parameter, ctx.transposed = parameter[0], transposed
        ctx.bias_shape = None if bias is None else bias.shape
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight)
        return multiply(x, weight.t() if transposed else weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        assert not torch.is_grad_enabled()  # what is added has no derivative; a wrapper that says so costs 5 us a call
        (grad,) = grads
        if grad is None:
            return None, None, None, None, None
        x, weight = ctx.saved_tensors
        shape, needed = x.shape, ctx.needs_input_grad
        if _later is not None:
            x = x.detach()  # it would keep what it was made by
        rows, grad = x.reshape(-1, shape[-1]), grad.reshape(-1, grad.shape[-1])
        gradient = WeightGradient(ctx.parameter, *((grad, rows) if ctx.transposed else (rows, grad)))
        if _later is not None:
            _later.append(gradient)
        else:
            gradient.add()
        back = multiply(grad, weight if ctx.transposed else weight.t()).view(shape) if needed[0] else None
        return back, None, grad.sum_to_size(ctx.bias_shape) if needed[2] else None, None, None


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, transposed: bool) -> torch.Tensor:
    """Return x @ weight + bias, or with the weight transposed as in `torch.nn.Linear`.  weight: 2-D.

    Where the weight is trained, the backward adds its gradient to the `.grad` of the parameter.
    """
    leaf = trained_leaf(weight)
    if leaf is None and not torch.is_grad_enabled() and (bias is None or bias.dim() < 2):
        return multiply(x, weight.t() if transposed else weight, bias)
    if leaf is None or (bias is not None and bias.dim() > 1):
        return times(x, weight.t() if transposed else weight, bias)
    made: torch.Tensor = _Product.apply(x, weight, bias, (leaf,), transposed)  # type: ignore[no-untyped-call]
    return made
