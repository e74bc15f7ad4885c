"""Stages played one after another in this process, with the real stage code, routes and stage runner.

Every stage has its own copy of the tensors it uses, as on ranks of their own; only what the edges of the routed
program carry passes from one to another.  Benchmarks use it, and so do the tests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from autopart.capture import CaptureCache, Captured
from autopart.capture.batch import Batch, flatten
from autopart.capture.guards import check_model
from autopart.files.clusters import parse_cluster
from autopart.ir.graph import Graph, LossReduction
from autopart.ir.plan import Plan
from autopart.ir.program import Program, Slot
from autopart.options import Options
from autopart.passes.program.routing import route
from autopart.passes.program.verify import check_program
from autopart.planning import Planned, make_plan
from autopart.runtime.stage import StageRunner
from autopart.runtime.tensors import LocalTensors
from autopart.session.compare import (
    BUFFERS,
    PLAIN,
    RANDOM,
    Outcome,
    Verification,
    compared,
    couples_rows,
    fresh_copy,
    plain_outcome,
    precision_of,
)
from autopart.session.split import stage_module
from autopart.session.stage_code import StageCode

CPU = torch.device("cpu")
ALIKE: dict[str, Any] = {
    "costs": "analytic", "schedule": "1f1b", "recompute": "off", "optimizer": "sgd", "cache": False,
}  # fmt: skip
"""Options that make plans the same everywhere."""


@dataclass(frozen=True)
class Replayed:
    """loss: sum over the micro-batches.  gradients: by name, summed over stages.  buffers: after the step."""

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor]
    program: Program


def replay(
    captured: Captured,
    plan: Plan,
    micros: Sequence[Mapping[str, torch.Tensor]],
    shares: Sequence[float] | None = None,
) -> Replayed:
    """One training step over micro-batches of `plan.micro_rows` rows.  shares: of the loss of each micro-batch in the
    loss; None adds them up."""
    graph = captured.graph
    program = check_program(route(plan.decision, graph), plan.schedule)
    tensors = [_own_copies(captured) for _ in plan.stages]
    runners = [_runner(captured, program, s, plan, tensors[s]) for s in range(len(plan.stages))]
    loss = torch.zeros(())
    for micro, inputs in enumerate(micros):
        share = 1.0 if shares is None else shares[micro]
        found = _one(graph, program, runners, micro, inputs, share)
        loss = loss + found * share if share else loss
    for runner in runners:
        assert runner.in_flight == 0
        runner.finish()
    return Replayed(loss, _gradients(graph, program, tensors), _buffers(graph, plan, tensors), program)


def _own_copies(captured: Captured) -> dict[str, torch.Tensor]:
    copies: dict[str, torch.Tensor] = {}
    for name, tensor in captured.tensors.items():
        copy = tensor.detach().clone()
        copies[name] = nn.Parameter(copy, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copy
    return copies


def _runner(
    captured: Captured, program: Program, stage: int, plan: Plan, tensors: Mapping[str, torch.Tensor]
) -> StageRunner:
    code = stage_module(captured, program, stage, plan.stages[stage], CPU)
    back = frozenset(name for e in program.edges if e.dst == stage for name in e.grads)
    out = frozenset(name for e in program.edges if e.src == stage for name in e.grads)
    held = {name: tensors[name] for name in code.held}  # nothing else can be reached
    return StageRunner({captured.graph.rows: code}, held, back, out | {captured.graph.outputs[0]})


def _one(
    graph: Graph,
    program: Program,
    runners: Sequence[StageRunner],
    micro: int,
    inputs: Mapping[str, torch.Tensor],
    share: float,
) -> torch.Tensor:
    """Forward through all stages, then backward; returns the loss."""
    made: list[dict[str, torch.Tensor]] = []
    for s, runner in enumerate(runners):
        given: dict[str, torch.Tensor] = dict(inputs) if s == 0 else {}
        for edge in program.edges:
            if edge.dst == s:
                given.update({name: made[edge.src][name].detach().clone() for name in edge.values})
        made.append({**given, **runner.forward(Slot(s, micro), graph.rows, given, (0, 0), train=True)})
    loss = next(m[graph.outputs[0]] for m in made if graph.outputs[0] in m)
    back: list[dict[str, torch.Tensor]] = [{} for _ in runners]
    for s in reversed(range(len(runners))):
        grads: dict[str, torch.Tensor] = {}
        if graph.outputs[0] in made[s] and share:
            grads[graph.outputs[0]] = torch.full_like(loss, share)
        for edge in program.edges:
            for name in edge.grads if edge.src == s else ():
                grads[name] = grads[name] + back[edge.dst][name] if name in grads else back[edge.dst][name]
        back[s] = runners[s].backward(Slot(s, micro), grads)
    return loss.detach()


def _gradients(
    graph: Graph, program: Program, tensors: Sequence[Mapping[str, torch.Tensor]]
) -> dict[str, torch.Tensor | None]:
    """Summed over the stages that share a parameter; any other parameter may have one on a single stage."""
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
    """The graph's inputs by name, for a batch of any form."""
    return dict(zip(captured.graph.inputs, flatten(batch).tensors, strict=True))


