"""Tests of DAPPLE's cost model against hand-computed values, and of its search."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest

from autopart.ir.errors import UsageError
from benchmarks.papers.planners.dapple import (
    Links,
    Setting,
    Stage,
    allreduce_s,
    data_parallel,
    evaluate,
    solve,
    transfer_s,
)
from benchmarks.papers.planners.pipedream import profile

LINKS = Links(within=100.0, across=10.0, single=5.0)
SETTING = Setting((2, 2), global_batch=8, micro_batch=1, profile_batch=1, links=LINKS, overhang=False)
CHAIN = profile([[], [0], [1], [2]], [1.0, 2.0, 3.0, 2.0], [5.0, 10.0, 5.0, 1.0], [0.0, 40.0, 40.0, 80.0])


def some(*devices: int) -> frozenset[int]:
    return frozenset(devices)


def test_an_all_reduce_is_a_ring_on_the_slowest_link() -> None:
    assert allreduce_s(SETTING, some(2), 100.0) == 0
    assert allreduce_s(SETTING, some(0, 1), 100.0) == 100.0 / 100.0
    assert allreduce_s(SETTING, some(0, 2), 100.0) == 100.0 / 10.0
    assert allreduce_s(SETTING, some(0, 1, 2, 3), 100.0) == pytest.approx(2 * 3 / 4 * 100.0 / 10.0)


def test_a_transfer_pays_only_for_data_that_leaves_a_server() -> None:
    assert transfer_s(SETTING, some(0), some(1), 100.0) == 1.0
    assert transfer_s(SETTING, some(0, 1), some(2, 3), 100.0) == 20.0
    assert transfer_s(SETTING, some(0, 2), some(3), 100.0) == 10.0  # half of it is already there
    assert transfer_s(SETTING, some(0), some(1, 2), 100.0) == 10.0


def test_the_step_is_warm_up_steady_state_transfers_and_the_exposed_all_reduce() -> None:
    plan = evaluate(CHAIN, SETTING, 1, [Stage(0, 3, 3, some(0, 1, 2)), Stage(3, 4, 1, some(3))])
    # one micro-batch: stages of 2 and 2 s; 5 bytes over the cut, two thirds of them from another server
    moved = 5 * 2 / 3 / 5
    assert plan.step_s == pytest.approx(7 * 2 + 8 + moved + 2 * 2 / 3 * 80 / 10)
    assert plan.score == pytest.approx(64 / plan.step_s)
    late = evaluate(CHAIN, replace(SETTING, overhang=True), 1, plan.stages)
    assert late.step_s == pytest.approx(7 * 2 + 8 + moved + 2 * 2 / 3 * 160 / 10)


def test_copies_share_the_batch_and_the_all_reduce() -> None:
    stages = [Stage(0, 3, 1, some(0, 1)), Stage(3, 4, 1, some(2, 3))]
    plan = evaluate(CHAIN, SETTING, 2, stages)
    block = 48 / 2 / 4  # 6 s of 8 for each of 4 micro-batches
    assert plan.step_s == pytest.approx(3 * block + 64 / 2 / 4 + 5 * 8 / 2 / 4 / 5 + 80 / 100)
    with pytest.raises(UsageError, match="micro-batch"):
        evaluate(CHAIN, SETTING, 9, stages)


def test_data_parallel_hides_nothing() -> None:
    assert data_parallel(CHAIN, SETTING).step_s == pytest.approx(64 / 4 + 2 * 3 / 4 * 160 / 10)


def test_the_search_beats_all_two_stage_plans_in_server_order() -> None:
    best = solve(CHAIN, SETTING)
    for cut in range(1, 4):
        for count in range(1, 4):
            for chosen in combinations(range(4), count):
                first, second = frozenset(chosen), some(0, 1, 2, 3) - set(chosen)
                stages = [Stage(0, cut, count, first), Stage(cut, 4, 4 - count, second)]
                assert evaluate(CHAIN, SETTING, 1, stages).score <= best.score + 1e-12


def test_the_search_finds_the_straight_pipeline() -> None:
    heavy = profile([[], [0], [1], [2]], [2.0] * 4, [0.0] * 4, [1e6] * 4)
    found = solve(heavy, SETTING)
    assert found.copies == 1 and [(s.start, s.end, s.replicas) for s in found.stages] == [
        (0, 1, 1),
        (1, 2, 1),
        (2, 3, 1),
        (3, 4, 1),
    ]
