"""No message between positions takes less than the bound has for it, and no plan of costly messages beats the bound."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import combinations, permutations, product
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.grids import sampled
from support.oracles.drawn_clusters import Timed, bound_of, drawn, random_plan

from autopart.ir.cluster import Cluster, Device, Level, Link
from autopart.passes.program.orders import LOOP, ONE, V
from autopart.passes.proof import positions
from autopart.passes.proof.crossings import paces, parted
from autopart.passes.proof.sets import sets_of
from autopart.passes.search.evaluation import Candidate, evaluate
from autopart.passes.search.layout import Layout
from autopart.passes.search.space import SearchSpace
from autopart.passes.search.variants.ordered import shortest_way, with_order
from autopart.passes.simulation.traffic import p2p_load


def costly(problem: Timed, draw: Random) -> Timed:
    """The problem with links on which messages take about as long as computes."""
    factor = draw.choice([4, 20, 100])
    levels = []
    for level in problem.cluster.levels:
        link = replace(level.link, latency_ns=level.link.latency_ns * 4, bytes_per_s=level.link.bytes_per_s // factor)
        levels.append(replace(level, link=link))
    return replace(problem, cluster=replace(problem.cluster, levels=tuple(levels)))


def compositions(whole: int, parts: int) -> list[tuple[int, ...]]:
    cuts = combinations(range(1, whole), parts - 1)
    return [tuple(np.diff((0, *each, whole)).tolist()) for each in cuts]


ORDERS = [
    *[(name, 1, ONE) for name in ("1f1b", "gpipe", "zb-h2", "searched")],
    *[("searched", 2, V), ("searched", 2, LOOP), ("zb-v", 2, V), ("interleaved", 2, LOOP)],
]


def every_plan(space: SearchSpace) -> list[Candidate]:
    """All orders of the devices, positions, cuts, ways to cut the batch, and orders by name or searched."""
    world, n, found = space.costs.cluster.world, space.chain.n, list[Candidate]()
    for order, used, rows in product(permutations(range(world)), range(1, world + 1), space.request.micro_rows):
        for stages, (schedule, per_rank, placement) in product(range(1, used + 1), ORDERS):
            if stages * per_rank > n or (per_rank > 1 and stages == 1) or len(rows) % stages * (placement == LOOP):
                continue
            for widths, sizes in product(compositions(used, stages), compositions(n, stages * per_rank)):
                bounds = (0, *np.cumsum(sizes).tolist())
                if max(widths) <= space.request.most_replicas(rows):
                    layout = Layout(1, world, 1, order)
                    found.append(Candidate(bounds, widths, 0, 0, layout, rows, schedule, (), per_rank, placement))
    return found


def step_of(space: SearchSpace, plan: Candidate) -> int | None:
    if plan.schedule != "searched":
        return evaluate(space, plan).step_ns
    way = shortest_way(space, plan, 0)
    return None if way is None else evaluate(space, with_order(space, plan, way, 50)).step_ns


def steps(space: SearchSpace, plans: list[Candidate]) -> dict[tuple[tuple[int, ...], int], int]:
    """The fastest step of each way to cut the batch and number of stages a rank."""
    fastest: dict[tuple[tuple[int, ...], int], int] = {}
    for plan in plans:
        step, key = step_of(space, plan), (plan.micro_rows, plan.per_rank)
        if step is not None:
            fastest[key] = min(step, fastest.get(key, step))
    return fastest


def small(seed: int) -> Timed:
    """At most three devices and five layers, batches cut in at most four."""
    draw = Random(seed)
    problem = costly(drawn(seed, devices=3, layers=5), draw)
    rows = tuple(each for each in problem.request.micro_rows if len(each) <= 4)
    return replace(problem, request=replace(problem.request, micro_rows=rows))


@pytest.mark.parametrize("seed", sampled(range(120), every=60))
def test_no_plan_at_all_of_a_small_problem_is_faster_than_the_bound(seed: int) -> None:
    space = small(seed).space
    plans = every_plan(space)
    for (rows, per_rank), step in steps(space, Random(seed).sample(plans, min(len(plans), 300))).items():
        assert bound_of(space, rows, per_rank) <= step, (rows, per_rank)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(4))
def test_no_random_plan_with_costly_messages_is_faster_than_the_bound(part: int) -> None:
    for seed in range(2000 + 40 * part, 2040 + 40 * part):
        draw = Random(seed)
        space = costly(drawn(seed, devices=7, layers=12), draw).space
        fastest: dict[tuple[tuple[int, ...], int], int] = {}
        for plan in [random_plan(space, draw) for _ in range(60)]:
            if plan is not None:
                key = plan.candidate.micro_rows, plan.candidate.per_rank
                fastest[key] = min(plan.step_ns, fastest.get(key, plan.step_ns))
        for (rows, per_rank), step in fastest.items():
            assert bound_of(space, rows, per_rank) <= step, (seed, rows, per_rank)


KINDS = [Device("cuda", 1 << 34, 10**12, 10**12, name) for name in "abc"]


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    devices = tuple(draw(st.lists(st.sampled_from(KINDS), min_size=2, max_size=6)))
    links = [Link(draw(st.integers(0, 50)), draw(st.integers(1, 9)) * 10**8) for _ in range(2)]
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=len(devices)))
    while sum(sizes) < len(devices):
        sizes.append(1)
    groups, left = [], len(devices)
    for size in sizes:
        groups.append(min(size, left))
        left -= groups[-1]
    groups = [each for each in groups if each]
    if draw(st.booleans()):
        return Cluster(devices, (Level(len(devices), links[0]),))
    return Cluster(devices, (Level(max(groups), links[0], tuple(groups)), Level(len(devices), links[1])))


@given(clusters(), st.data())
def test_no_message_takes_less_than_the_bound_has_for_its_devices(machines: Cluster, data: st.DataObject) -> None:
    ranks = data.draw(st.permutations(range(machines.world)))
    first = data.draw(st.integers(1, machines.world - 1))
    end = data.draw(st.integers(first + 1, machines.world))
    ours, theirs = tuple(ranks[:first]), tuple(ranks[first:end])
    rows = 12
    cuts = [
        tuple(sorted(data.draw(st.sets(st.integers(1, rows - 1), min_size=len(own) - 1, max_size=len(own) - 1))))
        for own in (ours, theirs)
    ]
    space = replace(drawn(0), cluster=machines).space
    sets = sets_of(space, machines.world, 10**6)
    assert sets is not None
    kinds = [Counter(space.costs.kinds_of(own)) for own in (ours, theirs)]
    at, to = (sets.index(tuple(own[kind] for kind in range(len(space.costs.device_types)))) for own in kinds)
    latency, pace = paces(space, sets)
    load = p2p_load(machines, ours, theirs, *((0, *each, rows) for each in cuts))
    assert latency[at, to] <= load.pace[0]
    assert pace[at, to] <= load.pace[1] * (1 + 1e-9)


@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.data())
def test_parts_of_two_positions_are_no_more_than_what_is_between_them(numbers: list[int], data: st.DataObject) -> None:
    kinds = range(len(numbers))
    pairs = np.zeros((1, len(numbers), len(numbers)))
    for a, b in product(kinds, kinds):
        if a <= b:
            pairs[0, a, b] = pairs[0, b, a] = data.draw(st.integers(0, 20))
    found = parted(pairs, numbers)[0]
    assert found.min() >= 0
    for a, b in product(kinds, kinds):
        if a != b or numbers[a] > 1:
            assert found[a] + found[b] <= pairs[0, a, b] + 1e-9


def test_messages_that_count_too_much_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check above can fail: with messages half as long again, the bound is above plans that it was below."""
    space = small(33).space
    fastest = steps(space, every_plan(space))
    assert all(bound_of(space, rows, per_rank) <= step for (rows, per_rank), step in fastest.items())
    monkeypatch.setattr(positions, "paces", lambda *given: tuple(1.5 * each for each in paces(*given)))
    assert any(bound_of(space, rows, per_rank) > step for (rows, per_rank), step in fastest.items())
