"""Ranks are lost and come back while a run goes on: the same losses, each sample once an epoch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.jobs import elastic_jobs as jobs
from support.jobs import straggler_jobs as stragglers
from support.workers import Workers

import autopart

pytestmark = pytest.mark.timeout(400)


@pytest.mark.slow
def test_three_of_four_ranks_go_on_after_a_kill_and_the_fourth_joins_back(tmp_path: Path) -> None:
    run = jobs.Run(str(tmp_path), kills=((2, 4),), pause_s=0.2)
    results = autopart.launch(jobs.train, jobs.slow_cluster(4), run, elastic=(2, 4), rejoin=3.0, timeout=300)
    steps = jobs.noted(run.folder)
    jobs.require_each_sample_once(steps)
    assert jobs.largest_error(steps) < 1e-10
    assert results == [(2, len(steps))] * 4
    assert {each.world for each in steps if each.generation == 1} == {3}
    assert steps[-1].world == 4
    assert all(each.working == each.world for each in steps)


@pytest.mark.slow
@pytest.mark.parametrize("slow_rank", [0, 1])
def test_a_rank_slowed_to_a_third_is_named_and_gets_less(pair: Workers, slow_rank: int) -> None:
    for losses, named, adopted, before, after in pair.run(stragglers.train, 2, slow_rank, 3):
        assert 0 < named <= 20
        assert adopted and after < 0.7 * before
        torch.testing.assert_close(losses, stragglers.plainly(len(losses)), rtol=1e-10, atol=0)
