"""The engine on real processes: stages anywhere, several on a rank, in any order that the verifier accepts."""

from __future__ import annotations

import pytest
from support.jobs.engine_jobs import step
from support.workers import Workers

MICROS = 3


@pytest.mark.parametrize(
    ("stage_ranks", "schedule"),
    [((0, 1, 0, 1), "in_loops"), ((1, 0, 1, 0), "in_loops")],
    ids=["stages in turn", "the other way round"],
)
def test_several_stages_on_a_rank_give_the_gradients_of_one_process(
    pair: Workers, stage_ranks: tuple[int, ...], schedule: str
) -> None:
    found = pair.run(step, stage_ranks, schedule, MICROS)
    assert sum(f["loss"] for f in found) == pytest.approx(found[0]["expected"], rel=1e-6)
    assert max(f["gradients"] for f in found) < 1e-5, [f["worst"] for f in found]
    buffers = [pair for f in found for pair in f["buffers"].values()]
    assert len(buffers) == 1 and buffers[0][0] == pytest.approx(buffers[0][1], rel=1e-6)
    for rank, f in enumerate(found):
        mine = {stage for stage, at in enumerate(stage_ranks) if at == rank}
        assert {int(action[0]) for action in f["actions"] if action != "0A"} == mine
