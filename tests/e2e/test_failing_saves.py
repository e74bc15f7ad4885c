"""A save of a pipe that fails on one rank: all ranks raise it, the last checkpoint stays, training goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.jobs import checkpoint_jobs
from support.jobs import failing_save_jobs as jobs
from support.workers import Workers

import autopart


@pytest.mark.parametrize(("bad", "wait"), [(0, True), (1, False)])
def test_a_full_disk_on_one_rank_is_raised_on_all_and_training_goes_on(
    pair: Workers, tmp_path: Path, bad: int, wait: bool
) -> None:
    for message, newest, expected, losses, loaded, left in pair.run(jobs.on_a_full_disk, str(tmp_path), bad, wait):
        assert message.startswith("CheckpointError: the checkpoint cannot be written") and f"rank {bad}" in message
        assert newest.endswith("step-00000002")
        assert losses == expected
        assert loaded == 5
        assert left == [".lock", ".order", "latest", "step-00000002", "step-00000005"]


@pytest.mark.parametrize("bad", [0, 1])
def test_a_save_that_fails_beside_the_last_step_is_raised_by_close_which_still_brings_the_weights_together(
    pair: Workers, tmp_path: Path, bad: int
) -> None:
    for message, whole, left in pair.run(jobs.at_the_end, str(tmp_path), bad):
        assert message.startswith("CheckpointError: the checkpoint cannot be written") and f"rank {bad}" in message
        assert whole and left == [".lock"]


def test_a_rank_that_closes_while_another_one_steps_beside_a_save_harms_no_checkpoint(
    pair: Workers, tmp_path: Path
) -> None:
    assert all(
        "ranks 0 and 1 make different calls" in said for said in pair.run(jobs.closed_beside_a_step, str(tmp_path))
    )
    model = checkpoint_jobs.model(2)
    autopart.load_into(model, tmp_path)
    assert str(autopart.latest(tmp_path)).endswith(("step-00000001", "step-00000002"))
    last = autopart.save_from(model, tmp_path, step=9)  # the ranks live, and do not hold the folder any more
    assert autopart.latest(tmp_path) == last and not list(tmp_path.glob("*.tmp"))
