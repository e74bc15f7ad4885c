"""What a rank runs for batches of one signature: its stage's code and the shapes of all values, by number of rows."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from autopart.capture import Captured
from autopart.ir.graph import LossReduction
from autopart.ir.plan import Stage
from autopart.ir.program import Program
from autopart.runtime.stage_module import StageModule
from autopart.runtime.tensors import LocalTensors
from autopart.runtime.transport import Spec
from autopart.session.split import ancestors, cut, stage_module


class StageCode:
    """The dictionaries are handed to engine and stage runner once and filled, or emptied, later."""

    def __init__(self, tensors: LocalTensors, device: torch.device) -> None:
        self._tensors = tensors
        self._device = device
        self.modules: dict[int, StageModule] = {}
        self.specs: dict[int, Mapping[str, Spec]] = {}
        self._counters: dict[int, StageModule] = {}

    def clear(self) -> None:
        """Forget everything: a batch of another signature comes."""
        self.modules.clear()
        self.specs.clear()
        self._counters.clear()

    def has(self, rows: int) -> bool:
        """Whether everything for micro-batches of so many rows has been made."""
        return rows in self.specs

    def add_specs(self, captured: Captured) -> None:
        """Note shapes and dtypes of all values at the rows of `captured`."""
        self.specs[captured.graph.rows] = {
            value.name: Spec(value.shape, getattr(torch, value.dtype)) for value in captured.graph.values
        }

    def add_stage(self, captured: Captured, program: Program, stage: int, planned: Stage) -> None:
        """Cut the stage out of `captured` and hold the tensors that it uses."""
        module = stage_module(captured, program, stage, planned, self._device)
        self._tensors.hold(module.held, captured.tensors)
        self.modules[captured.graph.rows] = module

    def add_counter(self, captured: Captured, value: str) -> None:
        """Cut out what computes the count that weighs a micro-batch's loss, unless it is an input."""
        if value in captured.graph.inputs:
            return
        module = cut(captured, ancestors(captured.graph, value), [value], self._device)
        self._tensors.hold(module.held, captured.tensors)
        self._counters[captured.graph.rows] = module

    def count(self, weight: LossReduction, rows: int, inputs: Mapping[str, torch.Tensor]) -> float:
        """The count that weighs the loss of one micro-batch with these inputs."""
        assert weight.value is not None
        if weight.value in inputs:
            result = inputs[weight.value]
        else:
            module = self._counters[rows]
            arguments = module.arguments(self._tensors.held)
            (result,) = module.module(*arguments, *(inputs[name] for name in module.inputs))
        if weight.ignore is not None:
            result = result != weight.ignore
        return float(result.sum(dtype=torch.float64))
