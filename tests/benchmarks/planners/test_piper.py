"""Tests of Piper's cost model against hand-computed values, and of its solver against enumeration."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopart.ir.errors import InfeasibleError, UsageError
from benchmarks.papers.planners.piper import Limits, Mode, Model, Stage, evaluate, solve


def mode(seconds: float, held: float, fixed: float = 0.0, weights: float = 0.0, before: int = -1) -> Mode:
    sync_in = ((before, 2.0),) if before >= 0 else ()
    return Mode("", seconds, weights, held, fixed, sync_in, ((before + 2, 1.0),))


def chain(n: int, tensors: tuple[int, ...] = (1,)) -> Model:
    """Return layers of 4 s that hold 10 bytes, or 6 s and 4 bytes, both divided by t tensor-parallel devices."""

    def modes(v: int) -> dict[int, tuple[Mode, ...]]:
        return {t: (mode(4 / t, 10 / t, 1, 8, v - 1), mode(6 / t, 4 / t, 1, 8, v - 1)) for t in tensors}

    return Model(tuple(map(modes, range(n))), tuple((v, v + 1, 5.0) for v in range(n - 1)))


def test_a_stage_pays_compute_edges_and_all_reduce() -> None:
    limits = Limits(8, 1e9, 2.0, 4)
    one = Stage((0, 1), 2, 1, (0, 0))
    assert evaluate(chain(2), limits, [one]) == pytest.approx(8 / 2 + 2 * 4 * 1 * 8 / (2 * 4) / 2)
    two = [Stage((0,), 1, 1, (0,)), Stage((1,), 2, 1, (1,))]
    # the first sends 2 * (5 + 1) bytes, the second gets 2 * (5 + 2)
    assert evaluate(chain(2), limits, two) == pytest.approx(max(4 + 12 / 2, 6 / 2 + (14 / 2 + 4 * 8 / (2 * 4)) / 2))


def test_a_plan_that_exceeds_a_limit_takes_infinitely_long() -> None:
    limits = Limits(2, 21.0, 1e9, 4)
    pair = [Stage((0,), 1, 1, (0,)), Stage((1,), 1, 1, (0,))]
    assert evaluate(chain(2), limits, pair) < np.inf  # the first holds two micro-batches, 21 bytes
    assert evaluate(chain(2), Limits(2, 20.0, 1e9, 4), pair) == np.inf
    assert evaluate(chain(2), Limits(1, 21.0, 1e9, 4), pair) == np.inf
    assert evaluate(chain(2), limits, pair[:1]) == np.inf
    assert evaluate(chain(2), limits, [Stage((1,), 1, 1, (0,)), Stage((0,), 1, 1, (0,))]) == np.inf
    assert evaluate(chain(1), Limits(4, 99.0, 1e9, 4), [Stage((0,), 3, 1, (0,))]) == np.inf  # 3 does not divide 4


def every(model: Model, limits: Limits) -> Iterator[list[Stage]]:
    """Yield all pipelines of a chain, valid or not."""
    n = len(model.modes)
    for cuts in product((False, True), repeat=n - 1):
        starts = [0, *(v + 1 for v, cut in enumerate(cuts) if cut), n]
        parts = [tuple(range(a, b)) for a, b in pairwise(starts)]
        choices = [
            [
                Stage(part, d, t, picked)
                for d in range(1, limits.devices + 1)
                for t in model.modes[0]
                for picked in product(range(2), repeat=len(part))
            ]
            for part in parts
        ]
        yield from map(list, product(*choices))


@settings(max_examples=12)
@given(
    st.integers(1, 3),
    st.sampled_from([(1,), (1, 2)]),
    st.integers(1, 3),
    st.sampled_from([11.0, 16.0, 22.0, 35.0, 99.0]),
    st.sampled_from([1, 2, 4]),
)
def test_the_solver_finds_the_best_pipeline_of_all(
    n: int, tensors: tuple[int, ...], devices: int, memory: float, micros: int
) -> None:
    model, limits = chain(n, tensors), Limits(devices, memory, 3.0, micros)
    best = min(evaluate(model, limits, stages) for stages in every(model, limits))
    if best == np.inf:
        with pytest.raises(InfeasibleError, match="fits"):
            solve(model, limits)
        return
    found = solve(model, limits)
    assert found.objective_s == pytest.approx(best, rel=1e-12)
    assert evaluate(model, limits, found.stages) == pytest.approx(best, rel=1e-12)


def test_an_unneeded_swap_is_undone() -> None:
    """Swaps are tried by time per byte: the small one first, although the large one alone suffices."""
    small = (Mode("", 1.0, 0, 10, 0), Mode("", 1.1, 0, 8, 0))
    large = (Mode("", 1.0, 0, 20, 0), Mode("", 2.0, 0, 5, 0))
    found = solve(Model(({1: small}, {1: large}), ()), Limits(1, 16.0, 1.0, 1))
    assert found.objective_s == 3.0 and found.stages[0].modes == (0, 1)


def test_a_layer_that_cannot_be_split_keeps_its_stage_whole() -> None:
    whole = ({1: (Mode("", 3.0, 0, 1, 0),)}, {1: (Mode("", 4.0, 0, 1, 0),), 2: (Mode("", 1.0, 0, 1, 0),)})
    found = solve(Model(whole, ()), Limits(3, 9.0, 1.0, 2))
    assert found.objective_s == 3.0
    assert {stage.layers: stage.tensor for stage in found.stages} == {(0,): 1, (1,): 2}


def test_no_devices_are_refused() -> None:
    with pytest.raises(UsageError):
        solve(chain(1), Limits(0, 1.0, 1.0, 1))
