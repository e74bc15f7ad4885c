"""One rank of a running pipeline: brought up with the other ranks, run, changed and closed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Self

import torch

from autopart.batch.batch import Batch
from autopart.capture import CaptureCache
from autopart.capture.python.guards import tied_names
from autopart.costs.sources import CostedGraph
from autopart.ir.cluster import Cluster
from autopart.ir.graph import Graph
from autopart.ir.plan import Plan
from autopart.ir.timeline import Span
from autopart.options import Options
from autopart.planning.make import Planned, read_plan
from autopart.report.plan_table import summary
from autopart.runtime.activity import set_activity, set_rank_label
from autopart.runtime.group.world import World
from autopart.runtime.tensors import LocalTensors, Values, broadcast_weights_if_different, without_values
from autopart.runtime.watch.progress import tell
from autopart.session.executors.context import RankContext
from autopart.session.executors.executor import Executor
from autopart.session.executors.step_end import StepEnd
from autopart.session.lists import Samples, weights_of
from autopart.session.making import Maker
from autopart.session.placement import relocate
from autopart.session.ranks.agreement import FAILURES, together
from autopart.session.ranks.call_sync import STEP_FAILED, Calls
from autopart.session.road import CALLS, Road
from autopart.session.standing import Standing
from autopart.session.step.data import Arguments, first_batch

Preparing = Callable[[], Callable[[RankContext], None]]
"""Checks what follows a plan, and returns what moves it to where the context of another plan needs it.  Collective."""


class Session:
    """One rank of a running pipeline; every rank has one, and calls its methods in the same order.

    It is ready after `bring_up`.

    captures: captures of the model.  cluster: the machines.  world: the process group.
    calls: the collective calls of this rank.  batch: the one that was planned for.
    standing: the plan that runs, and what this rank has for it.  road: of each batch to its executor.
    tied: first name of each tied tensor, by its other names.
    spans: gets what this rank does in training steps, if it is a list.
    costs: by which rank 0 chose its last plan; None on other ranks, and for a plan that was given.
    """

    standing: Standing
    batch: Batch

    def __init__(self, captures: CaptureCache, cluster: Cluster, options: Options) -> None:
        """Join the process group.  Collective.  Raises ClusterError when the processes that run are not those of the
        cluster."""
        self.captures = captures
        self.options = options
        self.cluster = cluster
        self.spans: list[Span] | None = None
        self.tied: Mapping[str, str] = {}
        self._later_values: Values = without_values
        local, timeout_s = cluster.levels[0].size, options.timeout
        self.world = World(cluster.kind, cluster.world, local=local, timeout_s=timeout_s, transport=options.transport)
        self.calls = Calls(self.world)
        self.road = Road(self.world, self.calls, captures, options)
        self._maker = Maker(self.world, captures, cluster, options)
        self.costs: CostedGraph | None = None

    # -- getting there ---------------------------------------------------------------------------------------------

    def bring_up(self, arguments: Arguments, *, sharded: bool = False) -> None:
        """Plan on rank 0 for the batch of these arguments, check that every rank holds the same model, and make this
        rank's stages.  Collective; a request that cannot be met is refused here, on all ranks at once."""
        try:
            with self.calls.collective("compiling"):
                self.calls.enter("compile")()
                with together(self.world, "reading the model and the plan"):
                    # Kept: another plan captures the model at other sizes.
                    self.batch = first_batch(self.road.read(arguments), sharded=sharded)
                    read_plan(self.options)
                    self.tied = tied_names(self.captures.trained)
                    weights = weights_of(self.captures.trained, self.options.weights, self.options.seed)
                began = time.perf_counter()
                planned, self.batch = self._maker.plan(self.batch)
                planning_s = time.perf_counter() - began - self.captures.seconds
                set_activity("comparing weights")
                broadcast_weights_if_different(self.world, planned.captured.tensors)
                device = self.world.device
                values = without_values if weights is None else partial(weights.values, device=device)
                context = self._maker.context(planned, values=values)
                executor = self._maker.executor(planned, context, self.batch)
                if weights is not None:
                    self._maker.complete(weights, context)
                    self._later_values = partial(weights.unsaved, device=device)
                self._install(planned, context, executor)
                took = f"captured in {self.captures.seconds:.1f} s, planned in {max(0.0, planning_s):.1f} s"
                tell(f"{took}: {summary(self.plan.decision)}{_predicted(self.plan)}")
            self._brought_up()
        except BaseException:
            self.close()
            raise
        set_activity("between calls")

    def adopt(
        self, plan: Plan | str | os.PathLike[str], prepare: Preparing, kept: Sequence[tuple[str, torch.Tensor]] = ()
    ) -> None:
        """Go on under another plan (rank 0's counts) for the same model, batch and number of ranks.  Collective.

        Parameters, buffers and gradients move to the ranks that need them.  A plan that does not fit is refused on all
        ranks, and nothing has changed.  prepare: called first; what it returns moves what else follows the plan.  kept:
        values that the plan begins with (`Batch.kept`)."""
        with self.call("adopt"):
            with together(self.world, "comparing the model with its capture"):  # layers may have been frozen since
                self.road.follow_model(training=True)
            move = prepare()
            wanted = replace(self.options, plan=plan)
            planned, batch = self._maker.plan(replace(self.batch, kept=tuple(kept)), wanted)
            context = self._maker.context(planned, self.standing.context, self._maker.empty)
            executor = self._maker.executor(planned, context, batch)
            began, before = time.perf_counter(), self.standing.context
            with self.calls.running("moving the weights to another plan"):
                self.tensors.masters.write()
                before.values.gather()
                relocate(self.world, before.placement, context.placement, self.tensors, context.tensors)
                move(context)
            self.batch = batch
            self._install(planned, context, executor, time.perf_counter() - began)
        self._brought_up()

    def _brought_up(self) -> None:
        for each in self.calls.listeners:
            each.brought_up(self.plan)

    def _install(self, planned: Planned, context: RankContext, executor: Executor, moving_s: float = 0.0) -> None:
        context.tensors.settle(self._later_values)
        self.costs = planned.costs or self.costs
        self.standing = Standing(planned.plan, planned.captured, context, executor, self._maker.seconds, moving_s)
        self.road.begin(self.standing, self.batch)
        context.values.drop_foreign_gradients()
        stages = planned.plan.decision.stages_of_rank(self.world.rank)
        set_rank_label(f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}" if stages else "idle")

    # -- running ---------------------------------------------------------------------------------------------------

    def loss(
        self,
        mode: str,
        arguments: Arguments,
        step: int = 0,
        *,
        sharded: bool = False,
        scale: float = 1.0,
        unscaled: float | None = None,
        samples: Samples | None = None,
    ) -> StepEnd:
        """Return how a batch ended: its loss, and the first gradient that is not finite ("" if all are, or are not
        checked).

        In mode "step" gradients are accumulated, unless one is not finite.  step: for random numbers.  sharded: whether
        each replica of the first stage is given its own rows.  scale: of the loss, for its backward.  unscaled: what
        gradients are divided by before they are checked, None to leave them.  samples: names of the rows (`Road.plan`).
        Collective."""
        with self.calls.collective(STEP_FAILED if mode == "step" else f"a {CALLS[mode]} failed"):
            executor, _, plan = self.road.plan(mode, arguments, step, scale, sharded=sharded, samples=samples)
            with self.calls.running(STEP_FAILED):
                end = executor.loss(plan, self.spans if mode == "step" else None, unscaled=unscaled)
            for each in self.calls.listeners if mode == "step" else ():
                each.step_ended(end)
            return end

    def predict(self, arguments: Arguments) -> Any:
        """Return what the model returns in eval mode, on every rank, on the CPU.  Collective."""
        with self.calls.collective("a prediction failed"):
            executor, batch, plan = self.road.plan("predict", arguments)
            with self.calls.running("a prediction failed"):
                return executor.predict(batch, plan)

    # -- what it is ------------------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The plan that runs."""
        return self.standing.plan

    @property
    def graph(self) -> Graph:
        """The captured graph that was planned."""
        return self.standing.graph

    @property
    def whole_graph(self) -> Graph:
        """The graph of the whole model; it begins before `graph` if the plan begins behind frozen layers.  Local."""
        return self.captures(self.batch.plain, self.graph.size).graph if self.batch.kept else self.graph

    @property
    def tensors(self) -> LocalTensors:
        """The tensors that this rank holds."""
        return self.standing.tensors

    # -- calls ------------------------------------------------------------------------------------------------------

    @contextmanager
    def call(self, name: str) -> Iterator[Self]:
        """Run the body once every rank makes this call.  A failure of the body ends the pipe on all ranks.

        Raises UsageError for different calls, and RefusedError when the model has other tensors than the pipeline."""
        failure: BaseException | None = None
        try:
            if name != "close":
                self.captures.check_tensors()
            if name not in ("close", "sync_model", "save_pretrained"):
                self.tensors.masters.check()
        except FAILURES as error:
            failure = error
        with self.calls.collective(name):
            self.calls.enter(name, failure)()
            yield self
        set_activity("between calls")

    def close(self) -> None:
        """Leave the process group.  The model keeps the weights that this rank holds."""
        for each in self.calls.listeners:
            each.closed()
        self.road.close()
        self.world.close()


def _predicted(plan: Plan) -> str:
    """Return what a plan says of its step, as the end of a line."""
    return f"; predicted step {plan.step_ns / 1e6:.1f} ms" if plan.step_ns else ""
