"""The small models of RaNNC's suite in real stages: loss, gradients and buffers equal one process."""

from __future__ import annotations

import pytest
from support.grids import with_rotated
from support.jobs.step_jobs import compare
from support.models.small_models import SMALL

from autopart.ir.errors import UsageError
from autopart.passes.program.named import FAMILY as SCHEDULES

MICROS = (1, 2, 4)
ROWS = 10  # ten rows in four micro-batches: uneven


def check(workers, name, stages, schedule, micros):
    stages = min(stages, SMALL[name].most)
    results = workers.run(compare, name, stages, schedule, micros, ROWS)
    losses = {loss for loss, _, _ in results}
    assert len(losses) == 1  # the loss is returned on every rank
    difference, ran = results[0][1:]
    assert ran == stages
    assert difference.within(), difference
    assert difference.parameters == len({id(p) for p in SMALL[name].model().parameters()})


SUBSET = [(name, SCHEDULES[i % 3], (4, 3)[i // 3 % 2]) for i, name in enumerate(SMALL)]


@pytest.mark.parametrize(("name", "schedule", "micros"), SUBSET[::12])
def test_a_small_model_in_four_stages_trains_as_in_one_process(workers, name, schedule, micros):
    check(workers, name, 4, schedule, micros)


@pytest.mark.parametrize(("name", "schedule", "micros"), SUBSET[1::12])
def test_a_small_model_in_two_stages_trains_as_in_one_process(pair, name, schedule, micros):
    check(pair, name, 2, schedule, micros)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "stages", "schedule", "micros"), with_rotated((SMALL, (1, 2, 4), SCHEDULES), MICROS))
def test_the_whole_grid_of_small_models_equals_one_process(workers, name, stages, schedule, micros):
    check(workers, name, stages, schedule, micros)


def test_a_model_of_one_op_cannot_be_cut_into_four_stages(workers):
    with pytest.raises(UsageError, match="blocks that can stand apart"):
        workers.run(compare, "one_op", 4, "1f1b", 2, ROWS)


def test_by_default_the_planner_idles_ranks_that_a_small_model_cannot_use(workers):
    results = workers.run(compare, "one_op", None, "1f1b", 2, ROWS)
    assert results[0][2] <= 3 and results[0][1].within()
    assert len({loss for loss, _, _ in results}) == 1
