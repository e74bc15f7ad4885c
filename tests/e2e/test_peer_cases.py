"""Models that other pipeline systems refuse, crash on or silently get wrong: exact here."""

from __future__ import annotations

import pytest
from support.grids import sampled, with_rotated
from support.jobs.step_jobs import accumulate, compare, frozen_gradients, lengths, warned
from support.models.peer_models import PEERS

from autopart.passes.program.named import FAMILY as SCHEDULES

EXACT = [name for name in PEERS if name != "dropped"]
LAYERS = ["layers.1", "layers.2", "layers.3"]
CUTS = {
    "skips": LAYERS,  # every stage sends to every later one
    "rotary": LAYERS,
    "transposed": LAYERS,
    "in_place": LAYERS,
    "two_outputs": LAYERS,
    "mixed_grads": ["layers.2"],
    "shared_by_all": LAYERS,
    "late_inputs": ["layers.3"],
    "tied": ["body.layers.0", "body.layers.2", "head"],
}


def check(workers, name, stages=4, schedule="1f1b", micros=4, rows=12, cuts=()):
    results = workers.run(compare, name, stages, schedule, micros, rows, "float32", cuts)
    difference = results[0][1]
    assert len({loss for loss, _, _ in results}) == 1
    assert results[0][2] == (stages or results[0][2])
    assert difference.within(), difference


SUBSET = [(name, SCHEDULES[i % 3]) for i, name in enumerate(EXACT) if name not in CUTS][::2]
QUICK_CUTS = ("in_place", "tied")


@pytest.mark.parametrize(("name", "schedule"), SUBSET)
def test_a_hard_model_trains_as_in_one_process(workers, name, schedule):
    check(workers, name, 4, schedule)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "stages", "schedule", "micros"), with_rotated((EXACT, (1, 2, 3, 4), SCHEDULES), (1, 2, 5))
)
def test_the_whole_grid_of_hard_models_equals_one_process(workers, name, stages, schedule, micros):
    check(workers, name, stages, schedule, micros)


@pytest.mark.parametrize(
    ("name", "cuts"),
    [pytest.param(*case, marks=() if case[0] in QUICK_CUTS else pytest.mark.slow) for case in CUTS.items()],
)
def test_cuts_between_the_layers_are_exact(workers, name, cuts):
    check(workers, name, len(cuts) + 1, cuts=cuts)


@pytest.mark.parametrize("schedule", sampled(SCHEDULES, 3))
def test_fourteen_rows_in_four_micro_batches_are_exact(workers, schedule):
    check(workers, "stack", 4, schedule, 4, rows=14)
    check(workers, "tied", 2, schedule, 4, rows=14)


@pytest.mark.parametrize("schedule", sampled(SCHEDULES, 3))
def test_fewer_micro_batches_than_stages_are_exact(workers, schedule):
    check(workers, "skips", 4, schedule, micros=2)


def test_micro_batches_of_one_row_are_exact(workers):
    check(workers, "tied", 4, "1f1b", 5, rows=5)
    check(workers, "stack", 4, "gpipe", 3, rows=3)


@pytest.mark.parametrize("name", sampled(["batch_norm", "tied", "shared_by_all", "stack_sum"], 4))
def test_gradients_accumulate_over_steps_without_zero_grad(workers, name):
    found = workers.run(accumulate, name, 4, "1f1b", 3, [9, 9])[0]
    assert found.within(), found


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        pytest.param("stack", [4, 8, 5, 2], marks=pytest.mark.slow),
        pytest.param("late_inputs", [4, 8, 2], marks=pytest.mark.slow),
        ("batch_norm", [4, 8, 5]),
    ],
)
def test_the_next_batch_may_have_another_size(workers, name, sizes):
    found = workers.run(accumulate, name, 4, "1f1b", 2, sizes)[0]
    assert found.within(), found


def test_the_next_batch_may_have_another_sequence_length(workers):
    for found in workers.run(lengths, 4, [(4, 5), (8, 5), (4, 9), (6, 3), (4, 5)])[0]:
        assert found.within(), found


def test_frozen_parameters_get_no_gradient_and_the_others_do(workers):
    results = workers.run(frozen_gradients, "frozen")
    held = {name: flags for rank, _ in results for name, flags in rank.items()}
    assert all(needs == has for needs, has in held.values()), held
    trainable = {n for n, p in PEERS["frozen"].model().named_parameters() if p.requires_grad}
    assert all(names == trainable for _, names in results)
    assert {name for name, (needs, _) in held.items() if needs} == trainable


@pytest.mark.slow
def test_activation_checkpointing_inside_the_model_gives_no_warning(workers):
    assert workers.run(warned, "checkpointed")[0] == []
    assert workers.run(warned, "stack")[0] == []
