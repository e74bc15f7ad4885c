"""Gradients checked for infinities and NaN, and freed of the scale of the loss."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from autopart.runtime.activity import waiting


def unscale(parameters: Mapping[str, torch.nn.Parameter], scale: float) -> str | None:
    """Divide all gradients by `scale`, in place; the name of the first that is not finite, None where all are.

    Waits for the device, once.  O(gradients).
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
        flags.append(torch.isfinite(numbers).all())
    if not flags:
        return None
    with waiting():
        good = torch.stack([flag.to(flags[0].device) for flag in flags]).tolist()
    return next((name for name, finite in zip(names, good, strict=True) if not finite), None)
