"""A user-defined schedule, importable on the ranks of a pool."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import autopart

# -- code that a user writes ------------------------------------------------------------------------------------------


def eager_first_stage(stages: int, micro_batches: int) -> list[list[str]]:
    """1F1B in which the first stage runs all its forwards first."""
    orders = []
    for stage in range(stages):
        forward = [f"{stage}F{i}" for i in range(micro_batches)]
        backward = [f"{stage}B{i}" for i in range(micro_batches)]
        ahead = micro_batches if stage == 0 else min(micro_batches, stages - stage)
        order = forward[:ahead]
        for i in range(micro_batches):
            order += backward[i : i + 1] + forward[ahead + i : ahead + i + 1]
        orders.append(order)
    return orders


# -- training with the schedule ----------------------------------------------------------------------------------------


def verified() -> tuple[bool, list[str]]:
    """Return on every rank whether a step equals one process's, and the computations of the first rank in order."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(4, 4), nn.Tanh())))
    batch = torch.randn(8, 4), torch.randn(8, 4)
    options: dict[str, Any] = {"loss_fn": nn.functional.mse_loss, "costs": "analytic", "stages": 2, "micro_batches": 4}
    result = autopart.verify(model, "cpu:2", sample=batch, schedule=eager_first_stage, **options)
    with autopart.compile(model, "cpu:2", sample=batch, schedule=eager_first_stage, **options) as pipe:
        step = pipe.timeline(batch)
    return result.ok, [str(s.action) for s in step.spans if s.rank == 0 and s.action.kind in ("F", "B")]
