"""The lists by which extras enter a session: where values of a model come from, and what is done to each batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from autopart.batch.batch import Batch
from autopart.capture import CaptureCache
from autopart.capture.trained import Trained
from autopart.ir.graph import Graph
from autopart.ir.plan import Stage
from autopart.runtime.group.world import World
from autopart.runtime.stages.stage_module import StageModule

Samples = Sequence[int | str]
"""The number or name of each row's sample in the data set."""


class WeightSource(Protocol):
    """Values for the tensors of a model that are on the meta device.  wanted: these tensors by name."""

    wanted: dict[str, torch.Tensor]

    def values(self, wanted: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
        """Return new tensors on a device with the values of these, which are some of `wanted`."""

    def unsaved(self, wanted: Mapping[str, torch.Tensor], device: torch.device) -> Mapping[str, torch.Tensor]:
        """Return the same after training has begun.  Raises RefusedError for what a step may have changed."""


WEIGHTS: list[Callable[[Trained, str | None, int], WeightSource | None]] = []
"""What gives a model its values, from the options weights= and seed=; None where the model has them.  An entry checks
everything before a plan is made, and raises UsageError, RefusedError or CheckpointError on the rank that finds it.
"""


class BatchStep(Protocol):
    """Something that is done to every batch of a training step between capture and executor; one for each session."""

    @property
    def active(self) -> bool:
        """Whether the plan that runs needs it."""

    def begin(self, batch: Batch, rows: int) -> None:
        """Go on under a plan for batches like this one.  rows: that are run at once.  Local."""

    def extended(
        self, batch: Batch, samples: Samples | None, own: Sequence[int], tensors: Mapping[str, torch.Tensor]
    ) -> Batch:
        """Return the batch as the plan takes it: the rows `own` are those that this rank needs.  Local; raises
        BatchError and RefusedError.

        samples: names of all rows, None if there are none.  tensors: the model's that this rank holds."""

    def close(self) -> None:
        """Free what is kept."""


BATCH_STEPS: list[Callable[[CaptureCache, torch.device], BatchStep]] = []
"""The steps of a session in their order.  An entry leaves a batch whole and its results equal to those of the model."""


class Sharding(Protocol):
    """Parameters of which each rank of a stage holds one piece, and the code that computes with pieces."""

    def axes(self, graph: Graph, stage: Stage) -> Mapping[str, int]:
        """Return the parameters that the ranks of a stage divide into equal pieces, with the axis that is cut."""

    def rewrite(self, code: StageModule, world: World, ranks: Sequence[int]) -> None:
        """Let the code of a stage compute with this rank's pieces, whose gradients nothing else sums.  Local; what the
        code exchanges goes through the group of these ranks for `batch_statistics.PURPOSE`."""


SHARDINGS: list[Sharding] = []
"""By what stages divide parameters; without an entry every rank holds whole tensors."""
