"""Steps whose loss is multiplied by a number, over ranks, beside the sum that is divided by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import autopart


def accumulated(options: dict[str, Any], dtype: torch.dtype) -> tuple[list[float], list[float], float]:
    """Return the losses of three steps with scale=, those without, and the largest relative error of a gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)
    data = [(torch.randn(8, 4, dtype=dtype), torch.randint(3, (8,))) for _ in range(3)]
    with autopart.compile(
        model, "cpu:2", sample=data[0], loss_fn=nn.functional.cross_entropy, costs="analytic", **options
    ) as pipe:
        scaled = [pipe.step(batch, scale=1 / 3).item() for batch in data]
        found = pipe.gradients()
        pipe.zero_grad()
        plain = [pipe.step(batch).item() for batch in data]
        whole = pipe.gradients()
    errors = []
    for name, gradient in whole.items():
        assert gradient is not None and found[name] is not None, name
        errors.append(float((found[name] - gradient / 3).norm() / (gradient / 3).norm()))
    return scaled, plain, max(errors)


def different() -> None:
    """Give each rank another scale."""
    model, batch = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.ones(4, 4)
    with autopart.compile(
        model, "cpu:2", sample=(batch, batch), loss_fn=nn.functional.mse_loss, stages=2, costs="analytic"
    ) as pipe:
        pipe.step((batch, batch), scale=1.0 + pipe.rank)
