"""Tests of how predictions are compared with steps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopart
from autopart.ir.plan import Decision, Estimate
from autopart.passes.program.orders import Shape
from autopart.passes.program.schedules import find, pattern
from benchmarks.planning.prediction import error_of, estimated


def test_a_machine_that_gets_slower_between_blocks_is_no_error() -> None:
    assert error_of([[1.0, 1.0, 1.0], [2.0, 2.0, 2.0]], [1.0, 1.0, 3.0]) == pytest.approx(0.0)
    assert error_of([[1.0, 9.0, 1.0]], [0.8, 1.0]) == pytest.approx(-0.1)


def walked(decision: Decision, estimates: tuple[Estimate, ...], rank: int) -> int:
    """Return the most bytes of activations between the forwards and the backwards of a rank, by going through them."""
    now = most = 0
    turns = pattern(find(decision.schedule), Shape.of(decision)).workers[rank]
    for kind, stage, _ in turns:
        now += {"F": 1, "B": -1, "I": -1, "W": 0}[kind] * estimates[stage].activation_bytes
        most = max(most, now)
    return most


@pytest.mark.parametrize(
    ("schedule", "stages"), [("1f1b", 2), ("gpipe", 2), ("zb-h1", 2), ("interleaved", 4), ("zb-v", 4)]
)
def test_what_a_rank_holds_is_the_most_of_all_its_stages_together(schedule: str, stages: int) -> None:
    model = nn.Sequential(*(nn.Linear(8 * width, 8 * width + 8) for width in range(1, 7)))
    plan = autopart.plan(
        model, "cpu:2", sample=(torch.ones(16, 8), torch.zeros(16, 56)), loss_fn=nn.functional.mse_loss, stages=stages,
        replicas=1, micro_batches=4, schedule=schedule, costs="analytic", cache=False, optimizer="sgd",
    )  # fmt: skip
    for rank in (0, 1):
        found = estimated(plan.decision, plan.estimates, rank)
        assert found == walked(plan.decision, plan.estimates, rank) > 0
