"""Killed, stopped or raising, in any phase, a rank or its launcher, under `launch` and torchrun: the cause is named
once and in time, and no process is left."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
from support.jobs.strike_jobs import HOW, PHASES, WHOM
from support.jobs.strikes import LAUNCHERS, play

pytestmark = pytest.mark.timeout(300)

NAMED_S = 15.0
"""Seconds until the cause is named. How long interpreters take to end is up to the machine's load: no bar on that."""
DEFAULT = {("torchrun", "stop", "forward", "worker")}
"""What runs by default; `test_launch` and `test_failures` have some of the others, in a pool that is up already."""

CELLS = [
    pytest.param(*cell, id="-".join(cell), marks=[] if cell in DEFAULT else [pytest.mark.slow])
    for cell in itertools.product(LAUNCHERS, HOW, PHASES, WHOM)
    if cell[1::2] != ("stop", "parent")  # a stopped launcher is continued by who stopped it
]


def named_by(launcher: str, how: str, phase: str, whom: str) -> str:
    """What names the cause, as a pattern; "" where nobody is left to name it."""
    rank = 0 if phase == "planning" else 1
    if whom == "parent":
        return {"kill": "", "raise": "KeyboardInterrupt|SignalException"}[how]
    killed = {"launch": f"rank {rank}.* died: .*SIGKILL", "torchrun": f"rank {rank} .*ended|exitcode *: -9"}
    return {"kill": killed[launcher], "stop": rf"rank {rank}( \(.*\))? is stopped", "raise": "the op gave up"}[how]


@pytest.mark.parametrize(("launcher", "how", "phase", "whom"), CELLS)
def test_whoever_is_struck_is_named_in_time_and_nothing_is_left(
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
    """Who tells of the failure as its own: the launching process, with the traceback of a rank, or the rank itself."""
    if launcher == "launch":
        return set(re.findall(r"^traceback of rank \d|failed first", said, re.M))
    own = r"^\[rank(\d)\]: (?:autopart\.ir\.errors\.StageError: |RuntimeError: the op gave up)"
    return set(re.findall(own, said, re.M))
