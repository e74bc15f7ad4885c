"""Stages run one after another in this process, with the real stage code, routes and stage runner.

Every stage has its own copy of its tensors, as on separate ranks; only the values of the routed program's edges pass
from one to another. Used by benchmarks and tests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from autopart.batch.batch import Batch, flatten
from autopart.capture import CaptureCache, Captured
from autopart.capture.python.guards import check_model
from autopart.files.clusters import parse_cluster
from autopart.ir.actions import Slot
from autopart.ir.graph import Graph, LossReduction
from autopart.ir.plan import Plan
from autopart.ir.program import Program
from autopart.ir.shares import Division, Window
from autopart.options import Options
from autopart.passes.program.routing import route
from autopart.passes.program.verify import check_program
from autopart.pipe.compare import (
    BUFFERS,
    PLAIN,
    RANDOM,
    TERMS,
    Outcome,
    Verification,
    compared,
    fresh_copy,
    plain_outcome,
    precision_of,
)
from autopart.planning.derive.reduction import coupling_ops
from autopart.planning.make import Planned, make_plan
from autopart.runtime.stages.stage import StageRunner
from autopart.runtime.tensors import LocalTensors
from autopart.session.step.batch_counts import BatchCounts
from autopart.session.step.loss_shares import Share, idle_values, loss_shares
from autopart.stagecode.split import stage_module

CPU = torch.device("cpu")
ADDED = LossReduction("sum")
ALIKE: dict[str, Any] = {
    "costs": "analytic", "schedule": "1f1b", "recompute": "off", "optimizer": "sgd", "cache": False,
}  # fmt: skip
"""Options that make plans independent of the machine."""


@dataclass(frozen=True)
class Replayed:
    """The results of a step. loss: sum over the micro-batches; gradients: summed over stages; buffers: after the
    step.
    """

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor]
    program: Program


def replay(
    captured: Captured,
    plan: Plan,
    micros: Sequence[Mapping[str, torch.Tensor]],
    reduction: LossReduction = ADDED,
) -> Replayed:
    """Run one training step over micro-batches of `plan.micro_rows` rows. reduction: how their losses combine."""
    graph, rows = captured.graph, plan.micro_rows
    shares = _shares(captured, reduction, rows, micros)
    program = check_program(route(plan.decision, graph), plan.schedule)
    tensors = [_own_copies(captured) for _ in plan.stages]
    runners = [_runner(captured, program, s, plan, tensors[s], reduction) for s in range(len(plan.stages))]
    loss = torch.zeros(())
    for micro, inputs in enumerate(micros):
        share, *numbers = shares[micro]
        stages = _Stages(graph, program, runners, idle_values(graph, reduction, shares[micro]))
        found = stages.played(micro, inputs, share, numbers)
        loss = loss + found * share if share else loss
    for runner in runners:
        runner.finish()
    return Replayed(loss, _gradients(graph, program, tensors), _buffers(graph, plan, tensors), program)


def _shares(
    captured: Captured, reduction: LossReduction, rows: tuple[int, ...], micros: Sequence[Mapping[str, torch.Tensor]]
) -> list[Share]:
    """Return the share of each micro-batch."""
    counts = BatchCounts(LocalTensors(CPU), CPU)
    counts.add(captured, reduction)
    measured = counts.measured(reduction, rows, micros, alone=len(rows) == 1)
    return [share for (share,) in loss_shares(reduction, rows, (Division(),), measured)[Division()]]


def _own_copies(captured: Captured) -> dict[str, torch.Tensor]:
    copies: dict[str, torch.Tensor] = {}
    for name, tensor in captured.tensors.items():
        copy = tensor.detach().clone()
        copies[name] = nn.Parameter(copy, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copy
    return copies


def _runner(
    captured: Captured,
    program: Program,
    stage: int,
    plan: Plan,
    tensors: Mapping[str, torch.Tensor],
    reduction: LossReduction,
) -> StageRunner:
    code = stage_module(captured, program.edges, stage, plan.stages[stage], CPU, reduction.adjusted)
    back = frozenset(name for e in program.edges if e.dst == stage for name in e.grads)
    out = frozenset(name for e in program.edges if e.src == stage for name in e.grads)
    held = {name: tensors[name] for name in code.held}  # the stage sees no other tensors
    return StageRunner({captured.graph.rows: (None, (code,))}, held, back, out | {captured.graph.outputs[0]})


@dataclass(frozen=True)
class _Stages:
    """The stages of a micro-batch. idle: values without weight, and so without a gradient, in this micro-batch."""

    graph: Graph
    program: Program
    runners: Sequence[StageRunner]
    idle: frozenset[str]

    def played(
        self, micro: int, inputs: Mapping[str, torch.Tensor], share: float, numbers: Sequence[float]
    ) -> torch.Tensor:
        """Run forward through all stages, then backward, and return the loss."""
        made: list[dict[str, torch.Tensor]] = []
        rows = self.graph.rows
        for s, runner in enumerate(self.runners):
            given: dict[str, torch.Tensor] = dict(inputs) if s == 0 else {}
            for edge in self.program.edges:
                if edge.dst == s:
                    given.update({name: made[edge.src][name].detach().clone() for name in edge.values})
            slot = Slot(s, micro)
            outputs = runner.forward(slot, Window(0, rows, rows), given, (0, 0), train=True, numbers=numbers)
            made.append({**given, **outputs})
        name = self.graph.outputs[0]
        loss = next(m[name] for m in made if name in m)
        self._backward(micro, {name: torch.full_like(loss, share)}, [name in m for m in made])
        return loss.detach()

    def _backward(self, micro: int, seed: Mapping[str, torch.Tensor], has_loss: Sequence[bool]) -> None:
        back: list[dict[str, torch.Tensor]] = [{} for _ in self.runners]
        for s in reversed(range(len(self.runners))):
            grads = dict(seed) if has_loss[s] else {}
            for edge in self.program.edges:
                for name in edge.grads if edge.src == s else ():
                    grads[name] = grads[name] + back[edge.dst][name] if name in grads else back[edge.dst][name]
            grads = {name: grad for name, grad in grads.items() if name not in self.idle}
            back[s] = self.runners[s].backward(Slot(s, micro), grads)


def _gradients(
    graph: Graph, program: Program, tensors: Sequence[Mapping[str, torch.Tensor]]
) -> dict[str, torch.Tensor | None]:
    """Return gradients summed over stages that share a parameter; another parameter may have one on a single stage
    only.
    """
    tied = {name for name, _ in program.tied}
    found: dict[str, torch.Tensor | None] = {}
    for param in graph.params:
        if not param.trainable:
            continue
        grads = [t[param.name].grad for t in tensors if t[param.name].grad is not None]
        assert len(grads) <= 1 or param.name in tied, param.name
        found[param.name] = sum(grads) if grads else None  # type: ignore[assignment]
    return found


def _buffers(graph: Graph, plan: Plan, tensors: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    writer = graph.writer()
    return {
        buffer: next(tensors[s][buffer] for s, stage in enumerate(plan.stages) if writer[value] in stage.ops)
        for buffer, value in graph.updates
    }


def inputs_of(captured: Captured, batch: Any) -> dict[str, torch.Tensor]:
    """Return the graph's inputs by name for a batch of any form."""
    return dict(zip(captured.graph.inputs, flatten(batch).tensors, strict=True))


