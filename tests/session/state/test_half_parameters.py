"""Models in half precision: gradients are summed in fp32 over the micro-batches of a step, and rounded once."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autopart

CAN_WIDEN = pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="needs a later torch")
MICROS = 64


def model(*, sparse: bool = False) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Embedding(50, 16, sparse=sparse), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 50)
    return nn.Sequential(*layers).bfloat16()


def loss_fn(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), target.flatten())


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = torch.randint(0, 50, (2, MICROS, 8), generator=torch.Generator().manual_seed(1))
    return inputs, targets


def exact_sums(plain: nn.Module) -> dict[str, torch.Tensor]:
    """Gradients of every micro-batch by itself, summed in fp64."""
    inputs, targets = batch()
    sums = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in plain.named_parameters()}
    for row in range(MICROS):
        plain.zero_grad()
        (loss_fn(plain(inputs[row : row + 1]), targets[row : row + 1]) / MICROS).backward()
        for name, parameter in plain.named_parameters():
            sums[name] += parameter.grad.double().to_dense()
    return sums


@CAN_WIDEN
@pytest.mark.parametrize("sparse", [False, True])
def test_gradients_are_rounded_once_a_step(sparse: bool) -> None:
    trained = model(sparse=sparse)
    expected = exact_sums(model(sparse=sparse))
    options = {"loss_fn": loss_fn, "micro_batches": MICROS, "costs": "analytic"}
    with autopart.compile(trained, "cpu:1", sample=batch(), **options) as pipe:
        pipe.step(batch())
        for name, parameter in trained.named_parameters():
            found = parameter.grad.to_dense()
            assert found.dtype == torch.bfloat16 and parameter.grad_dtype == torch.bfloat16
            off = (found.double() - expected[name]).abs()
            assert (off <= expected[name].abs() * 2**-8 + 1e-9).all(), name
        pipe.step(batch())  # adds to what is there
        for name, parameter in trained.named_parameters():
            twice = 2 * expected[name]
            assert ((parameter.grad.to_dense().double() - twice).abs() <= twice.abs() * 2**-7 + 1e-9).all(), name
        torch.optim.SGD(pipe.parameters(), lr=0.1).step()


@CAN_WIDEN
def test_a_step_that_fails_leaves_gradients_as_they_were() -> None:
    trained = model()
    options = {"loss_fn": loss_fn, "micro_batches": 4, "costs": "analytic", "non_finite": "skip"}
    with autopart.compile(trained, "cpu:1", sample=batch(), **options) as pipe:
        pipe.step(batch())
        before = {name: parameter.grad.clone() for name, parameter in trained.named_parameters()}
        with torch.no_grad():
            trained[1].weight[0, 0] = float("nan")
        pipe.step(batch())
        assert pipe.skipped
        assert all(torch.equal(parameter.grad, before[name]) for name, parameter in trained.named_parameters())
