"""One way to run the model (a training step, an evaluation loss, a prediction), at any number of rows.

An executor captures the model once per number of rows, requires that each capture is the program that was planned,
cuts this rank's stage out of it and plays the plan's program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autopart.capture import Captured
from autopart.capture.batch import Batch
from autopart.capture.export import rebuild_outputs
from autopart.capture.reduction import WHOLE, BatchRule, family_of_batch, loss_reduction, row_layouts
from autopart.capture.rows import require_same_program
from autopart.ir.graph import Graph
from autopart.ir.plan import Decision
from autopart.ir.program import Program
from autopart.ir.shares import RowLayout
from autopart.ir.size import Size
from autopart.passes.program.messages import check_messages
from autopart.passes.program.routing import divided_values, route
from autopart.passes.program.verify import check_program, forward_program
from autopart.runtime.activity import patient
from autopart.runtime.batch_statistics import BatchStatistics
from autopart.runtime.engine import Engine, StepInput, StepResult
from autopart.runtime.finite import unscale
from autopart.runtime.replicas import Shared
from autopart.runtime.sliced_stage import SlicedRunner
from autopart.runtime.stage import StageRunner
from autopart.runtime.trace import Trace
from autopart.runtime.transport import Spec
from autopart.session.agreement import FAILURES, broadcast_result, raise_first
from autopart.session.batch_counts import BatchCounts, PartWeights, Weights, among, weighted_loss
from autopart.session.context import UNGUARDED, Guard, Mode, RankContext
from autopart.session.data import micro_rows
from autopart.session.parts import (
    Parts,
    among_all,
    digest,
    parts_of,
    require_same_batch,
    shared_of,
)
from autopart.session.shard_counts import Pieces, pieces_of, weights_of_pieces
from autopart.session.slicing import TokenSlicing
from autopart.session.stage_code import StageCode
from autopart.session.synced import open_statistics, require_known, require_weights, synced_stages

Key = tuple[int, int]
"""Of random numbers: (seed, step)."""
Shards = Sequence[int]
"""The rows that each replica of the first stage was given; empty where each was given the whole batch."""


class Executor:
    """Runs a model in one mode along the stages of a plan.  Every method that runs something is collective."""

    def __init__(
        self, mode: Mode, context: RankContext, planned: Captured, decision: Decision, rule: BatchRule | None
    ) -> None:
        """planned: the capture, in this mode, that `decision` is for; rule: how the first batch that is prepared is
        cut, None where that has to be derived."""
        self._mode = mode
        self._world = context.world
        self._captures = context.captures
        self._tensors = context.tensors
        self._values = context.values
        self._health = context.health
        self._planned = planned
        self._decision = decision
        self._planned_rule = rule
        self._weight = rule.reduction if rule is not None else WHOLE
        self._rules: dict[object, BatchRule] = {}
        self._layouts: dict[str | tuple[str, int], RowLayout] = {}
        self._rowless: frozenset[str] = frozenset()
        self._stated = context.loss_reduction
        self._parts = Parts(decision, context.world.rank)
        self._stage = self._parts.stage
        self._first_rank = decision.stages[0].ranks[0]
        self._synced = synced_stages(planned.graph, decision) if context.sync_batchnorm and self.train else ()
        self._statistics = BatchStatistics() if self._stage in self._synced else None
        self._code = StageCode(context.tensors, context.world.device, context.values.owners, self._statistics)
        self._counts = BatchCounts(context.tensors, context.world.device)
        self._slicing = TokenSlicing(context.captures, decision, context.tensors, context.world.device)
        self._signature: object = None
        self._engines: dict[int, Engine] = {}
        self._runner: StageRunner | None = None
        self.trace: Trace | None = None

    @property
    def graph(self) -> Graph:
        """The graph that was planned."""
        return self._planned.graph

    @property
    def train(self) -> bool:
        """Whether gradients are computed."""
        return self._mode is Mode.TRAIN

    # -- running -------------------------------------------------------------------------------------------------

    def loss(self, batch: Batch, key: Key, guard: Guard = UNGUARDED, shards: Shards = ()) -> tuple[torch.Tensor, str]:
        """The loss of the whole batch, 0-dim on the CPU, on every rank; when training, gradients are accumulated.

        With it, where the guard looks: where a gradient is not finite, on the same step of all ranks; then nothing is
        accumulated.  "" where all are.

        Raises BatchError and RefusedError on all ranks before anything is sent, StageError and WorkerError after.
        """
        micro_rows = self.micro_rows(batch, shards)
        parts = self.agree(batch, micro_rows, shards)
        if self._synced and (weightless := require_weights(parts, micro_rows)) is not None:
            raise self._world.known(weightless)
        weights = parts.own(self._parts.division, self._parts.replica)
        output = self.graph.outputs[0]
        total, overflow = 0.0, ""

        def share_loss(result: StepResult) -> bool:
            """Every rank gets the loss, and none before all have done their part; so with infinite gradients."""
            nonlocal total, overflow
            mine = weighted_loss(result.losses, weights.shares)
            given = (self._tensors.masters.by_name, result.before)
            first = unscale(self._parameters(), guard.scale, *given) if self.train and guard.looks else None
            everyone = self._world.gather_numbers([mine, float(first is not None)])
            total = sum(everyone[rank][0] for rank in self._ranks_of(output))
            if any(row[1] for row in everyone):
                names = self._world.gather_text(first or "")
                overflow = next(f"{name} on rank {rank}" for rank, name in enumerate(names) if name)
            return not overflow

        with self._health.watched("a step failed"):
            self._run(
                batch, micro_rows, weights, key, share_loss, guard.scale, uneven=parts.uneven, sharded=bool(shards)
            )
        return torch.tensor(total, dtype=getattr(torch, self.graph.value_map()[output].dtype)), overflow

    def predict(self, batch: Batch, key: Key) -> Any:
        """What the model returns, on every rank, on the CPU."""
        rows = batch.rows or 1
        self.agree(batch, (rows,))
        with self._health.watched("a prediction failed"):
            outputs = self._run(batch, (rows,), Weights([1.0], [[]]), key).results.get(0, {})
            collected = tuple(self._collect(name, outputs, self._code.specs[rows][name]) for name in self.graph.outputs)
        form = self._capture(batch, rows).outputs
        assert form is not None
        return rebuild_outputs(form, collected)

    def _collect(self, name: str, outputs: Mapping[str, torch.Tensor], spec: Spec) -> torch.Tensor:
        """An output of the model, from the rank that computed it."""
        owner = self._ranks_of(name)[0]
        if owner == self._world.rank:
            data = outputs[name].detach().cpu().contiguous()
        else:
            data = torch.empty(spec.shape, dtype=spec.dtype)
        return self._world.broadcast(data, owner)

    def _run(
        self,
        batch: Batch,
        micro_rows: tuple[int, ...],
        weights: Weights,
        key: Key,
        agree: Callable[[StepResult], bool] | None = None,
        scale: float = 1.0,
        *,
        uneven: bool = False,
        sharded: bool = False,
    ) -> StepResult:
        engine = self._engine(len(micro_rows))
        given, device = (batch, self.graph.inputs, micro_rows), self._world.device
        inputs = self._parts.inputs(*given, device, sharded=sharded) if self._stage == 0 else ()
        engine.trace = self.trace
        shares = [share * scale for share in weights.shares]
        idle = {micro: names - self._rowless for micro, names in weights.idle(self.graph, self._weight).items()}
        step = StepInput(micro_rows, inputs, shares, key, weights.numbers, idle, uneven)
        if not self.train:  # by first replicas, while the others have values to give
            self._values.gather()
        masters = self._tensors.masters.by_name
        return engine.step(step, self._parameters(), train=self.train, agree=agree, masters=masters)

    def _parameters(self) -> dict[str, nn.Parameter]:
        return {name: t for name, t in self._tensors.held.items() if isinstance(t, nn.Parameter)}

    # -- before anything is sent -----------------------------------------------------------------------------------

    def micro_rows(self, batch: Batch, shards: Shards = ()) -> tuple[int, ...]:
        """Rows of each micro-batch of this batch.  Evaluation takes a batch whole, which is exact for any model."""
        decision = self._decision if self.train else replace(self._decision, micro_rows=(1,))
        return micro_rows(batch, shards, decision)

    def agree(self, batch: Batch, micro_rows: tuple[int, ...], shards: Shards = ()) -> PartWeights:
        """Make the code for this batch, on which all ranks agree already.  Collective.

        Returns what weighs each part's loss, as the first rank of the first stage counts it, or of shards each of its
        replicas.  Raises on all ranks what any rank finds wrong.
        """
        self._agree_on_rule(batch, micro_rows)
        failure: BaseException | None = None
        nothing = PartWeights.nothing(self._parts.divisions, len(micro_rows), len(self._weight.adjusted))
        pieces = pieces_of(micro_rows, self._parts.divisions, self._decision.stages[0].division) if shards else None
        mine = nothing.flat() if pieces is None else pieces.among(-1, (), self._width)
        seen = 0.0
        try:
            with patient("preparing the batch"):
                self.prepare(batch, micro_rows, pieces)
                if self._stage == 0 and self._parts.division.count > 1:
                    alike = (t for t, split in batch.tensors_and_splits() if not (split and shards))
                    seen = digest(alike)
                if pieces is not None and self._stage == 0:
                    mine = self._measured(batch, pieces)
                elif self._world.rank == self._first_rank:
                    mine = self._weights_of(batch, micro_rows).flat()
        except FAILURES as error:
            failure = error
        rows = self._world.gather_numbers([float(failure is not None), seen, *mine])
        if any(row[0] for row in rows):
            raise_first(self._world, failure, "preparing the batch")
        different = require_same_batch([row[1] for row in rows], self._parts.first_ranks)
        if different is not None:
            raise self._world.known(different)
        if pieces is None:
            return nothing.read(rows[self._first_rank][2:])
        measured = pieces.read([rows[rank][2:] for rank in self._parts.first_ranks], self._width)
        return weights_of_pieces(self._weight, pieces, measured)

    @property
    def _width(self) -> int:
        """How many numbers are measured of each piece."""
        return 1 + 2 * len(self._weight.adjusted)

    def _agree_on_rule(self, batch: Batch, micro_rows: Sequence[int]) -> None:
        """How a batch is cut, as the first rank of the first stage derives it.  Collective where batches of this kind
        come for the first time: a Python value or a length in the batch may choose another loss than that of the batch
        that was planned for."""
        signature = self._signature_of(batch)
        if signature != self._signature and not self._knows_rule(signature):
            content, failure = None, None
            if self._world.rank == self._first_rank:
                try:
                    with patient("preparing the batch"):
                        content = self._derived_rule(batch, micro_rows).to_json()
                except FAILURES as error:
                    failure = error
            content = broadcast_result(self._world, content, failure, "preparing the batch", self._first_rank)
            self._rules[signature] = BatchRule.from_json(content)
        self._take(signature)

    def _derived_rule(self, batch: Batch, micro_rows: Sequence[int]) -> BatchRule:
        several = micro_rows if len(micro_rows) > 1 else [*micro_rows, *micro_rows]
        family = family_of_batch(self._captures, batch, several)
        reduction = loss_reduction(family, (several,), self._stated)
        divided = divided_values(self._decision, self.graph, self._slicing.prologue_of(batch))
        return BatchRule(reduction, row_layouts(family, reduction, *divided))

    def _knows_rule(self, signature: object) -> bool:
        alone = len(self._decision.micro_rows) == 1 and not self._parts.divided
        if alone or not self.train:
            self._rules[signature] = BatchRule(WHOLE)
        elif not self._rules and self._planned_rule is not None:
            self._rules[signature] = self._planned_rule
        return signature in self._rules

    def _signature_of(self, batch: Batch) -> object:
        return self._captures.version, batch.signature()

    def _take(self, signature: object) -> None:
        """Make ready for batches of this kind, whose rule is known."""
        if signature != self._signature:
            self._code.clear()
            self._counts.clear()
            self._slicing.clear()
            rule = self._rules[signature]
            self._signature, self._weight = signature, rule.reduction
            self._layouts.clear()
            self._layouts.update({name: layout for name, layout in rule.layouts.items() if layout is not None})
            # Their gradients come from a rank with other rows, which may have weight where this one's have none.
            self._rowless = frozenset(rule.layouts.keys() - self._layouts.keys())

    def prepare(self, batch: Batch, micro_rows: Sequence[int], pieces: Pieces | None = None) -> None:
        """Make the code for every number of rows.  pieces: of a batch in shards.  Local; raises RefusedError when the
        model runs another program at these shapes than the one that was planned."""
        signature = self._signature_of(batch)
        assert self._knows_rule(signature)
        require_known(self._world, self.graph, self._synced, sliced=self._slicing.active)
        self._take(signature)
        for rows in self._parts.sizes(micro_rows):
            if not self._code.has(rows):
                self._add(self._capture(batch, rows), batch)
        if not set(self._weight.counted()) <= set(self.graph.inputs):
            for rows in self._sizes_to_count(micro_rows, pieces):
                if not self._counts.has(rows):
                    self._counts.add(self._capture(batch, rows), self._weight)
        self._slicing.check_constants()

    def _sizes_to_count(self, micro_rows: Sequence[int], pieces: Pieces | None) -> Sequence[int]:
        """The numbers of rows at which this rank counts what weighs losses."""
        if pieces is not None:
            own = pieces.own(self._parts.replica) if self._stage == 0 else ()
            return sorted({pieces.rows[place] for place in own}, reverse=True)
        return self._parts.all_sizes(micro_rows) if self._world.rank == self._first_rank else ()

    def _capture(self, batch: Batch, rows: int) -> Captured:
        captured = self._captures(batch, Size(rows), self._mode.value)
        require_same_program(captured.graph, self.graph)
        return captured

    def _add(self, captured: Captured, batch: Batch) -> None:
        layouts = self._rules[self._signature].layouts
        if self._slicing.active:
            adjusted = self._weight.adjusted
            self._slicing.add(self._code, captured, batch, self.program, self._stage, adjusted, layouts)
            self._layouts.update(self._slicing.layouts)
        elif self._stage is not None:
            planned = self._decision.stages[self._stage]
            self._code.add_stage(captured, self.program(1), self._stage, planned, self._weight.adjusted, layouts)
        self._code.add_specs(captured)

    def _weights_of(self, batch: Batch, micro_rows: tuple[int, ...]) -> PartWeights:
        """What weighs each part; on the first rank of the first stage."""
        self._slicing.check(batch, self.graph.inputs)
        found = {}
        for each in self._parts.divisions:
            parts = parts_of(micro_rows, each)
            rows = tuple(filter(None, parts))
            inputs = among_all(batch, self.graph.inputs, parts, self._world.device, range(len(parts)))
            weights = self._counts.weights(self._weight, rows, list(inputs.values()))
            found[each] = among(parts, weights, len(self._weight.adjusted))
        return PartWeights(found)

    def _measured(self, batch: Batch, pieces: Pieces) -> list[float]:
        """What weighs the parts of shards follows from, of the pieces that this rank has."""
        rows = [pieces.rows[place] for place in pieces.own(self._parts.replica)]
        inputs = among_all(batch, self.graph.inputs, rows, self._world.device, range(len(rows)))
        self._slicing.check(batch, self.graph.inputs)
        measured = self._counts.measured(self._weight, rows, list(inputs.values()))
        return pieces.among(self._parts.replica, measured, self._width)

    # -- the program and what plays it -----------------------------------------------------------------------------

    def program(self, micros: int) -> Program:
        """The verified program for `micros` micro-batches."""
        decision = replace(self._decision, micro_rows=(1,) * micros)
        program = route(decision, self.graph, self._slicing.prologue)
        program = replace(program, statistics=self._synced)
        program = check_program(program, decision.schedule) if self.train else forward_program(program)
        return program if self._world.carrier is None else check_messages(program)

    def open(self, micros: int) -> None:
        """Make what plays so many micro-batches, so that no step finds a channel closed.  Collective."""
        self._engine(micros)

    def _engine(self, micros: int) -> Engine:
        if micros not in self._engines:
            program = self.program(micros)
            if self._runner is None:
                open_statistics(self._world, self._decision, self._synced, self._statistics)
                self._runner = self._stage_runner(program)
            runners = {self._stage: self._runner} if self._stage is not None else {}
            ops = self.graph.op_map()
            loss = None if self._mode is Mode.PREDICT else self.graph.outputs[0]
            self._engines[micros] = Engine(
                self._world, program, runners, self._code.specs, ops, loss, self._layouts, self._shared(), self._values
            )
        return self._engines[micros]

    def _shared(self) -> dict[int, Shared]:
        if self._stage is None:
            return {}
        return {self._stage: shared_of(self.graph, self._decision, self._stage, self._values.owners)}

    def _stage_runner(self, program: Program) -> StageRunner:
        back = frozenset(name for e in program.edges if e.dst == self._stage for name in e.grads)
        out = frozenset(name for e in program.edges if e.src == self._stage for name in e.grads)
        held, out = self._tensors.held, out | {self.graph.outputs[0]}
        if self._slicing.active:
            return SlicedRunner(self._code.sliced, held, back, out)
        return StageRunner(self._code.modules, held, back, out, self._statistics)

    def _ranks_of(self, value: str) -> tuple[int, ...]:
        """The ranks that compute a value."""
        writer = self.graph.writer()[value]
        return next(stage.ranks for stage in self._decision.stages if writer in stage.ops)
