"""Every schedule with every placement of stages, for real architectures: loss and gradients as in one process."""

from __future__ import annotations

import pytest
import torch
from support.grids import with_rotated
from support.jobs.random_schedule_jobs import random_cases
from support.jobs.schedule_jobs import Placed, compare_placed
from support.jobs.step_jobs import EVERY
from support.workers import Workers

from autopart.passes.program.named import BUILT_IN
from autopart.passes.program.orders import LOOP, V
from autopart.passes.program.schedules import find

MICROS = (3, 4, 8)
ARCHITECTURES = ("gpt2", "llama_tied", "t5", "mixtral", "vit", "resnet", "tied", "skips", "batch_norm", "dropped")
"""With tied weights, skip connections, an encoder and a decoder, experts, batch norms and dropout."""
PLACES = [
    *((1, LOOP, schedule) for schedule in ("1f1b", "1f1b-deep", "gpipe", "zb-h1", "zb-h2", "searched")),
    *((v, LOOP, schedule) for v in (2, 4) for schedule in ("interleaved", "gpipe", "searched")),
    *((2, V, schedule) for schedule in ("zb-v", "gpipe", "searched")),
    *((4, V, schedule) for schedule in ("gpipe", "searched")),
]
"""Stages of each rank, where they are, and the schedule; the orders of "searched" are drawn."""
SMALLEST = {"batch_norm": 12, "skips": 12}
"""Most stages of models with few ops."""


def check(workers: Workers, name: str, place: tuple[int, str, str], micros: int) -> None:
    """Compare a step with one process, or with one device if numbers are drawn; in double precision if the model can
    run in it."""
    per_rank, placement, schedule = place
    dtype = "float64" if getattr(EVERY[name], "double", True) else "float32"
    against = "one device" if name == "dropped" else "one process"
    seed = per_rank + micros
    placed = Placed(per_rank=per_rank, placement=placement, schedule=schedule, micros=micros, seed=seed, split=0.7)
    rows = 2 * micros if name == "batch_norm" else 12  # a batch norm needs two rows
    results = workers.run(compare_placed, name, placed, rows, dtype, against)
    found = results[0][0]
    assert found is not None and found.within(getattr(torch, dtype)), found
    if find(schedule).splits:
        assert {"I", "W"} <= {kind for _, kinds in results for kind in kinds}


def test_the_grid_has_every_synchronous_schedule() -> None:
    assert {schedule for _, _, schedule in PLACES} == {each.name for each in BUILT_IN if each.synchronous}


@pytest.mark.parametrize("place", [(1, LOOP, "zb-h1"), (2, LOOP, "interleaved"), (2, V, "zb-v")], ids=str)
def test_a_schedule_trains_as_one_process(pair: Workers, place: tuple[int, str, str]) -> None:
    check(pair, "tied", place, 4)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "place", "micros"), with_rotated((ARCHITECTURES, PLACES), MICROS))
def test_the_grid_on_two_processes_equals_one(
    pair: Workers, name: str, place: tuple[int, str, str], micros: int
) -> None:
    check(pair, name, place, micros)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "place", "micros"),
    [case for case in with_rotated((ARCHITECTURES, PLACES), (8, 3, 4)) if case[1][0] < 4 or case[0] not in SMALLEST],
)
def test_the_grid_on_four_processes_equals_one(
    workers: Workers, name: str, place: tuple[int, str, str], micros: int
) -> None:
    check(workers, name, place, micros)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(0, 400, 20))
def test_random_plans_equal_one_process(workers: Workers, start: int) -> None:
    """Schedule, placement, replicas, recomputation, slices, precision and sharing of optimizers, all drawn; every
    program is proven under the rules of Gloo and of NCCL."""
    found = workers.run(random_cases, list(range(start, start + 20)))[0]
    assert not [text for text, good in found if good is False]
    assert sum(good is None for _, good in found) <= 0.3 * len(found)
