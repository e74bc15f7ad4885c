"""What a rank runs for batches of one signature: its stage's code and the shapes of all values, by number of rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from autopart.capture import Captured
from autopart.capture.reduction import Layouts
from autopart.ir.graph import Adjusted
from autopart.ir.plan import Stage
from autopart.ir.program import Program
from autopart.runtime.stage_module import StageModule
from autopart.runtime.tensors import LocalTensors
from autopart.runtime.transport import Spec
from autopart.session.split import stage_module


class StageCode:
    """The dictionaries are handed to engine and stage runner once and filled, or emptied, later."""

    def __init__(self, tensors: LocalTensors, device: torch.device) -> None:
        self._tensors = tensors
        self._device = device
        self.modules: dict[int, StageModule] = {}
        self.specs: dict[int, Mapping[str, Spec]] = {}

    def clear(self) -> None:
        """Forget everything: a batch of another signature comes."""
        self.modules.clear()
        self.specs.clear()

    def has(self, rows: int) -> bool:
        """Whether everything for micro-batches of so many rows has been made."""
        return rows in self.specs

    def add_specs(self, captured: Captured) -> None:
        """Note shapes and dtypes of all values at the rows of `captured`."""
        self.specs[captured.graph.rows] = {
            value.name: Spec(value.shape, getattr(torch, value.dtype)) for value in captured.graph.values
        }

    def add_stage(
        self,
        captured: Captured,
        program: Program,
        stage: int,
        planned: Stage,
        adjusted: Sequence[Adjusted],
        layouts: Layouts,
    ) -> None:
        """Cut the stage out of `captured` and hold the tensors that it uses."""
        module = stage_module(captured, program, stage, planned, self._device, adjusted, layouts)
        self._tensors.hold(module.held, captured.tensors)
        self.modules[captured.graph.rows] = module
