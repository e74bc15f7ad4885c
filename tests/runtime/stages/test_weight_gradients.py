"""Products with weights that wait for the backward of weights: what they hold, what they add, and when."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autopart.runtime.stages.weight_gradients import WeightGradient, add_all, deferring, product


def test_a_backward_leaves_products_for_later() -> None:
    weight, bias, x = nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(3)), torch.randn(5, 2)
    later: list[WeightGradient] = []
    with deferring(later):
        product(x, weight, bias, True).sum().backward()
    assert weight.grad is None and torch.equal(bias.grad, torch.full((3,), 5.0))
    (one,) = later
    assert one.parameter is weight and not one.right.requires_grad
    add_all(later)
    assert torch.allclose(weight.grad, torch.ones(5, 3).T @ x) and not later
    product(x, weight, bias, True).sum().backward()  # nobody defers any more
    assert torch.allclose(weight.grad, 2 * torch.ones(5, 3).T @ x)


def test_a_parameter_is_complete_after_its_last_product() -> None:
    first, second = nn.Parameter(torch.randn(3, 3)), nn.Parameter(torch.randn(3, 3))
    later: list[WeightGradient] = []
    with deferring(later):
        hidden = product(product(torch.randn(2, 3), first, None, True), second, None, True)
        product(hidden, first, None, False).sum().backward()
    assert [one.parameter for one in later] == [first, second, first]
    seen: list[tuple[torch.Tensor, int]] = []
    add_all(later, lambda parameter: seen.append((parameter, len(later))))
    assert [(parameter is first, left) for parameter, left in seen] == [(False, 1), (True, 0)]


@pytest.mark.parametrize("swapped", [False, True])
def test_no_gradient_is_added_to_the_memory_of_one_that_waits(swapped: bool) -> None:
    """The gradient of the sum is that of the product and of the parameter, which autograd could take for its own."""
    weight, added, x = (torch.randn(*shape, dtype=torch.float64) for shape in ((3, 2), (4, 3), (4, 2)))
    found, expected = ([each.clone().requires_grad_() for each in (weight, added)] for _ in range(2))
    waiting: list[WeightGradient] = []
    for factor in (1.0, 2.0):
        scale = factor * torch.arange(12.0).view(4, 3)
        made = product(x, found[0], None, True)
        with deferring(waiting):
            ((found[1] + made if swapped else made + found[1]) * scale).sum().backward()
        ((F.linear(x, expected[0]) + expected[1]) * scale).sum().backward()
    add_all(waiting)
    for mine, plain in zip(found, expected, strict=True):
        assert torch.allclose(mine.grad, plain.grad, rtol=1e-14)


def test_an_error_in_a_backward_ends_the_deferring() -> None:
    with pytest.raises(RuntimeError, match="grad can be implicitly created"), deferring([]):
        product(torch.randn(2, 3), nn.Parameter(torch.randn(3, 3)), None, True).backward()
    weight = nn.Parameter(torch.randn(3, 3))
    product(torch.randn(2, 3), weight, None, True).sum().backward()
    assert weight.grad is not None
