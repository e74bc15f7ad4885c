"""Tests of the linear fit of measured slice times."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from autopart.ir.errors import UsageError
from autopart.passes.tokens.lengths import cut_tokens, slice_times
from benchmarks.papers.planners.slice_costs import LinearContext, Sample, fit

LENGTHS = tuple(range(8, 257, 8))


def layer_ns(rows: int, length: int, context: int) -> float:
    """Return the time of a layer that attends to all earlier tokens."""
    return 5e4 + 300.0 * rows * length + 2.0 * rows * length * (context + length)


ALONE = {rows: (LENGTHS, tuple(layer_ns(rows, length, 0) for length in LENGTHS)) for rows in (1, 2)}
SAMPLES: list[Sample] = [
    (rows, length, context, layer_ns(rows, length, context))
    for rows in (1, 2)
    for length in LENGTHS[::4]
    for context in range(0, 256, 64)
]


def test_the_fit_recovers_the_line() -> None:
    held_out = SAMPLES[::4]
    found = fit(ALONE, [sample for sample in SAMPLES if sample not in held_out])
    assert found.error(held_out) < 1e-9
    assert found.line[3] == pytest.approx(2.0)


def test_layers_and_messages_are_added() -> None:
    found = fit(ALONE, SAMPLES, layers=3, message=(1000.0, 2.0))
    at = found(2, np.array([16]), np.array([32]))[0]
    assert at == pytest.approx(3 * layer_ns(2, 16, 32) + 2 * (1000 + 2 * 2 * 16))


def test_the_fit_is_usable_as_slice_costs() -> None:
    ends = cut_tokens(slice_times(partial(fit(ALONE, SAMPLES), 1), 256, 16), 1, 7)
    assert len(ends) > 1 and ends[-1] == 16


def test_sizes_that_were_not_measured_are_refused() -> None:
    with pytest.raises(UsageError, match="3 rows"):
        LinearContext(ALONE)(3, np.array([8]), np.array([0]))
    with pytest.raises(UsageError, match="four terms"):
        fit(ALONE, SAMPLES[:3])
