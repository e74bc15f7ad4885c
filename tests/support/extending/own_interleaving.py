"""A user-defined interleaved schedule and a hand-written plan for it, importable on the ranks of a pool."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

import autopart
from autopart.passes.program.schedules import register

ROWS, WIDTH, STAGES, RANKS, MICROS = 8, 6, 4, 2, 4

# -- code that a user writes ------------------------------------------------------------------------------------------


def in_groups(stages: int, micro_batches: int) -> list[list[str]]:
    """Interleaved 1F1B (Megatron-LM, SC 2021, section 2.2): worker w has the stages w, w + 2, ...

    Micro-batches come in groups of two. Raises ValueError for other numbers of micro-batches.
    """
    if micro_batches % RANKS:
        raise ValueError(f"micro-batches come in groups of {RANKS}, not {micro_batches}")
    orders = []
    chunks = stages // RANKS
    for worker in range(RANKS):
        groups = [range(first, first + RANKS) for first in range(0, micro_batches, RANKS)]
        forward = [f"{c * RANKS + worker}F{m}" for group in groups for c in range(chunks) for m in group]
        backward = [f"{c * RANKS + worker}B{m}" for group in groups for c in reversed(range(chunks)) for m in group]
        ahead = min(len(forward), (RANKS - worker - 1) * 2 + (chunks - 1) * RANKS + 1)
        order = forward[:ahead]
        for place, item in enumerate(backward):
            order += [item, *forward[ahead + place : ahead + place + 1]]
        orders.append(order)
    return orders


# -- training with the schedule ----------------------------------------------------------------------------------------


class Net(nn.Module):
    """Four layers, one per stage. tied: three of them share a weight."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(STAGES))
        if tied:
            self.layers[2].weight = self.layers[0].weight
            self.layers[3].weight = self.layers[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x
        for layer in self.layers:
            x = torch.tanh(layer(x)) + 0.5 * first
        return x


def net(*, tied: bool) -> nn.Module:
    """Return the model with the same weights on every rank."""
    torch.manual_seed(0)
    return Net(tied=tied).double()


def batch(seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets."""
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, y


OPTIONS: dict[str, Any] = {"loss_fn": nn.functional.mse_loss, "costs": "analytic", "recompute": "off", "replicas": 1}


def two_stages_a_rank(*, tied: bool) -> autopart.Plan:
    """Return a plan for four ranks, rewritten to two ranks with two stages each."""
    schedule = register(in_groups)
    cuts = tuple(f"layers.{layer}" for layer in range(1, STAGES))
    plan = autopart.plan(
        net(tied=tied), f"cpu:{STAGES}", sample=batch(), cuts=cuts, micro_batches=MICROS, schedule="1f1b", **OPTIONS
    )
    stages = tuple(replace(stage, ranks=(number % RANKS,)) for number, stage in enumerate(plan.stages))
    decision = replace(plan.decision, world=RANKS, stages=stages, schedule=schedule.name)
    return replace(plan, decision=decision, outlook=replace(plan.outlook, notes=()))


def trained(plan: autopart.Plan, steps: int, tied: bool) -> dict[str, Any]:
    """Train and return losses, gradient errors and predictions of the pipeline and of one process on every rank."""
    register(in_groups)
    torch.set_num_threads(1)
    loss_fn = OPTIONS["loss_fn"]
    found: dict[str, Any] = {}
    losses, alone = [], []
    with autopart.compile(
        net(tied=tied), f"cpu:{RANKS}", sample=batch(), plan=plan, loss_fn=OPTIONS["loss_fn"]
    ) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
        for step in range(steps):
            optimizer.zero_grad()
            losses.append(pipe.step(batch(step)).item())
            gradients = pipe.gradients()
            optimizer.step()
        found["evaluated"] = pipe.eval_loss(batch()).item()
        found["predicted"] = pipe.predict(batch()[0])
        timeline = pipe.timeline(batch())
    found["computes"] = [str(s.action) for s in timeline.spans if s.rank == 0 and s.action.kind in ("F", "B")]
    model = net(tied=tied)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        x, y = batch(step)
        loss = loss_fn(model(x), y)
        loss.backward()
        alone.append(loss.item())
        worst = max((gradients[name] - p.grad).abs().max().item() for name, p in model.named_parameters())
        optimizer.step()
    x, y = batch()
    with torch.no_grad():
        found["off"] = (found.pop("predicted") - model(x)).abs().max().item()
        found["expected"] = loss_fn(model(x), y).item()
    return found | {"losses": losses, "alone": alone, "gradients": worst}
