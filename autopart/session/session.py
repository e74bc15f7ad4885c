"""One rank of a running pipeline: brought up with the other ranks, run, changed and closed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache, partial
from typing import Any, Self

import torch

from autopart.batch.batch import Batch
from autopart.capture import CaptureCache
from autopart.capture.python.guards import tied_names
from autopart.costs.sources import CostedGraph
from autopart.ir.cluster import Cluster
from autopart.ir.graph import Graph, Size
from autopart.ir.plan import Plan, Precision
from autopart.ir.timeline import Span
from autopart.options import Options, stated
from autopart.passes.program.routing import homes
from autopart.planning.derive.reduction import BatchRule
from autopart.planning.make import Planned, make_plan, precision_of, read_plan
from autopart.report.plan_table import summary
from autopart.runtime.activity import patient, set_activity, set_rank_label
from autopart.runtime.group.world import World
from autopart.runtime.sums.shared_values import SharedValues
from autopart.runtime.tensors import (
    LocalTensors,
    Values,
    broadcast_weights_if_different,
    like,
    require_equal_values,
    without_values,
)
from autopart.runtime.watch.progress import tell
from autopart.session.executors.context import RankContext
from autopart.session.executors.executor import Executor
from autopart.session.executors.step_end import StepEnd
from autopart.session.lists import WEIGHTS, Samples, WeightSource
from autopart.session.placement import placement_of, rank_label, relocate
from autopart.session.ranks.agreement import FAILURES, from_rank, require_same_everywhere, together
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
        self._preparing_s = 0.0
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
                    asked = self.captures.trained, self.options.weights, self.options.seed
                    weights = next((found for make in WEIGHTS if (found := make(*asked)) is not None), None)
                began = time.perf_counter()
                planned, self.batch = self._plan(self.batch, self.options)
                planning_s = time.perf_counter() - began - self.captures.seconds
                set_activity("comparing weights")
                broadcast_weights_if_different(self.world, planned.captured.tensors)
                device = self.world.device
                values = without_values if weights is None else partial(weights.values, device=device)
                context = self._context(planned, values=values)
                executor = self._executor(planned, context, self.batch)
                if weights is not None:
                    self._complete(weights, context)
                    self._later_values = partial(weights.unsaved, device=device)
                self._install(planned, context, executor)
                took = f"captured in {self.captures.seconds:.1f} s, planned in {max(0.0, planning_s):.1f} s"
                predicted = f"; predicted step {self.plan.step_ns / 1e6:.1f} ms" if self.plan.step_ns else ""
                tell(f"{took}: {summary(self.plan.decision)}{predicted}")
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

        def empty(wanted: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
            return {name: like(tensor, self.world.device) for name, tensor in wanted.items()}  # they come from others

        with self.call("adopt"):
            with together(self.world, "comparing the model with its capture"):  # layers may have been frozen since
                self.road.follow_model(training=True)
            move = prepare()
            wanted = replace(self.options, plan=plan)
            planned, batch = self._plan(replace(self.batch, kept=tuple(kept)), wanted)
            context = self._context(planned, self.standing.context, empty)
            executor = self._executor(planned, context, batch)
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
        self.standing = Standing(planned.plan, planned.captured, context, executor, self._preparing_s, moving_s)
        self.road.begin(self.standing, self.batch)
        context.values.drop_foreign_gradients()
        set_rank_label(rank_label(planned.plan.decision, self.world.rank))

    # -- what a rank has under a plan, made before anything of the plan that runs is changed -----------------------

    def _plan(self, batch: Batch, options: Options) -> tuple[Planned, Batch]:
        """Return the plan of rank 0 for a batch, on every rank with its own capture, and the batch as captures judge
        it.  Collective; an error is raised on all ranks."""
        mine: Planned | None = None

        def made() -> tuple[Plan, BatchRule]:
            nonlocal mine
            with patient("planning"), self._telling(options) as tell:
                mine = make_plan(self.captures, batch, self.cluster, options, tell=tell)
            return mine.plan, mine.rule

        if self.world.rank:
            self._capture_early(batch)
        decided, rule = from_rank(self.world, 0, "planning", made)
        began = time.perf_counter()
        with together(self.world, "capturing the model"), patient("capturing the model"):
            if mine is None:
                self._run_in(decided.provenance.precision)
                mine = Planned(decided, self.captures(batch, Size(max(decided.micro_rows))), rule)
            batch = self.captures.judged(batch)
            fingerprint = f"{mine.captured.graph.shape_digest()} {mine.plan.digest()}"
        require_same_everywhere(self.world, fingerprint, stated(self.options))
        self._preparing_s = time.perf_counter() - began
        return mine, batch

    @contextmanager
    def _telling(self, options: Options) -> Iterator[Callable[[Size], None]]:
        """Yield what tells the other ranks a size at which the plan is likely to run (`_capture_early`)."""
        told: set[Size | None] = set()
        precision = cache(lambda: precision_of(options, read_plan(options)))  # a plan file is read once

        def tell(size: Size | None) -> None:
            if size not in told:
                told.add(size)
                self.world.broadcast_object((size, precision() if size is not None else None))

        try:
            yield tell
        except FAILURES:
            tell(None)
            raise
        tell(None)

    def _capture_early(self, batch: Batch) -> None:
        """Capture at the sizes that rank 0 expects while it plans; what fails is raised once the plan is there."""
        while (told := self.world.broadcast_object(None))[0] is not None:
            size, precision = told
            with patient("capturing the model"), suppress(*FAILURES):
                self._run_in(precision)
                self.captures(batch, size)

    def _run_in(self, precision: Precision) -> None:
        comes = self.options.weights is not None
        self.captures.run_in(precision, self.cluster.devices[0].device_type, values_come=comes)

    def _context(
        self, planned: Planned, earlier: RankContext | None = None, values: Values = without_values
    ) -> RankContext:
        """Return what executors share under a plan.  earlier: under the plan before.  values: of tensors on the meta
        device.  Collective."""
        graph, decision = planned.captured.graph, planned.plan.decision
        used = placement_of(graph, decision)
        placement = used.with_unused(earlier.placement) if earlier is not None else used
        rank, wanted = self.world.rank, self.options.master_weights
        mastered: Callable[[str], bool] = lambda name: wanted and placement.keeps(rank, name)  # noqa: E731
        before, piece = earlier.tensors if earlier else None, partial(placement.piece, rank)
        tensors = LocalTensors(self.world.device, before, mastered, values, piece)
        mine = decision.stages_of_rank(rank)
        tensors.hold([name for name, home in homes(decision, graph).items() if home in mine], planned.captured.tensors)
        if rank in planned.plan.stages[0].ranks:
            tensors.hold(graph.before, planned.captured.tensors)
        unused = placement.holders.keys() - used.holders.keys()
        tensors.hold([piece.name for piece in unused if rank in placement.holders[piece]], planned.captured.tensors)
        shared = SharedValues(self.world, placement.sharing, tensors.held)
        return RankContext(self.world, self.captures, tensors, placement, shared, self.options)

    def _executor(self, planned: Planned, context: RankContext, batch: Batch) -> Executor:
        """Return the executor of the batches that a plan is for.  Collective."""
        began = time.perf_counter()
        with together(self.world, "making the stages"), patient("making the stages"):
            executor = Executor("step", context, planned.captured, planned.plan.decision, planned.rule)
        executor.agree_on_orders()
        with together(self.world, "making the stages"), patient("making the stages"):
            executor.preparation.prepare(batch, (max(planned.plan.micro_rows),))
        if self.world.carrier is not None:  # opens all channels before the first step
            executor.engine(len(planned.plan.micro_rows))
        self._preparing_s += time.perf_counter() - began
        return executor

    def _complete(self, weights: WeightSource, context: RankContext) -> None:
        """Give the model values of what no stage uses, and compare what several ranks have.  Collective."""
        placement, device = context.placement, self.world.device
        with together(self.world, "making the weights"):
            unused = {name: t for name, t in weights.wanted.items() if placement.owner(name) is None}
            for name, value in weights.values(unused, device).items():
                torch.utils.swap_tensors(unused[name], value)  # type: ignore[no-untyped-call]
        held = {name: (placement.piece(self.world.rank, name), t) for name, t in context.tensors.held.items()}
        shared = {name: t for name, (piece, t) in held.items() if len(placement.holders.get(piece, ())) > 1}
        require_equal_values(self.world, {n: t for n, t in {**shared, **unused}.items() if n in weights.wanted})

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
        return self.standing.captured.graph

    @property
    def whole_graph(self) -> Graph:
        """The graph of the whole model; it begins before `graph` if the plan begins behind frozen layers.  Local."""
        return self.captures(self.batch.plain, self.graph.size).graph if self.batch.kept else self.graph

    @property
    def tensors(self) -> LocalTensors:
        """The tensors that this rank holds."""
        return self.standing.context.tensors

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
