"""The running pipeline as the user holds it, one object on every rank.

Every method that moves data between ranks is collective: call it on all ranks, in the same order.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import nn

from autopart.capture import CaptureCache
from autopart.ir.cluster import Cluster
from autopart.ir.errors import NonFiniteError, UsageError
from autopart.ir.plan import Plan
from autopart.ir.program import Program
from autopart.ir.timeline import Timeline
from autopart.options import Options
from autopart.report.plan_table import stage_table
from autopart.runtime.trace import Trace
from autopart.session.call_batch import Arguments
from autopart.session.context import Guard, Mode
from autopart.session.data import own_rows
from autopart.session.measured import gather_timeline
from autopart.session.parts import micro_cut
from autopart.session.scaler import LossScaler
from autopart.session.session import Session
from autopart.session.state import (
    check_norm_type,
    clip_gradients,
    empty_foreign,
    gather_gradients,
    load_state,
    masters_of,
    remembered,
    steps_of,
    sync_at_the_end,
    sync_state,
    take_masters,
    whole_state,
)
from autopart.session.torch_habits import watch_optimizers, without_backward


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
        self._scaler = LossScaler()
        self._skipped = False
        self._restored: Mapping[str, torch.Tensor] = {}
        self._closed = False
        self._unwatch: Callable[[], None] = lambda: None
        if sample is not None:
            self._bring_up(((sample,), {}))

    def _bring_up(self, arguments: Arguments, *, sharded: bool = False) -> Session:
        session = Session(self._captures, self._cluster, self._options)
        session.bring_up(arguments, sharded=sharded)
        self._session = session
        take_masters(session, self._restored)
        self._unwatch = watch_optimizers(session)
        return session

    # -- running -------------------------------------------------------------------------------------------------

    def step(self, *args: Any, sharded: bool = False, **kwargs: Any) -> torch.Tensor:
        """One training step: every micro-batch, forward and backward; gradients are added to `.grad`.

        Takes a batch as described in `capture.batch`, or the model's own positional and keyword arguments; None where
        this rank needs none (`needs_data`).  Returns the loss of the whole batch (0-dim, its backward done) on every
        rank.  Raises BatchError before anything is sent, StageError and WorkerError while running.

        sharded: whether the ranks that need data are each given their own rows (`data_shard`, `data_rows`).  The step
        is that of one process over all of them: micro-batch by micro-batch, the next rows of each shard.

        In fp16 the loss is scaled for the backward (`scaler`), and gradients are what they are without a scale.  Where
        one is not finite, nothing is added to any: `skipped` is True, and `optimizer.step()` is to be left out (it does
        nothing for parameters whose `.grad` is None).
        """
        self._require_open()
        session = self._session or self._bring_up((args, kwargs), sharded=sharded)
        scaler = self.scaler
        how = self._options.non_finite
        looks = scaler is not None or how != "auto"
        guard = Guard(looks, scaler.scale) if scaler is not None else Guard(looks)
        loss, overflow = session.loss(Mode.TRAIN, (args, kwargs), self._steps, guard, sharded=sharded)
        self._steps += 1
        self._skipped = bool(overflow)
        if scaler is not None:
            scaler.update(finite=not overflow)
        if overflow and how == "raise":
            raise session.world.known(_not_finite(overflow, guard))
        return without_backward(loss)

    def eval_loss(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The loss of a batch with the model in eval mode, through the same stages, without gradients.  Only the first
        rank of the first stage needs the batch; others may pass None."""
        return without_backward(self.session.loss(Mode.LOSS, (args, kwargs))[0])

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns in eval mode for this batch, on every rank, on the CPU, through the same stages.

        The batch holds no target; as in `eval_loss`, others than the first may pass None.  Caches and other objects
        that are no tensors are left out of the result.
        """
        return self.session.predict((args, kwargs))

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises UsageError: calling the model says neither whether to train nor what comes back."""
        raise UsageError(
            "a pipe is not called like a model",
            why="forward and backward of all micro-batches run together, so there is no output to call backward() on",
            fix="pipe.step(batch) trains, pipe.eval_loss(batch) and pipe.predict(inputs) evaluate",
        )

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
        self._require_open()
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

    def timeline(self, *args: Any, sharded: bool = False, **kwargs: Any) -> Timeline:
        """Run a training step as `step` does, and return what every rank did in it, in nanoseconds, on every rank.

        Times count from the start of the step on each rank.  `autopart.save_trace` writes it for a viewer, and
        `autopart.simulate` returns the same for the plan.  Raises what `step` raises.
        """
        self._require_open()
        if self._session is None:
            self._bring_up((args, kwargs), sharded=sharded)
        with self.traced() as trace:
            self.step(*args, sharded=sharded, **kwargs)
        with self.session.call("timeline") as session:
            return gather_timeline(session.world, trace.timeline)

    @property
    def needs_data(self) -> bool:
        """Whether this rank needs the batch of a step; others may pass None."""
        return self.rank in self.session.needing

    def data_shard(self) -> tuple[int, int]:
        """(number, of) for a sampler that deals every replica of the first stage as many rows:
        `DistributedSampler(dataset, num_replicas=of, rank=number)`.  A rank that needs no data has the number 0."""
        ranks = self.session.needing
        return (ranks.index(self.rank) if self.needs_data else 0), len(ranks)

    def data_rows(self, rows: int) -> tuple[int, ...]:
        """The places of the rows that this rank needs of a batch of `rows` rows, in the order in which `step` takes
        them as its shard.  A step over these shards is the step over the batch."""
        number, _ = self.data_shard()
        planned = micro_cut(rows, self.plan.micro_rows)
        return own_rows(planned, self.plan.stages[0].division, number) if self.needs_data else ()

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

    @property
    def scaler(self) -> LossScaler | None:
        """What scales the loss in fp16, alike on every rank, and is kept by `state_dict`; None in another precision."""
        return self._scaler if self.plan.provenance.precision == "fp16" else None

    @property
    def skipped(self) -> bool:
        """Whether the last step found gradients that are not finite, on any rank, and added nothing."""
        return self._skipped

    def explain(self) -> str:
        """The stage table: what runs where, with simulated times and memory."""
        return stage_table(self.plan, self.session.graph)

    # -- as of a module ------------------------------------------------------------------------------------------

    @property
    def model(self) -> nn.Module:
        """The model that was compiled.  What other ranks train is old in it until `sync_model` or `close`."""
        return self._captures.model

    def train(self, mode: bool = True) -> Pipe:
        """Set the training flags of the model, as its own train() does; the next step follows them.  Call it on every
        rank.  `eval_loss` and `predict` need no eval(): they run in eval mode."""
        self.model.train(mode)
        return self

    def eval(self) -> Pipe:
        """`train(False)`."""
        return self.train(False)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of this rank's parameters, as the optimizer's zero_grad() does."""
        for parameter in self.parameters():
            if set_to_none or parameter.grad is None:
                parameter.grad = None
            else:
                parameter.grad.detach_().zero_()

    def to(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises UsageError: where and in which precision a pipeline runs is settled when it is compiled."""
        raise UsageError(
            "a pipe cannot be moved or converted",
            why="its plan says which device runs what, and its program in which precision",
            fix="convert the model before compile (model.to(torch.bfloat16)), and name the devices there: "
            'autopart.compile(model, "cuda:4")',
        )

    # -- parameters ----------------------------------------------------------------------------------------------

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters under their original names, tied ones under the first; with zero=1 those that it owns.
        Before the first step of a pipe without a sample: all of the model's."""
        if self._session is None:
            yield from self._captures.trained.named_parameters()
            return
        for name, tensor in self._session.tensors.driven.items():
            if isinstance(tensor, nn.Parameter) and self._session.context.keeps(name):
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
        None where there is none, sparse ones dense.  Sends the size of the model: meant for checks."""
        with self.session.call("gradients") as session:
            return gather_gradients(session)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients so that their global norm over all stages is at most max_norm; tied parameters count
        once.  Returns the norm before, on every rank, as torch.nn.utils.clip_grad_norm_ does."""
        check_norm_type(norm_type)
        with self.session.call("clip_grad_norm_") as session:
            return clip_gradients(session, max_norm, norm_type)

    # -- state ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The whole model's state under its original names, buffers included, on every rank, on the CPU; the plain
        model's load_state_dict takes it.  It remembers `steps`, as long as it is kept by torch.save."""
        with self.session.call("state_dict") as session:
            return whole_state(session, self._steps, self.scaler)

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take over a state of the plain model, given alike on every rank, and `steps` where it is remembered.
        Nothing changes when a name or a shape does not fit (UsageError)."""
        self._require_open()
        load_state(self._captures.trained, self._session, state)
        self._restored = masters_of(state)
        steps = steps_of(state)
        if steps is not None:
            self._steps = steps
        scaler = remembered(state).get("scaler")
        if isinstance(scaler, Mapping):
            self._scaler.load_state_dict(scaler)

    def sync_model(self) -> None:
        """Bring the trained values to the model that was compiled, on every rank, in place: then `model.state_dict()`
        and `model.save_pretrained(...)` have them.  Collective; `close` does it too."""
        with self.session.call("sync_model") as session:
            sync_state(session)

    @property
    def steps(self) -> int:
        """Training steps taken: what random numbers such as dropout's follow.  Set it to go on where another run
        stopped, where a state does not remember it."""
        return self._steps

    @steps.setter
    def steps(self, count: int) -> None:
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise UsageError(f"steps is {count!r}", fix="use the number of steps that were taken, an integer")
        self._steps = count

    # -- ending --------------------------------------------------------------------------------------------------

    def close(self, *, sync: bool = True) -> None:
        """Bring the trained values to the model (`sync_model`) and leave the process group.  Collective, unless it is
        closed already or has failed.

        sync: False where a rank cannot hold the whole model.  Then, and after a failure, parameters and buffers that
        other ranks trained are emptied in the model, so that nobody saves or trains stale values.
        """
        self._unwatch()
        session, self._session, self._closed = self._session, None, True
        if session is None:
            return
        try:
            if sync and session.healthy:
                with session.call("close"):
                    sync_at_the_end(session)
            elif self._steps:
                empty_foreign(session)
        finally:
            session.close()

    def _require_open(self) -> None:
        if self._closed:
            raise UsageError(
                "the pipe is closed",
                fix="compile the model again: it holds the trained values, so that training goes on from there",
            )

    def __enter__(self) -> Pipe:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None and self._session is not None:
            self._session.abandon(error)
        self.close(sync=kind is None)


def _not_finite(where: str, guard: Guard) -> NonFiniteError:
    return NonFiniteError(
        f"the gradient of {where} is infinite or NaN",
        why=f"the loss was scaled by {guard.scale:g}"
        if guard.scale != 1.0
        else "the step diverged, or divided by zero",
        fix='go on with the next batch (gradients are as before the step), or pass non_finite="skip"',
    )
