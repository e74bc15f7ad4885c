"""Small spaces, in which every candidate can be judged."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise, product
from math import comb

from autopart.passes.search.evaluation import Candidate
from autopart.passes.search.layout import Layout, layouts
from autopart.passes.search.partition import Partition
from autopart.passes.search.space import SearchSpace

MOST_BLOCKS = 20_000
"""Blocks of all candidates together; judging is about linear in them."""
MOST_ACTIONS = 250_000
"""Actions of all of them together."""


def enumerate_all(space: SearchSpace) -> list[Candidate] | None:
    """Every candidate that the request allows, each plan once; None when judging all would take long."""
    n, request, cluster = space.chain.n, space.request, space.costs.cluster
    grounds = list(layouts(cluster, replicas=request.may_replicate))
    deepest = min(n, cluster.world, request.stages or n)
    cuts = sum(comb(n - 1, s - 1) * comb(cluster.world, s) for s in range(request.stages or 1, deepest + 1))
    ways = sum(len(rows) for rows in request.micro_rows)
    if cuts * ways * len(grounds) * len(request.schedules) * 6 > MOST_ACTIONS * 10:
        return None
    found: dict[tuple[object, ...], Candidate] = {}
    cost = 0
    for layout in grounds:
        for division in _all_divisions(space, layout):
            for micro_rows in request.micro_rows:
                if max(division.widths) * layout.copies > max(micro_rows):
                    continue
                for schedule in request.schedules if division.stages > 1 else request.schedules[:1]:
                    candidate = Candidate(division, layout, micro_rows, schedule)
                    if found.setdefault(candidate.key, candidate) is candidate:
                        cost += 6 * division.stages * len(micro_rows)
                        if cost > MOST_ACTIONS or n * len(found) > MOST_BLOCKS:
                            return None
    return list(found.values())


def _all_divisions(space: SearchSpace, layout: Layout) -> Iterator[Partition]:
    """Every division for a layout that the request allows."""
    n, request = space.chain.n, space.request
    for stages in [request.stages] if request.stages else range(1, min(n, layout.depth) + 1):
        fixed = request.replicas_of(stages)
        masks = [space.legal_at(s) for s in range(stages)]
        if any(home >= stages for home in request.pins.values()) or (fixed and len(fixed) != stages):
            continue
        for inner in combinations(range(1, n), stages - 1):
            bounds = (0, *inner, n)
            if not all(masks[s][a, b] for s, (a, b) in enumerate(pairwise(bounds))):
                continue
            for widths in product(layout.widths, repeat=stages):
                if sum(widths) <= layout.depth and fixed in (None, tuple(w * layout.copies for w in widths)):
                    yield Partition(bounds, widths, 0)
