"""Models that other pipeline systems refuse, crash on or silently get wrong: exact here.

`test_any_plan` draws plans for them; here are batches of other sizes and lengths, and models that cannot be cut.
"""

from __future__ import annotations

import pytest
from support.jobs.step_jobs import accumulate, compare, frozen_gradients, lengths, warned
from support.models.peer_models import PEERS

from autopart.ir.errors import UsageError


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        pytest.param("stack", [4, 8, 5, 2], marks=pytest.mark.slow),
        pytest.param("late_inputs", [4, 8, 2], marks=pytest.mark.slow),
        pytest.param("batch_norm", [4, 8, 5], marks=pytest.mark.slow),
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


def test_a_model_of_one_op_cannot_be_cut_into_four_stages(workers):
    with pytest.raises(UsageError, match="blocks that can stand apart"):
        workers.run(compare, "one_op", 4)


def test_by_default_the_planner_idles_ranks_that_a_small_model_cannot_use(workers):
    results = workers.run(compare, "one_op", None)
    assert results[0][2] <= 3 and results[0][1].within()
    assert len({loss for loss, _, _ in results}) == 1
