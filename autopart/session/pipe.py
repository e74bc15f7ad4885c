"""The running pipeline as the user holds it, one object on every rank.

Every method that moves data between ranks is collective: call it on all ranks, in the same order.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from autopart.capture import CaptureCache
from autopart.capture.batch import Batch, flatten
from autopart.ir.cluster import Cluster
from autopart.ir.errors import BatchError, UsageError
from autopart.ir.plan import Plan
from autopart.ir.program import Program
from autopart.ir.timeline import Timeline
from autopart.options import Options
from autopart.report.plan_table import stage_table
from autopart.runtime.trace import Trace
from autopart.session.executor import Mode
from autopart.session.measured import gather_timeline
from autopart.session.session import Session
from autopart.session.state import clip_gradients, gather_gradients, gather_state, load_state


class Pipe:
    """A planned, running training pipeline; made by `autopart.compile`.

    With a sample it is ready at once, without one at the first `step`.  It is a context manager; `close` ends it.
    After a step that failed while ranks were running, it refuses to run anything more (RunError).
    """

    def __init__(self, captures: CaptureCache, cluster: Cluster, options: Options, sample: Any = None) -> None:
        self._captures = captures
        self._cluster = cluster
        self._options = options
        self._session: Session | None = None
        self._placeholder = nn.Parameter(torch.empty(0))
        self._steps = 0
        if sample is not None:
            self._bring_up(self._flatten(sample))

    def _bring_up(self, batch: Batch) -> Session:
        session = Session(self._captures, self._cluster, self._options, batch)
        session.bring_up()
        self._session = session
        return session

    def _flatten(self, batch: Any) -> Batch:
        return flatten(batch, with_target=self._options.loss_fn is not None)

    # -- running -------------------------------------------------------------------------------------------------

    def step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """One training step: every micro-batch, forward and backward; gradients are added to `.grad`.

        Takes a batch as described in `capture.batch`, or the model's own positional and keyword arguments.  Returns
        the loss of the whole batch (0-dim, detached) on every rank.  Raises BatchError before anything is sent,
        StageError and WorkerError while running.
        """
        batch = self._flatten(_one_batch(args, kwargs))
        session = self._session or self._bring_up(batch)
        loss = session.loss(Mode.TRAIN, batch, self._steps)
        self._steps += 1
        return loss

    def eval_loss(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The loss of a batch with the model in eval mode, through the same stages, without gradients."""
        return self.session.loss(Mode.LOSS, self._flatten(_one_batch(args, kwargs)))

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns in eval mode for this batch, on every rank, on the CPU, through the same stages.

        The batch holds no target.  Caches and other objects that are no tensors are left out of the result.
        """
        return self.session.predict(flatten(_one_batch(args, kwargs)))

    def adopt(self, plan: Plan | str | os.PathLike[str]) -> None:
        """Go on under another plan for the same model, batch and number of ranks: other cuts, micro-batches, schedule.

        Call it between two steps, on every rank; rank 0's plan is taken.  Weights, buffers and gradients that were
        accumulated move to the ranks that need them, and `parameters()` yields others afterwards.  An optimizer is
        yours: make a new one from `parameters()`, and set the state that it should start from; the state of the old one
        stays on the rank where it was.  A plan that cannot be taken raises PlanError or UsageError, and nothing has
        changed.
        """
        self.session.adopt(plan)

    # -- what it is ----------------------------------------------------------------------------------------------

    @property
    def session(self) -> Session:
        """What this rank runs on, for tools and checks.  Raises UsageError before the pipeline has been planned."""
        if self._session is None:
            raise UsageError(
                "the pipeline has not been planned yet",
                why="compile was called without a sample, and no step has run",
                fix="pass sample=batch to compile, or call step(batch) first",
            )
        return self._session

    @property
    def plan(self) -> Plan:
        """The plan that runs."""
        return self.session.plan

    @property
    def cluster(self) -> Cluster:
        """The cluster that was planned for."""
        return self._cluster

    @property
    def program(self) -> Program:
        """What every rank does in one training step, action by action."""
        return self.session.program()

    def timeline(self, *args: Any, **kwargs: Any) -> Timeline:
        """Run a training step as `step` does, and return what every rank did in it, in nanoseconds, on every rank.

        Times count from the start of the step on each rank.  `autopart.save_trace` writes it for a viewer, and
        `autopart.simulate` returns the same for the plan.  Raises what `step` raises.
        """
        if self._session is None:
            self._bring_up(self._flatten(_one_batch(args, kwargs)))
        with self.traced() as trace:
            self.step(*args, **kwargs)
        return gather_timeline(self.session.world, trace.timeline)

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self.session.world.rank

    @contextlib.contextmanager
    def traced(self) -> Iterator[Trace]:
        """Record what this rank does in the training steps run inside."""
        trace = Trace(self.rank)
        self.session.trace_steps(trace)
        try:
            yield trace
        finally:
            self.session.trace_steps(None)

    def explain(self) -> str:
        """The stage table: what runs where, with simulated times and memory."""
        return stage_table(self.plan, self.session.graph)

    # -- parameters ----------------------------------------------------------------------------------------------

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters under their original names, tied ones under the first.  Before the first step of a
        pipe without a sample: all of the model's."""
        if self._session is None:
            yield from self._captures.model.named_parameters()
            return
        for name, tensor in self._session.tensors.held.items():
            if isinstance(tensor, nn.Parameter):
                yield name, tensor

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's parameters: what its optimizer drives.

        A rank that holds none (it idles, or its stage has only the loss) yields an empty one, which no name stands
        for: torch's optimizers refuse an empty list, and the same script has to run on every rank.
        """
        held = [parameter for _, parameter in self.named_parameters()]
        yield from held or [self._placeholder]

    def gradients(self) -> dict[str, torch.Tensor | None]:
        """The gradient of every trainable parameter by original name (tied ones once), on every rank, on the CPU;
        None where there is none.  Sends the size of the model: meant for checks."""
        return gather_gradients(self.session)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients so that their global norm over all stages is at most max_norm; tied parameters count
        once.  Returns the norm before, on every rank, as torch.nn.utils.clip_grad_norm_ does."""
        return clip_gradients(self.session, max_norm, norm_type)

    # -- state ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The whole model's state under its original names, buffers included, on every rank, on the CPU; the plain
        model's load_state_dict takes it."""
        return gather_state(self.session)

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take over a state of the plain model, given alike on every rank.  Nothing changes when a name or a shape
        does not fit (UsageError)."""
        load_state(self._captures.model, self._session, state)

    # -- ending --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Leave the process group, when no other pipe of this process uses it.  The model keeps its weights."""
        if self._session is not None:
            self._session.close()
        self._session = None

    def __enter__(self) -> Pipe:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _one_batch(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs:
        return (args, kwargs) if args else kwargs
    if not args:
        raise BatchError("step was called without a batch", fix="pass the batch that the model takes")
    return args[0] if len(args) == 1 else args
