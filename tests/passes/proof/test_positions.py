"""No plan on positions with any number of stages each beats the bound of its micro-batches and stages a rank."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import numpy as np
import pytest
from support.grids import sampled
from support.oracles.drawn_clusters import drawn, found_for
from support.oracles.planner_oracle import Problem

from autopart.passes.program.orders import LOOP, ONE, V
from autopart.passes.proof.lower_bound import lower_bound
from autopart.passes.proof.positions import positions_bound
from autopart.passes.proof.prices import Priced
from autopart.passes.search.evaluation import Candidate, Evaluation, evaluate
from autopart.passes.search.layout import Layout
from autopart.passes.search.space import SearchSpace
from autopart.passes.search.variants.ordered import shortest_way, with_order


def case_of(space: SearchSpace, rows: tuple[int, ...], *, several: bool, orders: bool = True) -> Priced:
    types, world = len(space.costs.device_types), space.costs.cluster.world
    widest = min(world, max(rows))
    return Priced(space, rows, np.ones(types), 1.0, widest, several=several, orders=orders)


def bound_of(space: SearchSpace, rows: tuple[int, ...], per_rank: int) -> int:
    return positions_bound(case_of(space, rows, several=per_rank > 1), (per_rank,), float("inf"))


def random_plan(space: SearchSpace, draw: Random) -> Evaluation | None:
    """Devices in any order, any number of them a position, any cuts, and an order by name or a searched one."""
    world, n, rows = space.costs.cluster.world, space.chain.n, draw.choice(space.request.micro_rows)
    order = draw.sample(range(world), world)
    used = draw.randint(1, world)
    ends = sorted(draw.sample(range(1, used), draw.randint(0, used - 1)))
    widths = tuple(b - a for a, b in pairwise((0, *ends, used)))
    schedule, per_rank, placement = draw.choice(
        [("1f1b", 1, ONE), ("gpipe", 1, ONE), ("zb-h2", 1, ONE), ("searched", 1, ONE), ("zb-v", 2, V)]
        + [("searched", number, placement) for number in (2, 4) for placement in (V, LOOP)] * 2
    )
    if len(widths) * per_rank > n or (per_rank > 1 and len(widths) == 1):
        return None
    if max(widths) > space.request.most_replicas(rows):
        return None
    bounds = (0, *sorted(draw.sample(range(1, n), len(widths) * per_rank - 1)), n)
    layout = Layout(1, world, 1, tuple(order))
    plan = Candidate(bounds, widths, 0, 0, layout, rows, schedule, (), per_rank, placement)
    if not space.allows(bounds):
        return None
    if schedule == "searched":
        way = shortest_way(space, plan, 0)
        return None if way is None else evaluate(space, with_order(space, plan, way, 200))
    return evaluate(space, plan)


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
