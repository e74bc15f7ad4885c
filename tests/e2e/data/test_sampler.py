"""Three epochs over changes of the plan and of the number of ranks: each sample once an epoch (row F15)."""

from __future__ import annotations

import pytest
from support.jobs.state import sampler_jobs as jobs

TWO_STAGES = {"stages": 2, "micro_batches": 2}
REPLICAS = {"stages": 1, "replicas": 2, "micro_batches": 1, "sync_batchnorm": True}
ONE_RANK = {"stages": 1, "micro_batches": 1}


@pytest.mark.parametrize("readers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_each_sample_comes_once_an_epoch_over_four_changes_of_the_plan(pair, tmp_path, readers):
    folder = str(tmp_path)
    first = pair.run(jobs.part, folder, TWO_STAGES, "cpu:2", readers, 2, {"stages": 2, "micro_batches": 1})
    second = pair.run(jobs.part, folder, REPLICAS, "cpu:2", readers, 3)
    alone = jobs.part(folder, ONE_RANK, "cpu:1", readers, 2)
    last = pair.run(jobs.part, folder, TWO_STAGES, "cpu:2", readers, 100)
    for rank in range(2):
        seen = first[rank] + second[rank] + alone + last[rank]
        assert sorted(seen) == [(epoch, sample) for epoch in range(3) for sample in range(jobs.SIZE)]
