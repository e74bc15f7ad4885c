"""Loss and gradients of real architectures in real stages equal those of one process.

A representative subset runs by default (every kind of model, every schedule); the whole grid is marked `slow`.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from support.grids import with_rotated
from support.jobs.step_jobs import compare
from support.models.zoo import CASES
from support.workers import Workers

from autopart.passes.program.named import FAMILY as SCHEDULES

STAGES, MICROS = (1, 2, 4), (1, 3, 4)
GRID = with_rotated((CASES, STAGES, SCHEDULES), MICROS)
_SPREAD = list(itertools.product(SCHEDULES, (3, 4)))
SUBSET = [(name, *_SPREAD[i % len(_SPREAD)]) for i, name in enumerate(CASES)]
TWO = ("resnet",)
"""Default models, on the pool of two processes alone; the next test has a vision transformer."""
RECOMPUTED = ("mixtral",)
"""Default models that recompute all activations."""
DOUBLE = [name for name, case in CASES.items() if case.double]


def _check(workers: Workers, *case: object, dtype: str = "float32", recompute: str = "auto") -> None:
    name, stages, schedule, micros = case
    _, difference, ran = workers.run(compare, name, stages, schedule, micros, 12, dtype, (), recompute)[0]
    assert ran == stages
    assert difference.parameters > 5
    assert difference.within(getattr(torch, dtype)), difference


@pytest.mark.parametrize(("name", "schedule", "micros"), [case for case in SUBSET if case[0] in TWO])
def test_a_real_model_in_two_stages_trains_as_in_one_process(pair, name, schedule, micros):
    _check(pair, name, 2, schedule, micros, recompute="all" if name in RECOMPUTED else "auto")


@pytest.mark.parametrize("name", [pytest.param("t5", marks=pytest.mark.slow), "vit"])
def test_in_double_precision_only_rounding_errors_are_left(pair, name):
    _check(pair, name, 2, "1f1b", 4, dtype="float64")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "stages", "schedule", "micros"), GRID)
def test_the_whole_grid_equals_one_process(workers, name, stages, schedule, micros):
    _check(workers, name, stages, schedule, micros)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "stages"), list(itertools.product(CASES, (1, 2, 4))))
def test_recomputing_all_activations_equals_one_process(workers, name, stages):
    _check(workers, name, stages, "1f1b", 3, recompute="all")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "stages"), list(itertools.product(DOUBLE, (2, 4))))
def test_the_whole_zoo_in_double_precision(workers, name, stages):
    _check(workers, name, stages, "1f1b", 3, dtype="float64")
