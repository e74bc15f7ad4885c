"""One kind of batch in one mode ("step", "loss" or "predict"), at any number of rows: its captures, the code of this
rank's stages, the engine, and the plan of each batch that the engine plays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from autopart.batch.batch import Batch
from autopart.capture import Captured
from autopart.ir.plan import Decision
from autopart.ir.program import Program
from autopart.ir.shares import parts_of_all
from autopart.ir.timeline import Span
from autopart.passes.program.messages import check_messages
from autopart.passes.program.stream import ring_programs, ring_ticks
from autopart.planning.derive.reduction import BatchRule
from autopart.runtime.engine import Engine, StepOutcome
from autopart.runtime.messages.mailbox import Mailbox
from autopart.runtime.messages.stream_mailbox import StreamMailbox
from autopart.runtime.player import BatchPlan, Player
from autopart.runtime.stages.batch_statistics import PURPOSE
from autopart.runtime.stages.stage import StageRunner
from autopart.runtime.stream import StreamEngine, Update
from autopart.runtime.sums.reduce import unscale
from autopart.runtime.sums.replicas import ReplicaSums, open_sums
from autopart.runtime.sums.shared_values import SharedValues
from autopart.session.executors.context import RankContext
from autopart.session.executors.evaluation import evaluation_program
from autopart.session.executors.preparation import Preparation
from autopart.session.executors.step_end import StepEnd, StepEnds
from autopart.session.ranks.agreement import from_rank
from autopart.session.step.batch_counts import weighted_loss
from autopart.session.step.loss_shares import idle_by_slot, is_uneven
from autopart.session.step.parts import inputs_of, of_micros, replicated_of, training_program
from autopart.session.step.synced import members_of, open_shards, rewrites_of, synced_stages
from autopart.stagecode.compilers import EAGER
from autopart.stagecode.memory import orders_of
from autopart.stagecode.stage_code import StageCode


class Executor:
    """Runs batches of one kind along the stages of a plan.  Every method that runs something is collective.

    planned: the capture that the decision is for.  preparation: of each batch.  stand_in: an empty batch, for ranks
    that are given none.
    """

    def __init__(
        self, mode: str, context: RankContext, planned: Captured, decision: Decision, rule: BatchRule | None = None
    ) -> None:
        """planned: the capture, in this mode, that `decision` is for.  rule: how such batches are cut; derived from the
        first one if None.  Raises RefusedError and UsageError where batch statistics cannot be shared."""
        self._context, self._world, self._tensors = context, context.world, context.tensors
        self.planned, self._graph, self.decision = planned, planned.graph, decision
        self._mode, self._train = mode, mode == "step"
        self._rank = rank = context.world.rank
        self._stages = {stage: decision.stages[stage] for stage in decision.stages_of_rank(rank)}
        synced = context.options.sync_batchnorm and self._train
        self._synced = synced_stages(self._world, self._graph, decision) if synced else ()
        rewrites = rewrites_of(self._world, self._graph, decision, context.placement, self._synced)
        self._members = members_of(self._world, decision)
        self._code = StageCode(
            context.captures, decision, context.tensors, self._world.device, context.values.owners, rewrites,
            backend=context.options.backend if self._train else EAGER, members=self._members,
            held=context.placement.held,
        )  # fmt: skip
        self.preparation = Preparation(mode, context, planned, decision, self._code, rule, synced=bool(self._synced))
        self._engines: dict[int, Engine] = {}
        self._runners: dict[int, StageRunner] = {}
        loss = self._graph.value_map()[self._graph.outputs[0]]
        self._ends = StepEnds(self._world, getattr(torch, loss.dtype))
        self.stand_in: Batch | None = None

    def agree_on_orders(self) -> None:
        """Take over how values lie in memory on the first rank, before code is made: others may have been given a batch
        that lies otherwise, or none.  Collective."""
        first = self.decision.stages[0].ranks[0]
        self._code.orders.update(from_rank(self._world, first, "making the stages", partial(orders_of, self.planned)))

    # -- running -------------------------------------------------------------------------------------------------

    def loss(self, plan: BatchPlan, spans: list[Span] | None = None, *, unscaled: float | None = None) -> StepEnd:
        """Return how a step or an evaluation ended, the same on every rank; in training, gradients are accumulated.

        unscaled: gradients are divided by it, and none is accumulated if one is not finite.  None: neither.  spans:
        gets what this rank does.  Raises StageError and WorkerError."""
        with self._play(plan, spans) as outcome:
            last = self.home(self._graph.outputs[0])
            first_of_shards = last not in self._members or self._members[last].index == 0
            own = [share[0] for share in plan.shares.get(last, ())] if first_of_shards else ()
            first: str | None = None
            if self._train and unscaled is not None:  # first: then a device has all its work before one waits
                first = unscale(self._parameters(), unscaled, self._tensors.masters.by_name, outcome.before)
            mine = weighted_loss(outcome.losses, own)
            end = self._ends.end(mine, first, outcome.computed_ns)
            outcome.commit(gradients=not end.not_finite)
        return end

    def predict(self, batch: Batch, plan: BatchPlan) -> Any:
        """Return what the model returns, on every rank, on the CPU."""
        (rows,) = plan.rows
        with self._play(plan) as outcome:
            outcome.commit()
        outputs = outcome.results.get(0, {})
        collected = tuple(self._collect(name, outputs, rows) for name in self._graph.outputs)
        rebuilt = self.preparation.capture(batch, rows).outputs
        assert rebuilt is not None
        return rebuilt(collected)

    def _collect(self, name: str, outputs: Mapping[str, torch.Tensor], rows: int) -> torch.Tensor:
        owner = self.decision.stages[self.home(name)].ranks[0]
        if owner == self._rank:
            data = outputs[name].detach().cpu().contiguous()
        else:
            spec = self._code.specs[rows][name]
            data = torch.empty(spec.shape, dtype=spec.dtype)
        return self._world.broadcast(data, owner)

    def _play(self, plan: BatchPlan, spans: list[Span] | None = None) -> StepOutcome:
        engine = self.engine(len(plan.rows))
        engine.spans = spans
        if not self._train:  # some replicas may not run: gather while they have values to give
            self._context.values.gather()
        return engine.step(plan, self._parameters(), train=self._train, masters=self._tensors.masters.by_name)

    def _parameters(self) -> dict[str, nn.Parameter]:
        return {name: t for name, t in self._tensors.held.items() if isinstance(t, nn.Parameter)}

    def home(self, value: str) -> int:
        """Return the first stage that computes a value."""
        writer = self._graph.writer()[value]
        return next(number for number, stage in enumerate(self.decision.stages) if writer in stage.ops)

    # -- from a batch to its plan ----------------------------------------------------------------------------------

    def begin(self, batch: Batch, counts: Sequence[float]) -> bool:
        """Return whether a step with this batch may begin before the ranks have agreed on it: this rank knows the
        shares, and nothing is left to make or to send before they have.  Local.

        counts: of this rank (`Preparation.count`), which are those of all pieces on the first rank.
        """
        return len(self.preparation.rows_of(batch)) in self._engines and self.preparation.begin(batch, counts)

    def plan(
        self, batch: Batch, key: tuple[int, int], scale: float = 1.0, shards: Sequence[int] = (), before: int = 0
    ) -> BatchPlan:
        """Return what this rank's stages take of a batch whose shares are known (`Preparation.agree`, `begin`).  Local.

        key: of random numbers, (seed, step).  scale: of the loss.  shards, before: as for `Preparation.agree`.
        """
        rows = self.preparation.rows_of(batch, shards, before)
        shares, rule = self.preparation.shares, self.preparation.rule
        sharded = bool(shards)
        inputs = self._inputs(batch, rows, sharded=sharded) if 0 in self._stages else ()
        own = {
            number: [replicas[stage.ranks.index(self._rank)] for replicas in shares[stage.division]]
            for number, stage in self._stages.items()
        }
        uneven = is_uneven(shares)
        rowless = {name for name, layout in rule.layouts.items() if layout is None}
        idle = idle_by_slot(self._graph, rule.reduction, own, rowless) if self._train and uneven else {}
        return BatchPlan(rows, inputs, key, own, idle, uneven, scale)

    def _inputs(self, batch: Batch, rows: Sequence[int], *, sharded: bool) -> list[Mapping[str, torch.Tensor]]:
        """Return the model's inputs by name, for this rank's rows of each micro-batch; empty if it has none."""
        first = self._stages[0]
        replica = first.ranks.index(self._rank) // first.shards
        every = tuple(own[:: first.shards] for own in parts_of_all(first.division, tuple(rows)))
        if sharded:  # the batch holds these rows alone
            every, replica = tuple((own[replica],) for own in every), 0
        sizes = [count for own in every for count in own]
        places = range(replica, len(sizes), len(every[0]))
        found = inputs_of(batch, self._graph.inputs, sizes, self._world.device, places)
        return [found.get(place, {}) for place in places]

    # -- the program and what plays it -----------------------------------------------------------------------------

    def program(self, micros: int) -> Program:
        """Return the verified program for this number of micro-batches."""
        decision, graph = of_micros(self.decision, micros), self._graph
        if self._train:
            code, placement, steady = self._code, self._context.placement, self.preparation.rule.steady
            program = training_program(decision, graph, code.prologue, placement, tuple(sorted(code.rewrites)), steady)
        else:
            program = evaluation_program(decision, graph)
        return program if self._world.carrier is None else check_messages(program, self._world.rank)

    def engine(self, micros: int) -> Engine:
        """Return the engine that plays this number of micro-batches.  Collective when it is made, at first use."""
        if micros not in self._engines:
            program = self.program(micros)
            if not self._engines:
                for stage in self._code.rewrites:  # whose ranks compute together, in groups of their own
                    self._world.group(self.decision.stages[stage].ranks, purpose=PURPOSE)
                open_shards(self._world, self.decision)
                self._runners = {stage: self._runner(program, stage) for stage in self._stages}
            player = self._player(program, self._runners, Mailbox, self._sums(program), self._context.values)
            self._engines[micros] = Engine(self._world, player)
        return self._engines[micros]

    def stream(self, micros: int, update: Update) -> StreamEngine:
        """Return an engine for asynchronous training with batches of this number of micro-batches.  Collective.

        update: steps the optimizer of this rank's parameters.  Raises PlanError (`streaming_of`)."""
        decision = replace(self.decision, micro_rows=(1,) * micros)
        rhythm, turn, turns = ring_programs(decision, self._graph, self._code.prologue)
        runners = {stage: self._runner(turn, stage) for stage in self._stages}
        player = self._player(turn, runners, StreamMailbox, {}, None)
        ticks = ring_ticks(rhythm, turns, self._rank)
        return StreamEngine(player, rhythm, ticks, self._sums(turn), self._parameters(), update)

    def _player(
        self,
        program: Program,
        runners: Mapping[int, StageRunner],
        mailbox: type[Mailbox],
        sums: Mapping[int, ReplicaSums],
        values: SharedValues | None,
    ) -> Player:
        code, ops = self._code, self._graph.op_map()
        loss = None if self._mode == "predict" else self._graph.outputs[0]
        messages = mailbox(self._world, program, code.specs, code.layouts, code.orders)
        return Player(self._world, program, runners, code.specs, ops, loss, messages, sums, values)

    def _sums(self, program: Program) -> dict[int, ReplicaSums]:
        owners, placement = self._context.values.owners, self._context.placement
        kept = {stage: replicated_of(self._graph, self.decision, stage, owners, placement) for stage in self._stages}
        return open_sums(self._world, program, kept)

    def _runner(self, program: Program, stage: int) -> StageRunner:
        back = frozenset(name for e in program.edges if e.dst == stage for name in e.grads)
        out = frozenset(name for e in program.edges if e.src == stage for name in e.grads)
        given = self._code.modules[stage], self._tensors.held, back, out | {self._graph.outputs[0]}
        return StageRunner(*given, synced=stage in self._synced, steady=self.preparation.rule.steady)
