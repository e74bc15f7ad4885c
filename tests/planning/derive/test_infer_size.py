"""One capture told at another number of rows: equal to the real capture there, or no answer at all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.models.zoo import CASES
from torch import nn
from torch.nn import functional as F

from autopart.batch.batch import Batch, flatten
from autopart.capture import Captured, capture
from autopart.ir.graph import Size
from autopart.planning.derive.family import infer_other_size, prime_batch_size


def telling(model: nn.Module, batch: Batch) -> Captured:
    """The capture at a number of rows that tells of others."""
    rows = prime_batch_size(model, batch)
    assert rows is not None
    return capture(model, batch, size=Size(rows))


FEW = ("resnet",)


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in FEW else pytest.mark.slow) for n in CASES])
def test_real_models_are_told_as_they_would_be_captured(name: str) -> None:
    case = CASES[name]
    with torch.device("meta"):
        model = case.make(0.1).train()
    batch = flatten(case.batch(4)).to(torch.device("meta"))
    found = infer_other_size(telling(model, batch), Size(7))
    assert found is not None and found.graph == capture(model, batch, size=Size(7)).graph


class Odd(nn.Module):
    """A linear layer, and a loss that uses the rows in the way it is told to."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.loss = loss

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.loss(self.linear(x))
        return loss


UNTOLD = {
    "a share of the rows": lambda y: y.sum() * (1 / y.shape[0]),
    "rows as a float": lambda y: (y * float(y.shape[0])).sum(),
    "rows shifted": lambda y: (y[1:] - y[:-1]).square().sum(),
    "one row less as a number": lambda y: y.square().sum() / (y.shape[0] - 1),
    "the number of pairs of rows": lambda y: y.sum() / y.shape[0] ** 2,
    "rows in a constant": lambda y: F.mse_loss(y[:, 0], torch.tensor([1.0] * y.shape[0])),
}
TOLD = {
    "mean": lambda y: y.mean(),
    "divided by rows": lambda y: y.sum() / y.shape[0],
    "rows and columns in one axis": lambda y: y.reshape(-1).square().sum() / (2 * y.numel()),
    "rows against rows": lambda y: (y @ y.T).sum(),
    "the last row": lambda y: y[-1].sum(),
    "every row from the second": lambda y: y[:, 1:].sum(),
    "a mask made of the rows": lambda y: (y * torch.ones(y.shape[0], 1)).sum(),
}


@pytest.mark.parametrize("loss", UNTOLD.values(), ids=UNTOLD)
def test_there_is_no_answer_where_rows_mean_something_else(loss: Any) -> None:
    assert infer_other_size(telling(Odd(loss), flatten(torch.randn(4, 5))), Size(9)) is None


@pytest.mark.parametrize("loss", TOLD.values(), ids=TOLD)
def test_sizes_and_arguments_follow_the_rows(loss: Any) -> None:
    model, batch = Odd(loss), flatten(torch.randn(4, 5))
    base = telling(model, batch)
    for rows in (2, 122):
        found = infer_other_size(base, Size(rows))
        assert found is not None and found.graph == capture(model, batch, size=Size(rows)).graph


def test_the_telling_number_of_rows_is_no_size_of_the_model_or_its_inputs() -> None:
    batch = flatten(torch.randn(4, 61))
    assert prime_batch_size(nn.Linear(61, 3), batch) == 67
    assert prime_batch_size(nn.Linear(61, 2 * 67 + 1), batch) == 71
    widths = nn.ModuleList(nn.Linear(1, size) for size in range(59, 400))
    assert prime_batch_size(widths, batch) is None
