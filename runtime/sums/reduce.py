"""Gradients of one step, apart from those of earlier steps: their sums over ranks, and whether they are finite.

A parameter that several stages use (tied weights) has a copy on each of their ranks.  One sum over all these ranks
keeps the copies' gradients equal to the bit, so equal optimizers keep the copies equal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from autopart.ir.actions import TIED, Action
from autopart.ir.program import Program
from autopart.runtime.activity import waiting
from autopart.runtime.group.world import World
from autopart.runtime.masters import CAN_WIDEN, HALF, gradient_dtype
from autopart.runtime.tensors import dense, laid_as


class TiedGradients:
    """Sums of the gradients of tied parameters, by the group of stages that they link.  Making one is collective."""

    def __init__(self, world: World, program: Program) -> None:
        self._world, self._program = world, program
        self._ties: dict[tuple[int, ...], list[tuple[str, dist.ProcessGroup]]] = {g: [] for g in program.groups(TIED)}
        for name, stages in program.tied:
            for ranks in program.tied_ranks(name, stages):
                group = world.group(ranks) if len(ranks) > 1 else None
                if world.rank in ranks and group is not None:
                    linked = next(found for found in self._ties if stages[0] in found)
                    self._ties[linked].append((name, group))

    def __call__(self, action: Action, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Sum this step's gradients, in the order of `Program.tied` on all ranks."""
        with waiting():
            for name, group in self._ties[self._program.group(action)]:
                parameters[name].grad = summed(self._world, parameters[name], group)


Doing = Callable[[Action, Mapping[str, torch.nn.Parameter]], None]
"""What a rank does in a collective.  parameters: those that it trains, by name, with this step's gradients."""
COLLECTIVES: dict[str, Callable[[World, Program], Doing]] = {"T": TiedGradients}
"""By kind of action, what opens a collective once for a program: called on all ranks, it may open groups."""


class GradientsAside:
    """Gradients of earlier steps, put aside for one step: only what the step contributes is summed over ranks, and a
    step that fails leaves them unchanged.  Takes the memory of one more gradient if steps accumulate.

    During the step gradients of half-precision parameters are summed in fp32, over micro-batches and ranks, and rounded
    once at its end: in bf16 every addend would be rounded to 8 bits of the sum.  Takes 4 bytes a parameter.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        masters: Mapping[str, torch.nn.Parameter],
    ) -> None:
        """masters: the parameters whose master weight gets the gradient, not rounded."""
        self._kept = [(p, masters.get(name, p)) for name, p in parameters.items()]
        self._before = [keeper.grad for _, keeper in self._kept]
        self.before = {name: g for name, g in zip(parameters, self._before, strict=True) if g is not None}
        self._widened = [p for p, _ in self._kept if p.dtype in HALF and p.requires_grad and CAN_WIDEN]
        for parameter, _ in self._kept:
            parameter.grad = None
        for parameter in self._widened:
            parameter.grad_dtype = torch.float32

    def restore(self) -> None:
        """Drop what the step contributed."""
        self._narrow()
        for (_, keeper), before in zip(self._kept, self._before, strict=True):
            keeper.grad = before

    def keep(self) -> None:
        """Add what the step contributed."""
        added = [parameter.grad for parameter, _ in reversed(self._kept)]
        self._narrow()
        for (_, keeper), before in zip(self._kept, self._before, strict=True):
            fresh = added.pop()  # so that the memory of each is free when it was added
            if before is None:
                keeper.grad = fresh if fresh is None else _rounded(fresh, keeper.dtype)
            elif fresh is None:
                keeper.grad = before
            else:
                keeper.grad = _added(before, fresh)

    def _narrow(self) -> None:
        for parameter, _ in self._kept:
            parameter.grad = None
        for parameter in self._widened:
            parameter.grad_dtype = parameter.dtype


def _rounded(gradient: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the gradient in the parameter's dtype; entries of a sparse one are added up first."""
    if gradient.dtype == dtype:
        return gradient
    return (gradient.coalesce() if gradient.is_sparse else gradient).to(dtype)


