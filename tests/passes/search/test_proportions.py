"""Rows in proportion to speed on unlike devices: planned, and faster than equal shares."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.languages.graphs import graph, plan_of, source
from support.oracles.planner_oracle import two_kinds

from autopart.ir.cluster import Cluster
from autopart.ir.plan import Decision, Plan
from autopart.ir.shares import parts
from autopart.passes.program.routing import route
from autopart.passes.search.layout import dealt_out
from autopart.passes.simulation.estimate import estimate
from autopart.passes.simulation.stage_costs import Estimator

MODEL = graph("a:400000 +w <- x; b:400000 +v <- a; c:400000 +u <- b")


@given(st.lists(st.integers(1, 30), min_size=1, max_size=5), st.integers(0, 20))
def test_no_row_would_be_done_sooner_elsewhere(row_ns: list[int], more: int) -> None:
    rows = len(row_ns) + more
    found = dealt_out(rows, row_ns)
    assert sum(found) == rows and min(found) >= 1
    worst = max(mine * taken for mine, taken in zip(found, row_ns, strict=True) if mine > 1 or not more)
    assert all((mine + 1) * taken >= worst for mine, taken in zip(found, row_ns, strict=True)) or not more


def simulated(plan: Plan, c: Cluster, decision: Decision) -> int:
    """The step of another decision on the same devices."""
    return estimate(decision, route(decision, MODEL), Estimator(c, source(MODEL, c).cost_model, overlap=True)).step_ns


@pytest.mark.parametrize("slower", [2, 3])
def test_a_slow_device_beside_a_fast_one_gets_fewer_rows_and_the_step_is_shorter(slower: int) -> None:
    c = two_kinds(2, fast=(0,), slower=slower)
    plan = plan_of(MODEL, c, rows=(12, 12), stages=1, replicas=2)
    (stage,) = plan.stages
    by_rank = dict(zip(stage.ranks, stage.division.shares, strict=True))
    assert by_rank[0] == slower * by_rank[1]
    equal = replace(plan.decision, stages=(replace(stage, shares=()),))
    assert plan.step_ns == simulated(plan, c, plan.decision) < 0.8 * simulated(plan, c, equal)
    assert f"shares {':'.join(map(str, stage.division.shares))}" in plan.explain()


def test_equal_devices_have_equal_shares() -> None:
    plan = plan_of(MODEL, two_kinds(2), rows=(12, 12), stages=1, replicas=2)
    assert plan.stages[0].shares == ()


@pytest.mark.parametrize("rows", [(12, 12), (5, 4)])
def test_the_slow_device_gets_as_many_rows_as_a_replica_has_at_least(rows: tuple[int, ...]) -> None:
    c = two_kinds(2, fast=(0,), slower=30)
    (stage,) = plan_of(MODEL, c, rows=rows, stages=1, replicas=2, least_rows=2).stages
    assert min(own for each in rows for own in parts(stage.division, 0, each)) == 2
    (stage,) = plan_of(MODEL, c, rows=rows, stages=1, replicas=2).stages
    assert min(own for each in rows for own in parts(stage.division, 0, each)) < 2
