"""A batch in which every label is ignored gives what one process gives."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import autopart
from autopart.state.scaler import NonFiniteWarning


class Tagger(nn.Module):
    """A token mean: cross entropy, or a masked mean with a floor under the count."""

    def __init__(self, floor: bool) -> None:
        super().__init__()
        self.layer, self.floor = nn.Linear(4, 3), floor

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        scores = self.layer(x)
        if not self.floor:
            return functional.cross_entropy(scores.reshape(-1, 3), labels.reshape(-1))
        mask = (labels != -100).float()
        return (scores.sum(-1) * mask).sum() / mask.sum().clamp(min=1)


def _step(floor: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model, plain = Tagger(floor), Tagger(floor)
    plain.load_state_dict(model.state_dict())
    batch = {"x": torch.randn(6, 5, 4), "labels": torch.full((6, 5), -100)}
    expected = plain(**batch)
    expected.backward()
    with autopart.compile(model, "cpu:1", sample=batch, micro_batches=3, costs="analytic") as pipe:
        loss = pipe.step(batch)
        gradient = pipe.gradients()["layer.weight"]
    assert gradient is not None and plain.layer.weight.grad is not None
    return loss, expected.detach(), gradient, plain.layer.weight.grad


def test_cross_entropy_of_nothing_is_undefined_with_zero_gradients_as_in_one_process():
    with pytest.warns(NonFiniteWarning, match="the loss of step 1 is nan"):
        loss, expected, gradient, reference = _step(floor=False)
    assert torch.isnan(loss) and torch.isnan(expected)
    torch.testing.assert_close(gradient, reference)


def test_a_masked_mean_with_a_floor_is_zero_as_in_one_process():
    loss, expected, gradient, reference = _step(floor=True)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient, reference)
