"""fp32 master weights over stages and replicas equal a hand-written loop in one process, bit by bit."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from support.jobs.state import master_weight_jobs

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="needs a later torch"),
]


@pytest.mark.parametrize(
    "options",
    [
        {"stages": 2, "cuts": ["3"]},
        {"stages": 2, "cuts": ["3"], "schedule": "gpipe", "recompute": "all"},
        {"stages": 1, "replicas": 2, "zero": 0},
        {"stages": 1, "replicas": 2, "zero": 0, "bucket_bytes": 2000},
        {"stages": 1, "replicas": 2, "zero": 1, "bucket_bytes": 2000},
    ],
)
def test_ten_steps_equal_a_hand_written_loop_with_master_weights(pair, options):
    results = pair.run(partial(master_weight_jobs.trained, **options))
    for wrong, left, masters in results:
        assert (wrong, left) == ([], [])
        assert all(master.dtype == torch.float32 for master in masters.values())
    here, there = (masters for *_, masters in results)
    assert bool(here.keys() & there.keys()) == (options.get("zero") == 0)
    assert here.keys() | there.keys() == dict(master_weight_jobs.model().named_parameters()).keys()


@pytest.mark.parametrize(
    ("first", "second", "replicas"),
    [
        ({"cuts": ["1"], "stages": 2}, {"cuts": ["4"], "stages": 2}, 1),
        ({"stages": 2}, {"stages": 1}, 1),
        ({"stages": 1, "zero": 1}, {"stages": 1, "zero": 0}, 2),
        ({"stages": 1, "zero": 0}, {"stages": 1, "zero": 1}, 2),
    ],
)
def test_master_weights_and_their_gradients_move_to_another_plan(pair, first, second, replicas):
    assert pair.run(master_weight_jobs.adopted, first, second, replicas) == [[], []]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("options", [{"stages": 2}, {"stages": 1, "replicas": 2, "zero": 1}])
def test_a_checkpoint_holds_the_exact_master_weights(pair, when, options):
    assert pair.run(partial(master_weight_jobs.resumed, when, **options)) == [[], []]
