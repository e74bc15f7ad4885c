"""The part of a pipe that trains while batches follow each other without a flush."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from autopart.extras.asynchronous.limits import require_stream
from autopart.extras.asynchronous.training import Training
from autopart.ir.errors import UsageError
from autopart.state.core import Core, Part
from autopart.state.misuse_guards import without_backward
from autopart.state.optimizers import given_as


class Asynchronous(Part):
    """Asynchronous training.  training: the last call of `train`, None before the first."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self.training: Training | None = None

    def train(self, mode: Any = True, *, optimizer: Any = None, scheduler: Any = None) -> Any:
        """Train asynchronously on the batches of an iterable; or set training flags, as a module does.

        `train(batches, optimizer=lambda params: AdamW(params, ...))` returns an iterator of the losses of the batches,
        in order, for plans with schedule="pipedream" or "pipedream-2bw".  Batches follow each other without a flush, so
        the pipeline stays full: each stage steps its optimizer as soon as a batch has come back to it, and each batch
        uses one version of a stage's weights in its forward and its backward.  Losses therefore come some batches late.
        The loop over the losses is collective, and each rank passes the same number of batches; they may be None where
        `needs_data` is False.  A few batches are taken ahead.

        optimizer: called on every rank with the list of its parameters; it may return an existing one, or a list.
        scheduler: called with that optimizer; its result is stepped after every step of the optimizer.  Clipping by a
        norm over all stages is refused, since all gradients never exist at one time; a rank's optimizer may clip its
        own.

        Batches in flight come back at the end of the batches, at `flush`, and before every other collective call.  All
        stages have then made the updates of all batches.

        With r replicas in turn a stage makes one update for r batches, with the mean of their gradients.
        docs/asynchronous_training.md states which version of the weights a batch uses.  Raises UsageError and
        RefusedError before the first batch for a plan or model that cannot be trained like this, and what `step` raises
        while running.

        `train()` and `train(mode)` with a bool set the training flags of the model on this rank.
        """
        if optimizer is None and isinstance(mode, bool):
            self.core.model.train(mode)
            return self
        if not callable(optimizer) or isinstance(optimizer, torch.optim.Optimizer):
            raise UsageError(
                "pipe.train(batches) was given no function that makes an optimizer",
                why="the optimizer of each rank is stepped while batches are in flight",
                fix="pipe.train(batches, optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3))",
            )
        session = self.core.session
        require_stream(session.plan, session.graph, self.core.options, blocking=session.world.carrier is not None)
        if self.training is not None:
            self.training.end("another call of pipe.train")
            session.calls.listeners.remove(self.training)
        made = optimizer([parameter for _, parameter in self.core.named_parameters()])
        following = scheduler(made) if scheduler is not None else None
        paced = following if isinstance(following, list | tuple) else [] if following is None else [following]
        update = partial(_stepped, [*given_as("optimizer", made), *paced])
        self.training = Training(self.core, update)
        session.calls.listeners.append(self.training)
        return (without_backward(loss) for loss in self.training.losses(mode))

    def flush(self) -> None:
        """Wait until all batches that entered in `train` have come back and all stages have made their updates.
        Collective; does nothing if no batch is in flight."""
        session = self.core.session
        with session.calls.collective("a flush failed"):
            if self.training is not None:
                self.training.flush()


def _stepped(each: Sequence[Any]) -> None:
    for one in each:
        one.step()
