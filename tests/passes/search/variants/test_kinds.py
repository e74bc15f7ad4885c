"""Positions of like devices with several stages a rank: every way to divide unlike devices."""

from __future__ import annotations

from collections import Counter
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.grids import sampled
from support.oracles.drawn_clusters import drawn, found_for

from autopart.passes.search.layout import orders_of
from autopart.passes.search.variants.kinds import (
    DIVISIONS,
    Position,
    divisions,
    evaluate_kinds,
    promises,
    sums,
)


@given(st.integers(1, 9))
def test_every_way_to_write_a_number_as_a_sum_is_found_once(count: int) -> None:
    found = list(sums(count, count))
    assert len(found) == len(set(found)) == [1, 2, 3, 5, 7, 11, 15, 22, 30][count - 1]
    assert all(sum(way) == count and list(way) == sorted(way, reverse=True) for way in found)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 2)), min_size=1, max_size=5))
def test_every_order_of_positions_is_found_once(drawn: list[tuple[int, int]]) -> None:
    positions = tuple(Position(*each) for each in drawn)
    found = list(orders_of(positions))
    assert len(found) == len(set(found))
    assert set(found) == set(permutations(positions))


@pytest.mark.parametrize("seed", sampled(range(60), every=12))
def test_positions_have_all_devices_and_no_two_kinds(seed: int) -> None:
    found = found_for(drawn(seed, devices=6, layers=8))
    space, promised = found.fine, promises(found, 2)
    counts = [space.costs.cluster.types[kind] for kind in space.costs.device_types]
    assert bool(promised) <= (len(counts) > 1)
    for promise in promised:
        taken = Counter[int]()
        for kind, width in promise.positions:
            taken[kind] += width
        assert [taken[kind] for kind in range(len(counts))] == counts
        assert max(position.width for position in promise.positions) <= max(promise.micro_rows)
    assert promised == sorted(promised, key=lambda promise: promise.step_ns)
    assert len(divisions(space)) == len(set(divisions(space)))


@pytest.mark.parametrize("seed", sampled(range(60), every=12))
def test_what_is_found_makes_no_plan_slower_and_costs_no_more_than_it_may(seed: int) -> None:
    found = found_for(drawn(seed, devices=6, layers=8))
    before, best_ns = found.count, found.best_ns
    evaluate_kinds(found, 0)
    assert found.best_ns <= best_ns
    assert found.count - before <= DIVISIONS
