"""An interleaved schedule from outside: two stages on a rank, in groups of micro-batches, planned by hand and run."""

from __future__ import annotations

import pytest
from support.extending.own_interleaving import in_groups, trained, two_stages_a_rank
from support.workers import Workers


def test_two_stages_on_each_rank_train_as_one_process(pair: Workers) -> None:
    plan = two_stages_a_rank(tied=True)
    assert [plan.decision.stages_of_rank(rank) for rank in range(2)] == [(0, 2), (1, 3)]
    for found in pair.run(trained, plan, 2, True):
        assert found["losses"] == pytest.approx(found["alone"], rel=1e-12)
        assert found["gradients"] < 1e-12 and found["off"] < 1e-12
        assert found["evaluated"] == pytest.approx(found["expected"], rel=1e-12)
        if found["computes"]:
            assert found["computes"] == in_groups(4, 4)[0]
