"""The code of one stage at one number of rows, or of one slice of it, and what this code calls besides captured ops."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.autograd.function import once_differentiable

Cast = tuple[str, torch.dtype]
"""A copy of a parameter in another precision: the parameter's name and the dtype."""

ON_THE_WAY: dict[int, Callable[[], None]] = {}
"""By the identity of a parameter whose value another rank is sending: a function that waits for the value."""


@dataclass(frozen=True)
class StateBuffer:
    """The tokens of one slice inside a tensor that holds a state (K or V) of the whole sequence.

    Each slice writes its own tokens and reads those before it in place; joining copies for each of s slices would take
    (s + 1) / 2 times the memory.  shape: of the whole tensor.  axis: the axis with the tokens, along which the slice
    reads from entry `low` on and owns entries [start, end).
    """

    state: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    axis: int
    low: int
    start: int
    end: int

    def allocate(self) -> torch.Tensor:
        """Return uninitialized memory for all tokens."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)

    def prefix(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return the tokens before the slice that it reads."""
        return _same_memory(buffer, self.axis, self.low, self.start)

    def append(self, buffer: torch.Tensor, own: torch.Tensor, prefix: torch.Tensor | None) -> Any:
        """Write the tokens of the slice; return (the slice's tokens, all tokens that it reads).

        prefix: what `prefix` returned, which gets the gradient of these tokens; None if the slice reads none.
        """
        return _Append.apply(self, buffer, own, prefix)  # type: ignore[no-untyped-call]


class _Append(torch.autograd.Function):
    """Return tensors that share the buffer's memory but not its version: later slices write beside what they hold."""

    @staticmethod
    def forward(
        ctx: Any, place: StateBuffer, buffer: torch.Tensor, own: torch.Tensor, prefix: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.place, ctx.looks_back = place, prefix is not None
        ctx.set_materialize_grads(False)
        block = _same_memory(buffer, place.axis, place.start, place.end)
        block.copy_(own)
        return block, _same_memory(buffer, place.axis, place.low, place.end)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, of_block: torch.Tensor | None, of_all: torch.Tensor | None
    ) -> tuple[None, None, torch.Tensor | None, torch.Tensor | None]:
        place: StateBuffer = ctx.place
        if of_all is None:
            return None, None, of_block, None
        before = place.start - place.low
        own = of_all.narrow(place.axis, before, place.end - place.start)
        prefix = of_all.narrow(place.axis, 0, before) if ctx.looks_back else None
        return None, None, own if of_block is None else own + of_block, prefix


def _same_memory(buffer: torch.Tensor, axis: int, low: int, high: int) -> torch.Tensor:
    """Return entries [low, high) as a tensor that is not a view to autograd and has a version counter of its own."""
    part = buffer.detach().narrow(axis, low, high - low)
    return buffer.new_empty(0).set_(part.untyped_storage(), part.storage_offset(), part.shape, part.stride())


@dataclass(frozen=True)
class StageModule:
    """module(*params, *inputs, *numbers, *past, *buffers) returns the outputs, then the new values of the updated
    buffers of the model; or, in the code of a slice, what later slices read: `states`, then the slice's `buffers`.

    params: names of parameters, buffers, constants and `casts`.  inputs, outputs: names of values.  updates: names of
    buffers.  numbers: places of the numbers of a micro-batch that are passed in.  constants: tensors lifted out of
    forward(), by name.  casts: by name, copies of parameters that are made once a step.

    Of a slice: states are the values that it keeps for later slices.  past: (state, slice) of each earlier block that
    it reads.  buffers: states that all slices keep in one tensor; of each, that tensor is passed, then, if the slice
    reads tokens before its own, these.
    """

    module: fx.GraphModule
    params: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    updates: tuple[str, ...]
    constants: Mapping[str, torch.Tensor]
    numbers: tuple[int, ...] = ()
    casts: Mapping[str, Cast] = field(default_factory=dict)
    states: tuple[str, ...] = ()
    past: tuple[tuple[str, int], ...] = ()
    buffers: tuple[StateBuffer, ...] = ()

    @property
    def held(self) -> tuple[str, ...]:
        """Names of the model's own tensors that this code reads or updates."""
        own = (name for name in self.params if name not in self.constants and name not in self.casts)
        return tuple(dict.fromkeys((*own, *(parameter for parameter, _ in self.casts.values()), *self.updates)))

    def arguments(
        self, tensors: Mapping[str, torch.Tensor], copies: dict[Cast, torch.Tensor] | None = None
    ) -> list[torch.Tensor]:
        """Return what `params` names.  copies: the casts made in this step so far, to which missing ones are added."""
        copies = {} if copies is None else copies
        return [
            _cast(self.casts[name], tensors, copies)
            if name in self.casts
            else self.constants[name]
            if name in self.constants
            else tensors[name]
            for name in self.params
        ]


StageSlices = tuple[StageModule | None, tuple[StageModule, ...]]
"""The code of a stage: one module for each slice, in order, or a single one if sequences are not cut; before them the
prologue, which computes without gradients, once a micro-batch, what slices read of inputs and constants alone."""


def _cast(cast: Cast, tensors: Mapping[str, torch.Tensor], copies: dict[Cast, torch.Tensor]) -> torch.Tensor:
    """Return a parameter in another precision, from one copy for all uses in all micro-batches of a step.

    The gradient of each use flows back in the parameter's own precision, so that uses are summed there.
    """
    parameter = awaited(tensors[cast[0]])
    copy = copies.get(cast)
    if copy is None:
        copy = copies[cast] = parameter.detach().to(cast[1])
    if not (parameter.requires_grad and torch.is_grad_enabled()):
        return copy
    used: torch.Tensor = _UseCast.apply(parameter, (copy,))  # type: ignore[no-untyped-call]
    return used


class _UseCast(torch.autograd.Function):
    """A cast whose result exists already; the tuple hides it from autograd."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, copy: tuple[torch.Tensor]) -> torch.Tensor:
        ctx.parameter = parameter
        ctx.set_materialize_grads(False)
        return copy[0].detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        (grad,) = grads  # None if all its uses add to `.grad` themselves
        return None if grad is None else grad.to(ctx.parameter.dtype), None


def trained_leaf(weight: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor whose `.grad` the gradient of `weight` goes to: itself, or the parameter that it is a cast of.
    None if it gets no gradient, or through other ops."""
    if not (weight.requires_grad and torch.is_grad_enabled()):
        return None
    made_by: Any = weight.grad_fn
    if made_by is None:
        return weight
    return made_by.parameter if isinstance(made_by, _UseCast._backward_cls) else None  # type: ignore[attr-defined]


def awaited(parameter: torch.Tensor) -> torch.Tensor:
    """Return the parameter, after waiting for its value if another rank is sending it."""
    wait = ON_THE_WAY.get(id(parameter)) if ON_THE_WAY else None
    if wait is not None:
        wait()
    return parameter


def weighed(term: torch.Tensor, weight: float) -> torch.Tensor:
    """Return a term of the loss times its weight.  With weight 0 no gradient flows, since the term may be 0/0."""
    return term * weight if weight else torch.zeros_like(term)


def of_whole_batch(value: torch.Tensor, number: float) -> torch.Tensor:
    """Replace a value of one micro-batch by the number that it is for the whole batch."""
    return torch.full_like(value, number)
