"""Steps of the engine with stages placed on any ranks, compared with the same stages in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from autopart.batch.batch import flatten
from autopart.capture import Captured, capture
from autopart.ir.plan import Decision, Stage
from autopart.passes.program.messages import with_posting
from autopart.passes.program.routing import route
from autopart.passes.program.schedules import register
from autopart.passes.program.verify import check_program
from autopart.runtime.engine import Engine
from autopart.runtime.group.world import World
from autopart.runtime.messages.mailbox import Mailbox
from autopart.runtime.player import BatchPlan, Player
from autopart.runtime.stages.stage import StageRunner
from autopart.stagecode.split import stage_module
from support.oracles import fake_nccl  # noqa: F401  registers the transport
from support.oracles.one_process import gradient_error
from support.oracles.stages_in_process import inputs_of, plan_for, replay, slices

ROWS, WIDTH, LAYERS, CLASSES = 2, 8, 4, 8


class Skips(nn.Module):
    """Linear layers whose first output is read by each later one, and a head tied to the first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        self.head.weight = self.layers[0].weight
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.seen += x.abs().sum()
        first = x = self.layers[0](x).tanh()
        for layer in self.layers[1:]:
            x = layer(x + first).tanh()
        return nn.functional.cross_entropy(self.head(x), y, reduction="sum")


def batch(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, CLASSES, (ROWS,), generator=generator)
    return {"x": torch.randn(ROWS, WIDTH, generator=generator), "y": labels}


def in_loops(stages: int, micros: int) -> list[list[str]]:
    """Return the orders of two workers that hold every other stage: all forwards by micro-batch, then all backwards."""
    orders: list[list[str]] = [[], []]
    for micro in range(micros):
        for stage in range(stages):
            orders[stage % 2].append(f"{stage}F{micro}")
    for micro in range(micros):
        for stage in reversed(range(stages)):
            orders[stage % 2].append(f"{stage}B{micro}")
    return orders


def alone(stages: int, micros: int) -> list[list[str]]:
    """Return the order of one worker that holds all stages."""
    forwards = [f"{stage}F{micro}" for micro in range(micros) for stage in range(stages)]
    return [forwards + [f"{stage}B{micro}" for micro in range(micros) for stage in reversed(range(stages))]]


def parts_of(captured: Captured) -> list[list[str]]:
    """Return four stages, cut before the second, third and fourth layer."""
    starts = {op.module: place for place, op in reversed(list(enumerate(captured.graph.ops)))}
    return slices(captured.graph, [starts[f"layers.{layer}"] for layer in range(1, LAYERS)])


def step(
    stage_ranks: Sequence[int],
    schedule: str,
    micros: int,
    transport: str = "auto",
    kind: str = "cpu",
    prepare: Callable[[Engine, World], None] | None = None,
) -> dict[str, Any]:
    """Take one step with stage s on stage_ranks[s] and return the losses, gradient errors and buffers of this rank.

    Gradients start at one and the step adds to them. prepare: called with the engine before the step.
    """
    for order in (in_loops, alone):
        register(order)
    torch.manual_seed(5)
    captured = capture(Skips(), flatten(batch(0)))
    parts = parts_of(captured)
    reference = replay(captured, plan_for(captured.graph, parts, micros), [_inputs(captured, m) for m in range(micros)])
    world = World(kind, max(stage_ranks) + 1, transport=transport)
    engine, tensors, outcome = _play(world, captured, parts, stage_ranks, schedule, micros, prepare)
    parameters = {name: t for name, t in tensors.items() if isinstance(t, nn.Parameter)}
    expected = {name: reference.gradients[name] + 1 for name in parameters}
    found = {name: None if p.grad is None else p.grad.cpu() for name, p in parameters.items()}
    error, worst = gradient_error(found, expected)
    assert engine.spans is not None
    world.close()
    return {
        "loss": sum((loss.item() for loss in outcome.losses.values()), 0.0),
        "expected": reference.loss.item(),
        "gradients": error,
        "worst": worst,
        "buffers": {n: (t.item(), reference.buffers[n].item()) for n, t in tensors.items() if n in reference.buffers},
        "norm": sum(float(g.square().sum()) for g in reference.gradients.values() if g is not None) ** 0.5,
        "actions": [str(span.action) for span in engine.spans],
    }


def _inputs(captured: Captured, micro: int) -> dict[str, torch.Tensor]:
    return inputs_of(captured, batch(micro))


def _play(
    world: World,
    captured: Captured,
    parts: Sequence[Sequence[str]],
    stage_ranks: Sequence[int],
    schedule: str,
    micros: int,
    prepare: Callable[[Engine, World], None] | None,
) -> tuple[Engine, Mapping[str, torch.Tensor], Any]:
    graph = captured.graph
    stages = tuple(Stage(tuple(ops), (rank,)) for ops, rank in zip(parts, stage_ranks, strict=True))
    decision = Decision(world.size, stages, (ROWS,) * micros, schedule)
    program = with_posting(check_program(route(decision, graph), schedule))
    mine = [stage for stage, rank in enumerate(stage_ranks) if rank == world.rank]
    codes = {s: stage_module(captured, program.edges, s, stages[s], world.device) for s in mine}
    tensors: dict[str, torch.Tensor] = {}
    for code in codes.values():
        for name in code.held:
            tensor = captured.tensors[name].detach().to(world.device, copy=True)
            is_parameter = isinstance(captured.tensors[name], nn.Parameter)
            tensors.setdefault(name, nn.Parameter(tensor) if is_parameter else tensor)
    for tensor in tensors.values():
        if isinstance(tensor, nn.Parameter):
            tensor.grad = torch.ones_like(tensor)
    runners = {
        s: StageRunner(
            {ROWS: (None, (code,))},
            tensors,
            frozenset(name for e in program.edges if e.dst == s for name in e.grads),
            frozenset(name for e in program.edges if e.src == s for name in e.grads) | {graph.outputs[0]},
        )
        for s, code in codes.items()
    }
    specs = {ROWS: {v.name: torch.empty(v.shape, dtype=getattr(torch, v.dtype), device="meta") for v in graph.values}}
    mailbox = Mailbox(world, program, specs, {})
    engine = Engine(world, Player(world, program, runners, specs, graph.op_map(), graph.outputs[0], mailbox))
    engine.spans = []
    if prepare is not None:
        prepare(engine, world)
    given_to = range(micros) if 0 in mine else ()
    inputs = [{n: t.to(world.device) for n, t in _inputs(captured, micro).items()} for micro in given_to]
    parameters = {name: t for name, t in tensors.items() if isinstance(t, nn.Parameter)}
    given = BatchPlan((ROWS,) * micros, inputs, (0, 0), {stage: [(1.0,)] * micros for stage in mine})
    outcome = engine.step(given, parameters, train=True)
    outcome.commit()
    return engine, tensors, outcome
