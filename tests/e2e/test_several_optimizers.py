"""Several optimizers on ranks: their state moves with plans and checkpoints, each to the parameters that it is of."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.jobs import several_optimizer_jobs as jobs

pytestmark = pytest.mark.timeout(200)


def test_two_optimizers_go_on_under_other_plans_and_from_a_checkpoint(pair, tmp_path: Path) -> None:
    losses, state = jobs.alone(6)
    for found, its in pair.run(jobs.carried, tmp_path, 6):
        assert found == pytest.approx(losses, rel=1e-9)
        for name, tensor in state.items():
            torch.testing.assert_close(its[name], tensor, rtol=1e-9, atol=1e-11)


def test_an_optimizer_of_what_is_trained_is_not_refused_where_frozen_layers_move(pair) -> None:
    assert pair.run(jobs.frozen_moves) == [["", ""]] * 2


@pytest.mark.parametrize("several", [False, True])
def test_a_change_of_the_kind_of_batch_flushes_once_also_where_the_kind_is_new(pair, several: bool) -> None:
    for flushes in pair.run(jobs.kinds_in_turn, "aaaaabbbbbbbaaaa", several):
        assert flushes == [5, 12, 16]
