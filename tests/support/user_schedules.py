"""A schedule as a user would write it, and a job that trains with it."""

from __future__ import annotations

from typing import Any

from autopart.passes.program.schedules import register
from support.step_jobs import compare


def eager_first_stage(stages: int, micro_batches: int) -> list[list[str]]:
    """1F1B, but the first stage runs all its forwards at once."""
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


def train_eagerly(model: str, stages: int, micro_batches: int) -> Any:
    """`step_jobs.compare` under this schedule, registered on every rank."""
    return compare(model, stages, register(eager_first_stage).name, micro_batches, 12, "float32")
