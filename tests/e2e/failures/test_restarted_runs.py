"""A run whose ranks are killed, stopped or hang in any phase of a step goes on from its last checkpoint, and ends equal
to the bit to one without interruption."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.jobs.failures import run_script, runs
from support.jobs.failures.run_script import BOTH, REPLICAS, STAGES, Fault, Run
from support.workers import Workers

from autopart.ir.errors import WorkerError
from autopart.runtime.launch.local import launch

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]


def as_without(pool: Workers, tmp_path: Path, run: Run, launcher: str, *flags: str, limit_s: float = 500.0) -> str:
    """Play a run, and require that every rank ends as one of a run without faults; returns what it printed."""
    code, output = runs.play(launcher, run, *flags, limit_s=limit_s)
    assert code == 0, output
    expected = pool.run(run_script.finish, str(tmp_path / "whole"), run.plan, run.steps)
    assert [each[0] for each in runs.results(run, launcher)] == expected
    return output


def test_torchrun_starts_a_killed_run_again_which_ends_as_one_without_interruption(
    pair: Workers, tmp_path: Path
) -> None:
    run = Run(str(tmp_path / "run"), [Fault("kill", 1, 3, "backward")])
    as_without(pair, tmp_path, run, "torchrun", "--max-restarts", "1")


KILLS: list[tuple[dict[str, Any], bool, Sequence[Fault]]] = [
    (STAGES, True, [Fault("kill", 1, 1, "forward"), Fault("kill", 0, 3, "backward"), Fault("kill", 0, 4, "between")]),
    (STAGES, False, [Fault("kill", 0, 2, "weights"), Fault("kill", 1, 4, "optimizer"), Fault("kill", 1, 5, "forward")]),
    (REPLICAS, True, [Fault("kill", 0, 2, "sums"), Fault("kill", 1, 4, "between"), Fault("kill", 1, 5, "sums")]),
]


@pytest.mark.parametrize("launcher", ["launch", "torchrun"])
@pytest.mark.parametrize(("plan", "wait", "faults"), KILLS, ids=["stages", "stages-background", "replicas"])
def test_kills_in_every_phase_of_a_step_change_no_bit_of_the_result(
    pair: Workers, tmp_path: Path, plan: dict[str, Any], wait: bool, faults: Sequence[Fault], launcher: str
) -> None:
    run = Run(str(tmp_path / "run"), list(faults), plan, wait=wait, restarts=3)
    as_without(pair, tmp_path, run, launcher, "--max-restarts", "3")


def test_kills_among_stages_with_replicas_that_share_the_optimizer_change_no_bit(
    workers: Workers, tmp_path: Path
) -> None:
    faults = [Fault("kill", 3, 2, "backward"), Fault("kill", 1, 3, "optimizer"), Fault("kill", 0, 4, "sums")]
    run = Run(str(tmp_path / "run"), faults, BOTH, world=4, restarts=3)
    code, output = runs.play("launch", run, limit_s=500)
    assert code == 0, output
    expected = workers.run(run_script.finish, str(tmp_path / "whole"), BOTH, run.steps, 4)
    assert [each[0] for each in runs.results(run, "launch")] == expected


@pytest.mark.parametrize(
    ("how", "says"), [("stop", r"rank 1 .*is stopped"), ("hang", r"rank 1 .*(made no progress|does not answer)")]
)
def test_a_rank_that_is_stopped_or_hangs_is_named_and_the_run_goes_on(
    pair: Workers, tmp_path: Path, how: str, says: str
) -> None:
    run = Run(str(tmp_path / "run"), [Fault(how, 1, 3, "backward")], restarts=1, timeout=12.0)
    output = as_without(pair, tmp_path, run, "launch")
    assert re.search(f"restart 1 of 1 .*{says}", output), output


@pytest.mark.timeout(1800)
def test_twenty_restarts_at_once_find_each_other_twenty_times(pair: Workers, tmp_path: Path) -> None:
    faults = [Fault("kill", number % 2, 0, ("start", "forward")[number // 2 % 2]) for number in range(20)]
    run = Run(str(tmp_path / "run"), faults, restarts=20)
    as_without(pair, tmp_path, run, "torchrun", "--max-restarts", "20", limit_s=1700)


def test_exhausted_restarts_say_the_first_cause(tmp_path: Path) -> None:
    run = Run(str(tmp_path / "run"), [Fault("kill", 1, 0, "start"), Fault("kill", 0, 0, "forward")])
    with pytest.raises(WorkerError, match=r"rank 0 .*died: .*SIGKILL") as caught:
        launch(run_script.train, 2, run, restarts=1, timeout=200)
    assert any("start 0: rank 1 died: killed by signal 9" in note for note in caught.value.__notes__)
