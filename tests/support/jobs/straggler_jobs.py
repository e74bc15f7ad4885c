"""Training with a rank whose computes take three times as long from a step on, until it is named and a new plan is made
for that; and its oracle, the same training in one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import nn

import autopart
from autopart.runtime.stages.stage import StageRunner

WIDTH, ROWS = 384, 24


def net() -> nn.Module:
    """Return a tower of equal layers in fp64."""
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh()))).double()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the batch of a step."""
    generator = torch.Generator().manual_seed(step)
    x, y = (torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, y


@contextmanager
def slowed(factor: float) -> Iterator[None]:
    """Let every forward and backward of this process take `factor` times as long, by a busy loop behind it."""

    def slow(method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            result = method(*args, **kwargs)
            end = time.perf_counter() + (factor - 1) * (time.perf_counter() - began)
            while time.perf_counter() < end:
                pass
            return result

        return run

    with ExitStack() as stack:
        for name in ("forward", "backward"):
            stack.enter_context(mock.patch.object(StageRunner, name, slow(getattr(StageRunner, name))))
        yield


def shares(plan: autopart.Plan, rank: int) -> float:
    """Return the part of all work that a rank has: ops of its stages, each by its share of the rows."""
    whole = sum(len(stage.ops) for stage in plan.stages)
    own = 0.0
    for stage in plan.stages:
        if rank in stage.ranks:
            parts = stage.division.shares
            own += len(stage.ops) * parts[stage.ranks.index(rank)] / sum(parts)
    return own / whole


def train(
    world: int, slow_rank: int, more: int, costs: str = "analytic", **options: Any
) -> tuple[list[float], int, bool, float, float]:
    """Train 12 steps, then with a slow rank until it is named, and some more under a new plan.

    Returns the losses, after how many slow steps it was named (0: never within 40), whether a plan was adopted, and
    the part of the work that the slow rank had before and has then."""
    torch.set_num_threads(1)
    named, losses = 0, []
    asked: dict[str, Any] = {"loss_fn": nn.functional.mse_loss, "costs": costs, **options}
    with autopart.compile(net(), f"cpu:{world}", sample=batch(0), **asked) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3)

        def step() -> None:
            optimizer.zero_grad()
            losses.append(float(pipe.step(batch(pipe.steps))))
            optimizer.step()

        for _ in range(12):
            step()
        with slowed(3.0) if pipe.rank == slow_rank else nullcontext():
            for number in range(1, 41):
                step()
                if slow_rank in pipe.stragglers:
                    named = number
                    break
            before = shares(pipe.plan, slow_rank)
            found = pipe.replan(optimizer, steps=10**6)
            for _ in range(more):
                step()
        return losses, named, found.adopted, before, shares(pipe.plan, slow_rank)


def plainly(steps: int) -> list[float]:
    """Return the losses of the same training in one process."""
    model, losses = net(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        x, y = batch(step)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
