"""Jobs that freeze by policies, and their oracle in one process."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import autopart
from support.jobs.replan_jobs import Tower, batch
from support.jobs.step_jobs import refusal_of

SCHEDULE = [0, 1, 3, 3, 1, 0]
"""How many layers a user's rule freezes, by epoch."""


def plans() -> list[autopart.Plan]:
    ways: list[dict[str, Any]] = [
        {"stages": 2, "replicas": 1, "cuts": ("layers.3",)},
        {"stages": 1, "replicas": 2, "zero": 1},
        {"stages": 1, "replicas": 2, "zero": 0},
    ]
    return [
        autopart.plan(Tower(), "cpu:2", sample=batch(0), costs="analytic", cache=False, micro_batches=2, **way)
        for way in ways
    ]


def layer_of(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    assert isinstance(model.layers, nn.ModuleList)
    return {f"layers.{i}": list(layer.parameters()) for i, layer in enumerate(model.layers)}


def plain_norms() -> dict[str, float]:
    model = Tower()
    model(batch(0)).backward()
    return {
        name: float(torch.stack([p.grad.norm() for p in params if p.grad is not None]).norm())
        for name, params in layer_of(model).items()
    }


def norms_under(plan: autopart.Plan) -> dict[str, float]:
    with autopart.compile(Tower(), "cpu:2", sample=batch(0), plan=plan) as pipe:
        pipe.step(batch(0))
        return autopart.freeze.PipeTransformer().norms(pipe)


def followed(plan: autopart.Plan) -> tuple[list[list[str]], list[bool], list[float], dict[str, float]]:
    """Train under a user's rule; return the frozen layers of each epoch, whether they changed, the losses, and the
    norms of the first step."""
    policy = autopart.freeze.Policy(lambda epoch, norms: SCHEDULE[epoch], layers="layers.?")
    with autopart.compile(Tower(), "cpu:2", sample=batch(0), plan=plan) as pipe:
        pipe.step(batch(0))
        norms = policy.norms(pipe)
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        flags, changed, losses = [], [], []
        for epoch in range(len(SCHEDULE)):
            changed.append(policy.apply(pipe, epoch))
            pipe.zero_grad()
            flags.append([n for n, own in layer_of(pipe.model).items() if not any(p.requires_grad for p in own)])
            losses.append(pipe.step(batch(epoch)).item())
            optimizer.step()
        return flags, changed, losses, norms


def plain_losses(flags: list[list[str]]) -> list[float]:
    model = Tower()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for epoch, frozen in enumerate(flags):
        optimizer.zero_grad()
        model.requires_grad_(True)
        for name in frozen:
            model.get_submodule(name).requires_grad_(False)
        model.first.requires_grad_(not frozen)
        loss = model(batch(epoch))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return losses


def refused_prefix(plan: autopart.Plan) -> Any:
    policy = autopart.freeze.Policy(lambda epoch, norms: ["layers.1"])
    with autopart.compile(Tower(), "cpu:2", sample=batch(0), plan=plan) as pipe:
        pipe.step(batch(0))
        error = refusal_of(lambda: policy.apply(pipe, 1))
        pipe.step(batch(1))
        return error
