"""Runs `run_script` under a launcher."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from support.jobs.failures.fault_runs import environment
from support.jobs.failures.run_script import Run

LIMIT_S = 240.0


def start(launcher: str, run: Run, *flags: str) -> subprocess.Popen[str]:
    """Start the script.  launcher: "launch" or "torchrun"."""
    by = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(run.world), *flags]
    command = [
        sys.executable,
        *(by if launcher == "torchrun" else []),
        "-m",
        "support.jobs.failures.run_script",
        run.text(),
    ]
    return subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def play(launcher: str, run: Run, *flags: str, limit_s: float = LIMIT_S) -> tuple[int, str]:
    """Run the script to its end; returns the exit code and what was printed."""
    process = start(launcher, run, *flags)
    try:
        output = process.communicate(timeout=limit_s)[0]
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, output


def results(run: Run, launcher: str) -> list[Any]:
    """Return what each rank returned: its digest, and `stop_requested` by step."""
    names = ["result-all"] if launcher == "launch" else [f"result-{rank}" for rank in range(run.world)]
    found = [json.loads(Path(run.folder, name).read_text()) for name in names]
    return found[0][:-2] if launcher == "launch" else [each[0] for each in found]
