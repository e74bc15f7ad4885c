"""One kind of batch in one mode (a training step, an evaluation loss, a prediction), at any number of rows.

An executor captures the model once per number of rows, requires that each capture is the program that was planned,
cuts this rank's stages out of it, and makes of each batch the plan that the engine plays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autopart.capture import Captured
from autopart.capture.batch.batch import Batch
from autopart.capture.derive.reduction import WHOLE, BatchRule, family_of_batch, loss_reduction, row_layouts
from autopart.capture.derive.rows import require_same_program
from autopart.capture.trace.export import rebuild_outputs
from autopart.ir.graph import Graph
from autopart.ir.plan import Decision
from autopart.ir.program import Program
from autopart.ir.shares import RowLayout
from autopart.ir.size import Size
from autopart.passes.program.messages import check_messages
from autopart.passes.program.routing import divided_values, edges
from autopart.passes.program.schedules import find
from autopart.runtime.activity import patient
from autopart.runtime.engine import BatchPlan, Engine, StepOutcome
from autopart.runtime.stages.batch_statistics import BatchStatistics
from autopart.runtime.stages.sliced_stage import SlicedRunner
from autopart.runtime.stages.stage import StageRunner
from autopart.runtime.sums.finite import unscale
from autopart.runtime.trace import Trace
from autopart.session.code.slicing import TokenSlicing
from autopart.session.code.stage_code import StageCode
from autopart.session.context import UNGUARDED, Guard, Mode, RankContext
from autopart.session.ranks.agreement import FAILURES, broadcast_result, raise_first
from autopart.session.step.batch_counts import BatchCounts, weighted_loss
from autopart.session.step.data import micro_rows, require_no_questions
from autopart.session.step.loss_shares import LossShares, count_width, idle_values, loss_shares, pieces_of, places_of
from autopart.session.step.parts import code_sizes, digest, inputs_of, require_same_batch, shared_of, stage_inputs
from autopart.session.step.programs import evaluation_program, require_updatable, training_program
from autopart.session.step.synced import open_statistics, require_known, require_weights, synced_stages

Key = tuple[int, int]
"""Of random numbers: (seed, step)."""
Shards = Sequence[int]
"""The rows that each replica of the first stage was given; empty where each was given the whole batch."""


class Executor:
    """Runs batches of one kind along the stages of a plan.  Every method that runs something is collective."""

    def __init__(
        self,
        mode: Mode,
        context: RankContext,
        planned: Captured,
        decision: Decision,
        rule: BatchRule | None = None,
    ) -> None:
        """planned: the capture, in this mode, that `decision` is for.  rule: how such batches are cut, None where that
        has to be derived."""
        self._mode = mode
        self._context = context
        self._world = context.world
        self._tensors = context.tensors
        self._planned = planned
        self._decision = decision
        self._rank = rank = context.world.rank
        self._stages = {stage: decision.stages[stage] for stage in decision.stages_of_rank(rank)}
        self._divisions = tuple(dict.fromkeys(stage.division for stage in decision.stages))
        self._first_rank = decision.stages[0].ranks[0]
        whole = len(decision.micro_rows) == 1 and not any(each.splits for each in self._divisions)
        self._rule = BatchRule(WHOLE) if whole or not self.train else rule
        self._synced = synced_stages(planned.graph, decision) if context.sync_batchnorm and self.train else ()
        self._statistics = {stage: BatchStatistics() for stage in self._stages if stage in self._synced}
        self._code = StageCode(context.tensors, self._world.device, context.values.owners, self._statistics)
        self._counts = BatchCounts(context.tensors, self._world.device)
        self._slicing = TokenSlicing(context.captures, decision, context.tensors, self._world.device)
        self._layouts: dict[str | tuple[str, int], RowLayout] = {}
        self._agreed: dict[tuple[int, ...], LossShares | None] = {}
        self._engines: dict[int, Engine] = {}
        self._runners: dict[int, StageRunner] = {}
        self._update = find(decision.schedule).update if self.train else None
        self.stand_in: Batch | None = None  # for ranks that were given no batch
        self.trace: Trace | None = None

    @property
    def graph(self) -> Graph:
        """The graph that was planned."""
        return self._planned.graph

    @property
    def train(self) -> bool:
        """Whether gradients are computed."""
        return self._mode is Mode.TRAIN

    @property
    def rule(self) -> BatchRule:
        """How batches of this kind are cut; known once a batch was prepared."""
        assert self._rule is not None
        return self._rule

    # -- running -------------------------------------------------------------------------------------------------

    def loss(self, plan: BatchPlan, guard: Guard = UNGUARDED) -> tuple[torch.Tensor, str]:
        """The loss of the whole batch, 0-dim on the CPU, on every rank; when training, gradients are accumulated.

        With it, where the guard looks: where a gradient is not finite, on the same step of all ranks; then no gradient
        is accumulated.  "" where all are finite.  Raises StageError and WorkerError.
        """
        with self._context.health.watched("a step failed"), self._play(plan) as outcome:
            total, overflow = self._shared_loss(plan, outcome, guard)
            outcome.commit(gradients=not overflow)
        output = self.graph.value_map()[self.graph.outputs[0]]
        return torch.tensor(total, dtype=getattr(torch, output.dtype)), overflow

    def _shared_loss(self, plan: BatchPlan, outcome: StepOutcome, guard: Guard) -> tuple[float, str]:
        """The loss, once all ranks have done their part, and where a gradient is infinite.  Collective."""
        last = self._home(self.graph.outputs[0])
        mine = weighted_loss(outcome.losses, [share[0] for share in plan.shares.get(last, ())])
        given = (self._tensors.masters.by_name, outcome.before)
        first = unscale(self._parameters(), guard.scale, *given) if self.train and guard.looks else None
        everyone = self._world.gather_numbers([mine, float(first is not None)])
        total = sum(everyone[rank][0] for rank in self._decision.stages[last].ranks)
        if not any(row[1] for row in everyone):
            return total, ""
        names = self._world.gather_text(first or "")
        return total, next(f"{name} on rank {rank}" for rank, name in enumerate(names) if name)

    def predict(self, batch: Batch, plan: BatchPlan) -> Any:
        """What the model returns, on every rank, on the CPU."""
        (rows,) = plan.rows
        with self._context.health.watched("a prediction failed"):
            with self._play(plan) as outcome:
                outcome.commit()
            outputs = outcome.results.get(0, {})
            collected = tuple(self._collect(name, outputs, rows) for name in self.graph.outputs)
        form = self._capture(batch, rows).outputs
        assert form is not None
        return rebuild_outputs(form, collected)

    def _collect(self, name: str, outputs: Mapping[str, torch.Tensor], rows: int) -> torch.Tensor:
        """An output of the model, from the rank that computed it."""
        owner = self._decision.stages[self._home(name)].ranks[0]
        if owner == self._rank:
            data = outputs[name].detach().cpu().contiguous()
        else:
            spec = self._code.specs[rows][name]
            data = torch.empty(spec.shape, dtype=spec.dtype)
        return self._world.broadcast(data, owner)

    def _play(self, plan: BatchPlan) -> StepOutcome:
        engine = self.engine(len(plan.rows))
        engine.trace = self.trace
        if not self.train:  # by first replicas, while the others have values to give
            self._context.values.gather()
        return engine.step(plan, self._parameters(), train=self.train, masters=self._tensors.masters.by_name)

    def _parameters(self) -> dict[str, nn.Parameter]:
        return {name: t for name, t in self._tensors.held.items() if isinstance(t, nn.Parameter)}

    def _home(self, value: str) -> int:
        """The first stage that computes a value."""
        writer = self.graph.writer()[value]
        return next(number for number, stage in enumerate(self._decision.stages) if writer in stage.ops)

    # -- from a batch to its plan ----------------------------------------------------------------------------------

    def micro_rows(self, batch: Batch, shards: Shards = ()) -> tuple[int, ...]:
        """Rows of each micro-batch of this batch.  Evaluation takes a batch whole, which is exact for any model."""
        return micro_rows(batch, shards, self._decision)

    def said(self, batch: Batch) -> list[float] | None:
        """What this rank has to say of a whole batch before its step (`_measured`), None where its code is yet to be
        made, on all ranks.  Local; raises BatchError and RefusedError."""
        rows = self.micro_rows(batch)
        if rows not in self._agreed:
            return None
        self._slicing.check_constants()
        return self._measured(batch, rows, sharded=False)

    def agree(self, batch: Batch, shards: Shards = ()) -> list[list[float]]:
        """Make the code for this batch, of whose kind all ranks agree already; returns what all say of it.  Collective;
        raises on all ranks what any rank finds wrong."""
        micro_rows = self.micro_rows(batch, shards)
        if self._rule is None:
            self._rule = self._agreed_rule(batch, micro_rows)
        mine: list[float] = []
        failure: BaseException | None = None
        try:
            with patient("preparing the batch"):
                if shards:
                    require_no_questions(self._planned)
                self.prepare(batch, micro_rows, sharded=bool(shards))
                mine = self._measured(batch, micro_rows, sharded=bool(shards))
        except FAILURES as error:
            failure = error
        width = 2 + count_width(self.rule.reduction) * len(pieces_of(micro_rows, self._divisions))
        said = self._world.gather_numbers([float(failure is not None), *mine, *[0.0] * (width - 1 - len(mine))])
        if any(row[0] for row in said):
            raise_first(self._world, failure, "preparing the batch")
        if not shards:
            self._agreed[micro_rows] = None if count_width(self.rule.reduction) else self._shares(micro_rows)
        return [row[1:] for row in said]

    def plan(
        self,
        batch: Batch,
        said: Sequence[Sequence[float]],
        key: Key,
        scale: float = 1.0,
        shards: Shards = (),
    ) -> BatchPlan:
        """What this rank's stages take of a batch.  said: what each rank said of it.  Raises BatchError on all ranks
        for a batch that cannot be run."""
        if self._update is not None:
            require_updatable(self._decision, self.graph, scale)
        shares = self.shares(batch, said, shards)
        micro_rows = shares.micro_rows
        if self._synced and (weightless := require_weights(shares)) is not None:
            raise self._world.known(weightless)
        inputs: Sequence[Mapping[str, torch.Tensor]] = ()
        if 0 in self._stages:
            given = (batch, self.graph.inputs, self._stages[0], self._rank, micro_rows, self._world.device)
            inputs = stage_inputs(*given, sharded=bool(shards))
        own = {
            number: [replicas[stage.ranks.index(self._rank)] for replicas in shares.of[stage.division]]
            for number, stage in self._stages.items()
        }
        uneven = shares.uneven
        idle = self._idle(own) if self.train and uneven else {}
        return BatchPlan(micro_rows, inputs, key, own, idle, uneven, scale)

    def _idle(self, own: Mapping[int, Sequence[Sequence[float]]]) -> dict[tuple[int, int], frozenset[str]]:
        """By stage and micro-batch, the values that carry no weight, but for those whose gradients come from a rank
        with other rows: these may have weight where this rank's have none."""
        rowless = {name for name, layout in self.rule.layouts.items() if layout is None}
        return {
            (stage, micro): idle_values(self.graph, self.rule.reduction, tuple(share)) - rowless
            for stage, shares in own.items()
            for micro, share in enumerate(shares)
            if 0.0 in share
        }

    def shares(self, batch: Batch, said: Sequence[Sequence[float]], shards: Shards = ()) -> LossShares:
        """The shares of replicas in the loss of a batch.  said: what each rank said of it.  Raises BatchError on all
        ranks where replicas were given different batches."""
        micro_rows = self.micro_rows(batch, shards)
        first, ranks = self._decision.stages[0], self._decision.stages[0].ranks
        different = require_same_batch([row[0] for row in said], ranks)
        if different is not None:
            raise self._world.known(different)
        if not shards and (known := self._agreed[micro_rows]) is not None:
            return known
        width = count_width(self.rule.reduction)
        places = places_of(micro_rows, self._divisions, first.division)
        owners = {
            place: ranks[replica] if shards else self._first_rank
            for replicas in places
            for replica, inside in enumerate(replicas)
            for place in inside
        }
        measured = [said[owners[place]][1 + width * place :][:width] for place in sorted(owners)] if width else []
        return self._shares(micro_rows, measured)

    def _shares(self, micro_rows: tuple[int, ...], measured: Sequence[Sequence[float]] = ()) -> LossShares:
        return loss_shares(self.rule.reduction, micro_rows, self._divisions, measured)

    def _agreed_rule(self, batch: Batch, micro_rows: Sequence[int]) -> BatchRule:
        """How such batches are cut, as the first rank of the first stage derives it.  Collective: a Python value or a
        length in the batch may choose another loss than that of the batch that was planned for."""
        content, failure = None, None
        if self._rank == self._first_rank:
            try:
                with patient("preparing the batch"):
                    several = micro_rows if len(micro_rows) > 1 else [*micro_rows, *micro_rows]
                    family = family_of_batch(self._context.captures, batch, several)
                    reduction = loss_reduction(family, (several,), self._context.loss_reduction)
                    divided = divided_values(self._decision, self.graph, self._slicing.prologue_of(batch))
                    content = BatchRule(reduction, row_layouts(family, reduction, *divided)).to_json()
            except FAILURES as error:
                failure = error
        found = broadcast_result(self._world, content, failure, "preparing the batch", self._first_rank)
        return BatchRule.from_json(found)

    def prepare(self, batch: Batch, micro_rows: Sequence[int], *, sharded: bool = False) -> None:
        """Make the code for every number of rows.  Local; raises RefusedError when the model runs another program at
        these shapes than the one that was planned."""
        require_known(self._world, self.graph, self._synced, sliced=self._slicing.active)
        self._layouts.update({name: layout for name, layout in self.rule.layouts.items() if layout is not None})
        for stages, rows in self._wanted(micro_rows):
            if not self._code.has(rows, stages):
                self._add(self._capture(batch, rows), batch, stages)
        if not set(self.rule.reduction.counted()) <= set(self.graph.inputs):
            for rows in sorted(
                {rows for _, rows in self._own_pieces(tuple(micro_rows), sharded=sharded)}, reverse=True
            ):
                if not self._counts.has(rows):
                    self._counts.add(self._capture(batch, rows), self.rule.reduction)
        self._slicing.check_constants()

    def _wanted(self, micro_rows: Sequence[int]) -> list[tuple[list[int], int]]:
        """(stages of this rank, rows) of which it needs the code, the largest first; a rank without stages needs the
        shapes of what the model returns."""
        found: dict[int, list[int]] = {}
        for number, stage in self._stages.items():
            for rows in code_sizes(stage, self._rank, micro_rows):
                found.setdefault(rows, []).append(number)
        if not found:
            first = self._decision.stages[0]
            found = {rows: [] for rows in code_sizes(first, self._first_rank, micro_rows)}
        return [(found[rows], rows) for rows in sorted(found, reverse=True)]

    def _own_pieces(self, micro_rows: tuple[int, ...], *, sharded: bool) -> list[tuple[int, int]]:
        """(place, rows) of the pieces that this rank counts: of shards its own; else the first rank counts all."""
        pieces = pieces_of(micro_rows, self._divisions)
        first = self._decision.stages[0]
        wanted: Sequence[int] = range(len(pieces)) if self._rank == self._first_rank else ()
        if sharded:
            replica = first.ranks.index(self._rank) if 0 in self._stages else None
            places = places_of(micro_rows, self._divisions, first.division)
            wanted = [place for replicas in places for place in replicas[replica]] if replica is not None else ()
        return [(place, pieces[place][2] - pieces[place][1]) for place in wanted]

    def _capture(self, batch: Batch, rows: int) -> Captured:
        captured = self._context.captures(batch, Size(rows), self._mode.value)
        require_same_program(captured.graph, self.graph)
        return captured

    def _add(self, captured: Captured, batch: Batch, stages: Sequence[int]) -> None:
        rule = self.rule
        adjusted = rule.reduction.adjusted
        if self._slicing.active:
            self._slicing.add(self._code, captured, batch, stages, adjusted, rule.layouts)
            self._layouts.update(self._slicing.layouts)
        elif stages:
            links = edges(self._decision, self.graph)
            for stage in stages:
                self._code.add_stage(captured, links, stage, self._stages[stage], adjusted, rule.layouts)
        self._code.add_specs(captured)

    def _measured(self, batch: Batch, micro_rows: tuple[int, ...], *, sharded: bool) -> list[float]:
        """What this rank says of a batch: a digest of what replicas of the first stage must have alike, then what was
        measured of each piece, 0 of those that other ranks count."""
        seen = 0.0
        if 0 in self._stages and len(self._stages[0].ranks) > 1:
            seen = digest(t for t, split in batch.tensors_and_splits() if not (split and sharded))
        pieces = self._own_pieces(micro_rows, sharded=sharded)
        if pieces:
            self._slicing.check(batch, self.graph.inputs)
        reduction = self.rule.reduction
        width, count = count_width(reduction), len(pieces_of(micro_rows, self._divisions))
        if not width:
            return [seen]
        found = [0.0] * width * count
        rows = [own for _, own in pieces]
        inputs = inputs_of(batch, self.graph.inputs, rows, self._world.device, range(len(rows)))
        measured = self._counts.measured(reduction, rows, list(inputs.values()), alone=count == 1)
        for (place, _), numbers in zip(pieces, measured, strict=True):
            found[width * place : width * (place + 1)] = numbers
        return [seen, *found]

    # -- the program and what plays it -----------------------------------------------------------------------------

    def program(self, micros: int) -> Program:
        """The verified program for `micros` micro-batches."""
        decision = replace(self._decision, micro_rows=(1,) * micros)
        make = training_program if self.train else evaluation_program
        program = make(decision, self.graph, self._slicing.prologue, self._synced)
        return program if self._world.carrier is None else check_messages(program)

    def engine(self, micros: int) -> Engine:
        """What plays so many micro-batches.  Collective when it is made."""
        if micros not in self._engines:
            program = self.program(micros)
            if not self._engines:
                open_statistics(self._world, self._decision, self._synced, self._statistics)
                self._runners = {stage: self._stage_runner(program, stage) for stage in self._stages}
            ops = self.graph.op_map()
            loss = None if self._mode is Mode.PREDICT else self.graph.outputs[0]
            owners = self._context.values.owners
            shared = {stage: shared_of(self.graph, self._decision, stage, owners) for stage in self._stages}
            made_of = (self._world, program, self._runners, self._code.specs, ops, loss, self._layouts, shared)
            self._engines[micros] = Engine(*made_of, self._context.values)
        return self._engines[micros]

    def _stage_runner(self, program: Program, stage: int) -> StageRunner:
        back = frozenset(name for e in program.edges if e.dst == stage for name in e.grads)
        out = frozenset(name for e in program.edges if e.src == stage for name in e.grads)
        held, out = self._tensors.held, out | {self.graph.outputs[0]}
        if self._slicing.active:
            return SlicedRunner(self._code.sliced[stage], held, back, out)
        return StageRunner(self._code.modules[stage], held, back, out, self._statistics.get(stage), self._update)
