"""A plan on running processes: what one rank holds between two steps, and how it gets there.

`bring_up` plans on rank 0, checks that every rank holds the same model, and makes this rank's stage.  `adopt` replaces
the plan while the processes live: weights move to where the new plan wants them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from autopart.capture import CaptureCache
from autopart.capture.batch.batch import Batch, BatchReader
from autopart.capture.batch.stand_in import with_rows
from autopart.capture.derive.reduction import BatchRule
from autopart.capture.guards import tied_names
from autopart.capture.trained import refuse_meta
from autopart.files.plans import plan_from_json, plan_to_json
from autopart.ir.cluster import Cluster
from autopart.ir.errors import BatchError
from autopart.ir.graph import Graph
from autopart.ir.plan import Plan
from autopart.ir.program import Program
from autopart.ir.size import Size
from autopart.options import Options
from autopart.planning.make import Planned, make_plan, read_plan
from autopart.runtime.activity import patient, set_activity, set_rank_label
from autopart.runtime.group.world import World
from autopart.runtime.sums.shared_values import SharedValues
from autopart.runtime.tensors import LocalTensors, broadcast_weights_if_different
from autopart.runtime.trace import Trace
from autopart.session.context import UNGUARDED, Guard, Mode, RankContext
from autopart.session.executor import Executor
from autopart.session.kinds import largest_part, new_executor
from autopart.session.placement import Placement, placement_of, relocate
from autopart.session.ranks.agreement import FAILURES, broadcast_result, require_same_everywhere, together
from autopart.session.ranks.call_sync import ROOM, Calls, Heard, digest_of
from autopart.session.ranks.health import Health
from autopart.session.state.misuse_guards import refuse_target
from autopart.session.step.call_batch import Arguments, first_batch, one_batch
from autopart.session.step.data import rows_of_shards, shared_stand_in
from autopart.session.step.loss_shares import LossShares

_CALLS = {Mode.TRAIN: "step", Mode.LOSS: "eval_loss", Mode.PREDICT: "predict"}
_Kind = tuple[Mode, float, float]
"""Of batches: the mode, and digests of the model's version and of the batch's signature, alike on all ranks."""
_KEEP = 32  # kinds of batches whose executor is remembered


class Session:
    """One rank of a running pipeline; every rank has one, and calls its methods in the same order.

    captures: the model's captures.  world: the process group as this rank sees it.  tensors: what this rank holds.
    tied: every other name of a tensor to its first.  Ready for use after `bring_up`.
    """

    def __init__(self, captures: CaptureCache, cluster: Cluster, options: Options) -> None:
        """Join the process group.  Collective.  Raises ClusterError when the processes that run are not those of the
        cluster."""
        self.captures = captures
        self._cluster = cluster
        self._options = options
        self._reader = BatchReader()
        self._health = Health()
        self._kinds: dict[_Kind, Executor] = {}
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
        self.context = self._context_of()

    # -- getting there ---------------------------------------------------------------------------------------------

    def bring_up(self, arguments: Arguments, *, sharded: bool = False) -> None:
        """Plan for the batch of these arguments, agree, and make this rank's stages.  Collective.

        Everything that can be refused is refused here, on all ranks at once; the process group is then left.
        """
        try:
            with self.collective("compiling"):
                self._calls.enter("compile")
                with together(self.world, "reading the model and the plan"):
                    # Kept, for other plans capture the model at other sizes.
                    self._batch = first_batch(self._read(arguments), sharded=sharded)
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
        if self.world.carrier is not None:  # so that no step finds a channel closed
            executor.engine(len(planned.plan.micro_rows))
        return executor

    def _install(self, planned: Planned, context: RankContext, executor: Executor) -> None:
        context.tensors.forget_earlier()
        self._planned = planned
        self.context = context
        context.values.keep_own()
        signature = digest_of(repr(self._batch.signature()))
        self._kinds = {(Mode.TRAIN, digest_of(self.captures.version), signature): executor}
        self._training = executor
        executor.trace = self._trace
        stages = planned.plan.decision.stages_of_rank(self.world.rank)
        set_rank_label(f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}" if stages else "idle")

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
        for executor in self._kinds.values():
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
        with self.collective(name):
            self._calls.enter(name, failure)
            yield self
        set_activity("between calls")

    @contextmanager
    def collective(self, doing: str) -> Iterator[None]:
        """Tell all ranks, within a second, of an error of the body that not all of them raise alike: nothing is sent
        any more, and what they wait in ends.  Raises what failed first, on whichever rank."""
        try:
            yield
        except BaseException as error:
            first = self.world.end(error)
            if self.world.size > 1 and not self.world.is_known(error):
                self._health.note(doing, first)
            if first is error:
                raise
            raise first from None  # the broken connection only follows from it

    def loss(
        self, mode: Mode, arguments: Arguments, step: int = 0, guard: Guard = UNGUARDED, *, sharded: bool = False
    ) -> tuple[torch.Tensor, str]:
        """The loss of a batch on every rank, and with a guard where a gradient is not finite; when training, gradients
        are accumulated unless one is.  step: for random numbers.  sharded: whether the replicas of the first stage have
        rows of their own.  Collective."""
        self.require_healthy()
        with self.collective(f"a {_CALLS[mode]} failed"):
            executor, batch, said, shards = self._agreed(mode, arguments, scale=guard.scale, sharded=sharded)
            plan = executor.plan(batch, said, (self._options.seed, step), guard.scale, shards)
            found = executor.loss(plan, guard)
        return found

    def predict(self, arguments: Arguments) -> Any:
        """What the model returns in eval mode, on every rank, on the CPU.  Collective."""
        self.require_healthy()
        with self.collective("a prediction failed"):
            executor, batch, said, _ = self._agreed(Mode.PREDICT, arguments)
            result = executor.predict(batch, executor.plan(batch, said, (self._options.seed, 0)))
        return result

    def loss_shares(self, sample: Any) -> LossShares:
        """The shares of micro-batches and replicas in the loss of a training step.  Collective."""
        self.require_healthy()
        with self.collective("verifying"):
            executor, batch, said, _ = self._agreed(Mode.TRAIN, ((sample,), {}), "verify")
            found = executor.shares(batch, said)
        return found

    # -- the road of a batch, up to its plan (`Executor.plan`) ---------------------------------------------------------

    def _read(self, arguments: Arguments, mode: Mode = Mode.TRAIN) -> Batch | None:
        """The batch of a call taken apart, None where this rank is given none.  For a prediction it holds no target."""
        batch = one_batch(arguments)
        if batch is None:
            return None
        if mode is Mode.PREDICT and self._options.loss_fn is not None:
            refuse_target(self.captures.model, batch)
        return self._reader.read(batch, with_target=self._options.loss_fn is not None and mode is not Mode.PREDICT)

    def _agreed(
        self, mode: Mode, arguments: Arguments, call: str | None = None, scale: float = 1.0, *, sharded: bool = False
    ) -> tuple[Executor, Batch, Sequence[Sequence[float]], tuple[int, ...]]:
        """What runs the batch of a call, the batch as this rank has it, what every rank says of it, and the rows of
        each shard.  Collective; raises on all ranks what any rank finds wrong.

        A batch of a kind that came before takes one exchange, and another where shards are given.
        """
        batch: Batch | None = None
        failure: BaseException | None = None
        said: Sequence[float] | None = None
        signature, version = "", ""
        try:
            batch = self._read(arguments, mode)
            self.context.follow_model(training=mode is Mode.TRAIN)
            if batch is not None and not sharded:
                with patient("capturing the model"):
                    batch = self.captures.settled(batch, largest_part(batch, mode, self.plan.decision), mode.value)
            signature, version = repr(batch.signature()) if batch is not None else "", self.captures.version
            known = self._kinds.get((mode, digest_of(version), digest_of(signature)))
            if batch is None:  # what others say is enough, unless buffers have to be compared here
                said = None if self.plan.decision.token_slices else ()
            elif known is not None and not sharded:
                said = known.said(batch)
        except FAILURES as error:
            failure = error
        needed = self.needing if mode is Mode.TRAIN else self.needing[:1]
        heard = self._calls.enter(
            call or _CALLS[mode], failure, needed=needed, signature=signature, version=version,
            rows=(batch.rows or 0) if batch is not None else 0, scale=scale, sharded=sharded,
            said=said if said is None or len(said) <= ROOM else None,
        )  # fmt: skip
        kind = mode, digest_of(version), heard.signature
        stand_in = self._stand_in(kind, batch, heard, needed) if heard.missing or sharded else None
        shards = tuple(heard.rows[rank] for rank in needed) if sharded else ()
        if shards:
            self._require_whole(shards)
        if batch is None or (sharded and self.world.rank not in needed):
            assert stand_in is not None
            batch = with_rows(stand_in, sum(shards) if sharded else heard.rows[needed[0]])
        executor = self._executor(kind, batch, shards)
        executor.stand_in = stand_in or executor.stand_in
        return executor, batch, heard.said or executor.agree(batch, shards), shards

    def _stand_in(self, kind: _Kind, batch: Batch | None, heard: Heard, needed: Sequence[int]) -> Batch:
        """What stands for a batch on ranks that were given none.  Collective when it is made."""
        known = self._kinds.get(kind)
        if known is not None and known.stand_in is not None:
            return known.stand_in
        return shared_stand_in(self.world, batch, needed[0], heard.signature)

    def _require_whole(self, shards: tuple[int, ...]) -> None:
        """Raises BatchError on all ranks for shards that do not make a batch."""
        try:
            rows_of_shards(shards, self.plan.decision)
        except BatchError as error:
            raise self.world.known(error) from None

    def _executor(self, kind: _Kind, batch: Batch, shards: tuple[int, ...]) -> Executor:
        """What runs such batches; made at first use, along the stages of the training plan.  Collective.

        A batch of another kind, or a model that was changed, may run another program than the one that was planned.
        """
        if kind in self._kinds:
            self._kinds[kind] = self._kinds.pop(kind)  # the last one to be forgotten
        else:
            with together(self.world, "capturing the model"), patient("capturing the model"):
                decision = self.plan.decision
                executor = new_executor(kind[0], self.context, batch, shards, self.graph, decision)
                executor.trace = self._trace if executor.train else None
                self._kinds[kind] = executor
            if len(self._kinds) > _KEEP:
                del self._kinds[next(iter(self._kinds))]
        return self._kinds[kind]

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
        self._kinds.clear()
        self.world.close()
