"""Training with a loss function that has parameters, in pipes of two stages and in one process."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import autopart
from support.jobs.step_jobs import cluster, refusal_of
from support.models.misleading_models import Net, X, Y

Steps = tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]
"""Losses, the gradients of the last step and the state after it."""


class Weighing(nn.Module):
    """A loss over two terms whose weights are learned, with a learned output head."""

    def __init__(self) -> None:
        super().__init__()
        self.spread = nn.Parameter(torch.tensor([0.1, -0.2]).double())
        self.head = nn.Linear(8, 8, bias=False).double()

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        classes = F.cross_entropy(self.head(output), target, ignore_index=0)
        terms = torch.stack([classes, output.square().sum() / 50])
        return (torch.exp(-self.spread) * terms + self.spread).sum()


class Body(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(x)


def parts() -> tuple[nn.Module, Weighing]:
    torch.manual_seed(1)
    return Body().double(), Weighing()


BATCHES = [(X(7, seed).double(), Y(7, seed)) for seed in range(4)]


def names(model: nn.Module, loss: nn.Module, of: str) -> dict[str, torch.Tensor]:
    """Return the gradients or the values of the model and of the loss function, the latter under "loss_fn."."""
    found = {**dict(model.named_parameters()), **{f"loss_fn.{n}": p for n, p in loss.named_parameters()}}
    return {n: (p.grad if of == "grad" else p).detach().clone() for n, p in found.items()}


def alone() -> Steps:
    """Train in one process and return its results."""
    model, loss = parts()
    optimizer = torch.optim.SGD([*model.parameters(), *loss.parameters()], lr=0.1, momentum=0.9)
    losses = []
    for x, y in BATCHES:
        optimizer.zero_grad()
        value = loss(model(x), y)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses, names(model, loss, "grad"), names(model, loss, "value")


def opened(model: nn.Module, loss: nn.Module) -> autopart.Pipe:
    return autopart.compile(
        model, cluster(), sample=BATCHES[0], loss_fn=loss, micro_batches=3, stages=2, costs="analytic"
    )


def train(pipe: autopart.Pipe, batches: list[Any], losses: list[float]) -> None:
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
    for batch in batches:
        optimizer.zero_grad()
        losses.append(pipe.step(batch).item())
        optimizer.step()


def piped() -> tuple[Steps, dict[str, torch.Tensor], list[float]]:
    """Train in a pipe and return its results, the values after close, and two losses after loading the state."""
    model, loss = parts()
    losses: list[float] = []
    with opened(model, loss) as pipe:
        train(pipe, BATCHES, losses)
        gradients, state = pipe.gradients(), pipe.state_dict()
    kept = names(model, loss, "value")
    fresh, fresh_loss = parts()
    again: list[float] = []
    with opened(fresh, fresh_loss) as pipe:
        pipe.load_state_dict(state)
        again.append(pipe.eval_loss(BATCHES[0]).item())
    return (losses, gradients, state), kept, [*again, loss(model(BATCHES[0][0]), BATCHES[0][1]).item()]


def verified() -> tuple[bool, set[str], bool]:
    """Return whether `verify` succeeds, the gradients it compared, and whether it left the loss function unchanged."""
    model, loss = parts()
    before = copy.deepcopy(loss.state_dict())
    found = autopart.verify(
        model, cluster(), sample=BATCHES[0], loss_fn=loss, micro_batches=3, stages=2, costs="analytic"
    )
    same = all(torch.equal(before[n], t) for n, t in loss.state_dict().items())
    untouched = same and all(p.grad is None for p in loss.parameters())
    return found.ok, {d.name for d in found.gradients}, untouched


def refused(kind: str) -> autopart.AutopartError | None:
    """Return the error that compile raises for a loss function whose parameters it cannot own."""
    model, loss = parts()
    if kind == "a name of the model":
        model.loss_fn = nn.Linear(8, 8)
    given = {"a function": lambda output, target: loss(output, target), "a method": loss.forward}.get(kind, loss)
    return refusal_of(lambda: opened(model, given).close())
