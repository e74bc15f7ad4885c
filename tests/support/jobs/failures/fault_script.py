"""A short training script in which a rank or the launching process is killed, stopped or raises at a chosen moment.

Run as a script, under torchrun or directly (then it calls `autopart.launch`):

    python -m support.jobs.failures.fault_script <how> <phase> <whom> <folder>
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch

import autopart
from support.jobs.failures import failing_jobs
from support.jobs.failures.failing_jobs import CASE

HOW = ("kill", "stop", "raise")
PHASES = ("start", "planning", "forward", "backward", "weights", "idle", "close")
WHOM = ("worker", "parent")
WORLD = 2
LINGER_S = 90.0


def train(how: str, phase: str, whom: str, folder: str) -> None:
    """Write this rank's pid to the folder and train until the fault occurs in the given phase."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    Path(folder, f"pid{rank}").write_text(str(os.getpid()))
    victim = 0 if phase == "planning" else 1  # only rank 0 plans

    def fault_at(now: str) -> None:
        if rank == victim and now == phase and not Path(folder, "clock").exists():
            _cause_fault(how, whom, folder)

    fault_at("start")
    if phase in ("forward", "backward", "weights") and rank == victim:
        failing_jobs.arm(phase, lambda: _cause_fault(how, whom, folder), 5)
    options = {"cuts": ["layers.2"], "micro_batches": 4, "loss_fn": CASE.loss_fn, "costs": "analytic", "cache": False}
    options["schedule"] = "zb-h1" if phase == "weights" else "auto"
    with autopart.compile(
        CASE.model(), f"cpu:{WORLD}", sample=CASE.batch(8), watch=lambda *_: fault_at("planning"), **options
    ) as pipe:
        for _ in range(2):
            pipe.step(CASE.batch(8))
        fault_at("idle")
        pipe.step(CASE.batch(8))
        fault_at("close")
    if whom == "parent":
        time.sleep(LINGER_S)


def _cause_fault(how: str, whom: str, folder: str) -> None:
    target = os.getpid() if whom == "worker" else os.getppid()
    Path(folder, "clock.part").write_text(repr(time.monotonic()))
    Path(folder, "clock.part").rename(Path(folder, "clock"))
    if how == "kill":
        os.kill(target, signal.SIGKILL)
    elif how == "stop":
        os.kill(target, signal.SIGSTOP)
    elif whom == "parent":
        os.kill(target, signal.SIGINT)
    else:
        raise RuntimeError("the op gave up")


def main() -> None:
    """Launch the ranks, or run as a rank of torchrun."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    Path(sys.argv[4], f"main{os.getpid()}").touch()
    autopart.launch(train, f"cpu:{WORLD}", *sys.argv[1:])


if __name__ == "__main__":
    main()
