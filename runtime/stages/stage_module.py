"""What `split` makes and the runtime plays: the code of one stage at one number of rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import fx

from autopart.runtime.stages.casts import Cast, StepCasts


@dataclass(frozen=True)
class StageModule:
    """module(*params, *inputs, *numbers) returns the outputs, then the new values of the updated buffers.

    params: names of parameters, buffers, constants and `casts`; inputs, outputs: names of values; updates: of buffers.
    numbers: places of those that it takes of the numbers of a micro-batch, which are known before the step.
    constants: tensors lifted out of forward(), which may depend on the number of rows, by name.
    casts: by name, copies of parameters that are made once a step.
    """

    module: fx.GraphModule
    params: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    updates: tuple[str, ...]
    constants: Mapping[str, torch.Tensor]
    numbers: tuple[int, ...] = ()
    casts: Mapping[str, Cast] = field(default_factory=dict)

    @property
    def held(self) -> tuple[str, ...]:
        """Names of the model's own tensors that this code reads or updates."""
        own = (name for name in self.params if name not in self.constants and name not in self.casts)
        return tuple(dict.fromkeys((*own, *(cast.parameter for cast in self.casts.values()), *self.updates)))

    def arguments(self, tensors: Mapping[str, torch.Tensor], casts: StepCasts | None = None) -> list[torch.Tensor]:
        """What `module` takes first: this code's parameters, buffers and constants.  casts: of the step that runs."""
        casts = StepCasts() if casts is None else casts
        return [
            casts.use(self.casts[name], tensors)
            if name in self.casts
            else self.constants[name]
            if name in self.constants
            else tensors[name]
            for name in self.params
        ]


def weighed(term: torch.Tensor, weight: float) -> torch.Tensor:
    """A term of the loss times its weight.  Without weight it is nothing, and no gradient flows: it may be 0/0."""
    return term * weight if weight else torch.zeros_like(term)


def of_whole_batch(value: torch.Tensor, number: float) -> torch.Tensor:
    """What stands for `value` of one micro-batch: the number that it is for the whole batch."""
    return torch.full_like(value, number)
