"""One way to run the model (a training step, an evaluation loss, a prediction), at any number of rows.

An executor captures the model once per number of rows, requires that each capture is the program that was planned,
cuts this rank's stage out of it and plays the plan's program.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
from torch import nn

from autopart.capture import CaptureCache, Captured
from autopart.capture.batch import Batch, split_rows
from autopart.capture.export import rebuild_outputs
from autopart.capture.reduction import WHOLE, reduction_of_batch
from autopart.capture.rows import require_same_program
from autopart.ir.errors import BatchError, RunError
from autopart.ir.graph import Graph, LossReduction
from autopart.ir.plan import Decision
from autopart.ir.program import Program
from autopart.ir.size import Size
from autopart.passes.program.routing import route
from autopart.passes.program.verify import check_program, forward_program
from autopart.runtime.engine import Engine, StepInput, StepResult
from autopart.runtime.stage import StageRunner
from autopart.runtime.tensors import LocalTensors
from autopart.runtime.trace import Trace
from autopart.runtime.transport import Spec
from autopart.runtime.world import World
from autopart.session.agreement import FAILURES, raise_first
from autopart.session.stage_code import StageCode

Key = tuple[int, int]
"""Of random numbers: (seed, step)."""


class Mode(Enum):
    """What is run; the value is the mode of `capture`."""

    TRAIN = "step"
    LOSS = "loss"
    PREDICT = "predict"


class Health:
    """Whether something failed on this rank while ranks were running.

    Then nothing more may be sent: messages of the failed step may still be under way and would be taken for others,
    and the other ranks may wait in a collective for this one.
    """

    def __init__(self) -> None:
        self._failure = ""

    @contextmanager
    def watched(self, doing: str) -> Iterator[None]:
        """Note any failure of the body."""
        try:
            yield
        except BaseException as error:
            first_line = (str(error).splitlines() or [""])[0]
            self._failure = f"{doing}: {type(error).__name__}: {first_line}"
            raise

    @property
    def good(self) -> bool:
        """Whether nothing has failed."""
        return not self._failure

    def require(self) -> None:
        """Raises RunError when something has failed."""
        if self._failure:
            raise RunError(
                "the pipeline has failed and takes no further step",
                why=f"{self._failure}; its messages may still be under way, and its gradients are incomplete",
                fix="close the pipe on every rank, then compile the model again",
            )


@dataclass(frozen=True, slots=True)
class RankContext:
    """What all executors of one rank share."""

    world: World
    captures: CaptureCache
    tensors: LocalTensors
    health: Health
    loss_reduction: str = "auto"


class Executor:
    """Runs a model in one mode along the stages of a plan.  Every method that runs something is collective."""

    def __init__(
        self, mode: Mode, context: RankContext, planned: Captured, decision: Decision, weight: LossReduction | None
    ) -> None:
        """planned: the capture, in this mode, that `decision` is for; weight: how losses of micro-batches combine in
        the first batch that is prepared, None where that has to be derived."""
        self._mode = mode
        self._world = context.world
        self._captures = context.captures
        self._tensors = context.tensors
        self._health = context.health
        self._planned = planned
        self._decision = decision
        self._planned_weight = weight
        self._weight = weight or WHOLE
        self._weights: dict[object, LossReduction] = {}
        self._stated = context.loss_reduction
        self._stage = decision.stage_of_rank(context.world.rank)
        self._code = StageCode(context.tensors, context.world.device)
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

    def loss(self, batch: Batch, key: Key) -> torch.Tensor:
        """The loss of the whole batch, 0-dim on the CPU, on every rank; when training, gradients are accumulated.

        Raises BatchError and RefusedError on all ranks before anything is sent, StageError and WorkerError after.
        """
        micro_rows = self.micro_rows(batch)
        shares = self.agree(batch, micro_rows)
        output = self.graph.outputs[0]
        with self._health.watched("a step failed"):
            losses = self._run(batch, micro_rows, shares, key).losses
            total = torch.zeros((), dtype=torch.float64)
            for micro, share in enumerate(shares):
                if losses and share != 0.0:  # a micro-batch without a valid target may have a loss of 0/0
                    total = total + losses[micro].double().cpu() * share
            self._world.broadcast(total, self._rank_of(output))
        return total.to(getattr(torch, self.graph.value_map()[output].dtype))

    def predict(self, batch: Batch, key: Key) -> Any:
        """What the model returns, on every rank, on the CPU."""
        rows = batch.rows or 1
        self.agree(batch, (rows,))
        with self._health.watched("a prediction failed"):
            outputs = self._run(batch, (rows,), [1.0], key).results.get(0, {})
            collected = tuple(self._collect(name, outputs, self._code.specs[rows][name]) for name in self.graph.outputs)
        form = self._capture(batch, rows).outputs
        assert form is not None
        return rebuild_outputs(form, collected)

    def _collect(self, name: str, outputs: Mapping[str, torch.Tensor], spec: Spec) -> torch.Tensor:
        """An output of the model, from the rank that computed it."""
        owner = self._rank_of(name)
        if owner == self._world.rank:
            data = outputs[name].detach().cpu().contiguous()
        else:
            data = torch.empty(spec.shape, dtype=spec.dtype)
        return self._world.broadcast(data, owner)

    def _run(self, batch: Batch, micro_rows: tuple[int, ...], shares: Sequence[float], key: Key) -> StepResult:
        engine = self._engine(len(micro_rows))
        inputs = self._inputs(batch, micro_rows) if self._stage == 0 else ()
        parameters = {name: t for name, t in self._tensors.held.items() if isinstance(t, nn.Parameter)}
        engine.trace = self.trace
        return engine.step(StepInput(micro_rows, inputs, shares, key), parameters, train=self.train)

    # -- before anything is sent -----------------------------------------------------------------------------------

    def micro_rows(self, batch: Batch) -> tuple[int, ...]:
        """Rows of each micro-batch of this batch.  Evaluation takes a batch whole, which is exact for any model."""
        return micro_rows_of(batch, self._decision.micro_rows if self.train else (1,))

    def agree(self, batch: Batch, micro_rows: tuple[int, ...]) -> list[float]:
        """Make the code for this batch, on which all ranks agree already.  Collective.

        Returns the share of each micro-batch's loss in the whole loss, as the rank of the first stage counts it.
        Raises on all ranks what any rank finds wrong.
        """
        failure: BaseException | None = None
        shares = [0.0] * len(micro_rows)
        try:
            self.prepare(batch, micro_rows)
            shares = self._shares(batch, micro_rows)
        except FAILURES as error:
            failure = error
        rows = self._world.gather_numbers([float(failure is not None), *shares])
        if any(row[0] for row in rows):
            raise_first(self._world, failure, "preparing the batch")
        return rows[self._decision.stages[0].ranks[0]][1:]

    def prepare(self, batch: Batch, micro_rows: Sequence[int]) -> None:
        """Make the code for every number of rows.  Local; raises RefusedError when the model runs another program at
        these shapes than the one that was planned."""
        signature = (self._captures.version, batch.signature())
        if signature != self._signature:
            self._code.clear()
            self._signature = signature
            self._weight = self._weight_of(batch, micro_rows, signature)
        for rows in sorted(set(micro_rows), reverse=True):
            if not self._code.has(rows):
                self._add(self._capture(batch, rows))

    def _weight_of(self, batch: Batch, micro_rows: Sequence[int], signature: object) -> LossReduction:
        """How losses of micro-batches combine; only the rank of the first stage, which counts, has to know.  A Python
        value or a length in the batch may choose another loss than that of the batch that was planned for."""
        if self._stage != 0 or len(self._decision.micro_rows) == 1 or not self.train:
            return WHOLE
        if not self._weights and self._planned_weight is not None:
            self._weights[signature] = self._planned_weight
        if signature not in self._weights:
            several = micro_rows if len(micro_rows) > 1 else [*micro_rows, *micro_rows]
            self._weights[signature] = reduction_of_batch(self._captures, batch, several, self._stated)
        return self._weights[signature]

    def _capture(self, batch: Batch, rows: int) -> Captured:
        captured = self._captures(batch, Size(rows), self._mode.value)
        require_same_program(captured.graph, self.graph)
        return captured

    def _add(self, captured: Captured) -> None:
        if self._stage is not None:
            self._code.add_stage(captured, self.program(1), self._stage, self._decision.stages[self._stage])
        if self._stage == 0 and self._weight.value is not None:
            self._code.add_counter(captured, self._weight.value)
        self._code.add_specs(captured)

    def _shares(self, batch: Batch, micro_rows: tuple[int, ...]) -> list[float]:
        """Share of each micro-batch's loss in the whole loss, on the rank of the first stage; elsewhere zeros."""
        if self._stage != 0:
            return [0.0] * len(micro_rows)
        if len(micro_rows) == 1 or self._weight.kind == "sum":
            return [1.0] * len(micro_rows)
        if self._weight.value is None:
            return [rows / sum(micro_rows) for rows in micro_rows]
        inputs = self._inputs(batch, micro_rows)
        counts = [self._code.count(self._weight, rows, given) for rows, given in zip(micro_rows, inputs, strict=True)]
        total = sum(counts)
        # No counted token in the whole batch: equal shares give what one process gives, 0/0 or a floor's 0.
        return [count / total if total else 1 / len(counts) for count in counts]

    def _inputs(self, batch: Batch, micro_rows: tuple[int, ...]) -> list[Mapping[str, torch.Tensor]]:
        """The model's inputs for each micro-batch, by value name, on this rank's device."""
        device = self._world.device
        return [
            {name: tensor.to(device, non_blocking=True) for name, tensor in zip(self.graph.inputs, piece, strict=True)}
            for piece in batch.micro(micro_rows)
        ]

    # -- the program and what plays it -----------------------------------------------------------------------------

    def program(self, micros: int) -> Program:
        """The verified program for `micros` micro-batches."""
        decision = replace(self._decision, micro_rows=(1,) * micros)
        program = route(decision, self.graph)
        return check_program(program, decision.schedule) if self.train else forward_program(program)

    def _engine(self, micros: int) -> Engine:
        if micros not in self._engines:
            program = self.program(micros)
            if self._runner is None:
                self._runner = self._stage_runner(program)
            runners = {self._stage: self._runner} if self._stage is not None else {}
            ops = self.graph.op_map()
            loss = None if self._mode is Mode.PREDICT else self.graph.outputs[0]
            self._engines[micros] = Engine(self._world, program, runners, self._code.specs, ops, loss)
        return self._engines[micros]

    def _stage_runner(self, program: Program) -> StageRunner:
        back = frozenset(name for e in program.edges if e.dst == self._stage for name in e.grads)
        out = frozenset(name for e in program.edges if e.src == self._stage for name in e.grads)
        return StageRunner(self._code.modules, self._tensors.held, back, out | {self.graph.outputs[0]})

    def _rank_of(self, value: str) -> int:
        """The rank that computes a value."""
        writer = self.graph.writer()[value]
        return next(stage.ranks[0] for stage in self._decision.stages if writer in stage.ops)


def micro_rows_of(batch: Batch, planned: Sequence[int]) -> tuple[int, ...]:
    """Rows of each micro-batch: as many micro-batches as planned, and of a batch with fewer rows than that, as the last
    of an epoch may be, as many as it takes with the planned rows.  Raises BatchError for a batch without rows."""
    micros = len(planned)
    if batch.rows is not None:
        return split_rows(batch.rows, micros if batch.rows >= micros else -(-batch.rows // max(planned)))
    if micros > 1:
        raise BatchError(
            f"the batch has no rows to cut into {micros} micro-batches",
            why="none of its tensors has an axis",
            fix="pass a batch like the sample that was planned for",
        )
    return (1,)
