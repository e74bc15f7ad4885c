"""Backwards in two parts, of inputs and of weights: loss and gradients are those of the model in one process.

The orders are drawn: a backward of weights may run at any time after that of inputs.
"""

from __future__ import annotations

import pytest
import torch
from support.jobs import schedule_jobs
from support.jobs.schedule_jobs import Placed, compare_placed
from support.workers import Workers

from autopart.passes.program.orders import V

SLOW = pytest.mark.slow
EPS = {"bf16": 2**-7, "fp16": 2**-10}
"""Rounding error of one operation: gradients of replicas from messages of other rows may differ by one."""


def check(workers: Workers, name: str, placed: Placed, rows: int, dtype: str = "float64", against: str = "") -> None:
    """Compare a step with one process, or with one device; at least one rank splits a backward."""
    results = workers.run(compare_placed, name, placed, rows, dtype, against or "one process")
    found = results[0][0]
    assert found is not None and found.within(getattr(torch, dtype)), found
    assert {"I", "W"} <= {kind for _, kinds in results for kind in kinds}


@pytest.mark.parametrize(
    ("name", "placed", "rows"),
    [
        ("tied", Placed(per_rank=1), 12),
        ("tied", Placed(placement=V, split=0.5, seed=3), 11),
        ("skips", Placed(seed=1, micros=3, recompute=1.0), 12),
    ],
    ids=["one stage a rank", "some backwards whole", "recomputed"],
)
def test_gradients_are_those_of_one_process(pair: Workers, name: str, placed: Placed, rows: int) -> None:
    check(pair, name, placed, rows)


@pytest.mark.parametrize("bucket_bytes", [64, 25 << 20], ids=["many buckets", "one bucket"])
@pytest.mark.parametrize("zero", [0, 1])
def test_replicas_sum_gradients_that_are_complete_after_the_last_backward_of_weights(
    pair: Workers, zero: int, bucket_bytes: int
) -> None:
    check(pair, "tied", Placed(replicas=2, seed=1, zero=zero, bucket_bytes=bucket_bytes), 10)


def test_replicas_without_rows_sum_the_gradients_of_each_stage_in_an_order_of_their_own(pair: Workers) -> None:
    """One replica completes stage 0 in a micro-batch of which the other has no rows, and so sums it at the end."""
    check(pair, "tied", Placed(replicas=2, micros=3, schedule="weights last", bucket_bytes=64), 4)


@pytest.mark.parametrize(("shares", "rows"), [((), 16), ((3, 1), 9)], ids=["equal", "without rows"])
def test_replicas_share_batch_statistics_in_backwards_of_inputs(
    pair: Workers, shares: tuple[int, ...], rows: int
) -> None:
    placed = Placed(replicas=2, micros=4, seed=6, split=0.8, shares=shares, synced=True, recompute=0.3)
    check(pair, "batch_norm", placed, rows)


def test_dropout_draws_the_same_numbers_in_recomputed_groups(pair: Workers) -> None:
    check(pair, "dropped", Placed(seed=2, recompute=0.6), 12, against="one device")


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=SLOW)])
def test_half_precision_rounds_as_autocast_does(pair: Workers, precision: str) -> None:
    for result in pair.run(schedule_jobs.trained_in_half, "tied", Placed(seed=4, precision=precision), 3):
        assert result["first"] <= 1e-6
        if result["plain"] is not None:
            assert result["losses"] == pytest.approx(result["plain"]["losses"], rel=1e-6)
            assert result["scales"] == result["plain"]["scales"]


@pytest.mark.parametrize(
    ("name", "schedule", "words"),
    [
        ("batch_norm", "out of order", "runs micro-batch 1 behind 2"),
    ],
)
def test_what_would_not_be_exact_is_refused_by_name(pair: Workers, name: str, schedule: str, words: str) -> None:
    for text in pair.run(schedule_jobs.refusal, name, Placed(workers=1, micros=3, schedule=schedule), 9):
        assert words in text and "fix:" in text