# -- a whole step compared with one process ----------------------------------------------------------------------------


def verify_here(model: nn.Module, sample: Any, options: Options, plain: Outcome | None = None) -> Verification:
    """Compare a step with one process as `autopart.verify` does, with all stages in this process.

    plain: the results of one process on the whole batch, if known. Raises what `compile` raises.
    """
    loss_fn = options.loss_fn
    check_model(model)  # before copying, which separates shared memory
    batch = flatten(sample, with_target=loss_fn is not None)
    made = _planned(model, batch, options)
    graph, rows = made.captured.graph, made.plan.micro_rows
    found, reference = _played(made, batch), PLAIN
    random, couples = any(op.random for op in graph.ops), bool(coupling_ops(graph))
    if random or (couples and made.rule.reduction.adjusted):
        reference, alone = RANDOM if random else TERMS, replace(options, stages=1, micro_batches=len(rows))
        plain = _played(_planned(model, batch, alone), batch)
    elif couples:
        reference = BUFFERS
        shares = _shares(made.captured, made.rule.reduction, rows, _micros(made, batch))
        plain = plain_outcome(model, batch, loss_fn, rows, [share[0] for share in shares])
    elif plain is None:
        plain = plain_outcome(model, batch, loss_fn, (batch.rows or 1,), [1.0])
    return compared(found, plain, {}, precision_of(graph), None, reference)


def _planned(model: nn.Module, batch: Batch, options: Options) -> Planned:
    captures = CaptureCache(*fresh_copy(model, options.loss_fn))
    return make_plan(captures, batch, parse_cluster(f"cpu:{options.stages}"), options)


def _played(made: Planned, batch: Batch) -> Outcome:
    played = replay(made.captured, made.plan, _micros(made, batch), made.rule.reduction)
    return Outcome(played.loss.item(), played.gradients, played.buffers)


def _micros(made: Planned, batch: Batch) -> list[dict[str, torch.Tensor]]:
    names = made.captured.graph.inputs
    return [dict(zip(names, piece, strict=True)) for piece in batch.micro(made.plan.micro_rows)]
