"""Ranks and launchers that are killed, stopped or raise in any phase, under `launch` and torchrun.

The cause must be reported once and in time, and no process may be left.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
from support.jobs.fault_runs import LAUNCHERS, play
from support.jobs.fault_script import HOW, PHASES, WHOM

pytestmark = pytest.mark.timeout(300)

NAMED_S = 15.0
"""Seconds until the cause is reported. The time for interpreters to exit depends on the load and is not limited."""
DEFAULT = {("torchrun", "stop", "forward", "worker")}
"""Cases that run by default; `test_launch` and `test_failures` cover some others in a running pool."""

CELLS = [
    pytest.param(*cell, id="-".join(cell), marks=[] if cell in DEFAULT else [pytest.mark.slow])
    for cell in itertools.product(LAUNCHERS, HOW, PHASES, WHOM)
    if cell[1::2] != ("stop", "parent")  # a stopped launcher must be continued by its user
]


def named_by(launcher: str, how: str, phase: str, whom: str) -> str:
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
    quick = (launcher, how, phase, whom) in DEFAULT
    outcome = play(
        launcher, how, phase, whom, tmp_path, named_by(launcher, how, phase, whom),
        until_gone=not quick,
    )  # fmt: skip
    print(f"{launcher} {how} {phase} {whom}: named {outcome.named_s}, gone {outcome.gone_s}")
    assert outcome.named_s is not None and outcome.named_s <= NAMED_S, outcome.said
    if not quick:
        assert outcome.gone_s is not None, outcome.said  # torchrun itself gives a stopped rank 30 s
    if (how, whom) == ("raise", "worker"):
        assert len(told_by(launcher, outcome.said)) <= 1, outcome.said


def told_by(launcher: str, said: str) -> set[str]:
    """Return the processes that report the failure as their own: the launcher with a rank's traceback, or the rank."""
    if launcher == "launch":
        return set(re.findall(r"^traceback of rank \d|failed first", said, re.M))
    own = r"^\[rank(\d)\]: (?:autopart\.ir\.errors\.StageError: |RuntimeError: the op gave up)"
    return set(re.findall(own, said, re.M))
