"""Gradients of parameters that several stages use (tied weights): summed over those stages.

Every stage that uses the parameter holds a copy; after the sum all copies hold the same bits, so that equal optimizers
keep them equal.  Only what this step contributed is summed: a gradient left from an earlier step was summed then.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from autopart.ir.program import Program
from autopart.runtime.world import World


class TiedGradients:
    """The tied parameters of this rank.  Opening the groups is collective."""

    def __init__(self, world: World, program: Program) -> None:
        self._mine: list[tuple[str, dist.ProcessGroup]] = []
        for name, stages in program.tied:
            ranks = [program.stage_ranks[stage] for stage in stages]
            group = world.group(ranks)
            if world.rank in ranks:
                self._mine.append((name, group))
        self._before: dict[str, torch.Tensor | None] = {}
        self._parameters: Mapping[str, torch.nn.Parameter] = {}

    def begin(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Put earlier gradients aside for one step."""
        self._parameters = parameters
        self._before = {name: parameters[name].grad for name, _ in self._mine}
        for name, _ in self._mine:
            parameters[name].grad = None

    def reduce(self) -> None:
        """Sum this step's gradients over the stages and add what was put aside."""
        for name, group in self._mine:
            parameter = self._parameters[name]
            total = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            total = total.contiguous()
            dist.all_reduce(total, group=group)
            before = self._before.pop(name)
            parameter.grad = total if before is None else before.add_(total)
