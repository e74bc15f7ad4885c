"""Products with a weight that add the weight's gradient into `.grad` by themselves.

Autograd makes the gradient of every micro-batch as a new tensor and adds it to `.grad` afterwards.  A matrix product
can add to what is there already, which saves a pass over memory as large as the weight.  Autograd still knows that the
weight is used, though its gradient does not flow: when all uses in a backward have had their turn, it runs the hooks
of the weight, which tell the buckets of replicas that its gradient is complete.

A product that makes the gradient of a weight needs nothing but two tensors, and nothing but the weight waits for it, so
it can run later than the backward of its use (Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 2).
Then the sum that a gradient is has the same addends in another order: what autograd adds in a backward comes before the
products of that micro-batch, and they may come behind those of later micro-batches.

Ranks that compute parts of the same values exchange some inside of a backward (`shard_group`).  Where a device moves
bytes while it computes, products that make gradients of weights run meanwhile, as in Megatron-LM (in its
`tensor_parallel/layers.py` the sum of the input's gradient overlaps with the weight's product): from the first exchange
of a backward on they wait for the next one (`fill`), and what is left runs at its end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from autopart.runtime.masters import gradient_dtype
from autopart.runtime.stages.products import multiply, takes_onednn, times
from autopart.runtime.stages.recomputation import ends_with
from autopart.runtime.stages.stage_module import trained_leaf

_PIECE_BYTES = 4 << 20
"""Of a product that is made before it is added: a piece of it is still in the cache then, and no plan counts it."""


Factor = torch.Tensor | Callable[[], torch.Tensor]


class Source(Protocol):
    """Gives what a product reads once more in the backward, from the part of it that this rank keeps."""

    def begin(self, part: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begin to make it, once for all its readers, and return what waits for it."""


@dataclass(slots=True)
class WeightGradient:
    """What one use of a weight contributes to its gradient, before it is computed: left^T @ right.

    It holds all that the product needs, so the product may run at any time after the backward of its use.  parameter:
    whose `.grad` gets it; it may be in another precision than the factors.  left: (rows of the micro-batch, rows of the
    weight).  right: (rows of the micro-batch, columns of the weight).  A factor that is a view of a
    gradient holds that gradient, so that autograd does not take its memory for another one that it adds to.  A factor
    that is on its way is a function that waits for it.
    """

    parameter: torch.Tensor
    left: Factor
    right: Factor

    def add(self) -> None:
        """Compute the product and add it to the parameter's `.grad`; without one it becomes the `.grad`."""
        parameter, left, right = self.parameter, _made(self.left).t(), _made(self.right)
        total = parameter.grad
        if total is not None and total.layout == torch.strided:
            if total.dtype != left.dtype:  # half precision: rounded as autograd would, and added in fp32
                total.add_(multiply(left, right))
            elif takes_onednn(left, right):  # a few rows at a time, as it cannot add to what is there
                rows = max(1, _PIECE_BYTES // total[:1].nbytes)
                for part, own in zip(torch.split(total, rows), torch.split(left, rows), strict=True):
                    part.add_(multiply(own, right))
            else:
                total.addmm_(left, right)
            return
        made = multiply(left, right).to(gradient_dtype(parameter))
        parameter.grad = made if total is None else made + total  # a sparse one is that of an embedding


def _made(factor: Factor) -> torch.Tensor:
    return factor if isinstance(factor, torch.Tensor) else factor()


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


# ---- beside exchanges ------------------------------------------------------------------------------------------------

_waiting: dict[int, list[WeightGradient]] = {}
"""By the number of a backward that is running, the products that wait for an exchange in it."""


def begin_filling() -> None:
    """Let products of the backward that is running wait for its exchanges, unless they wait for more already."""
    task = torch._C._current_graph_task_id()
    if _later is None and task not in _waiting:
        _waiting[task] = []
        torch.autograd.Variable._execution_engine.queue_callback(lambda: add_all(_waiting.pop(task)))


def fill() -> None:
    """Compute products that wait for an exchange, which has begun: all but the largest, which is for the next one.

    Without others it is computed."""
    waiting = _waiting.get(torch._C._current_graph_task_id()) if _waiting else None
    if waiting:
        sizes = [gradient.parameter.numel() for gradient in waiting]
        kept = [waiting.pop(sizes.index(max(sizes)))] if len(waiting) > 1 else []
        add_all(waiting)
        waiting += kept


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
        again: tuple[torch.Tensor, Source] | None,
    ) -> torch.Tensor:
        ctx.parameter, ctx.transposed, ctx.shape = parameter[0], transposed, x.shape
        ctx.bias_shape = None if bias is None else bias.shape
        ctx.set_materialize_grads(False)
        kept, ctx.source = (x, None) if again is None else again
        ctx.save_for_backward(kept, weight)
        ends_with(kept, weight)
        return multiply(x, weight.t() if transposed else weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        assert not torch.is_grad_enabled()  # what is added has no derivative; a wrapper that says so costs 5 us a call
        (grad,) = grads
        if grad is None:
            return None, None, None, None, None, None
        x, weight = ctx.saved_tensors
        shape, needed, source = ctx.shape, ctx.needs_input_grad, ctx.source
        waiting = _later
        if waiting is None and _waiting:
            waiting = _waiting.get(torch._C._current_graph_task_id())
        if waiting is not None:
            x = x.detach()  # it would keep what it was made by
        grad = grad.reshape(-1, grad.shape[-1])
        rows = x.reshape(-1, shape[-1]) if source is None else _rows(source.begin(x), shape[-1])
        gradient = WeightGradient(ctx.parameter, *((grad, rows) if ctx.transposed else (rows, grad)))
        if waiting is not None:
            waiting.append(gradient)
        elif source is None:
            gradient.add()
        back = multiply(grad, weight if ctx.transposed else weight.t()).view(shape) if needed[0] else None
        if waiting is None and source is not None:  # it came meanwhile
            gradient.add()
        return back, None, grad.sum_to_size(ctx.bias_shape) if needed[2] else None, None, None, None


def _again(x: torch.Tensor) -> tuple[torch.Tensor, Source] | None:
    """Return this rank's part of a value that is made again in the backward, and what makes it; None if it is kept.
    Also of a view of all of it."""
    base = x if x._base is None else x._base
    found: tuple[torch.Tensor, Source] | None = getattr(base, "again", None)
    return found if found is None or (x.is_contiguous() and x.numel() == base.numel()) else None


def _rows(begun: Callable[[], torch.Tensor], columns: int) -> Callable[[], torch.Tensor]:
    return lambda: begun().reshape(-1, columns)


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, transposed: bool) -> torch.Tensor:
    """Return x @ weight + bias, or with the weight transposed as in `torch.nn.Linear`.  weight: 2-D.

    Where the weight is trained, the backward adds its gradient to the `.grad` of the parameter.
    """
    leaf = trained_leaf(weight)
    if leaf is None and not torch.is_grad_enabled() and (bias is None or bias.dim() < 2):
        return multiply(x, weight.t() if transposed else weight, bias)
    if leaf is None or (bias is not None and bias.dim() > 1):
        return times(x, weight.t() if transposed else weight, bias)
    made: torch.Tensor = _Product.apply(x, weight, bias, (leaf,), transposed, _again(x))  # type: ignore[no-untyped-call]
    return made
