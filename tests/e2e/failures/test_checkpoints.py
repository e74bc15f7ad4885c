"""A run that is saved and loaded goes on as if it had not been interrupted, also under another plan."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from support.jobs.state import checkpoint_jobs as jobs

TWO_STAGES = {"stages": 2, "micro_batches": 2}
REPLICAS = {"stages": 1, "replicas": 2, "micro_batches": 2, "zero": 1, "sync_batchnorm": True}


@pytest.mark.parametrize(("options", "wait"), [({**TWO_STAGES, "precision": "fp16"}, True), (REPLICAS, False)], ids=str)
def test_a_resumed_run_equals_one_without_interruption_bit_by_bit(pair, tmp_path, options, wait):
    results = pair.run(partial(jobs.saved_and_resumed, wait=wait), str(tmp_path), "adamw", dict(options), dict(options))
    for losses, again, state, resumed, extra in results:
        assert again == losses
        assert state.keys() == resumed.keys()
        assert all(torch.equal(state[name], resumed[name]) for name in state)
        assert extra == {"note": "third", "best": float("inf")}


MARKS = {kind: [pytest.mark.slow] for kind in ("sgd", "adam", "rmsprop", "adafactor")}
OTHERS = [
    {"stages": 1, "replicas": 2, "micro_batches": 2, "zero": 0, "sync_batchnorm": True},
    REPLICAS,
    {"stages": 2, "micro_batches": 4, "schedule": "zb-h1"},
    {"stages": 4, "stages_per_rank": 2, "micro_batches": 4, "schedule": "interleaved"},
]


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=MARKS.get(kind, [])) for kind in jobs.OPTIMIZERS])
def test_no_state_is_lost_under_another_plan(pair, tmp_path, kind):
    before, others = (TWO_STAGES, OTHERS[:2]) if kind != "adamw" else (REPLICAS, OTHERS[2:])
    assert pair.run(jobs.moved, str(tmp_path), kind, before, others) == [[[]] * len(others)] * 2


@pytest.mark.slow
def test_losses_go_on_under_another_plan(pair, tmp_path):
    for losses, again, *_ in pair.run(jobs.saved_and_resumed, str(tmp_path), "adam", dict(TWO_STAGES), dict(REPLICAS)):
        torch.testing.assert_close(torch.tensor(again), torch.tensor(losses), rtol=1e-4, atol=1e-5)
