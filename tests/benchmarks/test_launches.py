"""Tests of the count of launches: what counts, and that the captured program launches no more than the plain model."""

from __future__ import annotations

import pytest
import torch

from benchmarks.steps import launches


def test_kernels_count_and_views_and_allocations_do_not() -> None:
    x = torch.ones(4, 4)

    def step() -> None:
        y = x.view(16).t().unsqueeze(0) + torch.empty(16)
        y.sum().item()
        y.tolist()

    found = launches.counted(step, "cpu")
    assert found.ops == {"add": 1, "sum": 1}
    assert found.waits == {"_local_scalar_dense": 1, "tolist": 1}
    assert found.outside == found.ops


def test_an_op_written_in_python_counts_as_what_it_calls() -> None:
    import transformers.integrations.moe  # noqa: F401

    ends = torch.tensor([1, 3])
    product = torch.ops.transformers.grouped_mm_fallback
    found = launches.counted(lambda: product(torch.ones(3, 4), torch.ones(2, 4, 4), ends), "cpu")
    assert found.ops["mm"] == 2


@pytest.mark.parametrize(
    ("name", "mask"), [("bert", "ones"), ("llama", "none"), pytest.param("mixtral", "none", marks=pytest.mark.slow)]
)
def test_a_step_launches_no_more_than_the_plain_model(name: str, mask: str) -> None:
    found = launches.row(name, "fp32", mask)
    assert found.ours <= found.plain and found.waits_above <= 0, found
    assert sum(found.outside.values()) < 5
    assert "more" not in launches.line(found)
