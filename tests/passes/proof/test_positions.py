"""No plan on positions with any number of stages each beats the bound of its micro-batches and stages a rank."""

from __future__ import annotations

from random import Random

import pytest
from support.grids import sampled
from support.oracles.drawn_clusters import bound_of, drawn, found_for, random_plan
from support.oracles.planner_oracle import Problem

from autopart.passes.proof.lower_bound import lower_bound


def check(problem: Problem, draw: Random, *, plans: int) -> None:
    """The bound against what the search finds, and against random plans; memory only makes plans slower."""
    space, fastest = problem.space, dict[tuple[tuple[int, ...], int], int]()
    made = [random_plan(space, draw) for _ in range(plans)]
    every = [*found_for(problem).ranked, *(each for each in made if each is not None)]
    for plan in every:
        key = plan.candidate.micro_rows, plan.candidate.per_rank
        fastest[key] = min(plan.step_ns, fastest.get(key, plan.step_ns))
    for (rows, per_rank), step_ns in fastest.items():
        assert bound_of(space, rows, per_rank) <= step_ns, (rows, per_rank)
    fitting = [plan.step_ns for plan in every if plan.fits]
    assert not fitting or lower_bound(space, orders=True) <= min(fitting)


@pytest.mark.parametrize("seed", sampled(range(400), every=100))
def test_no_plan_is_faster_than_the_bound_of_its_stages_a_rank(seed: int) -> None:
    check(drawn(seed, devices=4, layers=6), Random(seed), plans=10)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(4))
def test_no_plan_of_many_unlike_clusters_is_faster_than_the_bound(part: int) -> None:
    for seed in range(1000 + 40 * part, 1040 + 40 * part):
        check(drawn(seed, devices=7, layers=12), Random(seed), plans=60)
