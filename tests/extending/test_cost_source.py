"""A cost source of a user: planned with, verified, simulated and run like ours."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support.extending import own_cost_source
from support.extending.own_cost_source import MODULE_NS, by_module
from support.workers import Workers
from torch import nn

import autopart
from autopart.report.plan_table import stage_table

MOST_LINES = 25


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.Tanh()))).double()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(8, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, y


OPTIONS: dict[str, Any] = {"loss_fn": nn.functional.mse_loss, "optimizer": "sgd", "stages": 2, "micro_batches": 4}


def planned(**options: Any) -> autopart.Plan:
    return autopart.plan(net(), "cpu:2", sample=batch(), replicas=1, **{**OPTIONS, **options})


def test_a_cost_source_is_short() -> None:
    assert len(Path(own_cost_source.__file__).read_text().splitlines()) <= MOST_LINES


def test_plans_are_made_from_the_costs_of_a_users_source() -> None:
    own, ours = planned(costs=by_module), planned(costs="analytic")
    assert own.provenance.costs == "by_module" and "costs: 4 modules timed by hand" in own.notes
    assert own.stages[0].ops == ("linear",)  # the first layer takes longer than all others
    assert ours.stages[0].ops != ("linear",)
    assert own.estimates[0].fwd_ns >= MODULE_NS["0"] and own.step_ns >= 4 * 3 * MODULE_NS["0"]
    assert "op costs: by_module" in stage_table(own)


def train(steps: int = 3) -> tuple[autopart.Plan, list[float], bool]:
    """On every rank: compare one step with one process, then train."""
    torch.set_num_threads(1)
    world = f"cpu:{os.environ['WORLD_SIZE']}"
    ok = autopart.verify(net(), world, sample=batch(), costs=by_module, **OPTIONS).ok
    with autopart.compile(net(), world, sample=batch(), costs=by_module, **OPTIONS) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        losses = []
        for _ in range(steps):
            optimizer.zero_grad()
            losses.append(pipe.step(batch()).item())
            optimizer.step()
        return pipe.plan, losses, ok


def test_a_users_cost_source_is_verified_and_trained_with(pair: Workers) -> None:
    results = pair.run(train)
    model, (x, y) = net(), batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    for plan, losses, ok in results:
        assert ok and plan.provenance.costs == "by_module" and len(plan.stages) == 2
        assert losses == pytest.approx(expected, rel=1e-12)
