"""Sums of gradients over ranks: of parameters that several stages use (tied weights).

Every stage that uses the parameter holds a copy; after the sum all copies hold the same bits, so that equal optimizers
keep them equal.  Only what this step contributed is summed: a gradient left from an earlier step was summed then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from autopart.ir.program import Program
from autopart.runtime.world import World


@dataclass(frozen=True)
class _Tie:
    """A parameter that several stages use.  group: the ranks that hold it, None where this rank is the only one."""

    name: str
    group: dist.ProcessGroup | None


class TiedGradients:
    """The tied parameters of this rank.  Opening the groups is collective."""

    def __init__(self, world: World, program: Program) -> None:
        self._ties: list[_Tie] = []
        for name, stages in program.tied:
            ranks = sorted({program.stage_ranks[stage][0] for stage in stages})
            group = world.group(ranks) if len(ranks) > 1 else None
            if world.rank in ranks:
                self._ties.append(_Tie(name, group))
        self._before: dict[str, torch.Tensor | None] = {}
        self._parameters: Mapping[str, torch.nn.Parameter] = {}

    def begin(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Put earlier gradients aside for one step."""
        self._parameters = parameters
        self._before = {tie.name: parameters[tie.name].grad for tie in self._ties}
        for tie in self._ties:
            parameters[tie.name].grad = None

    def restore(self) -> None:
        """The step failed: gradients that were put aside are back, and nothing was added to them."""
        for name, before in self._before.items():
            self._parameters[name].grad = before
        self._before = {}

    def reduce(self) -> None:
        """Sum this step's gradients over the ranks and add what was put aside.

        All of a rank's sums follow each other in the order of `Program.tied`, so that no two ranks wait for each other.

        A parameter that got no gradient on any rank keeps the one it had, or None: an optimizer must not take it for
        one of zeros.  Half-precision gradients are summed in fp32.
        """
        for tie in self._ties:
            parameter = self._parameters[tie.name]
            before = self._before.pop(tie.name)
            total = _summed(parameter, tie.group)
            if total is None:
                parameter.grad = before
            else:
                parameter.grad = total if before is None else before.add_(total)


def _summed(parameter: torch.nn.Parameter, group: dist.ProcessGroup | None) -> torch.Tensor | None:
    """This step's gradient over all ranks that hold the parameter, or None when none of them has one."""
    own = parameter.grad
    if group is None:
        return own
    present = torch.tensor([0 if own is None else 1], dtype=torch.int32, device=parameter.device)
    dist.all_reduce(present, op=dist.ReduceOp.MAX, group=group)
    if not present.item():
        return None
    total = torch.zeros_like(parameter) if own is None else own
    wide = total.float() if total.dtype in (torch.float16, torch.bfloat16) else total
    wide = wide.contiguous()
    dist.all_reduce(wide, group=group)
    return wide.to(total.dtype)
