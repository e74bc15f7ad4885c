"""Small spaces, in which every candidate can be evaluated."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise, product
from math import comb

from autopart.passes.search.evaluation import Candidate
from autopart.passes.search.layout import Layout, layouts
from autopart.passes.search.partition import Partition
from autopart.passes.search.space import SearchSpace

MOST_BLOCKS = 20_000
"""Blocks of all candidates together; evaluating is about linear in them."""
MOST_ACTIONS = 250_000
"""Actions of all of them together."""
ACTIONS_PER_STAGE = 6
"""Actions of a stage for one micro-batch, at most: forward and backward, and its messages."""


def enumerate_all(space: SearchSpace) -> list[Candidate] | None:
    """Every candidate that the request allows, each plan once; None when evaluating all would take long."""
    all_layouts = list(layouts(space.costs.cluster, replicas=space.request.may_replicate, wanted=space.request.copies))
    if _about_actions(space) * len(all_layouts) > MOST_ACTIONS * 10:
        return None
    found: dict[tuple[object, ...], Candidate] = {}
    actions = 0
    for candidate in _candidates(space, all_layouts):
        if found.setdefault(candidate.key, candidate) is candidate:
            actions += ACTIONS_PER_STAGE * candidate.partition.stages * len(candidate.micro_rows)
            if actions > MOST_ACTIONS or space.chain.n * len(found) > MOST_BLOCKS:
                return None
    return list(found.values())


def _about_actions(space: SearchSpace) -> int:
    """About the actions of all candidates of one layout, without looking at any."""
    n, request, world = space.chain.n, space.request, space.costs.cluster.world
    deepest = min(n, world, request.stages or n)
    partitions = sum(comb(n - 1, s - 1) * comb(world, s) for s in range(request.stages or 1, deepest + 1))
    micros = sum(len(rows) for rows in request.micro_rows)
    return partitions * micros * len(request.schedules) * ACTIONS_PER_STAGE


def _candidates(space: SearchSpace, all_layouts: list[Layout]) -> Iterator[Candidate]:
    """Every candidate; plans that several layouts can express come several times."""
    request = space.request
    for layout in all_layouts:
        for partition in _all_partitions(space, layout):
            replicas = max(partition.widths) * layout.pipeline_replicas
            schedules = request.schedules if partition.stages > 1 else request.schedules[:1]
            for micro_rows in request.micro_rows:
                if replicas <= request.most_replicas(micro_rows):
                    for schedule in schedules:
                        yield Candidate(partition, layout, micro_rows, schedule)


def _all_partitions(space: SearchSpace, layout: Layout) -> Iterator[Partition]:
    """Every partition for a layout that the request allows."""
    n, request = space.chain.n, space.request
    for stages in [request.stages] if request.stages else range(1, min(n, layout.depth) + 1):
        fixed = request.replicas_of(stages)
        legal = [space.legal_at(s) for s in range(stages)]
        if any(home >= stages for home in request.pins.values()) or (fixed and len(fixed) != stages):
            continue
        for inner in combinations(range(1, n), stages - 1):
            bounds = (0, *inner, n)
            if not all(legal[s][a, b] for s, (a, b) in enumerate(pairwise(bounds))):
                continue
            for widths in product(layout.widths, repeat=stages):
                replicas = tuple(width * layout.pipeline_replicas for width in widths)
                if sum(widths) <= layout.depth and fixed in (None, replicas):
                    yield Partition(bounds, widths, 0)
