"""Matrix products in single precision on CPUs, by the faster of the two libraries that torch brings along.

torch multiplies matrices in fp32 with MKL, which uses the wide vector units of Intel's processors alone; on others with
AVX-512 oneDNN takes half of the time (`benchmarks/steps/products.py`).  The rule is the kind of processor and the size
of the product, not a measurement, so that the same program gives the same bits in every run.  Results differ from
torch's in their last bits.  `torch.backends.mkldnn.enabled = False` turns oneDNN off, here too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import linear

from autopart.runtime.stages.recomputation import ends_with

_LEAST_FLOPS = 4_000_000
"""Of a product; a smaller one is over before oneDNN has begun."""
_aten = torch.ops.aten


@lru_cache(maxsize=1)
def _is_faster_here() -> bool:
    """Return whether oneDNN multiplies faster than MKL on this processor."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    makers = {line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")}
    return bool(makers) and "GenuineIntel" not in makers


def are_faster() -> bool:
    """Return whether large products of this process take oneDNN."""
    return _is_faster_here() and torch._C._get_mkldnn_enabled()


def multiply(left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return left @ right + bias without a derivative.  left: (..., k).  right: (k, n).  bias: (n)."""
    if not takes_onednn(left, right, bias):
        return linear(left, right.t(), bias)
    made: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(left, right.t(), bias, "none", [], "")
    return made


def _is_large(left: torch.Tensor, columns: int) -> bool:
    return 2 * left.numel() * columns >= _LEAST_FLOPS


def takes_onednn(left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
    """Return whether `multiply` uses oneDNN for these."""
    return (
        _is_large(left, right.shape[-1])
        and left.dtype is torch.float32
        and right.dtype is torch.float32
        and left.device.type == "cpu"
        and (right.is_contiguous() or right.t().is_contiguous())
        and (bias is None or (bias.shape == right.shape[1:] and bias.dtype is torch.float32 and bias.is_contiguous()))
        and are_faster()
    )


class _Multiplied(torch.autograd.Function):
    """`multiply`, with its derivative."""

    @staticmethod
    def forward(ctx: Any, left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        to_left, to_right, _ = ctx.needs_input_grad
        saved = left if to_right else None, right if to_left else None  # a frozen weight keeps no rows
        ctx.save_for_backward(*saved)
        ends_with(*saved)
        ctx.shape = left.shape
        ctx.has_bias = bias is not None
        return multiply(left, right, bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        left, right = ctx.saved_tensors
        flat = grads[0].reshape(-1, grads[0].shape[-1])
        to_left = multiply(flat, right.t()).view(ctx.shape) if ctx.needs_input_grad[0] else None
        to_right = multiply(left.reshape(-1, ctx.shape[-1]).t(), flat) if ctx.needs_input_grad[1] else None
        return to_left, to_right, flat.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None


def times(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return x @ weight + bias by the faster kernel, with derivatives.  Shapes: as for `multiply`."""
    return _linear(x, weight.t(), bias)


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    if not _is_large(x, weight.shape[0]):  # before the view: a small product takes little longer than that
        return linear(x, weight, bias)
    return _differentiable(_aten.linear.default, (x, weight, bias), x, weight.t(), bias)


def _addmm(bias: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return _differentiable(_aten.addmm.default, (bias, x, weight), x, weight, bias)


def _mm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return _differentiable(_aten.mm.default, (x, weight), x, weight, None)


def _differentiable(
    op: Callable[..., Any], given: tuple[Any, ...], x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    found: torch.Tensor = (
        _Multiplied.apply(x, weight, bias) if takes_onednn(x, weight, bias) else op(*given)  # type: ignore[no-untyped-call]
    )
    return found


_KERNELS: dict[Any, Callable[..., torch.Tensor]] = {
    _aten.linear.default: _linear,
    _aten.addmm.default: _addmm,
    _aten.mm.default: _mm,
}


def kernel_of(target: Any, kwargs: Mapping[str, Any]) -> Any:
    """Return what computes a product with a weight in the code of a stage; any other op, as it is, also `addmm` with a
    factor (beta, alpha).  kwargs: of the call."""
    return _KERNELS.get(target, target) if are_faster() and not kwargs else target
