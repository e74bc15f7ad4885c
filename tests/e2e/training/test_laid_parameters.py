"""Parameters that do not lie in the order of their axes: gradients and the optimizer's state lie as they do."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support.layouts import Images, channels_last, floats
from support.workers import Workers
from torch import nn
from torch.nn import functional as F

import autopart

STEPS = 3


class Laid(nn.Module):
    """Convolutions in channels_last between uses of one matrix that lies transposed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.images = nn.Sequential(Images(), Images()).to(memory_format=torch.channels_last)
        self.matrix = nn.Parameter(torch.randn(6, 6).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.images(x @ torch.tanh(self.matrix)) @ self.matrix


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images in channels_last, and targets."""
    return channels_last(floats(6, 4, 4, 6, seed=number).double()), floats(6, 4, 4, 6, seed=number + 50).double()


def fused(parameters: Any) -> torch.optim.Optimizer:
    """Return an optimizer whose kernel runs through a parameter, its gradient and its state as they lie in memory."""
    return torch.optim.AdamW(list(parameters), lr=0.01, eps=1e-3, fused=True)


def lies_otherwise(pipe: autopart.Pipe, optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the parameters whose gradient or state lies otherwise."""
    found = []
    for name, parameter in pipe.named_parameters():
        beside = {"grad": parameter.grad, **optimizer.state.get(parameter, {})}
        for key, tensor in beside.items():
            if tensor is not None and tensor.dim() and tensor.stride() != parameter.stride():
                found.append(f"{key} of {name}")
    return found


def trained(
    before: dict[str, Any], after: dict[str, Any], folder: str
) -> tuple[list[float], dict[str, Any], list[str]]:
    """Train under one plan, then under another, then from a checkpoint of the first step."""
    cluster, losses, wrong = f"cpu:{os.environ['WORLD_SIZE']}", [], []
    given = {"sample": batch(0), "loss_fn": F.mse_loss, "costs": "analytic", "micro_batches": 2}

    def step(number: int) -> None:
        losses.append(float(pipe.step(batch(number))))
        wrong.extend(lies_otherwise(pipe, optimizer))
        optimizer.step()
        optimizer.zero_grad()
        wrong.extend(lies_otherwise(pipe, optimizer))

    pipe = autopart.compile(Laid().double(), cluster, **given, **before)
    optimizer = fused(pipe.parameters())
    step(0)
    pipe.save(folder, optimizer)
    pipe.adopt(autopart.plan(Laid().double(), cluster, **given, **after), optimizer)
    step(1)
    step(2)
    pipe.load(folder, optimizer)
    step(1)
    step(2)
    state = {name: tensor.clone() for name, tensor in pipe.state_dict().items()}
    pipe.close()
    return losses, state, wrong


ONE_EACH, REPLICAS = {"stages": 2, "replicas": 1}, {"stages": 1, "replicas": 2}


@pytest.mark.parametrize(("before", "after"), [(ONE_EACH, REPLICAS), (REPLICAS, ONE_EACH)])
def test_fused_optimizers_update_what_lies_otherwise_as_in_one_process(
    pair: Workers, tmp_path: Path, before: dict[str, Any], after: dict[str, Any]
) -> None:
    model, losses = Laid().double(), []
    optimizer = fused(model.parameters())
    for number in range(STEPS):
        loss = F.mse_loss(model(batch(number)[0]), batch(number)[1])
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    for found, state, wrong in pair.run(trained, before, after, str(tmp_path)):
        assert found == pytest.approx([*losses, *losses[1:]], rel=1e-9)
        assert not wrong
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-9, atol=1e-12)