# -- a whole step against the plain model -----------------------------------------------------------------------------


def verify_here(model: nn.Module, sample: Any, options: Options, plain: Outcome | None = None) -> Verification | None:
    """As `autopart.verify`, with all stages in this process; None where the terms of the loss weigh differently, which
    takes real ones.  plain: what the plain model leaves on the whole batch, if that is known.  Raises as `compile`."""
    loss_fn = options.loss_fn
    check_model(model)  # a copy no longer shows which tensors share memory
    batch = flatten(sample, with_target=loss_fn is not None)
    made = _planned(model, batch, options)
    if getattr(made.weight, "adjusted", ()):
        return None
    graph, rows, shares = made.captured.graph, made.plan.micro_rows, loss_shares(made, batch)
    found, reference = _played(made, batch, shares), PLAIN
    if any(op.random for op in graph.ops):
        reference, alone = RANDOM, replace(options, stages=1, micro_batches=len(rows))
        plain = _played(_planned(model, batch, alone), batch, shares)
    elif graph.updates or couples_rows(graph):
        reference = BUFFERS
        plain = plain_outcome(fresh_copy(model), batch, loss_fn, rows, shares)
    elif plain is None:
        plain = plain_outcome(fresh_copy(model), batch, loss_fn, (batch.rows or 1,), [1.0])
    return compared(found, plain, {}, precision_of(graph), None, reference)


def _planned(model: nn.Module, batch: Batch, options: Options) -> Planned:
    captures = CaptureCache(fresh_copy(model), options.loss_fn)
    return make_plan(captures, batch, parse_cluster(f"cpu:{options.stages}"), options)


def _played(made: Planned, batch: Batch, shares: list[float]) -> Outcome:
    played = replay(made.captured, made.plan, _micros(made, batch), shares)
    return Outcome(played.loss.item(), played.gradients, played.buffers)


def _micros(made: Planned, batch: Batch) -> list[dict[str, torch.Tensor]]:
    names = made.captured.graph.inputs
    return [dict(zip(names, piece, strict=True)) for piece in batch.micro(made.plan.micro_rows)]


def loss_shares(made: Planned, batch: Batch) -> list[float]:
    """Share of each micro-batch's loss in the whole loss, as the rank of the first stage counts it."""
    rows, weight = made.plan.micro_rows, made.weight
    if weight.kind == "sum":
        return [1.0] * len(rows)
    if weight.value is None:
        return [count / sum(rows) for count in rows]
    counts = [_count(made, weight, inputs) for inputs in _micros(made, batch)]
    return [count / sum(counts) if sum(counts) else 1 / len(counts) for count in counts]


def _count(made: Planned, weight: LossReduction, inputs: dict[str, torch.Tensor]) -> float:
    code = StageCode(LocalTensors(CPU), CPU)
    assert weight.value is not None
    code.add_counter(made.captured, weight.value)
    return code.count(weight, made.captured.graph.rows, inputs)
