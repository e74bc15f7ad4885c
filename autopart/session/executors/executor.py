"""One kind of batch in one mode ("step", "loss" or "predict"), at any number of rows: its captures, the code of this
rank's stages, the engine, and the plan of each batch that the engine plays."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from autopart.batch.batch import Batch
from autopart.capture import CaptureCache, Captured
from autopart.ir.plan import Decision
from autopart.ir.program import Program
from autopart.ir.shares import parts
from autopart.ir.size import Size
from autopart.ir.timeline import Span
from autopart.options import Options
from autopart.passes.program.messages import check_messages
from autopart.passes.program.routing import divided_values
from autopart.passes.program.stream import ring_programs, ring_ticks
from autopart.planning.derive.reduction import WHOLE, BatchRule, family_of_batch, loss_reduction, rule_of
from autopart.planning.derive.rows import require_same_program
from autopart.runtime.activity import patient
from autopart.runtime.engine import BatchPlan, Engine, StepOutcome
from autopart.runtime.group.world import World
from autopart.runtime.stages.stage import StageRunner
from autopart.runtime.stream import StreamEngine, Update
from autopart.runtime.sums.finite import unscale
from autopart.runtime.sums.replicas import ReplicaSums, open_sums
from autopart.runtime.sums.shared_values import SharedValues
from autopart.runtime.tensors import LocalTensors
from autopart.session.executors.evaluation import evaluation_program
from autopart.session.executors.step_end import StepEnd, StepEnds
from autopart.session.placement import Placement
from autopart.session.ranks.agreement import FAILURES, from_rank, raise_first
from autopart.session.ranks.call_sync import different_batches
from autopart.session.step.batch_counts import BatchCounts, weighted_loss
from autopart.session.step.data import micro_rows, require_no_questions
from autopart.session.step.loss_shares import (
    Shares,
    count_width,
    counted_shares,
    counting_ranks,
    idle_by_slot,
    is_uneven,
    loss_shares,
    pieces_of,
)
from autopart.session.step.parts import (
    code_sizes,
    digest,
    inputs_of,
    of_micros,
    replicated_of,
    training_program,
)
from autopart.session.step.synced import open_statistics, require_weights, statistics_of, synced_stages
from autopart.stagecode.compilers import EAGER
from autopart.stagecode.stage_code import StageCode


@dataclass(frozen=True, slots=True)
class RankContext:
    """The state that executors of one rank share under a plan.  values: parameters whose optimizer state is shared."""

    world: World
    captures: CaptureCache
    tensors: LocalTensors
    placement: Placement
    values: SharedValues
    options: Options


class Executor:
    """Runs batches of one kind along the stages of a plan.  Every method that runs something is collective.

    planned: the capture that the decision is for.  stand_in: an empty batch, for ranks that are given none.  shares: of
    the last batch in its loss.  fitting: the rows that parts of a batch may have, None for any (`micro_rows`).
    """

    def __init__(
        self, mode: str, context: RankContext, planned: Captured, decision: Decision, rule: BatchRule | None = None
    ) -> None:
        """planned: the capture, in this mode, that `decision` is for.  rule: how such batches are cut; derived from the
        first one if None.  Raises RefusedError and UsageError where batch statistics cannot be shared."""
        self._mode = mode
        self._context = context
        self._world = context.world
        self._tensors = context.tensors
        self.planned = planned
        self._graph = planned.graph
        self.decision = decision
        self._train = mode == "step"
        self._rank = rank = context.world.rank
        self._stages = {stage: decision.stages[stage] for stage in decision.stages_of_rank(rank)}
        self._divisions = tuple(dict.fromkeys(stage.division for stage in decision.stages))
        self._first_rank = decision.stages[0].ranks[0]
        whole = len(decision.micro_rows) == 1 and not any(each.splits for each in self._divisions)
        self._given_rule = BatchRule(WHOLE) if whole else rule
        synced = context.options.sync_batchnorm and self._train
        self._synced = synced_stages(self._world, self._graph, decision) if synced else ()
        statistics = statistics_of(self._world, decision, self._synced)
        self._code = StageCode(
            context.captures, decision, context.tensors, self._world.device, context.values.owners, statistics,
            backend=context.options.backend if self._train else EAGER,
        )  # fmt: skip
        self._counts = BatchCounts(context.tensors, self._world.device)
        self._agreed: dict[tuple[int, ...], Shares | None] = {}
        self._engines: dict[int, Engine] = {}
        self._runners: dict[int, StageRunner] = {}
        self.shares: Shares = {}
        loss = self._graph.value_map()[self._graph.outputs[0]]
        self._ends = StepEnds(self._world, getattr(torch, loss.dtype))
        self.stand_in: Batch | None = None
        self.fitting: range | None = None

    @property
    def rule(self) -> BatchRule:  # known from the first batch on
        assert self._given_rule is not None
        return self._given_rule

    # -- running -------------------------------------------------------------------------------------------------

    def loss(self, plan: BatchPlan, spans: list[Span] | None = None, *, unscaled: float | None = None) -> StepEnd:
        """Return how a step or an evaluation ended, the same on every rank; in training, gradients are accumulated.

        unscaled: gradients are divided by it, and none is accumulated if one is not finite.  None: neither.  spans:
        gets what this rank does.  Raises StageError and WorkerError."""
        with self._play(plan, spans) as outcome:
            end = self._end(plan, outcome, unscaled)
            outcome.commit(gradients=not end.not_finite)
        return end

    def _end(self, plan: BatchPlan, outcome: StepOutcome, unscaled: float | None) -> StepEnd:
        """Return what all ranks know once each has done its part.  Collective."""
        last = self.home(self._graph.outputs[0])
        mine = weighted_loss(outcome.losses, [share[0] for share in plan.shares.get(last, ())])
        given = (self._tensors.masters.by_name, outcome.before)
        first = unscale(self._parameters(), unscaled, *given) if self._train and unscaled is not None else None
        return self._ends.end(mine, first, outcome.computed_ns)

    def predict(self, batch: Batch, plan: BatchPlan) -> Any:
        """Return what the model returns, on every rank, on the CPU."""
        (rows,) = plan.rows
        with self._play(plan) as outcome:
            outcome.commit()
        outputs = outcome.results.get(0, {})
        collected = tuple(self._collect(name, outputs, rows) for name in self._graph.outputs)
        rebuilt = self._capture(batch, rows).outputs
        assert rebuilt is not None
        return rebuilt(collected)

    def _collect(self, name: str, outputs: Mapping[str, torch.Tensor], rows: int) -> torch.Tensor:
        """Return an output of the model from the rank that computed it."""
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

    def count(self, batch: Batch) -> list[float] | None:
        """Return what this rank counts of a whole batch (`_counted`), None if its code is not made yet on all ranks.
        Local; raises BatchError and RefusedError."""
        rows = micro_rows(batch, (), self.decision, self.fitting)
        if rows not in self._agreed:
            return None
        self._code.checks.check_constants()
        return self._counted(batch, rows, sharded=False)

    def begin(self, batch: Batch, counts: Sequence[float]) -> bool:
        """Return whether a step with this batch may begin before the ranks have agreed on it: this rank knows the
        shares, and nothing is left to make or to send before they have.  Local.

        counts: of this rank (`count`), which are those of all pieces on the first rank.
        """
        rows = micro_rows(batch, (), self.decision, self.fitting)
        made = rows in self._agreed and len(rows) in self._engines
        if not (made and self._train) or self._synced:
            return False
        if self._agreed[rows] is None and self._rank != self._first_rank:
            return False
        self.shares = self._shares(rows, counts[1:], sharded=False)
        return True

    def agree(self, batch: Batch, counts: Sequence[float], shards: Sequence[int] = (), before: int = 0) -> None:
        """Find the shares of a batch in its loss together with all ranks.  Collective; raises BatchError on all ranks.

        counts: of the first rank, () to make the code and count now.  shards: rows that each replica of the first stage
        was given, () if each was given the whole batch.  before: micro-batches before the first one of this batch,
        after which replicas that take turns go on.
        """
        rows = (0,) * before + micro_rows(batch, shards, self.decision, self.fitting)
        counts = counts or self._prepare_together(batch, rows, sharded=bool(shards))
        self.shares = self._shares(rows, counts[1:], sharded=bool(shards))
        if self._synced and (weightless := require_weights(rows, self.shares)) is not None:
            raise self._world.known(weightless)

    def plan(
        self, batch: Batch, key: tuple[int, int], scale: float = 1.0, shards: Sequence[int] = (), before: int = 0
    ) -> BatchPlan:
        """Return what this rank's stages take of a batch whose shares are known (`agree`, `begin`).  Local.

        key: of random numbers, (seed, step).  scale: of the loss.  shards, before: as for `agree`.
        """
        rows = (0,) * before + micro_rows(batch, shards, self.decision, self.fitting)
        sharded = bool(shards)
        inputs = self._inputs(batch, rows, sharded=sharded) if 0 in self._stages else ()
        own = {
            number: [replicas[stage.ranks.index(self._rank)] for replicas in self.shares[stage.division]]
            for number, stage in self._stages.items()
        }
        uneven = is_uneven(self.shares)
        rowless = {name for name, layout in self.rule.layouts.items() if layout is None}
        idle = idle_by_slot(self._graph, self.rule.reduction, own, rowless) if self._train and uneven else {}
        return BatchPlan(rows, inputs, key, own, idle, uneven, scale)

    def _inputs(self, batch: Batch, rows: Sequence[int], *, sharded: bool) -> list[Mapping[str, torch.Tensor]]:
        """Return the model's inputs by name, for this rank's rows of each micro-batch; empty if it has none."""
        first = self._stages[0]
        replica = first.ranks.index(self._rank)
        every = [parts(first.division, micro, count) for micro, count in enumerate(rows)]
        if sharded:  # the batch holds these rows alone
            every, replica = [(own[replica],) for own in every], 0
        sizes = [count for own in every for count in own]
        places = range(replica, len(sizes), len(every[0]))
        found = inputs_of(batch, self._graph.inputs, sizes, self._world.device, places)
        return [found.get(place, {}) for place in places]

    def _prepare_together(self, batch: Batch, rows: tuple[int, ...], *, sharded: bool) -> list[float]:
        """Make the code for this batch, and return a digest and the counts of all pieces.  Collective; raises on all
        ranks what any rank finds wrong."""
        if self._given_rule is None:
            derived = partial(self._derived, batch, rows)
            self._given_rule = from_rank(self._world, self._first_rank, "preparing the batch", derived)
        mine: list[float] = []
        failure: BaseException | None = None
        try:
            with patient("preparing the batch"):
                if sharded:
                    require_no_questions(self.planned)
                self.prepare(batch, rows, sharded=sharded)
                mine = self._counted(batch, rows, sharded=sharded)
        except FAILURES as error:
            failure = error
        width, own, first = count_width(self.rule.reduction), iter(mine), self.decision.stages[0].ranks
        seen = next(own, -math.inf) if self._rank in first else -math.inf
        owners = counting_ranks(rows, self._divisions, first, sharded=sharded) if width else ()
        pieces = [next(own, 0.0) if rank == self._rank else -math.inf for rank in owners for _ in range(width)]
        told = [float(failure is not None), seen, -abs(seen), *pieces]
        failed, most, least, *counts = self._world.reduce_numbers(told)
        if failed:
            raise_first(self._world, failure, "preparing the batch")
        if most != -least:
            raise self._world.known(different_batches(first))
        if not sharded:
            self._agreed[rows] = None if width else loss_shares(self.rule.reduction, rows, self._divisions)
        return [most, *counts]

    def _derived(self, batch: Batch, rows: Sequence[int]) -> BatchRule:
        """Return how such batches are cut: a Python value or a length in the batch may choose another loss than the one
        that was planned for."""
        with patient("preparing the batch"):
            several = rows if len(rows) > 1 else [*rows, *rows]
            family = family_of_batch(self._context.captures, batch, several)
            reduction = loss_reduction(family, (several,), self._context.options.loss_reduction)
            divided = divided_values(self.decision, self._graph, self._code.prologue_of(batch))
            return rule_of(family, reduction, *divided)

    def prepare(self, batch: Batch, rows: Sequence[int], *, sharded: bool = False) -> None:
        """Make the code for every number of rows.  Local; raises RefusedError when the model runs another program at
        these shapes than the one that was planned."""
        wanted: dict[int, list[int]] = {}
        for number, stage in self._stages.items():
            for own in code_sizes(stage, self._rank, rows):
                wanted.setdefault(own, []).append(number)
        if not wanted:  # a rank without stages needs the shapes of what the model returns
            wanted = {own: [] for own in code_sizes(self.decision.stages[0], self._first_rank, rows)}
        for own in sorted(wanted, reverse=True):
            if not self._code.has(own, wanted[own]):
                self._code.add(self._capture(batch, own), batch, wanted[own], self.rule)
        if not set(self.rule.reduction.counted()) <= set(self._graph.inputs):
            for own in sorted(set(self._own_sizes(tuple(rows), sharded=sharded)), reverse=True):
                self._counts.add(self._capture(batch, own), self.rule.reduction)
        self._code.checks.check_constants()

    def _capture(self, batch: Batch, rows: int) -> Captured:
        captured = self._context.captures(batch, Size(rows), self._mode)
        require_same_program(captured.graph, self._graph)
        return captured

    def _own_sizes(self, rows: tuple[int, ...], *, sharded: bool) -> list[int]:
        """Return the rows of the pieces that this rank counts."""
        ranks = counting_ranks(rows, self._divisions, self.decision.stages[0].ranks, sharded=sharded)
        pieces = zip(ranks, pieces_of(rows, self._divisions), strict=True)
        return [end - first for rank, (_, first, end) in pieces if rank == self._rank]

    def _counted(self, batch: Batch, rows: tuple[int, ...], *, sharded: bool) -> list[float]:
        """Return a digest of what replicas of the first stage share, then the counts of this rank's pieces."""
        seen = 0.0
        if 0 in self._stages and len(self._stages[0].ranks) > 1:
            seen = digest(t for t, split in batch.plain.tensors_and_splits() if not (split and sharded))
        sizes = self._own_sizes(rows, sharded=sharded)
        if sizes:
            self._code.checks.check_masks(batch, self._graph.inputs)
        if not count_width(self.rule.reduction):
            return [seen]
        inputs = inputs_of(batch, self._graph.inputs, sizes, self._world.device, range(len(sizes)))
        alone = len(pieces_of(rows, self._divisions)) == 1
        measured = self._counts.measured(self.rule.reduction, sizes, list(inputs.values()), alone=alone)
        return [seen, *(number for numbers in measured for number in numbers)]

    def _shares(self, rows: tuple[int, ...], counts: Sequence[float], *, sharded: bool) -> Shares:
        """Return the shares of replicas in the loss of a batch.  counts: of all pieces."""
        if not sharded and (known := self._agreed.get(rows)) is not None:
            return known
        return counted_shares(self.rule.reduction, rows, self._divisions, counts)

    # -- the program and what plays it -----------------------------------------------------------------------------

    def program(self, micros: int) -> Program:
        """Return the verified program for this number of micro-batches."""
        decision, graph = of_micros(self.decision, micros), self._graph
        if self._train:
            program = training_program(decision, graph, self._code.prologue, self._context.placement, self._synced)
        else:
            program = evaluation_program(decision, graph)
        return program if self._world.carrier is None else check_messages(program)

    def engine(self, micros: int) -> Engine:
        """Return the engine that plays this number of micro-batches.  Collective when it is made."""
        if micros not in self._engines:
            program = self.program(micros)
            if not self._engines:
                open_statistics(self._world, self.decision, self._synced)
                self._runners = {stage: self._stage_runner(program, stage) for stage in self._stages}
            loss = None if self._mode == "predict" else self._graph.outputs[0]
            values = self._context.values
            self._engines[micros] = Engine(
                self._world, program, self._runners, self._code.specs, self._graph.op_map(), loss, self._code.layouts,
                self._open_sums(program), values,
            )  # fmt: skip
        return self._engines[micros]

    def stream(self, micros: int, update: Update) -> StreamEngine:
        """Return an engine for asynchronous training with batches of this number of micro-batches.  Collective.

        update: steps the optimizer of this rank's parameters.  Raises PlanError (`streaming_of`)."""
        decision = replace(self.decision, micro_rows=(1,) * micros)
        rhythm, turn, turns = ring_programs(decision, self._graph, self._code.prologue)
        runners = {stage: self._stage_runner(turn, stage) for stage in self._stages}
        ops, loss = self._graph.op_map(), self._graph.outputs[0]
        engine = StreamEngine(self._world, turn, runners, self._code.specs, ops, loss, self._code.layouts)
        ticks = ring_ticks(rhythm, turns, self._rank)
        engine.follow(rhythm, ticks, self._open_sums(turn), self._parameters(), update)
        return engine

    def _open_sums(self, program: Program) -> dict[int, ReplicaSums]:
        owners, held = self._context.values.owners, self._context.placement.tied
        kept = {stage: replicated_of(self._graph, self.decision, stage, owners, held) for stage in self._stages}
        return open_sums(self._world, program, kept)

    def _stage_runner(self, program: Program, stage: int) -> StageRunner:
        back = frozenset(name for e in program.edges if e.dst == stage for name in e.grads)
        out = frozenset(name for e in program.edges if e.src == stage for name in e.grads)
        given = self._code.modules[stage], self._tensors.held, back, out | {self._graph.outputs[0]}
        return StageRunner(*given, synced=stage in self._synced, steady=self.rule.steady)
