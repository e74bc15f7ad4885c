"""Jobs that go on under another plan with the same optimizer, and its oracle, the same training in one process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import autopart
from autopart.extras.freezing.replan import Replanned
from autopart.runtime.messages import moves
from autopart.session import placement
from support.jobs.step_jobs import refusal_of

ROWS, WIDTH = 12, 24
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1),
    "adafactor": lambda groups: torch.optim.Adafactor(groups, lr=0.05),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=0.005, momentum=0.5),
}


class Tower(nn.Module):
    """Layers with dropout, and a head tied to the first one."""

    def __init__(self, depth: int = 6) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(depth)
        )
        self.head = nn.Linear(WIDTH, WIDTH)
        self.head.weight = self.first.weight
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x).square().mean()


def batch(step: int) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def groups(named: Iterable[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
    """Two parameter groups: biases without decay; one may be empty on a rank."""
    owned = list(named)
    return [
        {"params": [p for name, p in owned if name.endswith("weight")]},
        {"params": [p for name, p in owned if not name.endswith("weight")], "lr": 0.02},
    ]


def plan_of(ranks: int, **options: Any) -> autopart.Plan:
    return autopart.plan(Tower(), f"cpu:{ranks}", sample=batch(0), costs="analytic", cache=False, **options)


def alone(kind: str, steps: int, frozen: Sequence[int] = ()) -> tuple[list[float], dict[str, Any], dict[str, Any]]:
    """Train in one process; return losses, state of the model and of the optimizer by name.

    frozen: how many layers are frozen before each step, the last number from then on."""
    model = Tower()
    optimizer = OPTIMIZERS[kind](groups(model.named_parameters()))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    losses = []
    for step in range(steps):
        freeze(model, frozen, step)
        loss = model(batch(step))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return losses, dict(model.state_dict()), state_by_name(optimizer, dict(model.named_parameters()))


def freeze(model: Any, frozen: Sequence[int], step: int) -> None:
    if frozen:
        for layer in model.layers[: frozen[min(step, len(frozen) - 1)]]:
            layer.requires_grad_(False)


def state_by_name(optimizer: torch.optim.Optimizer, named: dict[str, nn.Parameter]) -> dict[str, Any]:
    return {
        f"{name}/{key}": value.clone() if isinstance(value, torch.Tensor) else value
        for name, parameter in named.items()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def changing(
    kind: str, plans: Sequence[autopart.Plan], every: int, steps: int
) -> tuple[list[float], dict[str, Any], dict[str, Any], int]:
    """Train under one plan after another with one optimizer; returns what `alone` does, and how many parameters this
    rank's optimizer has at the end."""
    with autopart.compile(Tower(), f"cpu:{plans[0].decision.world}", sample=batch(0), plan=plans[0]) as pipe:
        optimizer = OPTIMIZERS[kind](groups(pipe.named_parameters()))
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        losses = []
        for step in range(steps):
            if step and step % every == 0:
                pipe.adopt(plans[step // every % len(plans)], optimizer)
            losses.append(pipe.step(batch(step)).item())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        own = state_by_name(optimizer, dict(pipe.named_parameters()))
        count = sum(p.numel() > 0 for group in optimizer.param_groups for p in group["params"])
        return losses, pipe.state_dict(), own, count


def replanned(kind: str, frozen: Sequence[int], at: Sequence[int], steps: int) -> Any:
    """Train while layers freeze, planning anew at some steps; returns what `changing` does, and what was found."""
    found: list[Replanned] = []
    with autopart.compile(Tower(), "cpu:2", sample=batch(0), costs="analytic", cache=False) as pipe:
        optimizer = OPTIMIZERS[kind](groups(pipe.named_parameters()))
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        losses = []
        for step in range(steps):
            freeze(pipe.model, frozen, step)
            if step in at:
                found.append(pipe.replan(optimizer, steps=10_000_000))
            losses.append(pipe.step(batch(step)).item())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        own = state_by_name(optimizer, dict(pipe.named_parameters()))
        return losses, pipe.state_dict(), own, found


def forgotten(plans: Sequence[autopart.Plan]) -> Any:
    """Return the error of stepping an optimizer that was left behind by a change of plan."""
    with autopart.compile(Tower(), "cpu:2", sample=batch(0), plan=plans[0]) as pipe:
        optimizer = OPTIMIZERS["sgd"](pipe.parameters())
        pipe.step(batch(0))
        optimizer.step()
        pipe.adopt(plans[1])
        pipe.step(batch(1))
        error = refusal_of(optimizer.step)
        optimizer = OPTIMIZERS["sgd"](pipe.parameters())
        optimizer.step()
        pipe.adopt(plans[0], optimizer)
        optimizer.step()
        return error


def moved(dtype: torch.dtype) -> tuple[int, int]:
    """Freeze layers while gradients are there, and plan anew; return the bytes that were said to move, and those that
    this rank sent."""
    sent: list[int] = []
    real = moves.move_tensors

    def counting(world: Any, routes: Any, tensors: Any) -> None:
        sent.extend(tensors[name].nbytes for name, source, _ in routes if source == world.rank)
        real(world, routes, tensors)

    own, sample = Tower().to(dtype), batch(0).to(dtype)
    options: dict[str, Any] = {"costs": "analytic", "cache": False, "master_weights": dtype != torch.float64}
    begun = autopart.plan(own, "cpu:2", sample=sample, stages=2, replicas=1, cuts=("layers.4",), **options)
    with autopart.compile(own, "cpu:2", sample=sample, plan=begun, **options) as pipe:
        optimizer = OPTIMIZERS["adamw"](pipe.parameters())
        for step in range(2):
            pipe.zero_grad()
            pipe.step(batch(step).to(dtype))
            optimizer.step()
        freeze(pipe.model, [4], 0)
        pipe.model.first.requires_grad_(False)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(placement, "move_tensors", counting)
            found = pipe.replan(optimizer, steps=10_000_000)
        assert found.adopted, found.reason
        return found.moved_bytes, sum(sent)
