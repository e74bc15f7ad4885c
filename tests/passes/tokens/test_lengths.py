"""The cut of sequences against every cut there is, and its objective against a pipeline played by its definition."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopart.ir.errors import UsageError
from autopart.passes.tokens.lengths import (
    NEVER,
    SliceTimes,
    cut_tokens,
    other_stages,
    slice_times,
)


def drawn(seed: int, cells: int, most: int, absent: float = 0.0) -> SliceTimes:
    """Random times of all slices, some of which there are not; the whole sequence always is."""
    draw = random.Random(seed)
    ns = np.full((cells, cells + 1), NEVER, dtype=np.int64)
    for c in range(cells):
        for k in range(1, cells - c + 1):
            if k == cells or draw.random() >= absent:
                ns[c, k] = draw.randint(1, most)
    return SliceTimes(cells, 1, ns)


def every_cut(times: SliceTimes) -> Iterator[tuple[int, int]]:
    """(sum, longest) of every cut."""
    for marks in product((False, True), repeat=times.cells - 1):
        ends = [0, *(i + 1 for i, cut in enumerate(marks) if cut), times.cells]
        own = [int(times.ns[a, b - a]) for a, b in pairwise(ends)]
        if max(own) < NEVER:
            yield sum(own), max(own)


def taken(times: SliceTimes, lengths: Sequence[int]) -> list[int]:
    """Nanoseconds of the slices of these lengths."""
    ends = [0, *np.cumsum(lengths)]
    return [int(times.ns[a, b - a]) for a, b in pairwise(ends)]


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
@settings(max_examples=150, deadline=None)
def test_no_cut_of_the_tokens_is_better(
    seed: int, cells: int, micros: int, others: float, most: int, absent: float
) -> None:
    times = drawn(seed, cells, most, absent)
    found = cut_tokens(times, micros, others)
    best = min(micros * total + others * longest for total, longest in every_cut(times))
    assert found.objective_ns == pytest.approx(best, abs=0.5)
    ((rows, lengths), *same) = found.micro_batches
    assert rows == 1 and len(same) == micros - 1 and sum(lengths) == cells
    assert (found.total_ns, found.slowest_ns) == (micros * sum(taken(times, lengths)), max(taken(times, lengths)))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_twelve_cells(seed: int) -> None:
    times = drawn(seed, 12, 1000)
    best = min(total + 5 * longest for total, longest in every_cut(times))
    assert cut_tokens(times, 1, 5).objective_ns == best


@given(seed=st.integers(0, 10**6), cells=st.integers(1, 9), micros=st.integers(1, 3), stages=st.integers(1, 6))
@settings(max_examples=60, deadline=None)
def test_the_objective_is_the_time_of_equal_stages(seed: int, cells: int, micros: int, stages: int) -> None:
    times = drawn(seed, cells, 100)
    found = cut_tokens(times, micros, other_stages([7] * stages))
    slices = [ns for _, lengths in found.micro_batches for ns in taken(times, lengths)]
    assert found.objective_ns == flow_shop(slices, stages)


def even(launch: int) -> SliceTimes:
    """Slices that take as many ns as they have tokens, and what it takes to launch one."""
    return slice_times(lambda rows, lengths, contexts: launch + rows * lengths, 1, 64, step=4)


def test_many_micro_batches_or_dear_launches_are_not_sliced() -> None:
    assert cut_tokens(even(1), 1, 3).sliced
    assert not cut_tokens(even(1), 10_000, 3).sliced
    assert not cut_tokens(even(200), 1, 3).sliced
    assert not cut_tokens(even(0), 1, 0).sliced  # one stage has nothing to gain


def test_slices_are_whole_steps_and_not_too_short() -> None:
    times = slice_times(lambda rows, lengths, contexts: lengths, 1, 61, step=8, shortest=20)
    ((_, lengths),) = cut_tokens(times, 1, 50).micro_batches
    assert lengths == (32, 29)
    whole = slice_times(lambda rows, lengths, contexts: lengths, 1, 5, step=8, shortest=20)
    assert cut_tokens(whole, 1, 50).micro_batches == ((1, (5,)),)


def test_context_makes_the_first_slices_the_longest() -> None:
    times = slice_times(lambda rows, lengths, contexts: 200 + lengths + lengths * (contexts + lengths) / 50, 1, 256)
    ((_, lengths),) = cut_tokens(times, 1, 7).micro_batches
    assert len(lengths) > 4 and sum(lengths[:2]) > sum(lengths[-2:])


def test_unequal_stages_count_for_what_they_take() -> None:
    assert other_stages([5, 5, 5]) == 2
    assert other_stages([2, 4, 1]) == 0.75
    assert other_stages([0, 0]) == 1


def test_a_sequence_without_tokens_is_refused() -> None:
    with pytest.raises(UsageError, match="at least 1"):
        slice_times(lambda rows, lengths, contexts: lengths, 1, 0)


def test_eight_thousand_tokens_are_cut_by_few_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    from autopart.passes.tokens import lengths as module

    solved = 0
    paths = module.least_sums

    def counted(times: SliceTimes, limits: module.Ints) -> module.Ints:
        nonlocal solved
        solved += len(limits)
        return paths(times, limits)

    monkeypatch.setattr(module, "least_sums", counted)
    cost = lambda rows, n, c: np.maximum(3e6, 5e3 * n + 0.7 * n * (c + n)) + 1e4 * n  # noqa: E731
    found = cut_tokens(slice_times(cost, 1, 2048, step=8), 2, 39)
    assert found.sliced and solved < 1000
