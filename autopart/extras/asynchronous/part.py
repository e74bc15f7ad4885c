"""The part of a pipe that trains while batches follow each other without a flush, and what has no meaning then."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from autopart.extras.asynchronous.training import Training
from autopart.ir.errors import RefusedError, UsageError
from autopart.ir.graph import Graph
from autopart.ir.plan import Plan
from autopart.options import Options
from autopart.passes.program.named import BUILT_IN
from autopart.passes.program.routing import tied
from autopart.passes.program.schedules import find, streams
from autopart.passes.program.stream import require_two_versions
from autopart.state.core import Core, Part
from autopart.state.misuse_guards import without_backward
from autopart.state.optimizers import given_as

STREAMED = tuple(schedule.name for schedule in BUILT_IN if streams(schedule))
"""The schedules whose plans are trained by `pipe.train`."""


def require_stream(plan: Plan, graph: Graph, options: Options, *, blocking: bool) -> None:
    """Raise UsageError for a plan with another schedule, and RefusedError for what asynchronous training cannot do.

    blocking: whether the transport blocks where messages are posted (NCCL).
    """
    if not streams(find(plan.schedule)):
        raise UsageError(
            f"pipe.train(batches) needs an asynchronous schedule, and the plan has {plan.schedule}",
            why="it steps the optimizer of every stage while other batches are in flight",
            fix=f"compile with schedule={' or '.join(map(repr, STREAMED))}; with {plan.schedule} call pipe.step(batch) "
            "and optimizer.step()",
        )
    require_two_versions(plan.decision)
    decision, ranks = plan.decision, [rank for stage in plan.stages for rank in stage.ranks]
    half = [p.name for p in graph.params if p.trainable and p.dtype in ("float16", "bfloat16")]
    shared = [name for name, _ in tied(decision, graph)]
    refused: Mapping[str, tuple[object, str]] = {
        f"{shared[0] if shared else ''}, which several stages use": (
            shared, "keep its uses on one stage (cuts=), or use a copy for each"),
        f"{half[0] if half else ''} in half precision": (half, 'keep parameters in fp32 and use precision="bf16"'),
        "fp16 and its loss scale": (plan.provenance.precision == "fp16", 'use precision="bf16"'),
        "non_finite=": (options.non_finite != "auto", "leave it out, and look at the losses"),
        "statistics that replicas share (sync_batchnorm)": (options.sync_batchnorm, "leave sync_batchnorm out"),
        "slices of sequences": (decision.token_slices, "leave token_slices out"),
        "an optimizer state that replicas share": (decision.zero, "use zero=0"),
        "several stages on a rank": (len(set(ranks)) < len(ranks), "use a plan with one stage for each rank"),
        "messages over NCCL": (blocking, 'compile with transport="gloo"'),
    }  # fmt: skip
    for what, (found, instead) in refused.items():
        if found:
            raise RefusedError(
                f"schedule {plan.schedule} cannot train with {what}",
                why="each stage updates its weights as soon as a batch has come back to it, while others are in flight",
                fix=f"{instead}; or use a synchronous schedule, such as schedule='1f1b'",
            )


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
        self.training = Training(self.core, [*given_as("optimizer", made), *paced])
        session.calls.listeners.append(self.training)
        return (without_backward(loss) for loss in self.training.losses(mode))

    def flush(self) -> None:
        """Wait until all batches that entered in `train` have come back and all stages have made their updates.
        Collective; does nothing if no batch is in flight."""
        session = self.core.session
        with session.calls.collective("a flush failed"):
            if self.training is not None:
                self.training.flush()
