"""Several optimizers on ranks: their state moves with plans and checkpoints, each to the parameters that it is of."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopart
from autopart.extras.asynchronous.part import Asynchronous

PLANS = [
    {"stages": 2, "replicas": 1, "cuts": ("2",), "micro_batches": 2},
    {"stages": 1, "replicas": 2, "micro_batches": 1},
    {"stages": 2, "replicas": 1, "cuts": ("4",), "micro_batches": 2},  # the last stage has no matrix
]


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.by


def net() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), Scale()).double()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = (torch.randn(4, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, y


def driving(named: Iterable[tuple[str, Any]]) -> tuple[list[Any], list[Any]]:
    """As the page says: a group may be empty on a rank."""
    own = [p for _, p in named]
    muon = torch.optim.Muon([{"params": [p for p in own if p.ndim == 2]}], lr=0.02)
    adamw = torch.optim.AdamW([{"params": [p for p in own if p.ndim != 2]}], lr=0.05)
    steps = torch.optim.lr_scheduler
    return [muon, adamw], [steps.ExponentialLR(muon, 0.9), steps.LinearLR(adamw, 0.5, total_iters=4)]


def stepped(optimizers: list[Any], schedulers: list[Any]) -> None:
    for each in [*optimizers, *schedulers]:
        each.step()
    for optimizer in optimizers:
        optimizer.zero_grad()


def alone(steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train in one process; return losses and the state."""
    model, losses = net(), []
    optimizers, schedulers = driving(model.named_parameters())
    for step in range(steps):
        x, y = batch(step)
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        losses.append(loss.item())
        stepped(optimizers, schedulers)
    return losses, dict(model.state_dict())


def carried(folder: Path, steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train under one plan after the other: by `adopt` from the first to the second, by save and load to the third,
    with the optimizers in the other order."""
    torch.set_num_threads(1)
    options: dict[str, Any] = {"loss_fn": nn.functional.mse_loss, "costs": "analytic", "sample": batch(0)}
    losses = []
    with autopart.compile(net(), "cpu:2", **options, **PLANS[0]) as pipe:
        optimizers, schedulers = driving(pipe.named_parameters())
        for step in range(steps - 2):
            if step == 2:
                pipe.adopt(autopart.plan(net(), "cpu:2", **options, **PLANS[1]), optimizers)
            losses.append(pipe.step(batch(step)).item())
            stepped(optimizers, schedulers)
        pipe.save(folder, optimizers, schedulers)
    with autopart.compile(net(), "cpu:2", **options, **PLANS[2]) as pipe:
        optimizers, schedulers = driving(pipe.named_parameters())
        pipe.load(folder, optimizers[::-1], schedulers[::-1])
        for step in range(steps - 2, steps):
            losses.append(pipe.step(batch(step)).item())
            stepped(optimizers, schedulers)
        return losses, dict(pipe.state_dict())


def frozen_moves() -> list[str]:
    """An optimizer of what is trainable keeps its parameters under a plan that moves frozen ones alone; return what
    each step of it raises."""
    torch.set_num_threads(1)
    model = net()
    for name in ("2.weight", "2.bias"):
        model.get_parameter(name).requires_grad_(False)
    options: dict[str, Any] = {"loss_fn": nn.functional.mse_loss, "costs": "analytic", "sample": batch(0)}
    before, after = ({"stages": 2, "replicas": 1, "cuts": cuts, "micro_batches": 2} for cuts in (("2",), ("3",)))
    found = []
    with autopart.compile(model, "cpu:2", **options, **before) as pipe:
        optimizer = torch.optim.AdamW([p for p in pipe.parameters() if p.requires_grad])
        for plan in (None, autopart.plan(model, "cpu:2", **options, **after)):
            if plan is not None:
                pipe.adopt(plan, optimizer)
            pipe.step(batch(0))
            try:
                optimizer.step()
                found.append("")
            except autopart.UsageError as error:
                found.append(str(error))
        return found


def kinds_in_turn(order: str, several: bool) -> list[int]:
    """Train asynchronously on batches of two sizes, and return the steps at which the pipeline was flushed."""
    torch.set_num_threads(1)
    options: dict[str, Any] = {"loss_fn": nn.functional.mse_loss, "costs": "analytic", "sample": batch(0)}
    data = [batch(n) if kind == "a" else tuple(part[:2] for part in batch(n)) for n, kind in enumerate(order)]
    flushes = list[int]()

    def made(parameters: list[Any]) -> Any:
        return driving(enumerate(parameters))[0] if several else torch.optim.SGD(parameters, lr=0.1)

    options |= PLANS[0] | {"schedule": "pipedream", "micro_batches": 1}
    with autopart.compile(net(), "cpu:2", **options) as pipe:
        training = pipe.train(data, optimizer=made)
        going = pipe._core.part(Asynchronous).training
        real = going._empty
        going._empty = lambda: (flushes.append(pipe.steps), real())[1]
        losses = [loss.item() for loss in training]
        assert len(losses) == len(data)
        return flushes


# -- tests -----------------------------------------------------------------------------------------------------------


pytestmark = pytest.mark.timeout(200)


def test_two_optimizers_go_on_under_other_plans_and_from_a_checkpoint(pair, tmp_path: Path) -> None:
    losses, state = alone(6)
    for found, its in pair.run(carried, tmp_path, 6):
        assert found == pytest.approx(losses, rel=1e-9)
        for name, tensor in state.items():
            torch.testing.assert_close(its[name], tensor, rtol=1e-9, atol=1e-11)


def test_an_optimizer_of_what_is_trained_is_not_refused_where_frozen_layers_move(pair) -> None:
    assert pair.run(frozen_moves) == [["", ""]] * 2


@pytest.mark.parametrize("several", [False, True])
def test_a_change_of_the_kind_of_batch_flushes_once_also_where_the_kind_is_new(pair, several: bool) -> None:
    for flushes in pair.run(kinds_in_turn, "aaaaabbbbbbbaaaa", several):
        assert flushes == [5, 12, 16]
