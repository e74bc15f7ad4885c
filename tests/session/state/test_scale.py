"""`pipe.step(batch, scale=)`: gradients of the loss times a number; the loss that comes back is not multiplied."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.workers import Workers
from torch import nn

import autopart
from autopart.ir.errors import BatchError, UsageError


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


# -- tests -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "dtype", "tolerance"),
    [
        ({"stages": 2, "micro_batches": 2}, torch.float64, 1e-12),
        ({"stages": 1, "replicas": 2, "zero": 1}, torch.float64, 1e-12),
        ({"stages": 2, "micro_batches": 2, "precision": "fp16"}, torch.float32, 5e-3),
        ({"stages": 2, "micro_batches": 2, "master_weights": True}, torch.bfloat16, 2e-2),
    ],
    ids=["stages", "zero", "fp16", "masters"],
)
def test_scaled_steps_add_up_to_the_divided_sum(
    pair: Workers, options: dict[str, Any], dtype: torch.dtype, tolerance: float
) -> None:
    for scaled, plain, error in pair.run(accumulated, options, dtype):
        assert scaled == plain
        assert error <= tolerance


def test_ranks_that_scale_differently_are_refused(pair: Workers) -> None:
    with pytest.raises(BatchError, match="the loss is scaled by 1 on rank 0 and by 2 on rank 1"):
        pair.run(different)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        return (self.layer(x) * scale).square().mean()


def test_a_scale_that_may_be_the_models_own_is_refused() -> None:
    batch = {"x": torch.randn(4, 4), "scale": 2.0}
    with autopart.compile(Scaled(), "cpu:1", sample=batch, costs="analytic") as pipe:
        whole = pipe.step(batch)
        first = pipe.gradients()
        pipe.zero_grad()
        with pytest.raises(UsageError, match="may mean the model's own argument"):
            pipe.step(**batch)
        assert torch.equal(pipe.step(batch, scale=0.5), whole)
        for name, gradient in pipe.gradients().items():
            torch.testing.assert_close(gradient, first[name] / 2)


@pytest.mark.parametrize("scale", [0, -1.0, float("inf"), float("nan"), "half", True])
def test_an_impossible_scale_is_refused(scale: Any) -> None:
    batch = torch.randn(4, 4), torch.randn(4, 4)
    with (
        autopart.compile(nn.Linear(4, 4), "cpu:1", sample=batch, loss_fn=nn.functional.mse_loss, costs="analytic") as p,
        pytest.raises(UsageError, match="scale is"),
    ):
        p.step(batch, scale=scale)


def test_a_pipe_shows_the_modules_and_buffers_of_its_model() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    batch = torch.randn(8, 4), torch.randn(8, 4)
    pipe = autopart.compile(model, "cpu:1", sample=batch, loss_fn=nn.functional.mse_loss, costs="analytic")
    with pipe:
        pipe.step(batch)
        assert list(pipe.modules()) == list(model.modules()) and list(pipe.children()) == list(model.children())
        assert list(pipe.named_modules()) == list(model.named_modules())
        assert list(pipe.named_children()) == list(model.named_children())
        assert [id(b) for b in pipe.buffers()] == [id(b) for _, b in pipe.named_buffers()] != []
    assert pipe.is_main
