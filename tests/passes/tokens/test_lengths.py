"""The cut of sequences against every cut there is, and its objective against a pipeline played by its definition."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopart.passes.tokens.lengths import NEVER, Ints, cut_tokens, other_stages, slice_times


def drawn(seed: int, cells: int, most: int, absent: float = 0.0) -> Ints:
    """Random times of all slices, some of which there are not; the whole sequence always is."""
    draw = random.Random(seed)
    ns = np.full((cells, cells + 1), NEVER, dtype=np.int64)
    for c in range(cells):
        for d in range(c + 1, cells + 1):
            if (c, d) == (0, cells) or draw.random() >= absent:
                ns[c, d] = draw.randint(1, most)
    return ns


def taken(times: Ints, ends: Sequence[int]) -> list[int]:
    """Nanoseconds of the slices with these ends."""
    return [int(times[a, b]) for a, b in pairwise((0, *ends))]


def pipeline_ns(times: Ints, ends: Sequence[int], micros: int, others: float) -> float:
    """What `cut_tokens` minimises."""
    own = taken(times, ends)
    return micros * sum(own) + others * max(own)


def every_cut(times: Ints) -> Iterator[list[int]]:
    """The ends of every cut."""
    for marks in product((False, True), repeat=len(times) - 1):
        ends = [*(i + 1 for i, cut in enumerate(marks) if cut), len(times)]
        if max(taken(times, ends)) < NEVER:
            yield ends


def flow_shop(jobs: Sequence[int], stages: int) -> int:
    """When the last job leaves the last of equal stages."""
    free = [0] * stages
    for job in jobs:
        arrived = 0
        for stage in range(stages):
            arrived = free[stage] = max(arrived, free[stage]) + job
    return free[-1]


@given(
    seed=st.integers(0, 10**6),
    cells=st.integers(1, 9),
    micros=st.integers(1, 4),
    others=st.sampled_from([0.0, 0.5, 1.0, 3.0, 7.25, 40.0]),
    most=st.sampled_from([3, 50, 10**9]),
    absent=st.sampled_from([0.0, 0.4]),
)
@settings(max_examples=150)
def test_no_cut_of_the_tokens_is_better(
    seed: int, cells: int, micros: int, others: float, most: int, absent: float
) -> None:
    times = drawn(seed, cells, most, absent)
    best = min(pipeline_ns(times, ends, micros, others) for ends in every_cut(times))
    assert pipeline_ns(times, cut_tokens(times, micros, others), micros, others) == best


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_twelve_cells(seed: int) -> None:
    times = drawn(seed, 12, 1000)
    best = min(pipeline_ns(times, ends, 1, 5) for ends in every_cut(times))
    assert pipeline_ns(times, cut_tokens(times, 1, 5), 1, 5) == best


@given(seed=st.integers(0, 10**6), cells=st.integers(1, 9), micros=st.integers(1, 3), stages=st.integers(1, 6))
@settings(max_examples=60)
def test_the_objective_is_the_time_of_equal_stages(seed: int, cells: int, micros: int, stages: int) -> None:
    times = drawn(seed, cells, 100)
    others = other_stages([7] * stages)
    ends = cut_tokens(times, micros, others)
    assert pipeline_ns(times, ends, micros, others) == flow_shop(taken(times, ends) * micros, stages)


def even(launch: int) -> Ints:
    """Slices that take as many ns as they have tokens, and what it takes to launch one."""
    return slice_times(lambda lengths, contexts: launch + lengths, 64, 4)


def test_many_micro_batches_or_dear_launches_are_not_sliced() -> None:
    assert len(cut_tokens(even(1), 1, 3)) > 1
    assert cut_tokens(even(1), 10_000, 3) == (16,)
    assert cut_tokens(even(200), 1, 3) == (16,)
    assert cut_tokens(even(0), 1, 0) == (16,)  # one stage has nothing to gain


def test_the_last_cell_may_be_shorter() -> None:
    times = slice_times(lambda lengths, contexts: 1000 * lengths + contexts, 61, 8)
    assert times.shape == (8, 9) and times[0, 8] == 61_000 and times[7, 8] == 5_056 and times[3, 3] == NEVER


def test_context_makes_the_first_slices_the_longest() -> None:
    times = slice_times(lambda lengths, contexts: 200 + lengths + lengths * (contexts + lengths) / 50, 256, 8)
    ends = cut_tokens(times, 1, 7)
    assert len(ends) > 4 and ends[1] > 32 - ends[-3]


def test_unequal_stages_count_for_what_they_take() -> None:
    assert other_stages([5, 5, 5]) == 2
    assert other_stages([2, 4, 1]) == 0.75
    assert other_stages([0, 0]) == 1
