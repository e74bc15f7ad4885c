"""Two ranks that learn that a rank is lost, keep their state in memory, and continue from there."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch

import autopart
from autopart.ir.errors import WorkerError
from autopart.session.ranks.call_sync import STEP_FAILED
from support.jobs.failures import elastic_jobs as jobs


def pipe_of(options: dict[str, Any]) -> autopart.Pipe:
    """Return a pipe of the model of elastic runs on two ranks."""
    batch = jobs.dataset()[: jobs.ROWS]
    return autopart.compile(jobs.net(), "cpu:2", sample=batch, loss_fn=jobs.loss_of, **options)


def train(pipe: autopart.Pipe, optimizer: torch.optim.Optimizer, steps: Iterable[int]) -> list[float]:
    """Run these steps; returns the losses."""
    losses, data = [], jobs.dataset()
    for step in steps:
        optimizer.zero_grad()
        losses.append(float(pipe.step(data[step : step + jobs.ROWS])))
        optimizer.step()
    return losses


def kept(folder: str, memory: str, options: dict[str, Any], ahead: int = 0) -> list[float]:
    """Save after 1 step, and lose a rank after 3; returns the losses of the next two steps.

    ahead: steps by which rank 1 believes to be ahead."""
    os.environ["AUTOPART_RESCUE"] = memory
    with pipe_of(options) as pipe:
        optimizer = jobs.optimizer_of(pipe.parameters())
        pipe.load(folder, optimizer, missing_ok=True)
        train(pipe, optimizer, range(1))
        pipe.save(folder, optimizer)
        train(pipe, optimizer, range(1, 3))
        optimizer.zero_grad()
        pipe.steps += ahead * pipe.rank
        for each in pipe.session.calls.listeners:
            each.failed(STEP_FAILED, WorkerError("rank 1 ended: its process 1 is gone"))
        pipe.steps -= ahead * pipe.rank
        return train(pipe, optimizer, range(3, 5))


def resumed(folder: str, memory: str, options: dict[str, Any]) -> tuple[int, list[float]]:
    """Load, and return the step and the losses of steps 3 and 4."""
    try:
        with pipe_of(options) as pipe:
            optimizer = jobs.optimizer_of(pipe.parameters())
            pipe.load(folder, optimizer, missing_ok=True)
            return pipe.steps, train(pipe, optimizer, range(3, 5))
    finally:
        del os.environ["AUTOPART_RESCUE"]
