"""Products of groups of rows with a matrix each, as experts of a mixture compute them, on the kernel made for that.

While transformers is traced it calls an op of its own that reads the sizes of the groups on the host and multiplies one
after another, since torch's kernel has no shape function for fp32.  The captured program keeps that op, because passes
run it on fake tensors; the code of a stage runs torch's kernel, as the plain model does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_FALLBACK = "transformers.grouped_mm_fallback.default"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_DENSE = torch.contiguous_format
_ALIGNED = 16
"""Bytes that divide the steps between rows that the kernel takes."""
_CAPABILITY = (8, 0)
"""Of the oldest CUDA devices that have the kernel."""


def kernel_of(target: Any) -> Any:
    """Return what runs in place of an op in the code of a stage; the op itself if it has no better kernel."""
    return grouped_product if str(target) == _FALLBACK else target


def grouped_product(rows: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Multiply each group of rows, (rows, in), with its matrix, (groups, in, out).

    ends: the row behind each group, in order.  Runs the op that was traced where torch's kernel does not take the
    operands.
    """
    if not _has_kernel(rows, matrices):
        traced: Callable[..., torch.Tensor] = torch.ops.transformers.grouped_mm_fallback
        return traced(rows, matrices, ends)
    found: Any = torch.ops.aten._grouped_mm(rows, matrices, ends.to(torch.int32))
    if found.requires_grad:  # the gradient may be expanded from a sum
        # a copy: one row is contiguous, however long the step to the next one
        found.register_hook(lambda grad: grad if _is_aligned(grad) else grad.clone(memory_format=_DENSE))
    result: torch.Tensor = found
    return result


def _has_kernel(rows: torch.Tensor, matrices: torch.Tensor) -> bool:
    """Return whether the kernel, and that of its backward, takes these operands."""
    if rows.dtype is not matrices.dtype or rows.dtype not in _DTYPES or not rows.numel() or not matrices.numel():
        return False
    if rows.is_cuda and torch.cuda.get_device_capability(rows.device) < _CAPABILITY:
        return False
    gradients = all(size * rows.element_size() % _ALIGNED == 0 for size in matrices.shape[1:])
    return gradients and rows.device.type in ("cpu", "cuda") and _is_aligned(rows) and _is_aligned(matrices)


def _is_aligned(tensor: torch.Tensor) -> bool:
    """Return whether the last two axes are dense rows or columns, with steps between them that the kernel takes."""
    size, element = tensor.shape[-2:], tensor.element_size()
    step = tensor.stride()[-2:]
    dense = (step[1] == 1 and step[0] >= size[1], step[0] == 1 and step[1] >= size[0])
    whole = all(jump * element % _ALIGNED == 0 for jump in (*tensor.stride()[:-2], step[1 if dense[1] else 0]))
    return any(dense) and whole and tensor.data_ptr() % _ALIGNED == 0
