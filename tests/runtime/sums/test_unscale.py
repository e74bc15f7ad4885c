"""Tests of the check that gradients are finite."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from autopart.runtime.sums.reduce import unscale

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64)
ODD = (math.nan, math.inf, -math.inf)


def with_gradient(gradient: torch.Tensor) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(gradient.shape, dtype=gradient.dtype))
    parameter.grad = gradient
    return parameter


@given(
    st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.sampled_from((0.5, -1.0, *ODD)), min_size=1)), min_size=1)
)
def test_the_first_gradient_with_a_number_that_is_not_finite_is_named(
    gradients: list[tuple[torch.dtype, list[float]]],
) -> None:
    parameters = {str(n): with_gradient(torch.tensor(each, dtype=kind)) for n, (kind, each) in enumerate(gradients)}
    expected = next((str(n) for n, (_, each) in enumerate(gradients) if not all(map(math.isfinite, each))), None)
    assert unscale(parameters, 1.0, {}, {}) == expected


@pytest.mark.parametrize("dtype", DTYPES[:4])
def test_large_gradients_whose_sum_overflows_are_finite(dtype: torch.dtype) -> None:
    largest = torch.full((5,), torch.finfo(dtype).max, dtype=dtype)
    assert unscale({"a": with_gradient(largest)}, 1.0, {}, {}) is None
    if dtype in (torch.float16, torch.bfloat16):  # the optimizer gets both together, which are infinite
        assert unscale({"a": with_gradient(largest)}, 1.0, {}, {"a": largest.clone()}) == "a"


def test_sparse_gradients_are_added_up_and_divided_before_they_are_checked() -> None:
    whole = torch.tensor([3e38, 3e38])
    parameter = with_gradient(torch.sparse_coo_tensor(torch.tensor([[1, 1]]), whole, (4,), check_invariants=True))
    assert unscale({"a": parameter}, 2.0, {}, {}) == "a"
    parameter = with_gradient(torch.sparse_coo_tensor(torch.tensor([[1, 2]]), whole, (4,), check_invariants=True))
    assert unscale({"a": parameter}, 2.0, {}, {}) is None
    assert parameter.grad is not None and parameter.grad.to_dense().tolist() == pytest.approx([0, 1.5e38, 1.5e38, 0])
