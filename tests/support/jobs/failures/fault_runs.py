"""Runs `fault_script` under a launcher and measures how long detection and termination take."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from autopart.runtime.watch.processes import state_of

TESTS = Path(__file__).parents[3]
LAUNCHERS = {
    "launch": [sys.executable, "-m", "support.jobs.failures.fault_script"],
    "torchrun": [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m",
        "support.jobs.failures.fault_script",
    ],
}  # fmt: skip
START_S, WATCH_S = 150.0, 60.0


def environment() -> dict[str, str]:
    """Return the environment in which scripts find the jobs."""
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        env.pop(name, None)
    return env


@dataclass(frozen=True)
class Outcome:
    """The result of a run with a fault.

    reported_s, gone_s: seconds from the fault until its cause was printed and until no process was left, None for
    never. output: everything printed.
    """

    reported_s: float | None
    gone_s: float | None
    output: str


def play(launcher: str, how: str, phase: str, whom: str, folder: Path, named: str) -> Outcome:
    """Run the script until the text `named` is printed and no process is left."""
    env = environment()
    log = folder / "log"
    command = [*LAUNCHERS[launcher], how, phase, whom, str(folder)]
    with log.open("w") as out:
        process = subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        fault_s = _await_fault(process, folder, log)
        return _watch(process, folder, log, fault_s, re.compile(named))
    finally:
        for pid in [process.pid, *_pids(folder)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait(20)


def _await_fault(process: subprocess.Popen, folder: Path, log: Path) -> float:
    end = time.monotonic() + START_S
    while not (folder / "clock").exists():
        assert time.monotonic() < end and process.poll() is None, log.read_text()
        time.sleep(0.05)
    return float((folder / "clock").read_text())


def _watch(process: subprocess.Popen, folder: Path, log: Path, fault_s: float, named: re.Pattern[str]) -> Outcome:
    reported_s = gone_s = None
    while time.monotonic() - fault_s < WATCH_S:
        process.poll()
        now = time.monotonic() - fault_s
        if reported_s is None and named.search(log.read_text()):
            reported_s = now
        if all(state_of(pid) == "gone" for pid in [process.pid, *_pids(folder)]):
            gone_s = now
            break
        time.sleep(0.05)
    output = log.read_text()
    if reported_s is None and named.search(output):
        reported_s = time.monotonic() - fault_s
    return Outcome(reported_s, gone_s, output)


def _pids(folder: Path) -> list[int]:
    return [int(path.read_text()) for path in folder.glob("pid*") if path.read_text()]
