"""Batches that run another program than the sample: remainders of any size, and other tasks and modalities."""

from __future__ import annotations

import pytest
from support.jobs import kind_jobs
from support.models.kind_models import ONE_ROW

SLOW = pytest.mark.slow
NAMES = tuple(ONE_ROW)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=SLOW) for seed in range(1, 12))])
def test_a_remainder_of_any_size_is_exact_on_one_rank(seed):
    assert kind_jobs.remainders(1, seed, NAMES if seed else ("masked",), 2) == []


@pytest.mark.parametrize("seed", [3, *(pytest.param(seed, marks=SLOW) for seed in range(12, 24))])
def test_a_remainder_of_any_size_is_exact_on_two_ranks(pair, seed):
    for wrong in pair.run(kind_jobs.remainders, 2, seed, NAMES if seed > 3 else ("squeezed",), 3):
        assert wrong == []


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=SLOW) for seed in range(1, 12))])
def test_batches_of_any_task_train_on_one_rank(seed):
    assert kind_jobs.tasks(1, seed, 6) == ([], [])


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=SLOW) for seed in range(12, 32))])
def test_batches_of_any_task_train_on_two_ranks_or_are_refused_by_name(pair, seed):
    """Refused are only batches for which the weight that a head shares with the embedding lies on another stage than
    they need: the sample, or they, are of that head's task."""
    for wrong, refused in pair.run(kind_jobs.tasks, 2, seed, 6):
        assert wrong == []
        for text in refused:
            assert "PlanError" in text and "('tied'" in text, text
            assert "compile with a batch of this kind as the sample" in text
