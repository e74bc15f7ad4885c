"""Stages played one after another in this process, with the real stage code, routes and stage runner.

Every stage has its own copy of the tensors it uses, as on ranks of their own; only what the edges of the routed
program carry passes from one to another.  Benchmarks use it, and so do the tests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopart.capture import Captured
from autopart.capture.batch import flatten
from autopart.ir.graph import Graph
from autopart.ir.plan import Plan
from autopart.ir.program import Program, Slot
from autopart.passes.program.routing import route
from autopart.passes.program.verify import check_program
from autopart.runtime.stage import StageRunner
from autopart.session.split import stage_module

CPU = torch.device("cpu")


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
