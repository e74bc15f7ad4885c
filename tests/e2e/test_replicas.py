"""Stages on several ranks: what `test_any_plan` does not draw of replicas."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from support.jobs import replica_jobs
from support.jobs.sparse_jobs import alone


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "slower", "rows", "options"),
    [
        ("llama_tied", (1, 3), (16, 7), {}),
        ("gpt2", (1, 2, 4, 2), (18, 13), {}),
        ("bert", (2, 1, 1, 3), (24, 5), {}),
        ("t5", (1, 4, 2, 2), (20, 9), {"stages": 2, "replicas": 2}),
        ("convnext", (1, 2, 3, 1), (16, 11), {"stages": 1, "replicas": 4}),
        ("tied", (3, 1, 2, 5), (22, 9), {"zero": 1, "recompute": "all"}),
    ],
)
def test_a_plan_for_devices_of_different_speeds_equals_one_process(workers, pair, name, slower, rows, options):
    """The planner must choose unequal shares."""
    found, planned = (pair if len(slower) == 2 else workers).run(
        replica_jobs.uneven_devices, name, slower, rows, options
    )[0]
    unequal = 0
    for ranks, shares in planned:
        for (a, mine), (b, other) in itertools.combinations(zip(ranks, shares, strict=True), 2):
            assert (mine >= other) if slower[a] < slower[b] else (mine <= other or slower[a] == slower[b])
        unequal += len(set(shares)) > 1
    assert unequal, planned
    for difference in found:
        assert difference.within(torch.float32), difference


def test_replicas_are_equal_bit_by_bit_after_many_clipped_steps(workers):
    counts = (2, 2)
    results = workers.run(replica_jobs.trained, "tied", counts, 10, 0.1)
    for result in results:
        for found, expected in (*result["losses"], *result["norms"], result["evaluated"]):
            assert found == pytest.approx(expected, rel=1e-4)
        for other in results:
            for held in result["held"].keys() & other["held"].keys():
                assert torch.equal(result["held"][held], other["held"][held])
    assert sorted(result["stage"] for result in results) == [s for s, count in enumerate(counts) for _ in range(count)]


@pytest.mark.parametrize("zero", [0, 1])
def test_sparse_gradients_stay_sparse(pair, zero):
    losses, norms, _, state = alone(False)
    results = pair.run(replica_jobs.sparse, 2, zero)
    for mine in [results] if zero else [[result] for result in results]:
        assert {name.partition(".")[0]: kind for result in mine for name, kind in result["sparse"].items()} == {
            "words": True, "bag": True, "layer": False, "head": False,
        }  # fmt: skip
    for result in results:
        assert all(math.isclose(a, b, rel_tol=1e-9) for a, b in zip(result["losses"], losses, strict=True))
        assert all(math.isclose(a, b, rel_tol=1e-9) for a, b in zip(result["norms"], norms, strict=True))
        assert all(torch.allclose(result["state"][name], tensor) for name, tensor in state.items())


def test_gradients_kept_by_the_user_are_not_changed_by_the_next_step(pair):
    assert pair.run(replica_jobs.kept_gradients) == [{"same": True, "apart": True, "freed": True}] * 2


def test_replicas_with_different_batches_are_refused(pair):
    for text in pair.run(replica_jobs.different_batches):
        assert "different batches" in text and "DistributedSampler" in text


def test_a_pipe_adopts_another_number_of_replicas(workers):
    assert workers.run(replica_jobs.moved, (2, 1), (1, 3))[0].within(torch.float32)
