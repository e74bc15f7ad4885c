"""Several stages on a rank, in loops or folded: a pipe trains, evaluates and changes its plan as one process does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.jobs.schedule_jobs import Placed, lived, verified, verified_by_options
from support.workers import Workers

from autopart.passes.program.orders import V


def check(workers: Workers, name: str, plans: list[Placed], rows: int) -> None:
    """Train under each plan in turn and compare with one process."""
    results: list[dict[str, Any]] = workers.run(lived, name, plans, rows)
    alone = results[0]["alone"]
    for result in results:
        ours = result["ours"]
        assert ours["losses"] == pytest.approx(alone["losses"], rel=1e-10)
        assert ours["evaluated"] == pytest.approx(alone["evaluated"], rel=1e-10)
        for found, expected in zip(ours["gradients"], alone["gradients"], strict=True):
            assert found.keys() == expected.keys()
            for key, gradient in expected.items():
                assert_close(found[key], gradient)
        for key, tensor in alone["state"].items():
            assert_close(ours["state"][key], tensor)


def assert_close(found: torch.Tensor | None, expected: torch.Tensor | None) -> None:
    """Compare two tensors, or two missing ones."""
    if expected is None or found is None:
        assert found is expected
    else:
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


PLAIN = Placed(per_rank=1, schedule="1f1b")


def test_a_pipe_changes_between_placements_and_orders(pair: Workers) -> None:
    """Tied weights lie on stages of one rank, then of two; a small batch has fewer micro-batches than the order."""
    plans = [
        Placed(schedule="searched", seed=1, micros=6),
        PLAIN,
        Placed(per_rank=4, placement=V, split=0.0, micros=3),
        Placed(schedule="zb-v", placement=V, micros=2),
    ]
    check(pair, "tied", plans, 12)


def test_stages_of_one_rank_that_share_a_weight_change_with_those_of_two(pair: Workers) -> None:
    check(pair, "shared_by_all", [Placed(schedule="interleaved"), replace(PLAIN, schedule="zb-h1", micros=3)], 8)


def test_verify_compares_a_plan_with_several_stages_a_rank(pair: Workers) -> None:
    for exact, gradients in pair.run(verified, "tied", Placed(schedule="zb-v", placement=V), 8):
        assert exact and gradients > 5


def test_verify_compares_a_model_with_dropout_with_one_stage(pair: Workers) -> None:
    options = {"stages": 4, "stages_per_rank": 2, "schedule": "zb-v", "micro_batches": 4}
    for exact, stages in pair.run(verified_by_options, "dropped", options):
        assert exact and len(stages) > 1


@pytest.mark.slow
@pytest.mark.parametrize("placed", [Placed(zero=1), Placed(per_rank=3, placement=V, zero=1, seed=2)])
@pytest.mark.parametrize("name", ["tied", "skips", "shared_by_all", "aliases", "frozen", "late_inputs", "unused_grad"])
def test_replicas_of_several_stages_share_optimizers(workers: Workers, name: str, placed: Placed) -> None:
    check(workers, name, [replace(placed, replicas=2), replace(placed, per_rank=1, split=0.5)], 9)
