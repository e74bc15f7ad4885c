"""Sums of gradients over ranks: of parameters that several stages use (tied weights).

Every stage that uses the parameter holds a copy, on each of its replicas, and one sum goes over all of them; after it
all copies hold the same bits, so that equal optimizers keep them equal.  Only what this step contributed is summed: a
gradient left from an earlier step was summed then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.distributed as dist

from autopart.ir.program import TIED, Action, Program
from autopart.runtime.activity import waiting
from autopart.runtime.group.world import World
from autopart.runtime.sums.masters import CAN_WIDEN, HALF
from autopart.runtime.tensors import dense


@dataclass(frozen=True)
class _Tie:
    """A parameter that several stages use.  group: the ranks that hold it, None where this rank is the only one."""

    name: str
    group: dist.ProcessGroup | None


class TiedGradients:
    """The tied parameters of this rank, by the group of stages that they link.  Opening the groups is collective."""

    def __init__(self, world: World, program: Program) -> None:
        self._world, self._program = world, program
        self._ties: dict[tuple[int, ...], list[_Tie]] = {group: [] for group in program.groups(TIED)}
        for name, stages in program.tied:
            ranks = program.ranks_of(stages)
            group = world.group(ranks) if len(ranks) > 1 else None
            if world.rank in ranks:
                linked = next(found for found in self._ties if stages[0] in found)
                self._ties[linked].append(_Tie(name, group))

    def __call__(self, action: Action, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Sum this step's gradients over the ranks.

        The sums of a group follow each other in the order of `Program.tied`, so that no two ranks wait for each other.

        A parameter that got no gradient on any rank has none: an optimizer must not take it for one of zeros.
        Half-precision gradients are summed in fp32.
        """
        with waiting():
            for tie in self._ties[self._program.group(action)]:
                parameters[tie.name].grad = _summed(self._world, parameters[tie.name], tie.group)


Doing = Callable[[Action, Mapping[str, torch.nn.Parameter]], None]
"""What a rank does where it joins a collective.  parameters: those that it trains, by name, with this step's
gradients."""
COLLECTIVES: dict[str, Callable[[World, Program], Doing]] = {"T": TiedGradients}
"""By kind of action, what opens a collective once for a program: it is called on all ranks, and may open groups."""


class GradientsAside:
    """Gradients of earlier steps, put aside for one step: only what it contributes is summed over ranks, and a step
    that fails leaves them as they were.  Takes the memory of one more gradient where steps accumulate.

    During the step those of half-precision parameters are summed in fp32, over micro-batches and ranks, and rounded
    once at its end: in bf16 every addend would be rounded to 8 bits of the sum.  Takes 4 bytes a parameter."""

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        masters: Mapping[str, torch.nn.Parameter] = MappingProxyType({}),
    ) -> None:
        """masters: of those that have one, which then gets the gradient, not rounded."""
        self._before = [(p, masters.get(name, p).grad) for name, p in parameters.items()]
        kept = zip(parameters, self._before, strict=True)
        self.before = {name: gradient for name, (_, gradient) in kept if gradient is not None}
        self._masters = {id(parameters[name]): master for name, master in masters.items() if name in parameters}
        self._widened = [p for p in parameters.values() if p.dtype in HALF and p.requires_grad and CAN_WIDEN]
        for parameter, _ in self._before:
            parameter.grad = None
        for parameter in self._widened:
            parameter.grad_dtype = torch.float32

    def restore(self) -> None:
        """The step failed: nothing was added."""
        for parameter, _ in self._before:
            parameter.grad = None
        self._narrow()
        for parameter, before in self._before:
            self._keeper(parameter).grad = before

    def keep(self) -> None:
        """The step is over: what it contributed is added."""
        added = [parameter.grad for parameter, _ in reversed(self._before)]
        for parameter in self._widened:
            parameter.grad = None
        self._narrow()
        for parameter, before in self._before:
            fresh, keeper = added.pop(), self._keeper(parameter)
            if before is None:
                keeper.grad = fresh if fresh is None else _rounded(fresh, keeper.dtype)
            elif fresh is None:
                keeper.grad = before
            else:
                keeper.grad = _added(before, fresh)

    def _keeper(self, parameter: torch.nn.Parameter) -> torch.nn.Parameter:
        """What gets its gradient."""
        return self._masters.get(id(parameter), parameter)

    def _narrow(self) -> None:
        for parameter in self._widened:
            parameter.grad_dtype = parameter.dtype


def _rounded(gradient: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The gradient in the parameter's type; entries of a sparse one are added up first."""
    if gradient.dtype == dtype:
        return gradient
    return (gradient.coalesce() if gradient.is_sparse else gradient).to(dtype)


def _added(before: torch.Tensor, fresh: torch.Tensor) -> torch.Tensor:
    """Their sum, in place where it can be: a sparse gradient takes no dense one."""
    if before.is_sparse and fresh.is_sparse:
        return _rounded(before.to(fresh.dtype) + fresh, before.dtype)
    if before.dtype != fresh.dtype:
        return (dense(before).to(fresh.dtype) + dense(fresh)).to(before.dtype)
    return dense(before).add_(dense(fresh))


def _summed(world: World, parameter: torch.nn.Parameter, group: dist.ProcessGroup | None) -> torch.Tensor | None:
    """This step's gradient over all ranks that hold the parameter, or None when none of them has one."""
    own = parameter.grad
    if group is None:
        return own
    present = torch.tensor([0 if own is None else 1], dtype=torch.int32)  # on the host, which then needs no device
    world.all_reduce(present, group, dist.ReduceOp.MAX)
    if not present.item():
        return None
    total = torch.zeros_like(parameter, dtype=gradient_dtype(parameter)) if own is None else dense(own)
    wide = total.to(wide_dtype(total.dtype)).contiguous()
    world.all_reduce(wide, group)
    return wide.to(total.dtype)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """In what gradients of this type are summed over ranks."""
    return torch.float32 if dtype in HALF else dtype


def gradient_dtype(parameter: torch.nn.Parameter) -> torch.dtype:
    """What its gradient has to be of now: in a step fp32 for half precision (`GradientsAside`)."""
    found: torch.dtype | None = getattr(parameter, "grad_dtype", None)
    return found or parameter.dtype
