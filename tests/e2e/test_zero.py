"""Replicas that share the optimizer state train bit by bit like replicas with full state, and hold less."""

from __future__ import annotations

import itertools

import pytest
import torch
from support.jobs import zero_jobs
from support.jobs.shared_state import CASES as SHARED
from support.jobs.shared_state import shared_state
from support.models.zoo import CASES


def test_two_replicas_share_the_state_of_the_optimizer(pair):
    results = shared_state(pair, "stack", (2,), clip=0.1, bucket_bytes=2000)
    assert max(result.shared for result in results) <= 0.6 * results[0].whole


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "counts"),
    list(itertools.product(CASES, ((2,), (2, 1)))),
)
def test_the_state_of_every_architecture_is_shared(workers, name, counts):
    first = [result for result in shared_state(workers, name, counts, clip=0.1) if result.stage == 0]
    assert max(result.shared for result in first) < first[0].whole


@pytest.mark.slow
@pytest.mark.parametrize(("name", "counts", "options"), [*SHARED, ("dropped", (1, 2), {"recompute": "all"})])
def test_replicas_of_pipeline_stages_share_the_state(workers, name, counts, options):
    shared_state(workers, name, counts, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("counts", "other", "zeros"),
    [((2, 1), (1, 3), (1, 0)), ((1, 3), (2, 2), (0, 1)), ((2, 2), (4,), (1, 1)), ((3, 1), (1, 1), (1, 1))],
)
def test_a_pipe_adopts_a_plan_with_different_sharing(workers, counts, other, zeros):
    assert workers.run(zero_jobs.moved, counts, other, zeros)[0].within(torch.float32)


@pytest.mark.slow
def test_closing_without_sync_empties_parameters_of_other_owners(pair):
    here, there = pair.run(zero_jobs.names_without_values)
    assert here and there and not set(here) & set(there)


@pytest.mark.slow
def test_freezing_and_unfreezing_works_with_shared_state(pair):
    whole, shared = (pair.run(zero_jobs.frozen_and_thawed, zero)[0] for zero in (0, 1))
    for before, after in zip(whole, shared, strict=True):
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert any(not torch.equal(whole[0][name], tensor) for name, tensor in whole[-1].items())
