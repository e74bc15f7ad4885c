"""What may compile the code of stages, by the name of a backend."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Protocol

import torch

from autopart.ir.graph import Op
from autopart.runtime.stages.stage_module import StageModule


class Compiler(Protocol):
    """Compiles the code of the stages of one rank."""

    def compile(
        self,
        code: StageModule,
        tensors: Mapping[str, torch.Tensor],
        specs: Mapping[str, torch.Tensor],
        trained: Collection[str],
        device: torch.device,
    ) -> StageModule:
        """Return code with equal results, made for what it is given in a training step.

        code: whole, in the order of the captured ops; parameters are arguments, and stay leaves.  tensors: what this
        rank holds of the model's.  specs: shapes of values, as meta tensors.  trained: inputs that get a gradient.
        """


EAGER = "eager"
"""The backend that compiles nothing."""
COMPILERS: dict[str, Callable[[Mapping[str, Op]], Compiler]] = {}
"""The compilers; each is made with the ops of the captured graph by name, for module paths and places of warnings.  An
entry keeps results and gradients equal up to rounding; what it cannot compile, it leaves as it is, with a warning.
"""
