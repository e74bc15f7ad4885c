"""What must be true of a pool of processes after one of them failed."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from autopart.ir.errors import RunError
from support.workers import Workers

LIMIT_S = 5.0
"""Seconds after which all processes have ended when one was killed."""


def failed(workers: Workers, job: Callable[..., Any], *args: Any) -> RunError:
    """Run a job that fails and return its error.  No process may be left."""
    workers.run(os.getpid)  # starts the processes
    pids = workers.pids
    assert len(pids) == workers.world
    with pytest.raises(RunError) as caught:
        workers.run(job, *args)
    assert not [pid for pid in pids if alive(pid)]
    return caught.value


def alive(pid: int) -> bool:
    """Return whether a process exists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
