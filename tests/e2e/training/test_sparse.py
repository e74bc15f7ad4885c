"""Sparse gradients of embeddings are clipped, gathered and summed over stages as in one process."""

from __future__ import annotations

import pytest
import torch
from support.jobs import sparse_jobs as jobs
from support.workers import Workers


@pytest.mark.parametrize("tied", [False, True])
def test_embeddings_with_sparse_gradients_equal_one_process(pair: Workers, tied: bool) -> None:
    losses, norms, gradients, state = jobs.alone(tied)
    for found in pair.run(jobs.piped, tied):
        assert found[0] == pytest.approx(losses, rel=1e-10)
        assert found[1] == pytest.approx(norms, rel=1e-6)  # the norm is in single precision
        for name, gradient in gradients.items():
            torch.testing.assert_close(found[2][name], gradient, rtol=1e-9, atol=1e-12)
        for name, tensor in state.items():
            torch.testing.assert_close(found[3][name], tensor, rtol=1e-9, atol=1e-12)
