"""What the cost model takes for an optimizer's step on a CPU is what torch's optimizers read and write."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autopart.costs.optimizer_state import state_factor
from autopart.ir.cluster import Device
from autopart.passes.simulation.charges import optimizer_ns

ELEMENTS = 1 << 16
Make = Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]


class Counting(TorchDispatchMode):
    """Counts the bytes that ops read and write."""

    moved = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        read = {id(t): t.nbytes for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        written = sum(t.nbytes for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor))
        self.moved += sum(read.values()) + written
        return result


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.AdamW,
        torch.optim.Adam,
        lambda params: torch.optim.SGD(params, lr=0.1),
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1),
    ],
)
def test_a_step_moves_as_many_bytes_as_are_charged(make: Make) -> None:
    parameter = torch.nn.Parameter(torch.ones(ELEMENTS))
    optimizer = make([parameter])
    for _ in range(2):  # the first one makes the state
        parameter.grad = torch.ones(ELEMENTS)
        with Counting() as counting:
            optimizer.step()
    device = Device("cpu", 1, 1, 10**9)
    charged = optimizer_ns(parameter.nbytes, state_factor(make)[0], device)
    assert charged == pytest.approx(counting.moved, rel=0.12)
