"""Writes to memory that the forward has just made: captured as ops without a write, as torch itself makes them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx, nn
from torch.export import ExportedProgram

from autopart.batch.batch import flatten
from autopart.capture import Captured, capture
from autopart.capture.trace import lower as lowering
from autopart.capture.trace.functional import functional_graph
from autopart.ir.graph import Size

ORDER = torch.tensor([2, 0, 1, 5, 4, 3])


def inverted(x: torch.Tensor) -> torch.Tensor:
    """Permute and bring back, as mixtures of experts do."""
    order = (x.sum(0) + ORDER).argsort()
    back = torch.empty_like(order)
    back[order] = torch.arange(6)
    return x[:, order].tanh()[:, back]


def twice(x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros_like(x)
    y[:, ORDER] = x.tanh()
    y[:, ORDER[:2]] = x[:, :2]
    return y * y


def scattered(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros(x.shape[0], 6).scatter_(1, ORDER.expand(x.shape[0], 6), x)


def read_before(x: torch.Tensor) -> torch.Tensor:
    y = torch.ones_like(x)
    z = y + x
    y[:, ORDER[:2]] = x[:, :2]
    return y * z


def seen_before(x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros_like(x)
    view = y.T
    y[:, ORDER[:3]] = x[:, :3]
    return view.T.cos()


FRESH, OTHER = (inverted, twice, scattered), (read_before, seen_before)


class Net(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function, self.layer = function, nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.layer(x)).square().mean()


def captured(function: Callable[[torch.Tensor], torch.Tensor]) -> Captured:
    return capture(Net(function), flatten({"x": torch.randn(4, 6)}), size=Size(4))


@pytest.mark.parametrize("function", [*FRESH, *OTHER])
def test_a_program_is_the_one_that_torch_makes_without_writes(
    function: Callable[[torch.Tensor], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole: list[bool] = []
    plain = functional_graph

    def noted(program: ExportedProgram) -> fx.Graph | None:
        found = plain(program)
        whole.append(found is None)
        return found

    monkeypatch.setattr(lowering, "functional_graph", noted)
    ours = captured(function)
    assert whole == [function in OTHER]
    monkeypatch.setattr(lowering, "without_fresh_writes", lambda graph: False)
    theirs = captured(function)
    assert whole[1:] == [True]
    assert ours.graph == theirs.graph and ours.module.code == theirs.module.code
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    given = [ours.tensors[param.name] for param in ours.graph.params]
    (loss,) = ours.module(*given, x)
    torch.testing.assert_close(loss.detach(), Net(function)(x).detach())
