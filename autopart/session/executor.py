"""One way to run the model (a training step, an evaluation loss, a prediction), at any number of rows.

A lane captures the model once per number of rows, requires that each capture is the program that was planned, cuts
its stage out of it and plays the route of the plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from autopart.capture import CaptureCache, Captured
from autopart.capture.batch import Batch
from autopart.capture.export import OutputSpec
from autopart.capture.rows import require_same_program
from autopart.ir.graph import Graph, LossReduction
from autopart.ir.plan import Plan, Stage
from autopart.ir.program import Program
from autopart.options import Options
from autopart.passes.program.routing import route
from autopart.passes.program.verify import check_program, forward_program
from autopart.runtime.engine import Engine, StepInput, StepResult
from autopart.runtime.stage import StageRunner
from autopart.runtime.stage_module import StageModule
from autopart.runtime.tensors import LocalTensors
from autopart.runtime.trace import Trace
from autopart.runtime.transport import Spec
from autopart.runtime.world import World
from autopart.session.split import ancestors, cut, stage_module


@dataclass(frozen=True)
class RankContext:
    """What all lanes of a pipe share."""

    capturer: CaptureCache
    world: World
    options: Options
    tensors: LocalTensors


class Executor:
    """mode: as in `capture`; stages: which ops run where; weight: how losses combine."""

    def __init__(
        self,
        setting: RankContext,
        mode: str,
        first: Captured,
        plan: Plan,
        stages: Sequence[Stage],
        weight: LossReduction,
    ) -> None:
        self._setting, self._mode, self.first, self.weight = setting, mode, first, weight
        self._decision = replace(plan.decision, stages=tuple(stages))
        self._stage = self._decision.stage_of_rank(setting.world.rank)
        self._codes: dict[int, StageModule] = {}
        self._counts: dict[int, StageModule] = {}
        self._specs: dict[int, dict[str, Spec]] = {}
        self._engines: dict[int, Engine] = {}
        self._signature: object = None
        self._runner: StageRunner | None = None
        self.trace: Trace | None = None

    @property
    def graph(self) -> Graph:
        """The graph that was planned."""
        return self.first.graph

    @property
    def train(self) -> bool:
        """Whether gradients are computed."""
        return self._mode == "step"

    @property
    def micro_batched(self) -> bool:
        """Whether the batch is cut as in training; evaluation takes it whole, which is exact for any model."""
        return self.train

    def outputs(self, batch: Batch) -> OutputSpec:
        """How the results for this batch become what the model returns."""
        spec = self._capture(batch, batch.rows or 1).outputs
        assert spec is not None
        return spec

    def specs(self, rows: int) -> Mapping[str, Spec]:
        """Shapes and dtypes of all values at `rows` rows."""
        return self._specs[rows]

    def rank_of_output(self, value: str) -> int:
        """The rank that computes an output."""
        writer = self.graph.writer()[value]
        return next(stage.ranks[0] for stage in self._decision.stages if writer in stage.ops)

    def run(
        self, batch: Batch, micro_rows: tuple[int, ...], weights: Sequence[float], key: tuple[int, int]
    ) -> StepResult:
        """Play one step of this rank.  `prepare` must have run for this batch."""
        engine = self._engine(len(micro_rows))
        micros = self._inputs(batch, micro_rows) if self._stage == 0 else ()
        given = StepInput(micro_rows, micros, weights, key)
        parameters = {n: t for n, t in self._setting.tensors.held.items() if isinstance(t, nn.Parameter)}
        engine.trace = self.trace
        return engine.step(given, parameters, train=self.train)

    def prepare(self, batch: Batch, micro_rows: tuple[int, ...]) -> None:
        """Make the code for every number of rows.  Local; raises RefusedError when the model runs another program at
        these shapes than the one that was planned."""
        signature = batch.signature()
        if signature != self._signature:
            self._codes.clear()
            self._counts.clear()
            self._specs.clear()
            self._signature = signature
        for rows in sorted(set(micro_rows), reverse=True):
            if rows not in self._specs:
                self._add(self._capture(batch, rows), rows)

    def _capture(self, batch: Batch, rows: int) -> Captured:
        captured = self._setting.capturer(batch, rows, self._mode)
        require_same_program(captured.graph, self.first.graph)
        return captured

    def _add(self, captured: Captured, rows: int) -> None:
        graph, device = captured.graph, self._setting.world.device
        self._specs[rows] = {v.name: Spec(v.shape, getattr(torch, v.dtype)) for v in graph.values}
        if self._stage is not None:
            code = stage_module(captured, self.program(1), self._stage, self._decision.stages[self._stage].ops, device)
            self._setting.tensors.hold(code.held, captured.tensors)
            self._codes[rows] = code
        value = self.weight.value
        if self._stage == 0 and value is not None and value not in graph.inputs:
            code = cut(captured, ancestors(graph, value), [value], device)
            self._setting.tensors.hold(code.held, captured.tensors)
            self._counts[rows] = code

    def program(self, micros: int) -> Program:
        """The verified program for `micros` micro-batches."""
        decision = replace(self._decision, micro_rows=(1,) * micros)
        program = route(decision, self.graph)
        return check_program(program, decision.schedule) if self.train else forward_program(program)

    def _engine(self, micros: int) -> Engine:
        if micros not in self._engines:
            program = self.program(micros)
            if self._runner is None:
                self._runner = self._make_runner(program)
            ops = self.graph.op_map()
            loss = None if self._mode == "predict" else self.graph.outputs[0]
            self._engines[micros] = Engine(self._setting.world, program, self._runner, self._specs, ops, loss)
        return self._engines[micros]

    def _make_runner(self, program: Program) -> StageRunner:
        back = frozenset(name for e in program.edges if e.dst == self._stage for name in e.grads)
        out = frozenset(name for e in program.edges if e.src == self._stage for name in e.grads)
        return StageRunner(self._codes, self._setting.tensors.held, back, out | {self.graph.outputs[0]})

    def _inputs(self, batch: Batch, micro_rows: tuple[int, ...]) -> list[dict[str, torch.Tensor]]:
        device = self._setting.world.device
        pieces = batch.micro(micro_rows)
        return [
            {name: tensor.to(device, non_blocking=True) for name, tensor in zip(self.graph.inputs, piece, strict=True)}
            for piece in pieces
        ]

    def shares(self, batch: Batch, micro_rows: tuple[int, ...]) -> list[float]:
        """Share of each micro-batch's loss in the whole loss, on the rank of stage 0; elsewhere zeros."""
        if self._stage != 0:
            return [0.0] * len(micro_rows)
        if self.weight.kind == "sum":
            return [1.0] * len(micro_rows)
        if self.weight.value is None:
            return [rows / sum(micro_rows) for rows in micro_rows]
        counts = [
            self._count(rows, values) for rows, values in zip(micro_rows, self._inputs(batch, micro_rows), strict=True)
        ]
        total = sum(counts)
        # No counted token in the whole batch: equal shares give what one process gives, 0/0 or a floor's 0.
        return [count / total if total else 1 / len(counts) for count in counts]

    def _count(self, rows: int, values: Mapping[str, torch.Tensor]) -> float:
        assert self.weight.value is not None
        if self.weight.value in values:
            result = values[self.weight.value]
        else:
            code = self._counts[rows]
            held = code.arguments(self._setting.tensors.held)
            (result,) = code.module(*held, *(values[name] for name in code.inputs))
        if self.weight.ignore is not None:
            result = result != self.weight.ignore
        return float(result.sum(dtype=torch.float64))
