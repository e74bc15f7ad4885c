"""Asynchronous 1F1B with weight stashing from outside: planned, verified and run, equal to a reference by hand."""

from __future__ import annotations

import pytest
import torch
from support.languages import own_pipedream
from support.workers import Workers

import autopart
from autopart.ir.errors import RefusedError, UsageError


def test_weights_are_stashed_and_updated_after_each_micro_batch(pair: Workers) -> None:
    losses, weights = own_pipedream.by_hand()
    for found, state in pair.run(own_pipedream.trained):
        assert found == losses
        assert all(torch.equal(state[name], tensor) for name, tensor in weights.items())


def test_it_is_planned_with_one_version_of_the_weights_for_each_micro_batch_in_flight() -> None:
    schedule = own_pipedream.registered()
    plan = autopart.plan(
        own_pipedream.net(), "cpu:2", sample=own_pipedream.batch(0), schedule=schedule.name, **own_pipedream.OPTIONS
    )
    assert [estimate.live for estimate in plan.estimates] == [2, 1]
    weights = plan.estimates[0].param_bytes
    assert plan.estimates[0].state_bytes == plan.estimates[1].state_bytes + weights


def test_half_precision_parameters_are_refused() -> None:
    schedule = own_pipedream.registered()
    options = own_pipedream.OPTIONS | {"stages": 1, "cuts": (), "replicas": 1, "schedule": schedule.name}
    with (
        autopart.compile(own_pipedream.net().bfloat16(), "cpu:1", sample=_half(), **options) as pipe,
        pytest.raises(RefusedError, match="half-precision parameters"),
    ):
        pipe.step(_half())


def test_verify_refuses_a_schedule_that_updates_within_the_step() -> None:
    options = own_pipedream.OPTIONS | {"stages": 1, "cuts": (), "schedule": own_pipedream.registered().name}
    with pytest.raises(UsageError, match="'own_pipedream' cannot be compared with one process") as caught:
        autopart.verify(own_pipedream.net(), "cpu:1", sample=own_pipedream.batch(0), **options)
    assert "updates weights within the step" in caught.value.why and "1f1b" in caught.value.fix


def _half() -> tuple[torch.Tensor, torch.Tensor]:
    x, y = own_pipedream.batch(0)
    return x.bfloat16(), y.bfloat16()
