"""A plan on running processes: what one rank holds between two steps, and how it gets there.

`bring_up` plans on rank 0, checks that every rank holds the same model, and makes this rank's stage.  `adopt` replaces
the plan while the processes live: weights move to where the new plan wants them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from autopart.capture import CaptureCache
from autopart.capture.batch import Batch
from autopart.capture.guards import check_autocast, tied_names
from autopart.capture.reduction import WHOLE, BatchRule
from autopart.capture.rows import program_key
from autopart.capture.trained import refuse_meta
from autopart.files.plans import plan_from_json, plan_to_json
from autopart.ir.cluster import Cluster
from autopart.ir.graph import Graph
from autopart.ir.plan import Plan, Stage
from autopart.ir.program import Program
from autopart.ir.size import Size
from autopart.options import Options
from autopart.passes.program.projection import check_gradients_stay, project_plan
from autopart.planning import Planned, make_plan, read_plan
from autopart.runtime.activity import patient, set_activity, set_rank_label
from autopart.runtime.shared_values import SharedValues
from autopart.runtime.tensors import LocalTensors, broadcast_weights_if_different
from autopart.runtime.trace import Trace
from autopart.runtime.world import World
from autopart.session.agreement import FAILURES, broadcast_result, require_same_everywhere, together
from autopart.session.batch_counts import PartWeights
from autopart.session.calls import Calls, Given
from autopart.session.context import UNGUARDED, Guard, Mode, RankContext
from autopart.session.data import KnownBatches, Taken, micro_rows, require_no_questions
from autopart.session.executor import Executor
from autopart.session.health import Health
from autopart.session.placement import Placement, placement_of, relocate

_CALLS = {Mode.TRAIN: "step", Mode.LOSS: "eval_loss", Mode.PREDICT: "predict"}
Read = Callable[[], Batch | None]
"""Takes the batch of a call apart; None where this rank was given none."""
_KEEP = 32  # kinds of batches whose executor is remembered


class Session:
    """One rank of a running pipeline; every rank has one, and calls its methods in the same order.

    captures: the model's captures.  world: the process group as this rank sees it.  tensors: what this rank holds.
    tied: every other name of a tensor to its first.  Ready for use after `bring_up`.
    """

    def __init__(self, captures: CaptureCache, cluster: Cluster, options: Options, read: Callable[[], Batch]) -> None:
        """Join the process group.  Collective.  read: takes the batch apart that is planned for.  Raises ClusterError
        when the processes that run are not those of the cluster."""
        self.captures = captures
        self._cluster = cluster
        self._options = options
        self._read = read
        self._health = Health()
        self._executors: dict[object, Executor] = {}
        self._chosen: dict[object, Executor] = {}
        self._training: Executor | None = None
        self._planned: Planned | None = None
        self._trace: Trace | None = None
        self.tied: Mapping[str, str] = {}
        self.world = World(
            cluster.kind,
            cluster.world,
            local=cluster.levels[0].size,
            timeout_s=options.timeout,
            transport=options.transport,
        )
        self._calls = Calls(self.world)
        self._known = KnownBatches(self.world)
        self.context = self._context_of()

    # -- getting there ---------------------------------------------------------------------------------------------

    def bring_up(self) -> None:
        """Plan, agree, and make this rank's stage.  Collective.

        Everything that can be refused is refused here, on all ranks at once; the process group is then left.
        """
        try:
            with self.told("compiling"):
                self._calls.enter("compile")
                with together(self.world, "reading the model and the plan"):
                    self._batch = self._read()  # kept, for other plans capture the model at other sizes
                    read_plan(self._options)
                    refuse_meta(self.captures.trained)
                    self.tied = tied_names(self.captures.trained)
                planned = self._plan_together(self._options)
                set_activity("comparing weights")
                broadcast_weights_if_different(self.world, planned.captured.tensors)
                context = self._context_of(planned)
                self._install(planned, context, self._executor_of(planned, context))
        except BaseException:
            self.close()
            raise
        set_activity("between calls")

    def adopt(self, plan: Plan | str | os.PathLike[str]) -> None:
        """Go on under another plan (rank 0's counts) for the same model, batch and number of ranks.  Collective.

        Parameters, buffers and accumulated gradients move to the ranks that need them.  A plan that cannot be taken is
        refused on all ranks, as `compile(plan=...)` refuses it, and the session goes on under the old one.
        """
        with self.call("adopt"):
            planned = self._plan_together(replace(self._options, plan=plan))
            context = self._context_of(planned, self.tensors)
            executor = self._executor_of(planned, context)
            with self._health.watched("moving the weights to another plan"):
                self.tensors.masters.write()
                self.context.values.gather()
                relocate(self.world, self.context.placement, context.placement, self.tensors, context.tensors)
            self._install(planned, context, executor)

    def _plan_together(self, options: Options) -> Planned:
        """The plan of rank 0 on every rank, each with its own capture.  Collective; an error is raised on all ranks."""
        mine: Planned | None = None
        content: dict[str, Any] = {}
        failure: BaseException | None = None
        if self.world.rank == 0:
            try:
                with patient("planning"):
                    mine = make_plan(self.captures, self._batch, self._cluster, options)
                content = {"plan": plan_to_json(mine.plan), "rule": mine.rule.to_json()}
            except FAILURES as error:
                failure = error
        content = broadcast_result(self.world, content, failure, "planning")
        with together(self.world, "capturing the model"), patient("capturing the model"):
            if mine is None:
                plan = plan_from_json(content["plan"], "plan of rank 0")
                self.captures.run_in(plan.provenance.precision, self._cluster.kind)
                captured = self.captures(self._batch, Size(max(plan.micro_rows)))
                mine = Planned(plan, captured, BatchRule.from_json(content["rule"]))
            self._batch = self.captures.judged(self._batch)
            fingerprint = (
                f"{mine.captured.graph.shape_digest()} {mine.plan.digest()} {options.seed} {options.master_weights}"
            )
        require_same_everywhere(self.world, fingerprint)
        return mine

    def _context_of(self, planned: Planned | None = None, earlier: LocalTensors | None = None) -> RankContext:
        """What executors share under a plan.  earlier: what this rank held before.  Collective."""
        placement = Placement() if planned is None else placement_of(planned.captured.graph, planned.plan.decision)
        rank, wanted = self.world.rank, self.has_masters
        tensors = LocalTensors(self.world.device, earlier, lambda name: wanted and placement.keeps(rank, name))
        values = SharedValues(self.world, placement.sharing, tensors.held)
        stated, synced = self._options.loss_reduction, self._options.sync_batchnorm
        return RankContext(self.world, self.captures, tensors, placement, values, self._health, stated, synced)

    def _executor_of(self, planned: Planned, context: RankContext) -> Executor:
        """What trains under a plan.  Collective."""
        executor = Executor(Mode.TRAIN, context, planned.captured, planned.plan.decision, planned.rule)
        with together(self.world, "making the stages"), patient("making the stages"):
            executor.prepare(self._batch, (max(planned.plan.micro_rows),))
        if self.world.carrier is not None:
            executor.open(len(planned.plan.micro_rows))
        return executor

    def _install(self, planned: Planned, context: RankContext, executor: Executor) -> None:
        context.tensors.forget_earlier()
        self._planned = planned
        self.context = context
        context.values.keep_own()
        self._executors = {(Mode.TRAIN, program_key(planned.captured.graph)): executor}
        self._chosen.clear()
        self._training = executor
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
    def needing(self) -> tuple[int, ...]:
        """The ranks that need the batch of a training step, in the order of its shards; of another call the first."""
        return self.plan.stages[0].ranks

    @property
    def tensors(self) -> LocalTensors:
        """What this rank holds."""
        return self.context.tensors

    @property
    def has_masters(self) -> bool:
        """Whether parameters in half precision that are trained have masters, each with whoever drives it."""
        return self._options.master_weights

    @property
    def owners(self) -> Mapping[str, int]:
        """For each parameter and buffer of the plan, the rank that answers for it."""
        return self.context.placement.owners

    def program(self) -> Program:
        """What every rank does in one training step."""
        assert self._training is not None
        return self._training.program(len(self.plan.micro_rows))

    def trace_steps(self, trace: Trace | None) -> None:
        """Record the training steps to come in `trace`, or no more."""
        self._trace = trace
        for executor in self._executors.values():
            executor.trace = trace if executor.train else None

    # -- running ---------------------------------------------------------------------------------------------------

    @contextmanager
    def call(self, name: str) -> Iterator[Session]:
        """The body is a collective call, entered once every rank makes it; raises on all ranks when they do not, and
        RefusedError when the model has other tensors than the pipeline; closing goes on all the same.

        A failure inside is told to all ranks, and ends the pipe."""
        self.require_healthy()
        failure: BaseException | None = None
        try:
            if name != "close":
                self.captures.check_tensors()
            if name not in ("close", "sync_model"):
                self.tensors.masters.check()
        except FAILURES as error:
            failure = error
        with self.told(name):
            self._calls.enter(name, failure=failure)
            yield self
        set_activity("between calls")

    @contextmanager
    def told(self, doing: str) -> Iterator[None]:
        """What the body raises that not all ranks raise alike reaches them within a second: nothing is sent any more,
        and what they wait in ends.  Raised is what failed first, on whichever rank."""
        try:
            yield
        except BaseException as error:
            first = self.world.end(error)
            if self.world.size > 1 and not self.world.is_known(error):
                self._health.note(doing, first)
            if first is error:
                raise
            raise first from None  # the broken connection only follows from it

    def take(
        self, mode: Mode, read: Read, call: str | None = None, scale: float = 1.0, *, sharded: bool = False
    ) -> Taken:
        """What this rank was given of a batch, once all have read theirs and hold the same model.  Collective.

        read: takes the batch apart, None where this rank was given none; what it raises is raised on all ranks.
        scale: of the loss, alike on all.  sharded: whether the replicas of the first stage have rows of their own.
        """
        batch: Batch | None = None
        given, failure = Given(), None
        try:
            batch = read()
            check_autocast(self.world.device.type)
            set_activity("comparing the model with its capture")
            self._check_held()
            if self.captures.refresh(training=mode is Mode.TRAIN):
                self.tensors.follow_flags(self.captures.trained.named_parameters())
            self.tensors.masters.write()
            if batch is not None and not sharded:
                with patient("capturing the model"):
                    batch = self.captures.settled(batch, self._largest(batch, mode), mode.value)
            signature, rows = (repr(batch.signature()), batch.rows or 0) if batch is not None else ("", 0)
            given = Given(signature, self.captures.version, rows, scale, sharded)
        except FAILURES as error:
            failure = error
        needed = self.needing if mode is Mode.TRAIN else self.needing[:1]
        heard = self._calls.enter(call or _CALLS[mode], given, failure, needed)
        return self._known.taken(batch, heard, needed, self.plan.decision, sharded=sharded)

    def _check_held(self) -> None:
        """Raises RefusedError when what this rank holds was changed so that no run can follow; flags of masters go to
        the model."""
        self.tensors.check()
        if toggled := self.tensors.masters.toggled():
            for name, parameter in self.captures.trained.named_parameters():
                parameter.requires_grad_(toggled.get(name, parameter.requires_grad))

    def loss(
        self, mode: Mode, read: Read, step: int = 0, guard: Guard = UNGUARDED, *, sharded: bool = False
    ) -> tuple[torch.Tensor, str]:
        """The loss of a batch on every rank, and with a guard where a gradient is not finite; when training, gradients
        are accumulated unless one is.  step: for random numbers.  sharded: as for `take`.  Collective."""
        self.require_healthy()
        with self.told(f"a {_CALLS[mode]} failed"):
            taken = self.take(mode, read, scale=guard.scale, sharded=sharded)
            found = self._executor(mode, taken).loss(taken.batch, (self._options.seed, step), guard, taken.shards)
        return found

    def predict(self, read: Read) -> Any:
        """What the model returns in eval mode, on every rank, on the CPU.  Collective."""
        self.require_healthy()
        with self.told("a prediction failed"):
            taken = self.take(Mode.PREDICT, read)
            batch = taken.batch
            result = self._executor(Mode.PREDICT, taken).predict(batch, (self._options.seed, 0))
        return result

    def loss_weights(self, batch: Batch) -> tuple[tuple[int, ...], PartWeights]:
        """The rows of each micro-batch in a training step, and what weighs the losses of its parts.  Collective."""
        self.require_healthy()
        with self.told("verifying"):
            taken = self.take(Mode.TRAIN, lambda: batch, "verify")
            executor, batch = self._executor(Mode.TRAIN, taken), taken.batch
            micro_rows = executor.micro_rows(batch)
            weights = executor.agree(batch, micro_rows)
        return micro_rows, weights

    def _executor(self, mode: Mode, taken: Taken) -> Executor:
        """What runs this mode for such batches; made at first use, along the stages of the training plan.  Collective.

        A batch of another kind, or a model that was changed, may run another program than the one that was planned.
        """
        key = (mode, self.captures.version, taken.batch.signature(), bool(taken.shards))
        if key not in self._chosen:
            with together(self.world, "capturing the model"), patient("capturing the model"):
                self._chosen[key] = self._find_executor(mode, taken)
            if len(self._chosen) > _KEEP:
                del self._chosen[next(iter(self._chosen))]
        return self._chosen[key]

    def _largest(self, batch: Batch, mode: Mode, shards: Sequence[int] = ()) -> Size:
        """The largest part of this batch that is run at once."""
        return Size(max(micro_rows(batch, shards, self.plan.decision)) if mode is Mode.TRAIN else batch.rows or 1)

    def _find_executor(self, mode: Mode, taken: Taken) -> Executor:
        captured = self.captures(taken.batch, self._largest(taken.batch, mode, taken.shards), mode.value)
        if taken.shards:
            require_no_questions(captured)
        program = mode, program_key(captured.graph)
        if program not in self._executors:
            stages = self._stages_of(captured.graph, mode)
            if mode is Mode.TRAIN:
                check_gradients_stay(captured.graph, stages, self.graph, self.plan.decision)
            if mode is not Mode.TRAIN:  # a batch is evaluated whole, which is exact for any model: by first replicas
                stages = tuple(replace(stage, ranks=stage.ranks[:1], shares=(), policy="split") for stage in stages)
            decision = replace(self.plan.decision, stages=stages)
            if mode is not Mode.TRAIN:
                decision = replace(decision, token_slices=())
            rule = None if mode is Mode.TRAIN else BatchRule(WHOLE)
            self._executors[program] = Executor(mode, self.context, captured, decision, rule)
            self._executors[program].trace = self._trace if mode is Mode.TRAIN else None
        return self._executors[program]

    def _stages_of(self, graph: Graph, mode: Mode) -> tuple[Stage, ...]:
        """The plan's stages for a program that it was not made for; its own where only gradients flow differently."""
        same = [(op.name, op.target) for op in graph.ops] == [(op.name, op.target) for op in self.graph.ops]
        if same and mode is Mode.TRAIN:
            return self.plan.decision.stages
        return project_plan(graph, self.graph, self.plan.decision)

    @property
    def healthy(self) -> bool:
        """Whether nothing failed here while ranks were running."""
        return self._health.good

    def require_healthy(self) -> None:
        """Raises RunError when something failed here while ranks were running."""
        self._health.require()

    def abandon(self, error: BaseException) -> None:
        """An error of the user's own code ends the pipe, perhaps on this rank alone: the others hear of it at once."""
        if self.world.size > 1 and self.healthy and not self.world.is_known(error):
            self._health.note("the script", error)
            self.world.fail(error)

    # -- ending ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Leave the process group.  The model keeps the weights that this rank holds."""
        self._executors.clear()
        self._chosen.clear()
        self.world.close()
