"""Model FLOPs: three forwards of what learns, one of what is frozen before it, two of what is frozen behind it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopart.batch.batch import flatten
from autopart.capture import CaptureCache
from autopart.ir.graph import Size
from autopart.passes.ops.flops import model_flops

WIDTH, ROWS, LAYERS = 64, 32, 4
FORWARD = 2 * ROWS * WIDTH * WIDTH
"""Of a layer."""


@pytest.mark.parametrize(
    ("frozen", "passes"),
    [
        ([], [2, 3, 3, 3]),  # the batch needs no gradient
        ([0], [1, 2, 3, 3]),
        ([0, 1], [1, 1, 2, 3]),
        ([3], [2, 3, 3, 2]),
        ([1, 2], [2, 2, 2, 3]),
    ],
)
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_counts_what_its_gradients_need(frozen: list[int], passes: list[int], bias: bool) -> None:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=bias) for _ in range(LAYERS)))
    for layer in frozen:
        model[layer].requires_grad_(False)
    graph = CaptureCache(model, nn.functional.mse_loss)(
        flatten((torch.ones(ROWS, WIDTH),) * 2, with_target=True), Size(ROWS)
    ).graph
    found = model_flops(graph)
    assert found.keys() == {"float32"}
    besides = 3 * ROWS * WIDTH  # the loss
    assert found["float32"] == pytest.approx(sum(passes) * FORWARD, abs=besides)


@pytest.mark.parametrize("rows", [8, 16])
def test_attention_counts_its_two_products_three_times(rows: int) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into = nn.Linear(WIDTH, 3 * WIDTH, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.into(x).chunk(3, -1)
            return nn.functional.scaled_dot_product_attention(q, k, v).sum()

    graph = CaptureCache(Attention(), None)(flatten(torch.ones(rows, 1, 24, WIDTH)), Size(rows)).graph
    assert model_flops(graph)["float32"] == pytest.approx(
        2 * 2 * rows * 24 * WIDTH * 3 * WIDTH + 3 * 2 * (2 * rows * 24 * 24 * WIDTH), rel=0.02
    )
