"""Steps in which only some ranks are given the batch: exact, or refused on all ranks."""

from __future__ import annotations

import itertools

import pytest
import torch
from support.jobs import data_jobs

SLOW = pytest.mark.slow


def _check(pool, name, counts, micros, rows):
    for found in pool.run(data_jobs.compare_feeds, name, counts, micros, rows):
        for way, difference in found:
            assert difference.within(torch.float64), (way, difference)


@pytest.mark.parametrize(
    ("name", "counts", "micros", "rows"),
    [
        ("tied", (2, 1), 2, (8,)),  # a mean over tokens with ignored labels
        ("late_inputs", (1, 2), 2, (6,)),  # Python values, and inputs read by a later stage
        pytest.param("llama_tied", (2, 1), 2, (8,), marks=SLOW),  # masks, which the whole batch shows to be unnecessary
        pytest.param("tied", (2, 2), 3, (10, 14, 3), marks=SLOW),  # also fewer rows than replicas
        *(
            pytest.param(name, counts, micros, (12, 7, 5, 10), marks=SLOW)
            for name, counts, micros in itertools.product(
                ("tied", "stack_sum", "shared_by_all", "rotary"), ((2, 2), (3, 1), (1, 3), (2, 1), (4,)), (1, 2, 3)
            )
        ),
    ],
)
def test_a_step_equals_one_process_however_the_batch_is_given(workers, name, counts, micros, rows):
    _check(workers, name, counts, micros, rows)


@pytest.mark.parametrize("counts", [(2, 1), pytest.param((3, 1), marks=SLOW), pytest.param((4,), marks=SLOW)])
def test_dropout_masks_do_not_depend_on_how_the_batch_is_given(workers, counts):
    for apart in workers.run(data_jobs.masked_shards, counts, 2, 12 if counts[0] == 3 else 8):
        assert max(apart) < 1e-6


def test_a_prediction_needs_the_batch_on_one_rank(pair):
    assert all(pair.run(data_jobs.predicted))


def test_inconsistent_batches_are_refused_on_all_ranks(pair):
    for messages in pair.run(data_jobs.refused):
        assert "rank 0 was given no batch" in messages["missing"]
        assert "rank 0 was given no batch" in messages["evaluated"]
        assert "rank 1 was given no batch" in messages["one"]
        assert "shards of 5 and 1 rows" in messages["sizes"]
        assert "sharded= differs" in messages["mixed"]


def test_ranks_without_the_batch_follow_branches_on_its_values(pair):
    for apart, _ in pair.run(data_jobs.value_branches, (1, 1), False):
        assert len(apart) == 3 and max(apart) < 1e-5


def test_a_model_that_reads_values_of_the_batch_refuses_shards(pair):
    for _, messages in pair.run(data_jobs.value_branches, (2,), True):
        assert "reads numbers of the whole batch" in messages
