"""A user-defined op, registered with one row in autopart's op table; importable on the ranks of a pool."""

from __future__ import annotations

import torch
from torch import nn

import autopart
from autopart.passes.ops.table import OpRow, register

# -- code that a user writes ------------------------------------------------------------------------------------------


@torch.library.custom_op("own::project", mutates_args=())
def project(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x @ weight.T


project.register_fake(lambda x, weight: x.new_empty(*x.shape[:-1], len(weight)))
project.register_autograd(
    lambda ctx, grad: (grad @ ctx.saved[1], grad.flatten(0, -2).T @ ctx.saved[0].flatten(0, -2)),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "saved", inputs),
)
register(OpRow("own.project", "matmul", "...k, nk -> ...n", linear="product", saves="factors", flops="...nk"))

# -- a model that uses it ----------------------------------------------------------------------------------------


class Projection(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6, generator=torch.Generator().manual_seed(1)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return project(x, self.weight).tanh()


class Projections(nn.Module):
    """Four layers with the mean of the last result as the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[Projection() for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).mean()


def batch() -> torch.Tensor:
    return torch.randn(8, 3, 6, generator=torch.Generator().manual_seed(2))


def verified(stages: int) -> tuple[bool, int, int]:
    """Return on every rank whether a step equals one process's, and the stages and micro-batches it used."""
    torch.set_num_threads(1)
    options = {"costs": "analytic", "stages": stages, "micro_batches": 4}
    result = autopart.verify(Projections(), f"cpu:{stages}", sample=batch(), **options)
    return result.ok, stages, 4
