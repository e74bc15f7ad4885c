"""Pipelines over a transport whose posts may block, as NCCL's may: none hangs, and a program that would is reported.

`test_any_plan` draws this transport too.
"""

from __future__ import annotations

import pytest
from support.grids import sampled
from support.jobs.engine_jobs import step
from support.jobs.fake_nccl_jobs import played, receives_first
from support.languages.nccl_programs import CASES, FINE, HANG, WRONG
from support.oracles.fake_nccl import NAME
from support.workers import Workers

from autopart.ir.errors import WorkerError
from autopart.runtime.launch.local import launch


@pytest.mark.parametrize("name", sampled(CASES, 5))
def test_the_fake_transport_behaves_like_nccl(workers: Workers, name: str) -> None:
    found = workers.run(played, name)
    assert (WRONG if WRONG in found else HANG if HANG in found else FINE) == CASES[name].outcome, found


def test_several_stages_on_a_rank_run_where_every_message_blocks(pair: Workers) -> None:
    found = pair.run(step, (0, 1, 0, 1), "in_loops", 3, NAME)
    assert sum(f["loss"] for f in found) == pytest.approx(found[0]["expected"], rel=1e-6)
    assert max(f["gradients"] for f in found) < 1e-5, [f["worst"] for f in found]


@pytest.mark.slow
def test_receives_posted_before_the_first_action_hang_and_are_reported() -> None:
    with pytest.raises(WorkerError, match=r"hangs at: receive \dS[FB]\d>\d"):
        launch(receives_first, 2, timeout=120)
