"""The planner against exhaustive search: every cut, every number of replicas, every order of the devices."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import event, given, settings
from support.languages.graphs import cluster, graph
from support.oracles.planner_oracle import (
    Kind,
    Problem,
    compare,
    fastest_assignment,
    planned,
    problem,
    problems,
    says,
    two_kinds,
)

from autopart.ir.plan import Plan
from autopart.passes.pipeline import build
from autopart.passes.search.space import PlanRequest

# ---- properties ----------------------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(problems(Kind(most=6, replicas=False, recompute=False)))
def test_pipelines_against_exhaustive_search(p: Problem) -> None:
    event(says(compare(p)))


@settings(max_examples=30)
@given(problems(Kind(most=5)))
def test_plans_of_every_kind_against_exhaustive_search(p: Problem) -> None:
    event(says(compare(p)))


@settings(max_examples=30)
@given(problems(Kind(most=5, devices=3, chain=False, replicas=False, recompute=False)))
def test_bound_covers_every_order_of_a_dag(p: Problem) -> None:
    """Stages that are no ranges of the line: the planner does not look at them, its bound must."""
    plan, best = planned(p), fastest_assignment(p.space)
    if plan is not None and best is not None:
        assert plan.outlook.optimality is not None
        assert plan.outlook.optimality.lower_bound <= best
        event(says(plan.step_ns / best - 1 if best else 0.0))


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("part", range(4))
def test_a_thousand_problems_against_exhaustive_search(part: int) -> None:
    """Also says how good the planner is, with `pytest -s`."""
    kinds = [
        Kind(replicas=False, recompute=False, mixed=False),
        Kind(replicas=False, recompute=False, mixed=True, most=7),
        Kind(replicas=True, recompute=False, mixed=False, most=7),
        Kind(recompute=True, most=6),
    ]
    found = [compare(problem(Random(1000 * part + i), kinds[part])) for i in range(250)]
    excess = [e for e in found if e is not None]
    print(f"\n{kinds[part]}: {len(excess)} plans, {len(found) - len(excess)} proven infeasible")
    print(Counter(map(says, excess)), f"mean {sum(excess) / len(excess):.2%}, worst {max(excess):.2%}")
    assert sum(excess) / len(excess) < 0.01 and sum(e > 0.05 for e in excess) < len(excess) / 20


# ---- one at a time -------------------------------------------------------------------------------------------------


def ask(text: str, c: object, *, rows: tuple[int, ...] = (1, 1), **request: object) -> Plan:
    g = graph(text, input_bytes=0)
    p = Problem(g, c, PlanRequest((rows,), **request))  # type: ignore[arg-type]
    compare(p)
    return build(p.source, p.cluster, p.request)


def test_the_fast_device_of_an_unlike_pair_gets_all() -> None:
    """Two stages would wait for the slow one; whether it is rank 0 or 1 must not matter."""
    for fast in (0, 1):
        plan = ask("a:100 #0 <- x; b:1 #0 <- a", two_kinds(2, fast=(fast,), slower=9), rows=(1,))
        assert [stage.ranks for stage in plan.stages] == [(fast,)]


def test_the_only_device_with_room_is_found_wherever_it_stands() -> None:
    text = "a:9 #0 ^100 <- x; b:9 #0 ^100 <- a"
    for place in range(3):
        memory = tuple(400 if rank == place else 50 for rank in range(3))
        assert ask(text, cluster(3, memory=memory)).stages[0].ranks == (place,)


def test_branches_run_side_by_side() -> None:
    """b and c read a and not each other: two stages for them, although in the line they follow one another."""
    plan = ask("a:10 #0 <- x; b:150 #0 <- a; c:150 #0 <- a", cluster(4), rows=(1,), replicas=1)
    assert [" ".join(stage.ops) for stage in plan.stages] in (["a", "b", "c"], ["a b", "c"])
    assert plan.step_ns <= 480


def test_one_stage_takes_replicas_across_nodes_when_that_link_is_faster() -> None:
    g = graph("a:100 +w:100 #0 <- x", input_bytes=0)
    c = two_kinds(4, levels=((2, 10**8), (4, 10**10)))
    compare(Problem(g, c, PlanRequest(((2,),))))


@given(problems(Kind(least=8, most=8, replicas=False, recompute=False, roomy=True)))
@settings(max_examples=5)
def test_same_problem_gives_the_same_plan(p: Problem) -> None:
    assert build(p.source, p.cluster, p.request).digest() == build(p.source, p.cluster, p.request).digest()
