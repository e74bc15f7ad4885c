"""Recurrent layers are one op each, with the random numbers of their dropout."""

from __future__ import annotations

import pkgutil
from unittest import mock

import pytest
import torch
from torch import nn

from autopart.batch.batch import flatten
from autopart.capture import capture


class Recurrent(nn.Module):
    def __init__(self, cell: type[nn.Module], dropout: float) -> None:
        super().__init__()
        self.cell = cell(4, 4, num_layers=2, dropout=dropout, batch_first=True)

    def forward(self, x):
        return self.cell(x)[0].square().mean()


@pytest.mark.filterwarnings("ignore:forward\\(\\) assigns attribute:autopart.CaptureWarning")
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("cell", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_recurrent_cell_draws_random_numbers_only_for_its_dropout(cell, dropout):
    graph = capture(Recurrent(cell, dropout), flatten(torch.randn(4, 3, 4))).graph
    assert any(op.random for op in graph.ops) == (dropout > 0)


@pytest.mark.parametrize(("cell", "step"), [(nn.LSTM, "lstm_cell"), (nn.GRU, "gru_cell")])
def test_a_recurrent_layer_is_not_walked_token_by_token_to_know_its_shapes(cell, step):
    name = f"torch._decomp.decompositions.{step}"
    with mock.patch(name, side_effect=pkgutil.resolve_name(name)) as taken:
        graph = capture(Recurrent(cell, 0.0), flatten(torch.randn(4, 50, 4))).graph
    assert taken.call_count < 25
    outputs = {value.shape for value in graph.values}
    assert {(4, 50, 4)} < outputs and len(graph.ops) < 20
