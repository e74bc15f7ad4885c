"""Ranks and launchers that are killed, stopped or raise in any phase, under `launch` and torchrun.

The cause must be reported once and in time, and no process may be left.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
from support.jobs.failures.fault_runs import LAUNCHERS, play
from support.jobs.failures.fault_script import HOW, PHASES, WHOM

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

REPORTED_S = 15.0
"""Seconds until the cause is reported. The time for interpreters to exit depends on the load and is not limited."""
CELLS = [
    pytest.param(*cell, id="-".join(cell))
    for cell in itertools.product(LAUNCHERS, HOW, PHASES, WHOM)
    if cell[1::2] != ("stop", "parent")  # a stopped launcher must be continued by its user
]


def reported_cause(launcher: str, how: str, phase: str, whom: str) -> str:
    """Return a pattern of the reported cause, "" if no process is left to report it."""
    rank = 0 if phase == "planning" else 1
    if whom == "parent":
        return {"kill": "", "raise": "KeyboardInterrupt|SignalException"}[how]
    killed = {"launch": f"rank {rank}.* died: .*SIGKILL", "torchrun": f"rank {rank} .*ended|exitcode *: -9"}
    return {"kill": killed[launcher], "stop": rf"rank {rank}( \(.*\))? is stopped", "raise": "the op gave up"}[how]


@pytest.mark.parametrize(("launcher", "how", "phase", "whom"), CELLS)
def test_a_fault_is_reported_in_time_and_no_process_is_left(
    launcher: str, how: str, phase: str, whom: str, tmp_path: Path
) -> None:
    outcome = play(launcher, how, phase, whom, tmp_path, reported_cause(launcher, how, phase, whom))
    print(f"{launcher} {how} {phase} {whom}: named {outcome.reported_s}, gone {outcome.gone_s}")
    assert outcome.reported_s is not None and outcome.reported_s <= REPORTED_S, outcome.output
    assert outcome.gone_s is not None, outcome.output  # torchrun itself gives a stopped rank 30 s
    if (how, whom) == ("raise", "worker"):
        assert len(reporters(launcher, outcome.output)) <= 1, outcome.output


def reporters(launcher: str, output: str) -> set[str]:
    """Return the processes that report the failure as their own: the launcher with a rank's traceback, or the rank."""
    if launcher == "launch":
        return set(re.findall(r"^traceback of rank \d|failed first", output, re.M))
    own = r"^(?:\[rank|rank )(\d)\]?: (?:autopart\.ir\.errors\.StageError: |RuntimeError: the op gave up)"
    return set(re.findall(own, output, re.M))
