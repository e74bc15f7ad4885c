"""Training with complex, infinite or partly sparse gradients on replicas."""

from __future__ import annotations

import math

import pytest
import torch
from support.jobs import special_gradient_jobs
from support.jobs.special_gradient_jobs import Complex, batch

import autopart


@pytest.mark.parametrize(
    ("kind", "options", "tolerance"),
    [
        ("complex", {}, 1e-5),
        ("complex", {"zero": 1}, 1e-5),
        ("tied", {}, 1e-5),
    ],
)
def test_gradients_and_their_norm_equal_one_process(pair, kind, options, tolerance):
    for name, error in pair.run(special_gradient_jobs.differences, kind, options)[0].items():
        assert error <= tolerance, name


def test_overflow_in_rounding_or_in_a_sum_is_refused(pair):
    """In half precision an input of 1.5 makes gradients of 45,000 and an input of 4 gradients of 120,000."""
    assert pair.run(special_gradient_jobs.overflowing, (1.5, 4.0, 1.5))[0] == [False, True, True]


def test_gradients_share_no_version_counter_and_keep_their_storage_while_steps_accumulate(pair):
    assert pair.run(special_gradient_jobs.held_between_steps)[0] == (True, True)


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_clipping_with_a_nan_norm_makes_all_gradients_nan(norm_type):
    with autopart.compile(Complex(), "cpu:1", sample=batch(), costs="analytic", cache=False) as pipe:
        pipe.step(batch())
        parameters = list(pipe.parameters())
        parameters[-1].grad.fill_(math.nan)
        norm = pipe.clip_grad_norm_(1e-3, norm_type=norm_type)
        assert norm.isnan() and all(torch.isnan(parameter.grad).all() for parameter in parameters)


def test_an_invalid_state_is_refused():
    with autopart.compile(Complex(), "cpu:1", sample=batch(), costs="analytic", cache=False) as pipe:
        state = pipe.state_dict()
        for wrong in (3, {**state, "out.bias": torch.ones(1, dtype=torch.complex64)}, {}):
            with pytest.raises(autopart.UsageError) as caught:
                pipe.load_state_dict(wrong)
            assert caught.value.fix
