"""Balance: all cuts of a pipeline at once, where single moves are of no help."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.grids import sampled
from support.languages.graphs import cluster, graph, source
from support.oracles.drawn_clusters import drawn, found_for

from autopart.passes.pipeline import _spaces
from autopart.passes.search import refinement
from autopart.passes.search.evaluation import Candidate, Search, evaluate
from autopart.passes.search.layout import Layout
from autopart.passes.search.refinement import Need, balanced, least_bound, least_ns
from autopart.passes.search.space import PlanRequest
from autopart.passes.simulation.stage_costs import Estimator

STAGES, BLOCKS = 6, 36


def test_all_cuts_move_together_as_long_as_the_step_gets_shorter() -> None:
    """Stages of 1, 7, 7, 7, 7, 7 blocks; with few micro-batches equal ones are the best."""
    text = "; ".join(f"v{i}:10 #{1 if i % 2 else 3} <- {f'v{i - 1}' if i else 'x'}" for i in range(BLOCKS))
    g, c = graph(text, input_bytes=1), cluster(STAGES)
    request = PlanRequest(((1,) * (2 * STAGES),), stages=STAGES)
    _, space = _spaces(source(g, c), g, Estimator(c, source(g, c).cost_model, overlap=True), request)
    bounds = (0, *range(1, BLOCKS, 7))
    uneven = Candidate(
        (*bounds[:STAGES], BLOCKS),
        (1,) * STAGES,
        0,
        0,
        Layout(1, STAGES, 1, tuple(range(STAGES))),
        request.micro_rows[0],
        "1f1b",
    )
    search = Search(space, space)
    before = search.evaluate(space, uneven)
    after = balanced(search, before)
    equal = replace(uneven, bounds=tuple(range(0, BLOCKS + 1, BLOCKS // STAGES)))
    assert after.step_ns < before.step_ns
    assert after.step_ns <= search.evaluate(space, equal).step_ns
    alone = search.evaluate(space, replace(uneven, bounds=(0, BLOCKS), widths=(1,)))
    assert balanced(search, alone) is alone


@pytest.mark.parametrize("seed", sampled(range(60), every=10))
def test_no_plan_takes_less_than_what_its_work_takes(seed: int) -> None:
    """Under every order, with replicas, and with little memory: so a move can be left out by its work alone."""
    found = found_for(drawn(seed, devices=3, layers=6))
    known = [*found.fitting.values(), *filter(None, [found.nearest])]
    ratios = [least_ns(each.space, each.candidate) / each.step_ns for each in known]
    assert not ratios or 0.3 < max(ratios) <= 1 or len({*found.fine.costs.cluster.devices}) > 1 >= max(ratios)


def test_a_branch_does_not_wait_for_the_one_before_it() -> None:
    g, c = graph("a:100/200 <- x; b:1000/2000 <- x; c:10/20 <- a, b"), cluster(3)
    request = PlanRequest(((1,),), stages=3)
    _, space = _spaces(source(g, c), g, Estimator(c, source(g, c).cost_model, overlap=True), request)
    branches = Candidate((0, 1, 2, 3), (1, 1, 1), 0, 0, Layout(1, 3, 1, (0, 1, 2)), (1,), "1f1b")
    assert not space.is_chain and 3000 <= least_ns(space, branches) <= evaluate(space, branches).step_ns


@given(st.data(), st.integers(1, 4), st.integers(1, 6))
def test_the_dynamic_program_finds_the_bounds_with_the_least_bound_of_the_step(
    data: st.DataObject, stages: int, micros: int
) -> None:
    places = [(0,), *[(10 * s, 10 * s + 1, 10 * s + 2) for s in range(1, stages)], (10 * stages,)]
    ns = st.integers(0, 30)
    needs = [
        {pair: Need(data.draw(ns), data.draw(ns), data.draw(ns), stages - s) for pair in product(*places[s : s + 2])}
        for s in range(stages)
    ]

    def bound(bounds: tuple[int, ...]) -> int:
        way = [need[pair] for need, pair in zip(needs, pairwise(bounds), strict=True)]
        latencies = [need.work_ns + need.arriving_ns for need in way]
        found = []
        for s, need in enumerate(way):
            through, turns = sum(latencies[s:]), micros - need.live - 1
            ends = [micros * need.work_ns + need.following_ns, through]
            ends += [2 * through + turns * need.work_ns + need.following_ns] if turns >= 0 else []
            found.append(sum(latencies[:s]) + max(ends))
        return max(found)

    with mock.patch.object(refinement, "WAYS", 1000):
        best = least_bound(needs, micros, 10 * stages)
    assert best is not None
    assert best.bound_ns == bound(best.bounds) == min(map(bound, product(*places)))
    some = least_bound(needs, micros, 10 * stages)
    assert some is not None and some.bound_ns == bound(some.bounds) >= best.bound_ns
