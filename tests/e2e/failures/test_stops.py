"""A run that is asked to stop by SIGTERM or SIGUSR1, on any rank or at its launcher."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.jobs.failures import run_script, runs, stop_jobs
from support.jobs.failures.run_script import Fault, Run
from support.workers import Workers

import autopart
from autopart.ir.errors import UsageError

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize(("rank", "phase"), [(0, "forward"), (1, "backward")])
def test_all_ranks_know_after_the_step_in_which_one_of_them_was_signalled(pair: Workers, rank: int, phase: str) -> None:
    assert pair.run(stop_jobs.in_a_step, rank, phase) == [([False, True, True], True, True)] * 2


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_between_calls_is_known_after_the_next_one(pair: Workers, rank: int) -> None:
    assert pair.run(stop_jobs.between_calls, rank) == [[False, False, True]] * 2


def test_asynchronous_training_stops_after_the_same_batch(pair: Workers) -> None:
    (asked, steps), other = pair.run(stop_jobs.in_training, 1, 4)
    assert (asked, steps) == other
    assert asked[-1] and 2 <= len(asked) <= 6 and len(asked) <= steps <= len(asked) + 3


@pytest.mark.parametrize("killed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_run_that_is_preempted_at_its_launcher_is_saved_and_not_restarted_even_if_it_was_killed_before(
    pair: Workers, tmp_path: Path, killed: bool
) -> None:
    faults = [Fault("kill", 1, 3, "backward")] * killed + [Fault("term-launcher", 0, 4, "forward")]
    run = Run(str(tmp_path / "run"), faults, restarts=3)
    code, output = runs.play("launch", run)
    assert code == 0, output
    assert output.count("restart 1 of 3") == killed and "restart 2" not in output and ("SIGKILL" in output) == killed
    expected = pair.run(run_script.finish, str(tmp_path / "whole"), run.plan, 5)
    asked = {str(step): step == 4 for step in range(2 * killed, 5)}
    assert runs.results(run, "launch") == [[digest, asked] for digest in expected]
    assert str(autopart.latest(run.folder)).endswith("step-00000005")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "rank", "phase"),
    [("term", 0, "weights"), ("usr1", 1, "between"), ("term-launcher", 1, "backward"), ("usr1-launcher", 0, "forward")],
)
@pytest.mark.parametrize("launcher", ["launch", "torchrun"])
def test_a_stop_is_known_to_all_ranks_at_once_and_the_run_goes_on_from_there(
    pair: Workers, tmp_path: Path, launcher: str, rank: int, phase: str, how: str
) -> None:
    run = Run(str(tmp_path / "run"), [Fault(how, rank, 3, phase)])
    code, output = runs.play(launcher, run, "--signals-to-handle", "SIGTERM,SIGINT,SIGUSR1")
    assert code == 0 or (launcher == "torchrun" and how.endswith("launcher")), output
    expected = pair.run(run_script.finish, str(tmp_path / "half"), run.plan, 4)
    found = runs.results(run, launcher)
    assert [each[0] for each in found] == expected
    assert all(each[1] == found[0][1] for each in found)
    code, output = runs.play(launcher, Run(run.folder))
    assert code == 0, output
    expected = pair.run(run_script.finish, str(tmp_path / "whole"), run.plan, run.steps)
    assert [each[0] for each in runs.results(run, launcher)] == expected


SCRIPT = """
import logging, sys
import autopart
from support.jobs.failures.stop_jobs import ignore_stops

if __name__ == "__main__":
    autopart.launch(ignore_stops, "cpu:2", 200.0, grace=float(sys.argv[1]), restarts=5)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("grace", "second"), [("1", False), ("100", True)])
def test_ranks_that_do_not_stop_are_killed_after_the_grace_or_by_a_second_sigterm(
    tmp_path: Path, grace: str, second: bool
) -> None:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, str(path), grace],
        env=runs.environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    for _ in range(2):
        assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    while second and process.poll() is None and time.monotonic() < began + 60:
        time.sleep(0.5)  # the launcher ignores what belongs to the first
        process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=60)
    assert process.returncode in ((143, -signal.SIGTERM) if second else (1,)), output
    if not second:
        assert "1 s after SIGTERM" in output[1] and "the launcher was asked to stop by SIGTERM: no restart" in output[1]


@pytest.mark.parametrize("grace", [-1, float("inf"), True, "3"])
def test_a_grace_that_is_none_is_refused(grace: object) -> None:
    with pytest.raises(UsageError, match="grace is"):
        autopart.launch(print, "cpu:1", grace=grace)  # type: ignore[arg-type]
