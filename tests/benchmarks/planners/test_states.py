"""Tests of the cuts of a DAG, against hand-computed values and all subsets."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopart.ir.errors import UsageError
from benchmarks.papers.planners.states import cut_states, downsets, members, nested, table

DIAMOND = [[], [0], [0], [1, 2]]


@st.composite
def dags(draw: st.DrawFn) -> list[list[int]]:
    n = draw(st.integers(1, 6))
    return [[u for u in range(v) if draw(st.booleans())] for v in range(n)]


def test_a_chain_is_cut_after_each_node() -> None:
    states = cut_states([[], [0], [1]])
    assert [members(mask) for mask in states.inside] == [[0], [0, 1], [0, 1, 2]]
    assert [members(mask) for mask in states.alive] == [[0], [1], [2]]


def test_values_stay_alive_for_readers_in_other_branches() -> None:
    states = cut_states(DIAMOND)
    alive = {tuple(members(i)): members(a) for i, a in zip(states.inside, states.alive, strict=True)}
    assert alive[0,] == [0]
    assert alive[0, 1] == [0, 1]  # 2 still reads 0
    assert alive[0, 1, 2] == [0, 1, 2]  # no node reads it any more, but the original counts it
    assert alive[0, 1, 2, 3] == [3]


def test_later_sources_come_with_their_readers() -> None:
    states = cut_states([[], [], [0, 1]])
    assert [members(mask) for mask in states.inside] == [[0], [0, 1, 2]]


@given(dags())
def test_downsets_are_all_sets_that_hold_their_ancestors(parents: list[list[int]]) -> None:
    n = len(parents)
    subsets = (set(c) for size in range(n + 1) for c in combinations(range(n), size))
    closed = {tuple(sorted(s)) for s in subsets if all(set(parents[v]) <= s for v in s)}
    found = downsets(parents)
    assert {tuple(members(mask)) for mask in found} == closed and len(found) == len(closed)
    inside = table(found, n)
    assert all(
        nested(inside)[k, j] == (found[k] != found[j] and found[k] & ~found[j] == 0)
        for k in range(len(found))
        for j in range(len(found))
    )


@given(dags())
def test_states_are_downsets_smaller_ones_first(parents: list[list[int]]) -> None:
    states = cut_states(parents)
    assert set(states.inside) <= set(downsets(parents))
    sizes = [mask.bit_count() for mask in states.inside]
    assert sizes == sorted(sizes)
    assert all(alive & ~inside == 0 for alive, inside in zip(states.alive, states.inside, strict=True))


def test_too_many_cuts_and_cycles_are_refused() -> None:
    wide = [[], *([0] for _ in range(12))]
    with pytest.raises(UsageError, match="more than 100 cuts"):
        cut_states(wide, limit=100)
    with pytest.raises(UsageError, match="more than 100 downsets"):
        downsets(wide, limit=100)
    with pytest.raises(UsageError, match="cycle"):
        cut_states([[], [2], [1]])
