"""Gradients freed of the scale of the loss, and checked for infinities and NaN."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from autopart.runtime.activity import waiting
from autopart.runtime.masters import HALF
from autopart.runtime.tensors import dense


def unscale(
    parameters: Mapping[str, torch.nn.Parameter],
    scale: float,
    masters: Mapping[str, torch.nn.Parameter],
    before: Mapping[str, torch.Tensor],
) -> str | None:
    """Divide all gradients by `scale`, in place; return the name of the first that is not finite, or None.

    Checked is what the optimizer gets: the gradient in the dtype of its parameter or master weight, and in half
    precision the sum with the gradient of earlier steps, `before`.  Waits for the device once.  O(gradients).
    """
    names, flags = [], []
    for name, parameter in parameters.items():
        if parameter.grad is None:
            continue
        numbers = parameter.grad.detach()
        if numbers.layout != torch.strided:
            numbers = parameter.grad = numbers.coalesce()
            numbers = numbers.values()
        if scale != 1.0:
            numbers.mul_(1.0 / scale)
        names.append(name)
        kept = masters.get(name, parameter).dtype
        if kept in HALF and name in before:
            numbers = dense(parameter.grad) + dense(before[name])
        flags.append(torch.isfinite(numbers.to(kept)).all())
    if not flags:
        return None
    with waiting():
        good = torch.stack([flag.to(flags[0].device) for flag in flags]).tolist()
    return next((name for name, finite in zip(names, good, strict=True) if not finite), None)
