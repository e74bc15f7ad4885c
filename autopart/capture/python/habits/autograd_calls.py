"""Calls of autograd inside forward(): inference mode, backward() and gradient hooks on tensors.

torch.export does not see inference mode; it is traced as no_grad, which export sees and which gives the same
gradients.  backward() and gradient hooks would run once, during the capture, and are refused.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from autopart.capture.source_location import user_line
from autopart.ir.errors import RefusedError


def enter_no_grad(original: Any, region: Any) -> None:
    """Enter no_grad instead of inference mode."""
    region._autopart_region = torch.no_grad() if region.mode else contextlib.nullcontext()
    region._autopart_region.__enter__()


def leave_no_grad(original: Any, region: Any, *error: Any) -> None:
    """Leave what `enter_no_grad` entered."""
    region._autopart_region.__exit__(*error)


def refuse_backward(*_: Any, **__: Any) -> None:
    """Refuse backward() in forward()."""
    raise RefusedError(
        "backward() is called in forward()",
        where=user_line(),
        why="the gradients that it leaves are not part of the captured program",
        fix="return the sum of the losses; the step takes the gradient of it",
    )


def refuse_hook(original: Any, tensor: torch.Tensor, hook: Any) -> None:
    """Refuse a gradient hook on a tensor in forward()."""
    raise RefusedError(
        f"a gradient hook is registered on a tensor in forward(): {getattr(hook, '__qualname__', repr(hook))}",
        where=user_line(),
        why="it would run once while the model is captured and never again",
        fix="take the hook out of forward(), or register an op with its own backward (torch.library.custom_op)",
    )
