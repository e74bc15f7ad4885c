"""Calls in forward() that tracing would lose or stop at: traced as what has the same effect, skipped, or refused.

- Inference mode, which torch.export does not see, is traced as no_grad, which gives the same gradients.
- A module converted to the dtype and device that it has (`self.head.to(torch.float32)`) stays as it is.  torch would
  put new parameters in the places of the old ones.
- torch's transformers do not look into a mask to see whether it is causal.  The mask is used as it is.
- backward() and gradient hooks, which would run once, during the capture, are refused; so are packed sequences, at
  which torch.export stops with an error of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from autopart.capture.source_location import user_line
from autopart.ir.errors import RefusedError


def enter_no_grad(original: Any, region: Any) -> None:
    """Enter no_grad instead of inference mode."""
    region._autopart_region = torch.no_grad() if region.mode else contextlib.nullcontext()
    region._autopart_region.__enter__()


def leave_no_grad(original: Any, region: Any, *error: Any) -> None:
    """Leave what `enter_no_grad` entered."""
    region._autopart_region.__exit__(*error)


def convert_module(
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


def refuse_backward(*_: Any, **__: Any) -> None:
    """Refuse backward()."""
    raise RefusedError(
        "backward() is called in forward()",
        where=user_line(),
        why="the gradients that it leaves are not part of the captured program",
        fix="return the sum of the losses; the step takes the gradient of it",
    )


def refuse_hook(original: Any, tensor: torch.Tensor, hook: Any) -> None:
    """Refuse a gradient hook on a tensor."""
    raise RefusedError(
        f"a gradient hook is registered on a tensor in forward(): {getattr(hook, '__qualname__', repr(hook))}",
        where=user_line(),
        why="it would run once while the model is captured and never again",
        fix="take the hook out of forward(), or register an op with its own backward (torch.library.custom_op)",
    )


def refuse_packing(*_: Any, **__: Any) -> None:
    """Refuse to pack sequences of several lengths."""
    raise RefusedError(
        "forward() packs sequences (torch.nn.utils.rnn.pack_padded_sequence)",
        where=user_line(),
        why="the sizes of a packed sequence depend on the lengths, and what a stage sends needs one size, with "
        "micro_batches=1 too",
        fix="run the layer on the padded tensor, and mask what it returns there: out = rnn(x)[0] * "
        "(torch.arange(x.shape[1]) < lengths[:, None])[..., None], with batch_first=True; the state after the last "
        "token of each row is out[torch.arange(len(x)), lengths - 1] (of one direction: the other one reads the "
        "padding first)",
    )
