"""Backwards in two parts, of inputs and of weights: the loss and every gradient are those of the model in one process."""

from __future__ import annotations

import pytest
import torch
from support.jobs.schedule_jobs import Placed, compare_placed
from support.languages.own_orders import FOLDED
from support.workers import Workers


def _check(workers: Workers, *case: object, dtype: str = "float64", against: str = "one process") -> None:
    results = workers.run(compare_placed, *case, dtype, against)
    found = results[0][0]
    assert found is not None and found.within(getattr(torch, dtype)), found
    assert {"I", "W"} <= {kind for _, kinds in results for kind in kinds}


CASES = {
    "tied": ("tied", Placed(), 12),
    "tied, folded": ("tied", Placed(placement=FOLDED, split=0.5, seed=3), 12),
    "replicas": ("tied", Placed(per_rank=2, replicas=2, seed=1, bucket_bytes=64), 10),
    "dropped": ("dropped", Placed(seed=2, recompute=0.6), 12),
}


@pytest.mark.parametrize("name", CASES)
def test_equal(pair, name):
    case = CASES[name]
    _check(pair, *case, against="one device" if case[0] == "dropped" else "one process")
