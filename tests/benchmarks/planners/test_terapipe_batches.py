"""Tests of TeraPipe's cut of rows and tokens against every possible cut."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopart.ir.errors import UsageError
from autopart.passes.tokens.lengths import NEVER, Ints
from benchmarks.papers.planners.terapipe import cut_batch


def drawn(seed: int, cells: int, most: int) -> Ints:
    """Return random times of all slices."""
    draw = random.Random(seed)
    ns = [[draw.randint(1, most) if d > c else NEVER for d in range(cells + 1)] for c in range(cells)]
    return np.array(ns, dtype=np.int64)


def slices(times: Ints, ends: list[int]) -> list[int]:
    """Return the nanoseconds of the slices between these cells."""
    return [int(times[a, b]) for a, b in pairwise(ends)]


def every_cut(times: Ints) -> Iterator[tuple[int, int]]:
    """Yield (sum, longest slice) of every cut."""
    for marks in product((False, True), repeat=len(times) - 1):
        own = slices(times, [0, *(i + 1 for i, cut in enumerate(marks) if cut), len(times)])
        yield sum(own), max(own)


@given(
    seed=st.integers(0, 10**6),
    cells=st.integers(1, 5),
    batch=st.integers(1, 4),
    others=st.sampled_from([0.0, 1.0, 4.5, 30.0]),
)
@settings(max_examples=80)
def test_no_cut_of_rows_and_tokens_is_better(seed: int, cells: int, batch: int, others: float) -> None:
    times = {rows: drawn(seed + rows, cells, 60 * rows) for rows in range(1, batch + 1)}
    cuts = {rows: list(every_cut(own)) for rows, own in times.items()}

    def fillings(left: int, most: int) -> Iterator[tuple[int, int]]:
        if not left:
            yield 0, 0
        for rows in range(1, min(left, most) + 1):
            for total, longest in fillings(left - rows, rows):
                for own, slice_ns in cuts[rows]:
                    yield total + own, max(longest, slice_ns)

    best = min(total + others * longest for total, longest in fillings(batch, batch))
    found = cut_batch(times, batch, others)
    assert found.objective_ns == pytest.approx(best, abs=0.5)
    assert sum(rows for rows, _ in found.micro_batches) == batch
    own = [ns for rows, ends in found.micro_batches for ns in slices(times[rows], [0, *ends])]
    assert (sum(own), max(own)) == (found.total_ns, found.slowest_ns)


def test_a_batch_that_cannot_be_made_up_is_refused() -> None:
    with pytest.raises(UsageError, match="2 rows make up a batch of 3"):
        cut_batch({2: drawn(0, 4, 9)}, 3, 1)
