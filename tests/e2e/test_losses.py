"""Losses of several terms that count different things, and masks made in forward(), as the plain model has them."""

from __future__ import annotations

import pytest
import torch
from support import silent_jobs as jobs
from support.loss_models import LOSSES
from support.mask_models import MASKED

from autopart.runtime.launch.local import Workers

SLOW = "a transformer with masks"
NAMES = [name if name != SLOW else pytest.param(name, marks=pytest.mark.slow) for name in [*LOSSES, *MASKED]]


@pytest.mark.parametrize("name", NAMES)
def test_a_step_is_exact_also_where_a_micro_batch_counts_nothing(pair: Workers, name: str) -> None:
    losses, gradients, error = pair.run(jobs.piped, name)[0]
    expected, plain = jobs.alone(name)
    assert error is None, error
    assert losses == pytest.approx(expected, rel=1e-10)
    for found, wanted in zip(gradients, plain, strict=True):
        for parameter, gradient in wanted.items():
            torch.testing.assert_close(found[parameter], gradient, rtol=1e-10, atol=1e-13)
