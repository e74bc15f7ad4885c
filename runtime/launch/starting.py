"""Processes of ranks: how one is started, and in which environment.

`spawned` starts a new Python, which imports torch; `Template.start` forks one that has imported it.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Protocol

from autopart.launcher import DEVICES_VARIABLE, Living
from autopart.runtime.activity import SharedStatus
from autopart.runtime.launch import worker
from autopart.runtime.launch.worker import PARENT_VARIABLE

_starting = threading.Lock()


class RankProcess(Protocol):
    """What a fleet needs of a process, as of `multiprocessing.Process`."""

    @property
    def pid(self) -> int | None:
        """The process id."""

    @property
    def sentinel(self) -> int:
        """A descriptor that becomes readable when it has ended."""

    @property
    def exitcode(self) -> int | None:
        """The exit code, minus the number of the signal that ended it, or None while it runs."""

    def join(self, timeout: float | None = None) -> None:
        """Wait until it has ended."""

    def terminate(self) -> None:
        """Send SIGTERM."""

    def kill(self) -> None:
        """Send SIGKILL."""


@dataclass(frozen=True, slots=True)
class Started:
    """The process of a rank that was started, the launcher's side of its pipe, and its status."""

    process: RankProcess
    conn: Connection
    status: SharedStatus


Starter = Callable[[int, Mapping[str, str]], Started]
"""Starts a rank with these variables besides those of the launcher."""


def spawned(rank: int, env: Mapping[str, str]) -> Started:
    """Start a rank as a new Python process."""
    context = multiprocessing.get_context("spawn")
    status = context.RawValue(SharedStatus)
    conn, theirs = context.Pipe()
    main_thread = threading.current_thread() is threading.main_thread()
    given = rank, theirs, status, main_thread
    process = context.Process(target=worker.spawned, args=given, name=f"autopart-rank-{rank}")
    with _environment(env):
        process.start()
    theirs.close()
    return Started(process, conn, status)


def local_env(rank: int, world: int) -> dict[str, str]:
    """Return what torchrun would set, and loopback and a fair share of the cores if the user set nothing else."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    defaults = {
        "OMP_NUM_THREADS": str(max(1, cores // world)),
        "GLOO_SOCKET_IFNAME": "lo" if os.uname().sysname == "Linux" else "lo0",
    }
    return {name: value for name, value in defaults.items() if name not in os.environ} | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        PARENT_VARIABLE: str(os.getpid()),
    }


def device_env(rank: int, living: Living | None) -> dict[str, str]:
    """Return what a rank of an elastic launch is told of its device."""
    if living is None:
        return {}
    return {"LOCAL_RANK": str(living.devices[rank]), DEVICES_VARIABLE: living.text()}


@contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Change os.environ for a moment: a spawned process imports torch before any code of ours could set a variable."""
    with _starting:
        before = {name: os.environ.get(name) for name in changes}
        os.environ.update(changes)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
