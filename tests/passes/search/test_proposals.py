"""Proposals of deep pipelines: what is left out to be quick must not have been worth anything."""

from __future__ import annotations

import math
from itertools import pairwise
from random import Random

import pytest
from support.languages.graphs import cluster, graph
from support.oracles.planner_oracle import Problem

from autopart.passes.search.evaluation import Search
from autopart.passes.search.layout import SMALL
from autopart.passes.search.proposals import WORTH, Proposal, layout_bound, longest_range, proposals_of
from autopart.passes.search.space import PlanRequest


def deep(seed: int, *, chain: bool = True, **request: object) -> Problem:
    """A line of 40 blocks of random weight for 20 devices, which are too many to try every width."""
    draw = Random(seed)
    reads = [0 if i == 0 else i - 1 if chain else draw.randint(max(0, i - 3), i - 1) for i in range(40)]
    ops = [
        f"v{i}:{draw.randint(1, 9)} #{draw.choice((0, 4, 40))} ^{draw.randint(0, 5)} <- {f'v{reads[i]}' if i else 'x'}"
        for i in range(40)
    ]
    rows = ((8,) * 2, (4,) * 4, (1,) * 16)
    return Problem(graph("; ".join(ops), input_bytes=0), cluster(20), PlanRequest(rows, **request))  # type: ignore[arg-type]


def latencies(proposals: list[Proposal]) -> dict[object, int]:
    return {(c.layout, c.micro_rows, c.stages, c.first): c.latency_ns for _, c in proposals}


@pytest.mark.parametrize("seed", range(8))
def test_quick_proposals_hold_every_partition_that_is_worth_it(seed: int) -> None:
    space = deep(seed, chain=seed % 2 == 0).space
    quick, whole = (
        latencies(proposals_of(Search(space, space))),
        latencies(proposals_of(Search(space, space), worth=math.inf)),
    )
    least = min(whole.values())
    assert min(quick.values()) == least
    worthwhile = {key: value for key, value in whole.items() if value <= WORTH * least}
    assert worthwhile.items() <= quick.items()


@pytest.mark.parametrize("seed", range(4))
def test_no_partition_is_below_the_bound_of_its_layout(seed: int) -> None:
    space = deep(seed).space
    for _, candidate in proposals_of(Search(space, space), worth=math.inf):
        bound = layout_bound(space, candidate.layout, candidate.micro_rows, candidate.stages)
        assert bound <= candidate.latency_ns
        if candidate.layout.depth > SMALL:
            length = max(b - a for a, b in pairwise(candidate.bounds))
            share = -(-max(candidate.micro_rows) // candidate.layout.pipeline_replicas)
            latency_ns = candidate.latency_ns
            assert length <= longest_range(space, share, len(candidate.micro_rows), latency_ns)
