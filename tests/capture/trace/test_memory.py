"""Ops that read a tensor as it lies in memory, whose copies a capture leaves out, give what the plain model gives."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.extending.shards_in_process import captured_at, drawn, errors, run_whole
from torch import nn

from autopart.ir.errors import RefusedError


class Reading(nn.Module):
    """A product, what reads it as it lies in memory, and a product that sums over what was read."""

    def __init__(self, read: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.read = nn.Linear(8, 8), nn.Linear(4, 4), read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.read(self.up(x))
        return (self.down(found) * torch.arange(1, found.shape[-2] + 1)[:, None]).square().mean()


def windows(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).contiguous().as_strided((len(x), 4, 3, 4), (48, 6, 2, 1))


def windows_of_permuted(x: torch.Tensor) -> torch.Tensor:
    return x.tanh().transpose(0, 1).as_strided((len(x), 4, 3, 4), (48, 6, 2, 1), 1)


def as_complex(x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_complex(x.unflatten(-1, (2, 4)).mT.contiguous().tanh()).abs()


@pytest.mark.parametrize("read", [windows, windows_of_permuted, as_complex])
def test_memory_is_read_as_the_model_reads_it(read: Callable[[torch.Tensor], torch.Tensor]) -> None:
    torch.manual_seed(0)
    model, x = Reading(read).double(), torch.randn(2, 6, 8, dtype=torch.double)
    loss = model(x)
    loss.backward()
    captured, inputs = captured_at(model, (x,))
    expected = run_whole(captured, inputs)
    torch.testing.assert_close(expected[0], loss)
    torch.testing.assert_close(expected[1], {name: p.grad for name, p in model.named_parameters()})
    for seed in range(4):  # ranks join its operand of parts
        assert errors(captured, inputs, drawn(captured.graph, 2, seed), expected=expected) < 1e-10, seed


@pytest.mark.parametrize("part", [lambda x: x[..., :5], lambda x: x[:, :2], lambda x: x[:1]])
def test_memory_beside_the_operand_is_not_read(part: Callable[[torch.Tensor], torch.Tensor]) -> None:
    model = Reading(lambda x: part(x).as_strided((len(x), 4, 3, 4), (48, 6, 2, 1)))
    with pytest.raises(RefusedError, match="as_strided reads memory that is not in its operand") as refused:
        captured_at(model, (torch.randn(2, 6, 8),))
    assert "test_memory.py" in refused.value.where
