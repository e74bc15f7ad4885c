"""A plan on running processes: what one rank holds between two steps, and how it gets there.

`bring_up` plans on rank 0, checks that every rank holds the same model, and makes this rank's stage.  `adopt` replaces
the plan while the processes live: weights move to where the new plan wants them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import nn

from autopart.capture import CaptureCache
from autopart.capture.batch import Batch
from autopart.capture.guards import tied_names
from autopart.files.plans import plan_from_json, plan_to_json
from autopart.ir.cluster import Cluster
from autopart.ir.errors import PlanError, UsageError
from autopart.ir.graph import Graph, LossReduction
from autopart.ir.plan import Plan
from autopart.ir.program import Program
from autopart.ir.size import Size
from autopart.options import Options
from autopart.passes.program.projection import project_plan
from autopart.planning import WHOLE, Planned, make_plan, read_plan
from autopart.runtime.activity import set_rank_label
from autopart.runtime.tensors import LocalTensors, broadcast_weights_if_different
from autopart.runtime.trace import Trace
from autopart.runtime.world import World
from autopart.session.agreement import FAILURES, broadcast_result, together
from autopart.session.executor import Executor, Health, Mode, RankContext
from autopart.session.placement import Placement, placement_of, relocate


class Session:
    """One rank of a running pipeline; every rank has one, and calls its methods in the same order.

    captures: the model's captures.  world: the process group as this rank sees it.  tensors: what this rank holds.
    tied: every other name of a tensor to its first.  Ready for use after `bring_up`.
    """

    def __init__(self, captures: CaptureCache, cluster: Cluster, options: Options, batch: Batch) -> None:
        """Join the process group.  Collective.  batch: what is planned for; kept, for other plans capture the model
        at other sizes.  Raises ClusterError when the processes that run are not those of the cluster."""
        self.captures = captures
        self._cluster = cluster
        self._options = options
        self._batch = batch
        self._health = Health()
        self._executors: dict[Mode, Executor] = {}
        self._planned: Planned | None = None
        self._placement = Placement({}, {})
        self._trace: Trace | None = None
        self.tied: Mapping[str, str] = {}
        self.world = World(cluster.kind, cluster.world)
        self.tensors = LocalTensors(self.world.device)

    # -- getting there ---------------------------------------------------------------------------------------------

    def bring_up(self) -> None:
        """Plan, agree, and make this rank's stage.  Collective.

        Everything that can be refused is refused here, on all ranks at once; the process group is then left.
        """
        try:
            with together(self.world, "reading the model and the plan"):
                read_plan(self._options)
                _refuse_meta(self.captures.model)
                self.tied = tied_names(self.captures.model)
            planned = self._plan_together(self._options)
            broadcast_weights_if_different(self.world, planned.captured.tensors)
            tensors = LocalTensors(self.world.device)
            self._install(planned, tensors, self._executor_of(planned, tensors))
        except BaseException:
            self.close()
            raise

    def adopt(self, plan: Plan | str | os.PathLike[str]) -> None:
        """Go on under another plan (rank 0's counts) for the same model, batch and number of ranks.  Collective.

        Parameters, buffers and accumulated gradients move to the ranks that need them.  A plan that cannot be taken is
        refused on all ranks, as `compile(plan=...)` refuses it, and the session goes on under the old one.
        """
        self.require_healthy()
        planned = self._plan_together(replace(self._options, plan=plan))
        tensors = LocalTensors(self.world.device, self.tensors)
        executor = self._executor_of(planned, tensors)
        with self._health.watched("moving the weights to another plan"):
            relocate(self.world, self._placement, _placed(planned), self.tensors.held, tensors.held)
        self._install(planned, tensors, executor)

    def _plan_together(self, options: Options) -> Planned:
        """The plan of rank 0 on every rank, each with its own capture.  Collective; an error is raised on all ranks."""
        mine: Planned | None = None
        content: dict[str, Any] = {}
        failure: BaseException | None = None
        if self.world.rank == 0:
            try:
                mine = make_plan(self.captures, self._batch, self._cluster, options)
                content = {"plan": plan_to_json(mine.plan), "weight": asdict(mine.weight)}
            except FAILURES as error:
                failure = error
        content = broadcast_result(self.world, content, failure, "planning")
        with together(self.world, "capturing the model"):
            if mine is None:
                plan = plan_from_json(content["plan"], "plan of rank 0")
                captured = self.captures(self._batch, Size(max(plan.micro_rows)))
                mine = Planned(plan, captured, LossReduction(**content["weight"]))
            fingerprint = f"{mine.captured.graph.shape_digest()} {mine.plan.digest()} {options.seed}"
        self._require_same_everywhere(fingerprint)
        return mine

    def _require_same_everywhere(self, fingerprint: str) -> None:
        """Every rank must have captured the same program.  Collective; raises PlanError on all ranks."""
        fingerprints = self.world.gather_text(fingerprint)
        for rank, other in enumerate(fingerprints):
            if other != fingerprints[0]:
                raise PlanError(
                    f"ranks 0 and {rank} hold different models or batches",
                    why="their captured programs, or their seeds, differ",
                    fix="build the same model, with the same flags, and pass the same sample and seed on every rank",
                )

    def _executor_of(self, planned: Planned, tensors: LocalTensors) -> Executor:
        """What trains under a plan; holds this rank's share of the model in `tensors`.  Collective."""
        context = RankContext(self.world, self.captures, tensors, self._health)
        executor = Executor(Mode.TRAIN, context, planned.captured, planned.plan.decision, planned.weight)
        with together(self.world, "making the stages"):
            executor.prepare(self._batch, (max(planned.plan.micro_rows),))
        return executor

    def _install(self, planned: Planned, tensors: LocalTensors, executor: Executor) -> None:
        tensors.forget_earlier()
        self._planned = planned
        self._placement = _placed(planned)
        self.tensors = tensors
        self._executors = {Mode.TRAIN: executor}
        executor.trace = self._trace
        stage = planned.plan.decision.stage_of_rank(self.world.rank)
        set_rank_label(f"stage {stage}" if stage is not None else "idle")

    # -- what it is ------------------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The plan that runs."""
        assert self._planned is not None
        return self._planned.plan

    @property
    def graph(self) -> Graph:
        """The captured training graph that was planned."""
        assert self._planned is not None
        return self._planned.captured.graph

    @property
    def owners(self) -> Mapping[str, int]:
        """For each parameter and buffer of the plan, the rank that answers for it."""
        return self._placement.owners

    def program(self) -> Program:
        """What every rank does in one training step."""
        return self._executors[Mode.TRAIN].program(len(self.plan.micro_rows))

    def trace_steps(self, trace: Trace | None) -> None:
        """Record the training steps to come in `trace`, or no more."""
        self._trace = trace
        self._executors[Mode.TRAIN].trace = trace

    # -- running ---------------------------------------------------------------------------------------------------

    def loss(self, mode: Mode, batch: Batch, step: int = 0) -> torch.Tensor:
        """The loss of a batch on every rank; when training, gradients are accumulated.  step: for random numbers.
        Collective."""
        return self._executor(mode, batch).loss(batch, (self._options.seed, step))

    def predict(self, batch: Batch) -> Any:
        """What the model returns in eval mode, on every rank, on the CPU.  Collective."""
        return self._executor(Mode.PREDICT, batch).predict(batch, (self._options.seed, 0))

    def loss_shares(self, batch: Batch) -> tuple[tuple[int, ...], list[float]]:
        """The rows of each micro-batch in a training step, and the share of its loss in the whole.  Collective."""
        executor = self._executor(Mode.TRAIN, batch)
        shares = executor.agree(batch)
        return executor.micro_rows(batch), shares

    def _executor(self, mode: Mode, batch: Batch) -> Executor:
        """What runs this mode; for evaluation made at first use, along the stages of the training plan.  Collective."""
        self.require_healthy()
        if mode not in self._executors:
            with together(self.world, "capturing the model for evaluation"):
                captured = self.captures(batch, Size(batch.rows or 1), mode.value)
                stages = project_plan(captured.graph, self.graph, self.plan.decision)
                context = RankContext(self.world, self.captures, self.tensors, self._health)
                decision = replace(self.plan.decision, stages=stages)
                executor = Executor(mode, context, captured, decision, WHOLE)
            self._executors[mode] = executor
        return self._executors[mode]

    def require_healthy(self) -> None:
        """Raises RunError when something failed here while ranks were running."""
        self._health.require()

    # -- ending ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Leave the process group.  The model keeps the weights that this rank holds."""
        self._executors.clear()
        self.world.close()


def _placed(planned: Planned) -> Placement:
    return placement_of(planned.captured.graph, planned.plan.decision)


def _refuse_meta(model: nn.Module) -> None:
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_meta:
            raise UsageError(
                f"{name} is on the meta device: it has no values to train",
                fix="use autopart.plan for planning alone; to run, build the model with weights",
            )
