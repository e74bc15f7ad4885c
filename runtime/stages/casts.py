"""Copies of parameters in another precision, each made once a step, however many micro-batches read it.

Under autocast every use of a weight reads a cast of it.  The value of a weight does not change during a step, so one
copy serves all its uses in all micro-batches.  Gradients stay those of a cast for each use: each flows back in the
parameter's own precision, so that sums over uses, and over micro-batches, are made there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from autopart.runtime.sums.shared_values import awaited


@dataclass(frozen=True, slots=True)
class Cast:
    """What a use of a parameter reads: `parameter`, by name, in `dtype`."""

    parameter: str
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _Held:
    """A tensor that autograd takes no notice of."""

    tensor: torch.Tensor


class _Use(torch.autograd.Function):
    """A cast whose result is there already."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, copy: _Held) -> torch.Tensor:
        ctx.dtype = parameter.dtype
        return copy.tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0].to(ctx.dtype), None


class StepCasts:
    """The copies of one step.  They take the memory of each parameter that is cast, in the smaller type."""

    def __init__(self) -> None:
        self._copies: dict[Cast, torch.Tensor] = {}

    def use(self, cast: Cast, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The parameter as one op reads it, in the micro-batch that runs."""
        parameter = awaited(tensors[cast.parameter])
        copy = self._copies.get(cast)
        if copy is None:
            copy = self._copies[cast] = parameter.detach().to(cast.dtype)
        if not (parameter.requires_grad and torch.is_grad_enabled()):
            return copy
        used: torch.Tensor = _Use.apply(parameter, _Held(copy))  # type: ignore[no-untyped-call]
        return used

    def clear(self) -> None:
        """The step is over: parameters may change."""
        self._copies.clear()
