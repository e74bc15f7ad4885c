"""Batch norms in stages with replicas: over the whole micro-batch with sync_batchnorm, otherwise per replica."""

from __future__ import annotations

import itertools

import pytest
import torch
from support.jobs import statistics_jobs as jobs

SLOW = pytest.mark.slow
COUNTS = ((2,), (2, 1), (1, 2), (2, 2), (3, 1), (4,))
NAMES = ("batch_norm", "buffer3", "resnet", "pictures")


@pytest.mark.parametrize(
    ("name", "counts", "micros", "rows", "recompute"),
    [
        ("pictures", (2, 1), 2, (5, 3), "off"),  # then micro-batches in which a replica has no row
        *(
            pytest.param(name, counts, 2, (16, 20), recompute, marks=SLOW)
            for name, counts, recompute in itertools.product(NAMES, COUNTS, ("off", "all"))
        ),
        pytest.param("pictures", (3, 1), 2, (12, 5, 4), "all", marks=SLOW),
        pytest.param("resnet", (3, 1), 3, (13, 7), "all", marks=SLOW),
    ],
)
def test_shared_batch_statistics_are_those_of_one_process(workers, name, counts, micros, rows, recompute):
    for found in workers.run(jobs.synced, name, counts, micros, rows, recompute):
        for difference in found:
            assert difference.within(torch.float64), difference


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["off", "all"])
@pytest.mark.parametrize(
    ("name", "counts", "shares"),
    [
        ("pictures", (2,), ((3, 1),)),
        ("pictures", (3, 1), ((1, 4, 2), ())),
        ("resnet", (2, 2), ((1, 3), ())),
        ("resnet", (1, 3), ((), (1, 5, 2))),
    ],
)
def test_replicas_with_unequal_shares_of_the_rows_share_statistics(workers, name, counts, shares, recompute):
    for found in workers.run(jobs.synced, name, counts, 2, (16, 11, 20), recompute, shares):
        for difference in found:
            assert difference.within(torch.float64), difference


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["off", "all"])
@pytest.mark.parametrize("own", [(), (1, 3)])
def test_statistics_are_shared_when_other_stages_take_micro_batches_in_turn(workers, own, recompute):
    for found in workers.run(jobs.synced, "pictures", (2, 2), 3, (13, 7), recompute, (own, "turn"), ("last",)):
        for difference in found:
            assert difference.within(torch.float64), difference


@pytest.mark.slow
def test_replicas_that_take_turns_do_not_share_statistics(pair):
    for message in pair.run(jobs.refused_in_turn):
        assert "cannot share batch statistics: its replicas take turns" in message and 'policy "split"' in message


@pytest.mark.parametrize(
    ("name", "counts", "micros", "rows", "recompute"),
    [
        pytest.param("pictures", (2, 1), 3, (7, 5), "off", marks=SLOW),
        *(
            pytest.param(name, counts, 4, (18, 13), recompute, marks=SLOW)
            for name, counts, recompute in itertools.product(NAMES, COUNTS, ("off", "all"))
        ),
    ],
)
def test_micro_batches_taken_in_turn_have_separate_statistics(workers, name, counts, micros, rows, recompute):
    compared = set()
    for result in workers.run(jobs.in_turn, name, counts, micros, rows, recompute):
        for difference in result["differences"]:
            assert difference.within(torch.float64), difference
        assert result["buffers"] < 1e-10
        compared.add(result["compared"])
    assert max(compared) > 0


def test_batch_statistics_are_per_replica_and_running_ones_of_the_first_replica(pair):
    for result in pair.run(jobs.normed, (2,)):
        assert result["difference"].within(torch.float32), result["difference"]
        assert result["compared"] and result["buffers"] < 1e-6


@pytest.mark.parametrize(
    ("name", "counts"),
    [("pictures", (2,)), *(pytest.param(*cell, marks=SLOW) for cell in itertools.product(NAMES, COUNTS[1:4]))],
)
def test_verify_compares_shared_statistics_with_one_process(workers, pair, name, counts):
    for good, reference, buffers, message in (pair if counts == (2,) else workers).run(jobs.verified, name, counts):
        assert good and buffers, message
        assert "the model itself, over the same micro-batches" in reference


@pytest.mark.slow
@pytest.mark.parametrize("counts", [(2,), (2, 1)])
def test_verify_cannot_compare_statistics_of_replicas_with_one_process(workers, counts):
    for good, *_, message in workers.run(jobs.verified, "pictures", counts, False):
        assert not good and "cannot be compared with one process" in message and "sync_batchnorm=True" in message
