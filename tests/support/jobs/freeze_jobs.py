"""Jobs that freeze and unfreeze layers between steps, and their oracle, the same training in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

import autopart
from support.jobs.replan_jobs import ROWS, WIDTH, batch

Frozen = Sequence[tuple[str, ...]]
"""Before each step, the modules that are frozen; all others learn."""


class Net(nn.Module):
    """Layers with skips and a batch norm, whose statistics change also while it is frozen."""

    def __init__(self, depth: int = 6, *, norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Linear(WIDTH, WIDTH, bias=not norm),
                nn.BatchNorm1d(WIDTH) if norm else nn.LayerNorm(WIDTH),
                nn.GELU(),
            )
            for _ in range(depth)
        )
        self.head = nn.Linear(WIDTH, 4)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x).square().mean()


def first(count: int) -> tuple[str, ...]:
    return tuple(f"layers.{i}" for i in range(count))


def freeze(model: nn.Module, names: tuple[str, ...]) -> None:
    model.requires_grad_(True)
    for name in names:
        model.get_submodule(name).requires_grad_(False)


def plan_of(ranks: int, *, norm: bool = False, frozen: tuple[str, ...] = (), **options: Any) -> autopart.Plan:
    model = Net(norm=norm)
    freeze(model, frozen)
    return autopart.plan(model, f"cpu:{ranks}", sample=batch(0), costs="analytic", cache=False, **options)


def alone(frozen: Frozen, *, norm: bool = False, micros: int = 1) -> tuple[list[float], list[Any], dict[str, Any]]:
    """Train in one process; return losses, gradients of every step, and the state at the end."""
    model = Net(norm=norm)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses, gradients = [], []
    for step, names in enumerate(frozen):
        freeze(model, names)
        loss = torch.zeros((), dtype=torch.float64)
        for rows in batch(step).split(-(-ROWS // micros)):
            own = model(rows) * (len(rows) / ROWS)
            own.backward()
            loss += own.detach()
        losses.append(loss.item())
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients, dict(model.state_dict())


def frozen_steps(
    plan: autopart.Plan, frozen: Frozen, planned_with: tuple[str, ...] = (), norm: bool = False
) -> tuple[list[float], list[Any], dict[str, Any], list[list[str]]]:
    """Train under a plan; return what `alone` does, and what this rank played in each step.  planned_with: frozen when
    the plan was made."""
    model = Net(norm=norm)
    freeze(model, planned_with)
    with autopart.compile(model, f"cpu:{plan.decision.world}", sample=batch(0), plan=plan) as pipe:
        optimizer: Any = None
        losses, gradients, played = [], [], []
        for step, names in enumerate(frozen):
            freeze(pipe.model, names)
            with pipe.traced() as spans:
                losses.append(pipe.step(batch(step)).item())
            played.append([str(span.action) for span in spans])
            gradients.append({n: g for n, g in pipe.gradients().items() if g is not None})
            optimizer = optimizer or torch.optim.AdamW(pipe.parameters(), lr=0.01)
            optimizer.step()
            pipe.zero_grad()
        return losses, gradients, pipe.state_dict(), played
