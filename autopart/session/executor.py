"""One way to run the model (a training step, an evaluation loss, a prediction), at any number of rows.

An executor captures the model once per number of rows, requires that each capture is the program that was planned,
cuts this rank's stage out of it and plays the plan's program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
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
from autopart.passes.program.messages import check_messages
from autopart.passes.program.routing import route
from autopart.passes.program.verify import check_program, forward_program
from autopart.runtime.activity import patient, waiting
from autopart.runtime.effects import first_line
from autopart.runtime.engine import Engine, StepInput, StepResult
from autopart.runtime.finite import unscale
from autopart.runtime.stage import StageRunner
from autopart.runtime.tensors import LocalTensors
from autopart.runtime.trace import Trace
from autopart.runtime.transport import Spec
from autopart.runtime.world import World
from autopart.session.agreement import FAILURES, broadcast_result, raise_first
from autopart.session.batch_counts import BatchCounts, Weights
from autopart.session.stage_code import StageCode

Key = tuple[int, int]
"""Of random numbers: (seed, step)."""


class Mode(Enum):
    """What is run; the value is the mode of `capture`."""

    TRAIN = "step"
    LOSS = "loss"
    PREDICT = "predict"


@dataclass(frozen=True, slots=True)
class Guard:
    """What is done about gradients that are not finite.  looks: whether they are looked for; scale: of the loss."""

    looks: bool = False
    scale: float = 1.0


UNGUARDED = Guard()


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
            self.note(doing, error)
            raise

    def note(self, doing: str, error: BaseException) -> None:
        """Note a failure; the first one counts."""
        if not self._failure:
            self._failure = f"{doing}: {type(error).__name__}: {first_line(error)}"

    @property
    def good(self) -> bool:
        """Whether nothing has failed."""
        return not self._failure

    def require(self) -> None:
        """Raises RunError when something has failed."""
        if self._failure:
            raise RunError(
                "the pipeline has failed and takes no further step",
                why=f"{self._failure}; the ranks are not connected any more.  Gradients and buffers are as before it",
                fix="close the pipe on every rank, load a state, and compile the model again",
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
        self._reductions: dict[object, LossReduction] = {}
        self._stated = context.loss_reduction
        self._stage = decision.stage_of_rank(context.world.rank)
        self._first_rank = decision.stages[0].ranks[0]
        self._code = StageCode(context.tensors, context.world.device)
        self._counts = BatchCounts(context.tensors, context.world.device)
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

    def loss(self, batch: Batch, key: Key, guard: Guard = UNGUARDED) -> tuple[torch.Tensor, str]:
        """The loss of the whole batch, 0-dim on the CPU, on every rank; when training, gradients are accumulated.

        With it, where the guard looks: where a gradient is not finite, on the same step of all ranks; then nothing is
        accumulated.  "" where all are.

        Raises BatchError and RefusedError on all ranks before anything is sent, StageError and WorkerError after.
        """
        micro_rows = self.micro_rows(batch)
        weights = self.agree(batch, micro_rows)
        output = self.graph.outputs[0]
        total, overflow = 0.0, ""

        def share_loss(result: StepResult) -> bool:
            """Every rank gets the loss, and none before all have done their part; so with infinite gradients."""
            nonlocal total, overflow
            mine = _weighted(result.losses, weights.shares)
            first = unscale(self._parameters(), guard.scale) if self.train and guard.looks else None
            everyone = self._world.gather_numbers([mine, float(first is not None)])
            total = everyone[self._rank_of(output)][0]
            if any(row[1] for row in everyone):
                names = self._world.gather_text(first or "")
                overflow = next(f"{name} on rank {rank}" for rank, name in enumerate(names) if name)
            return not overflow

        with self._health.watched("a step failed"):
            self._run(batch, micro_rows, weights, key, share_loss, guard.scale)
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
        owner = self._rank_of(name)
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
    ) -> StepResult:
        engine = self._engine(len(micro_rows))
        inputs = self._inputs(batch, micro_rows) if self._stage == 0 else ()
        engine.trace = self.trace
        shares = [share * scale for share in weights.shares]
        given = StepInput(micro_rows, inputs, shares, key, weights.numbers, weights.idle(self.graph, self._weight))
        return engine.step(given, self._parameters(), train=self.train, agree=agree)

    def _parameters(self) -> dict[str, nn.Parameter]:
        return {name: t for name, t in self._tensors.held.items() if isinstance(t, nn.Parameter)}

    # -- before anything is sent -----------------------------------------------------------------------------------

    def micro_rows(self, batch: Batch) -> tuple[int, ...]:
        """Rows of each micro-batch of this batch.  Evaluation takes a batch whole, which is exact for any model."""
        return micro_rows_of(batch, self._decision.micro_rows if self.train else (1,))

    def agree(self, batch: Batch, micro_rows: tuple[int, ...]) -> Weights:
        """Make the code for this batch, on which all ranks agree already.  Collective.

        Returns what weighs each micro-batch's loss, as the rank of the first stage counts it.  Raises on all ranks what
        any rank finds wrong.
        """
        self._agree_on_reduction(batch, micro_rows)
        failure: BaseException | None = None
        mine = Weights([0.0] * len(micro_rows), [[0.0] * len(self._weight.adjusted) for _ in micro_rows])
        try:
            with patient("preparing the batch"):
                self.prepare(batch, micro_rows)
                if self._stage == 0:
                    mine = self._weights_of(batch, micro_rows)
        except FAILURES as error:
            failure = error
        rows = self._world.gather_numbers([float(failure is not None), *mine.flat()])
        if any(row[0] for row in rows):
            raise_first(self._world, failure, "preparing the batch")
        return Weights.read(rows[self._first_rank][1:], len(micro_rows))

    def _agree_on_reduction(self, batch: Batch, micro_rows: Sequence[int]) -> None:
        """How losses of micro-batches combine, as the rank of the first stage derives it.  Collective where batches of
        this kind come for the first time: a Python value or a length in the batch may choose another loss than that of
        the batch that was planned for."""
        signature = self._signature_of(batch)
        if signature != self._signature and not self._knows_reduction(signature):
            content, failure = None, None
            if self._world.rank == self._first_rank:
                several = micro_rows if len(micro_rows) > 1 else [*micro_rows, *micro_rows]
                try:
                    with patient("preparing the batch"):
                        content = asdict(reduction_of_batch(self._captures, batch, several, self._stated))
                except FAILURES as error:
                    failure = error
            content = broadcast_result(self._world, content, failure, "preparing the batch", self._first_rank)
            self._reductions[signature] = LossReduction.from_json(content)
        self._take(signature)

    def _knows_reduction(self, signature: object) -> bool:
        if len(self._decision.micro_rows) == 1 or not self.train:
            self._reductions[signature] = WHOLE
        elif not self._reductions and self._planned_weight is not None:
            self._reductions[signature] = self._planned_weight
        return signature in self._reductions

    def _signature_of(self, batch: Batch) -> object:
        return self._captures.version, batch.signature()

    def _take(self, signature: object) -> None:
        """Make ready for batches of this kind, whose reduction is known."""
        if signature != self._signature:
            self._code.clear()
            self._counts.clear()
            self._signature, self._weight = signature, self._reductions[signature]

    def prepare(self, batch: Batch, micro_rows: Sequence[int]) -> None:
        """Make the code for every number of rows.  Local; raises RefusedError when the model runs another program at
        these shapes than the one that was planned."""
        signature = self._signature_of(batch)
        assert self._knows_reduction(signature)
        self._take(signature)
        for rows in sorted(set(micro_rows), reverse=True):
            if not self._code.has(rows):
                self._add(self._capture(batch, rows))

    def _capture(self, batch: Batch, rows: int) -> Captured:
        captured = self._captures(batch, Size(rows), self._mode.value)
        require_same_program(captured.graph, self.graph)
        return captured

    def _add(self, captured: Captured) -> None:
        if self._stage is not None:
            planned = self._decision.stages[self._stage]
            self._code.add_stage(captured, self.program(1), self._stage, planned, self._weight.adjusted)
        if self._stage == 0:
            self._counts.add(captured, self._weight)
        self._code.add_specs(captured)

    def _weights_of(self, batch: Batch, micro_rows: tuple[int, ...]) -> Weights:
        """What weighs each micro-batch; on the rank of the first stage."""
        return self._counts.weights(self._weight, micro_rows, self._inputs(batch, micro_rows))

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
        program = check_program(program, decision.schedule) if self.train else forward_program(program)
        return program if self._world.carrier is None else check_messages(program)

    def open(self, micros: int) -> None:
        """Make what plays so many micro-batches, so that no step finds a channel closed.  Collective."""
        self._engine(micros)

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


def _weighted(losses: Mapping[int, torch.Tensor], shares: Sequence[float]) -> float:
    """The loss of the whole batch, where it is computed; elsewhere 0.  Waits for the device, once."""
    total = torch.zeros((), dtype=torch.float64)
    with waiting():
        for micro, share in enumerate(shares):
            if losses and share != 0.0:  # a micro-batch without a valid target may have a loss of 0/0
                total = total.to(losses[micro].device) + losses[micro].double() * share
        return total.item()


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