def _added(before: torch.Tensor, fresh: torch.Tensor) -> torch.Tensor:
    """Add two gradients, in place if possible; a sparse one takes no dense one."""
    if before.is_sparse and fresh.is_sparse:
        return _rounded(before.to(fresh.dtype) + fresh, before.dtype)
    if before.dtype != fresh.dtype:
        return (dense(before).to(fresh.dtype) + dense(fresh)).to(before.dtype)
    return dense(before).add_(dense(fresh))


def summed(
    world: World, parameter: torch.nn.Parameter, group: dist.ProcessGroup, *, sparse: bool = False
) -> torch.Tensor | None:
    """Sum this step's gradient over the ranks of a group; None if no rank has one, since an optimizer must not take it
    for zeros.  sparse: whether all ranks keep it sparse; it is then summed on the host."""
    own = parameter.grad
    present = torch.tensor([0 if own is None else 1], dtype=torch.int32)  # on the host, which then needs no device
    world.all_reduce(present, group, dist.ReduceOp.MAX)
    if not present.item():
        return None
    if sparse:
        mine = (own if own is not None else _no_entries(parameter)).coalesce()
        entries = mine.to("cpu", wide_dtype(mine.dtype))
        dist.all_reduce(entries, group=group)
        return entries.to(mine.device, mine.dtype)
    total = torch.zeros_like(parameter, dtype=gradient_dtype(parameter)) if own is None else dense(own)
    wide = total.to(wide_dtype(total.dtype)).contiguous()
    world.all_reduce(wide, group)
    return laid_as(parameter, wide.to(total.dtype))


def _no_entries(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return a sparse gradient of an embedding without entries."""
    indices = torch.empty((1, 0), dtype=torch.int64, device=parameter.device)
    values = torch.empty((0, *parameter.shape[1:]), dtype=gradient_dtype(parameter), device=parameter.device)
    return torch.sparse_coo_tensor(indices, values, parameter.shape)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which gradients of this dtype are summed over ranks."""
    return torch.float32 if dtype in HALF else dtype


def _entries(gradient: torch.Tensor) -> torch.Tensor:
    """Return the numbers of a gradient, of a coalesced sparse one those that it holds."""
    return gradient if gradient.layout == torch.strided else gradient.values()


def unscale(
    parameters: Mapping[str, torch.nn.Parameter],
    scale: float,
    masters: Mapping[str, torch.nn.Parameter],
    before: Mapping[str, torch.Tensor],
) -> str | None:
    """Divide all gradients by `scale`, in place; return the name of the first that is not finite, or None.

    Checked is what the optimizer gets: the gradient in the dtype of its parameter or master weight, and in half
    precision the sum with the gradient of earlier steps, `before`.  A sum is finite only if all its numbers are, and
    takes a tenth of the time of looking at each; they are looked at where the sum is not, since it may overflow.  Waits
    for the device once.  O(gradients).
    """

    def numbers(name: str) -> torch.Tensor:
        parameter = parameters[name]
        assert parameter.grad is not None
        found = parameter.grad.detach()
        kept = masters.get(name, parameter).dtype
        if kept in HALF and name in before:
            found = dense(found) + dense(before[name])
        found = _entries(found).to(kept)
        return torch.view_as_real(found) if found.is_complex() else found

    names = [name for name, parameter in parameters.items() if parameter.grad is not None]
    totals = []
    for name in names:
        own = parameters[name].grad
        assert own is not None
        if own.layout != torch.strided:
            own = parameters[name].grad = own.coalesce()
        if scale != 1.0:
            _entries(own.detach()).mul_(1.0 / scale)
        found = numbers(name)
        totals.append(found.sum(dtype=wide_dtype(found.dtype)).reshape(1))
    if not names:
        return None
    with waiting():
        good = torch.isfinite(torch.cat([total.to(totals[0].device) for total in totals])).tolist()
    suspects = (name for name, finite in zip(names, good, strict=True) if not finite)
    return next((name for name in suspects if not torch.isfinite(numbers(name)).all()), None)
