"""Counts of the inputs of a batch, taken before its step, from which the shares of losses and their terms follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from autopart.capture import Captured
from autopart.ir.errors import BatchError
from autopart.ir.graph import LossReduction
from autopart.runtime.activity import waiting
from autopart.runtime.stages.stage_module import StageModule
from autopart.runtime.tensors import LocalTensors
from autopart.stagecode.split import ancestors, cut

Inputs = Mapping[str, torch.Tensor]


def weighted_loss(losses: Mapping[int, torch.Tensor], shares: Sequence[float]) -> float:
    """Return the loss of the whole batch on the ranks that compute it, 0 on others.  Waits for the device, once."""
    # A micro-batch without a valid target may have a loss of 0/0.
    counted = {micro: share for micro, share in enumerate(shares) if losses and share != 0.0}
    if not counted:
        return 0.0
    with waiting():
        given = [losses[micro] for micro in counted]
        found: list[float] = torch.stack(given).tolist() if len(given) > 1 else [given[0].item()]
    total = 0.0
    for loss, share in zip(found, counted.values(), strict=True):  # `sum` would round otherwise
        total += loss * share
    return total


class BatchCounts:
    """Counts and sums of the inputs alone, computed by ops cut out of the captured program."""

    def __init__(self, tensors: LocalTensors, device: torch.device) -> None:
        self._tensors = tensors
        self._device = device
        self._sizes: set[int] = set()
        self._known: dict[tuple[int, str], StageModule | torch.Tensor] = {}  # code, and constants

    def add(self, captured: Captured, reduction: LossReduction) -> None:
        """Cut out what computes the values that this reduction counts, once for each number of rows."""
        graph = captured.graph
        if graph.rows in self._sizes:
            return
        self._sizes.add(graph.rows)
        kinds = {param.name: param.kind for param in graph.params}
        for name in sorted(set(reduction.counted())):
            if kinds.get(name) == "constant":
                self._known[graph.rows, name] = captured.tensors[name].to(self._device)
            elif name in kinds:
                self._tensors.hold([name], captured.tensors)
            elif name not in graph.inputs:
                module = cut(captured, ancestors(graph, [name]), [name], self._device)
                self._tensors.hold(module.held, captured.tensors)
                self._known[graph.rows, name] = module

    def measured(
        self, reduction: LossReduction, rows: Sequence[int], inputs: Sequence[Inputs], *, alone: bool = False
    ) -> list[float]:
        """Return the counts of the pieces of a batch, one piece behind the other, from which `loss_shares` follows.

        These are the count of `reduction` and of the weight of each adjusted value, 0 if it needs none; then each
        adjusted value that is a number of the whole batch, 0 for others.  alone: whether the batch has one piece, which
        needs no count.
        """
        weights = [reduction, *(item.weight for item in reduction.adjusted)]
        found: list[torch.Tensor | float] = []
        for count, given in zip(rows, inputs, strict=True):
            found += [
                0.0 if alone or weight.value is None or weight.kind == "sum" else self._count(weight, count, given)
                for weight in weights
            ]
            found += [
                0.0 if item.reader is not None else self._value(item.value, count, given).double().reshape(())
                for item in reduction.adjusted
            ]
        on_device = [number for number in found if isinstance(number, torch.Tensor)]
        with waiting():  # once, for all numbers on a device
            read = iter(torch.stack(on_device).tolist() if on_device else ())
        return [next(read) if isinstance(number, torch.Tensor) else number for number in found]

    def _value(self, name: str, rows: int, inputs: Inputs) -> torch.Tensor:
        if name in inputs:
            return inputs[name]
        module = self._known.get((rows, name), self._tensors.held.get(name))
        if not isinstance(module, StageModule):
            assert module is not None
            return module
        arguments = module.arguments(self._tensors.held)
        with torch.no_grad():
            found: torch.Tensor = module.module(*arguments, *(inputs[value] for value in module.inputs))[0]
        return found

    def _count(self, weight: LossReduction, rows: int, inputs: Inputs) -> torch.Tensor:
        """Return the count of one piece, 0-dim in fp64."""
        assert weight.value is not None
        result = self._value(weight.value, rows, inputs)
        if weight.ignore is not None:
            counted = result != weight.ignore
            if weight.classes is None:
                return counted.sum(dtype=torch.float64)
            result = self._value(weight.classes, rows, inputs).detach()[result[counted]]
            if weight.smoothed and result.numel() and not result.any():
                raise BatchError(
                    "all targets of a micro-batch are of classes that weigh 0",
                    why="with label smoothing the loss of such targets is not 0, and its mean does not exist",
                    fix="use fewer micro_batches, or ignore_index in place of a weight of 0",
                )
        return result.sum(dtype=torch.float64)
