"""Token slices with recomputation, replicas, dropout and several losses equal one process."""

from __future__ import annotations

from typing import Any

import pytest
from support.jobs.sliced_plan_jobs import compare_with_whole
from support.models.decoder import Shape
from support.workers import Workers

from autopart.ir.plan import Decision

UNEVEN = (7, 5, 3, 1)


def check(workers: Workers, shape: Shape, rows: int, **options: Any) -> Decision:
    found = workers.run(compare_with_whole, shape, rows, UNEVEN, {"stages": 2, "micro_batches": 2, **options})
    losses, differences, decisions = zip(*found, strict=True)
    assert len(set(losses)) == 1
    assert differences[0].gradient <= 1e-10 and abs(differences[0].loss) <= 1e-10, differences[0]
    decision: Decision = decisions[0]
    return decision


@pytest.mark.slow
def test_recomputed_slices_with_dropout_and_two_losses_are_exact(pair: Workers) -> None:
    decision = check(pair, Shape(dropout=0.2, term=True), 4, recompute="all")
    assert all(stage.recompute for stage in decision.stages)


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [Shape(), Shape(written_out=True, dropout=0.2), Shape(window=5, term=True)],
    ids=["attention", "written_out", "window"],
)
@pytest.mark.parametrize("recompute", ["all", ("layers.1",), ("layers.0", "layers.2")], ids=str)
def test_any_group_can_be_recomputed(pair: Workers, shape: Shape, recompute: Any) -> None:
    check(pair, shape, 6, micro_batches=3, recompute=recompute, schedule="gpipe" if shape.term else "1f1b")


@pytest.mark.slow
@pytest.mark.parametrize("written_out", [False, True], ids=["attention", "written_out"])
@pytest.mark.parametrize("recompute", ["off", "all"])
def test_replicas_of_slices_have_the_dropout_masks_of_one_process(
    workers: Workers, written_out: bool, recompute: str
) -> None:
    check(workers, Shape(dropout=0.2, written_out=written_out), 8, replicas=2, recompute=recompute)


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [(1, 3), (3, 1)], ids=str)
@pytest.mark.parametrize(
    "shape",
    [Shape(), Shape(dropout=0.2), Shape(term=True, dropout=0.2), Shape(merged=True), Shape(merged=True, dropout=0.2)],
    ids=["plain", "dropout", "two_losses", "merged", "merged_dropout"],
)
def test_stages_may_divide_the_rows_of_slices_differently(workers: Workers, shape: Shape, replicas: Any) -> None:
    decision = check(workers, shape, 14, replicas=replicas)
    assert [len(stage.ranks) for stage in decision.stages] == list(replicas)


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [2, (1, 3), (3, 1)], ids=str)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_replicas_take_micro_batches_of_slices_in_turn(workers: Workers, replicas: Any, schedule: str) -> None:
    options = {"replicas": replicas, "replica_policy": "turn", "micro_batches": 5, "schedule": schedule}
    decision = check(workers, Shape(dropout=0.2, term=True), 10, **options)
    assert any(stage.division.in_turn for stage in decision.stages)
