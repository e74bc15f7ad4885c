"""A custom autograd.Function keeps its own backward through capture and cuts; what cannot be repeated is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.oracles.one_process import gradient_error, gradients_of
from support.oracles.stages_in_process import inputs_of, plan_for, replay, slices
from torch import nn
from torch.autograd import Function

from autopart.batch.batch import flatten
from autopart.capture import capture
from autopart.ir.errors import RefusedError


class Rounded(Function):
    """Straight through: a gradient that torch would not have found."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return (x * 4).round() / 4

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class Reversed(Function):
    """The argument itself; its gradient times a number that is no tensor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return -ctx.factor * grad, None


class Scaled(Function):
    """Two results, one saved, an optional argument, no gradient for the second; in the newer way of writing them."""

    @staticmethod
    def forward(x: torch.Tensor, weight: torch.Tensor, shift: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        assert shift is None
        return x * weight, x.exp()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[1], output[1])

    @staticmethod
    def backward(ctx: Any, first: torch.Tensor, second: torch.Tensor) -> tuple[Any, ...]:
        weight, exp = ctx.saved_tensors
        return first * weight * 3 + second * exp, None, None


class Times(Function):
    """A number by name, with a default."""

    @staticmethod
    def forward(x: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        return x * factor

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return -2 * ctx.factor * grad, None


rounded = Rounded.apply  # as torch's own tutorial takes it


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = Times.apply(rounded(self.layers[0](x)), factor=1.5)
        x = Reversed.apply(self.layers[1](x), 0.5)
        left, right = Scaled.apply(self.layers[2](x), self.weight, None)
        return (Times.apply(Rounded.apply(self.layers[3](left))) * right.tanh()).sum()


def test_the_gradients_of_its_own_backward_are_kept_in_stages():
    rows = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
    captured, plain = capture(Net(), flatten(rows[:2])), Net()
    plan = plan_for(captured.graph, slices(captured.graph, [3, 6, 8]), micros=2)
    found = replay(captured, plan, [inputs_of(captured, piece) for piece in rows.split(2)])
    loss = plain(rows)
    loss.backward()
    torch.testing.assert_close(found.loss, loss.detach())
    expected = gradients_of(plain)
    assert expected["weight"] is None  # as its backward says
    error, worst = gradient_error(found.gradients, expected)
    assert error <= 1e-5, worst


def _function(forward: Any) -> Any:
    return type("Own", (Function,), {"forward": staticmethod(forward), "backward": staticmethod(lambda ctx, *g: g)})


def _marked(ctx: Any, x: torch.Tensor) -> Any:
    result = x.round()
    ctx.mark_non_differentiable(result)
    return x * 2, result


REFUSED = {
    "draws random numbers": lambda x: _function(lambda ctx, x: x + torch.rand_like(x)).apply(x),
    "changes an argument in place": lambda x: _function(lambda ctx, x: ctx.mark_dirty(x) or x.mul_(2)).apply(x * 1),
    "is a dict": lambda x: _function(lambda ctx, x, table: x * table["a"]).apply(x, {"a": 2}),
    "something else than tensors": lambda x: _function(lambda ctx, x: [x * 2, 3]).apply(x)[0],
    "have no derivative": lambda x: sum(_function(_marked).apply(x)),
}


class Refused(nn.Module):
    def __init__(self, body: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self.layer(x)).mean()


@pytest.mark.parametrize("why", REFUSED)
def test_what_a_second_forward_would_not_repeat_is_refused(why):
    with pytest.raises(RefusedError, match=why) as caught:
        capture(Refused(REFUSED[why]), flatten(torch.randn(2, 4)))
    assert "custom autograd.Function" in str(caught.value) and "test_custom_functions.py" in caught.value.where
