"""One rank of a pipeline that has a plan: made together with the other ranks, brought up, and changed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Self

import torch

from autopart.batch.batch import Batch, BatchReader
from autopart.capture import CaptureCache, Captured
from autopart.capture.python.guards import check_autocast, tied_names
from autopart.costs.sources import CostedGraph
from autopart.ir.cluster import Cluster
from autopart.ir.explain import summary
from autopart.ir.graph import Graph
from autopart.ir.plan import Plan
from autopart.ir.program import Program
from autopart.ir.size import Size
from autopart.ir.timeline import Span
from autopart.options import Options
from autopart.passes.program.routing import homes
from autopart.planning.derive.reduction import BatchRule
from autopart.planning.make import Planned, make_plan, read_plan
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
from autopart.session.executors.executor import Executor, RankContext
from autopart.session.executors.kinds import KnownKinds
from autopart.session.lists import BATCH_STEPS, WeightSource, weights_of
from autopart.session.placement import placement_of, relocate
from autopart.session.ranks.agreement import FAILURES, from_rank, require_same_everywhere, together
from autopart.session.ranks.call_sync import Calls, digest_of
from autopart.session.step.data import (
    Arguments,
    first_batch,
    one_batch,
    refuse_target,
)  # fmt: skip
from autopart.session.step.loss_shares import Shares

Preparing = Callable[[], Callable[[RankContext], None]]
"""Checks what follows a plan, and returns what moves it to where the context of another plan needs it.  Collective."""


class SessionPlan:
    """What a rank holds under a plan, and what changes it.

    It is ready after `bring_up`.

    captures: captures of the model.  cluster: the machines.  world: the process group.
    calls: the collective calls of this rank.  batch: the one that was planned for.
    plan: the plan that runs.  context: what this rank holds under the plan.
    tied: first name of each tied tensor, by its other names.
    preparing_s, moving_s: seconds that capturing and making the stages, and moving tensors, took at the last change.
    spans: gets what this rank does in training steps, if it is a list.
    batch_steps: what is done to each batch (`lists.BATCH_STEPS`).
    costs: by which rank 0 chose its last plan; None on other ranks, and for a plan that was given.
    last_shares: rows of each micro-batch of the last batch, and their shares in its loss.  last_executor: that ran it.
    """

    plan: Plan
    context: RankContext
    _captured: Captured
    _training: Executor
    batch: Batch

    def __init__(self, captures: CaptureCache, cluster: Cluster, options: Options) -> None:
        """Join the process group.  Collective.  Raises ClusterError when the processes that run are not those of the
        cluster."""
        self.captures = captures
        self.options = options
        self.cluster = cluster
        self._reader = BatchReader(options.rows_axis)
        self._kinds = KnownKinds()
        self.spans: list[Span] | None = None
        self.tied: Mapping[str, str] = {}
        self.last_shares: tuple[tuple[int, ...], Shares] = ((), {})
        self.last_executor: Executor | None = None
        self._later_values: Values = without_values
        local, timeout_s = cluster.levels[0].size, options.timeout
        self.world = World(cluster.kind, cluster.world, local=local, timeout_s=timeout_s, transport=options.transport)
        self.calls = Calls(self.world)
        self.batch_steps = [make(captures, self.world.device) for make in BATCH_STEPS]
        self.costs: CostedGraph | None = None
        self.preparing_s = self.moving_s = 0.0

    # -- getting there ---------------------------------------------------------------------------------------------

    def bring_up(self, arguments: Arguments, *, sharded: bool = False) -> None:
        """Plan on rank 0 for the batch of these arguments, check that every rank holds the same model, and make this
        rank's stages.  Collective; a request that cannot be met is refused here, on all ranks at once."""
        try:
            with self.calls.collective("compiling"):
                self.calls.enter("compile")()
                with together(self.world, "reading the model and the plan"):
                    # Kept: another plan captures the model at other sizes.
                    self.batch = first_batch(self._read(arguments), sharded=sharded)
                    read_plan(self.options)
                    self.tied = tied_names(self.captures.trained)
                    weights = weights_of(self.captures.trained, self.options.weights, self.options.seed)
                began = time.perf_counter()
                planned = self._plan_together(self.options)
                planning_s = time.perf_counter() - began - self.captures.seconds
                set_activity("comparing weights")
                broadcast_weights_if_different(self.world, planned.captured.tensors)
                device = self.world.device
                values = without_values if weights is None else partial(weights.values, device=device)
                context = self._context_of(planned, values=values)
                executor = self._executor_of(planned, context)
                if weights is not None:
                    self._complete(weights, context)
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
                self.follow_model(training=True)
            move = prepare()
            before, self.batch = self.batch, replace(self.batch, kept=tuple(kept))
            try:
                planned = self._plan_together(replace(self.options, plan=plan))
                context = self._context_of(planned, self.tensors, self._empty)
                executor = self._executor_of(planned, context)
            except BaseException:
                self.batch = before
                raise
            began = time.perf_counter()
            with self.calls.running("moving the weights to another plan"):
                self.tensors.masters.write()
                self.context.values.gather()
                relocate(self.world, self.context.placement, context.placement, self.tensors, context.tensors)
                move(context)
            self.moving_s = time.perf_counter() - began
            self._install(planned, context, executor)
        self._brought_up()

    def _brought_up(self) -> None:
        for each in self.calls.listeners:
            each.brought_up(self.plan)

    def _plan_together(self, options: Options) -> Planned:
        """Return the plan of rank 0 on every rank, each with its own capture.  Collective; an error is raised on all
        ranks."""
        mine: Planned | None = None

        def made() -> tuple[Plan, BatchRule]:
            nonlocal mine
            with patient("planning"):
                mine = make_plan(self.captures, self.batch, self.cluster, options)
            return mine.plan, mine.rule

        plan, rule = from_rank(self.world, 0, "planning", made)
        began = time.perf_counter()
        with together(self.world, "capturing the model"), patient("capturing the model"):
            if mine is None:
                comes = self.options.weights is not None
                self.captures.run_in(plan.provenance.precision, self.cluster.kind, values_come=comes)
                captured = self.captures(self.batch, Size(max(plan.micro_rows)))
                mine = Planned(plan, captured, rule)
            self.batch = self.captures.judged(self.batch)
            fingerprint = (
                f"{mine.captured.graph.shape_digest()} {mine.plan.digest()} {options.seed} {options.master_weights}"
            )
        require_same_everywhere(self.world, fingerprint)
        self.preparing_s = time.perf_counter() - began
        return mine

    def _complete(self, weights: WeightSource, context: RankContext) -> None:
        """Give the model values of what no stage uses, and compare what several ranks have.  Collective."""
        placement, device = context.placement, self.world.device
        with together(self.world, "making the weights"):
            unused = {name: t for name, t in weights.wanted.items() if name not in placement.holders}
            for name, value in weights.values(unused, device).items():
                torch.utils.swap_tensors(unused[name], value)  # type: ignore[no-untyped-call]
        shared = {name: t for name, t in context.tensors.held.items() if len(placement.holders.get(name, ())) > 1}
        require_equal_values(self.world, {n: t for n, t in {**shared, **unused}.items() if n in weights.wanted})

    def _empty(self, wanted: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Return memory for tensors that come from other ranks."""
        return {name: like(tensor, self.world.device) for name, tensor in wanted.items()}

    def _context_of(
        self, planned: Planned, earlier: LocalTensors | None = None, values: Values = without_values
    ) -> RankContext:
        """Return what executors share under a plan.  earlier: tensors that this rank held before.  values: of
        tensors on the meta device.  Collective."""
        graph, decision = planned.captured.graph, planned.plan.decision
        placement = placement_of(graph, decision)
        rank, wanted = self.world.rank, self.options.master_weights
        mastered: Callable[[str], bool] = lambda name: wanted and placement.keeps(rank, name)  # noqa: E731
        tensors = LocalTensors(self.world.device, earlier, mastered, values)
        mine = decision.stages_of_rank(rank)
        tensors.hold([name for name, home in homes(decision, graph).items() if home in mine], planned.captured.tensors)
        if rank in planned.plan.stages[0].ranks:
            tensors.hold(graph.before, planned.captured.tensors)
        shared = SharedValues(self.world, placement.sharing, tensors.held)
        return RankContext(self.world, self.captures, tensors, placement, shared, self.options)

    def _executor_of(self, planned: Planned, context: RankContext) -> Executor:
        """Return the executor of the batches that a plan is for.  Collective."""
        began = time.perf_counter()
        with together(self.world, "making the stages"), patient("making the stages"):
            executor = Executor("step", context, planned.captured, planned.plan.decision, planned.rule)
            executor.prepare(self.batch, (max(planned.plan.micro_rows),))
        if self.world.carrier is not None:  # opens all channels before the first step
            executor.engine(len(planned.plan.micro_rows))
        self.preparing_s += time.perf_counter() - began
        return executor

    def _install(self, planned: Planned, context: RankContext, executor: Executor) -> None:
        context.tensors.settle(self._later_values)
        self.plan, self._captured = planned.plan, planned.captured
        self.costs = planned.costs or self.costs
        self.context = context
        for step in self.batch_steps:
            step.begin(self.batch, max(self.plan.micro_rows))
        context.values.drop_foreign_gradients()
        signature = digest_of(repr(self.batch.signature()))
        self._kinds.clear()
        kind = self._kinds.kind("step", digest_of(self.captures.version), signature, self.batch.rows)
        self._kinds.restart(context, planned.captured.graph, planned.plan.decision, kind, executor)
        self._training = executor
        stages = planned.plan.decision.stages_of_rank(self.world.rank)
        set_rank_label(f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}" if stages else "idle")

    # -- what it is ------------------------------------------------------------------------------------------------

    @property
    def graph(self) -> Graph:
        """The captured graph that was planned."""
        return self._captured.graph

    @property
    def whole_graph(self) -> Graph:
        """The graph of the whole model; it begins before `graph` if the plan begins behind frozen layers.  Local."""
        return self.captures(self.batch.plain, self.graph.size).graph if self.batch.kept else self.graph

    @property
    def last_captured(self) -> Captured:
        """The capture of the last batch, at the size of its largest micro-batch; before the first one, the planned."""
        return self._captured if self.last_executor is None else self.last_executor.planned

    @property
    def ran_as_planned(self) -> bool:
        """Whether the last batch was like the one that the plan is for, and as large."""
        return self.last_executor is self._training and self.last_shares[0] == self.plan.micro_rows

    @property
    def needing(self) -> tuple[int, ...]:
        """The ranks that need the batch of a training step, in the order of its shards; other calls need the first."""
        return self.plan.stages[0].ranks

    @property
    def tensors(self) -> LocalTensors:
        """The tensors that this rank holds."""
        return self.context.tensors

    @property
    def divides_parameters(self) -> bool:
        """Whether some rank does not keep the gradient of every parameter."""
        return any(len(ranks) < self.world.size for ranks in self.context.placement.keepers.values())

    def keeps(self, name: str) -> bool:
        """Return whether an optimizer of this rank updates what it holds under this name.  With zero=1 another replica
        may, and the value here is the one of the last run."""
        return self.context.placement.keeps(self.world.rank, name)

    def home(self, value: str) -> int:
        """Return the first stage that computes a value of the graph."""
        return self._training.home(value)

    def program(self) -> Program:
        """Return what every rank does in one training step."""
        return self._training.program(len(self.plan.micro_rows))

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

    def _read(self, arguments: Arguments, mode: str = "step") -> Batch | None:
        """Return the batch of a call taken apart, None if this rank is given none; in a prediction without target."""
        batch = one_batch(arguments)
        if batch is None:
            return None
        if mode == "predict" and self.options.loss_fn is not None:
            refuse_target(self.captures.model, batch)
        return self._reader.read(batch, with_target=self.options.loss_fn is not None and mode != "predict")

    def follow_model(self, *, training: bool) -> None:
        """Compare the model with its captures, and bring its new values and flags to what this rank holds.  training:
        whether training flags count.  Raises RefusedError for a change that no run can follow."""
        check_autocast(self.world.device.type)
        set_activity("comparing the model with its capture")
        self.tensors.check()
        if toggled := self.tensors.masters.toggled():
            for name, parameter in self.captures.trained.named_parameters():
                parameter.requires_grad_(toggled.get(name, parameter.requires_grad))
        if self.captures.refresh(training=training):
            self.tensors.follow_flags(self.captures.trained.named_parameters())
        self.tensors.masters.write()

    def close(self) -> None:
        """Leave the process group.  The model keeps the weights that this rank holds."""
        self._kinds.clear()
        for step in self.batch_steps:
            step.close()
        self.world.close()


def _predicted(plan: Plan) -> str:
    """Return what a plan says of its step, as the end of a line."""
    return f"; predicted step {plan.step_ns / 1e6:.1f} ms" if plan.step_ns else ""
