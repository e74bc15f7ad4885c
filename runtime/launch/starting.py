"""Processes of ranks: how one is started, and in which environment.

`spawned` starts a new Python, which imports torch; `forked` forks one that has imported it, multiprocessing's fork
server with `template`.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver, reduction
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Self

import torch

from autopart.launcher import DEVICES_VARIABLE, Living
from autopart.runtime.activity import SharedStatus
from autopart.runtime.heap import HUGE_PAGES
from autopart.runtime.launch import worker
from autopart.runtime.launch.worker import PARENT_VARIABLE

TIED_VARIABLE = "AUTOPART_TIED"
"""The launcher, for a fork server that its main thread starts, so that the kernel may end it with that thread."""
_starting = threading.Lock()
_log = logging.getLogger("autopart")


@dataclass(frozen=True, slots=True)
class Member:
    """The process of a rank as its launcher sees it: this side of its pipe, and its status, also after its end."""

    rank: int
    process: BaseProcess
    conn: Connection
    status: SharedStatus


Starter = Callable[[int, Mapping[str, str]], Member]
"""Starts a rank with these variables besides those of the launcher."""


def spawned(rank: int, env: Mapping[str, str]) -> Member:
    """Start a rank as a new Python process."""
    return _started("spawn", rank, f"autopart-rank-{rank}", env)


def forked(rank: int, env: Mapping[str, str], more: Sequence[str] = ()) -> Member:
    """Start a rank by a fork, or as a new process if that fails, and on other systems than Linux.  more: modules that
    the fork server has imported besides."""
    if sys.platform != "linux":
        return spawned(rank, env)
    forkserver.set_forkserver_preload([*more, "autopart.runtime.launch.template"])
    server = {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path), "PYTHONSAFEPATH": "1"}
    server |= {name: env[name] for name in env if name in ("OMP_NUM_THREADS", *HUGE_PAGES)}  # read by libraries
    if threading.current_thread() is threading.main_thread():
        server[TIED_VARIABLE] = str(os.getpid())
    try:
        return _started("forkserver", rank, _Name(f"autopart-rank-{rank}", {**os.environ, **env}), server)
    except (OSError, EOFError) as error:
        _log.warning("rank %d is started as a new process, since none can be forked: %s", rank, error)
        return spawned(rank, env)


def _started(method: str, rank: int, name: str, env: Mapping[str, str]) -> Member:
    """Start a rank.  env: of the new Python process."""
    context: Any = multiprocessing.get_context(method)
    status: SharedStatus = context.RawValue(SharedStatus)
    conn, theirs = context.Pipe()
    tied = method == "spawn" and threading.current_thread() is threading.main_thread()
    process = context.Process(target=worker.started, args=(rank, theirs, status, tied), name=name)
    with _environment(env), theirs:
        process.start()
    return Member(rank, process, conn, status)


class _Name(str):
    """The name of a process that is forked.  It is the first of ours that the process reads, before it imports the
    user's script, and gives it the environment and the output that a new process would have: the fork server may be
    of an earlier launch."""

    def __new__(cls, name: str, env: dict[str, str]) -> Self:
        """env: all variables of the process."""
        made = super().__new__(cls, name)
        made._env = env
        return made

    _env: dict[str, str]

    def __reduce__(self) -> tuple[Any, ...]:
        return _become, (str(self), self._env, reduction.DupFd(1), reduction.DupFd(2))


def _become(name: str, env: Mapping[str, str], *output: Any) -> str:
    """Make this process, which was forked, one with this environment and output, unless it is; returns the name."""
    parent = {PARENT_VARIABLE: str(os.getppid())}
    descriptors = [sent.detach() for sent in output]
    known = parent.items() <= os.environ.items()  # multiprocessing sends a name twice
    for number, descriptor in enumerate(descriptors, 1):
        if not known:
            os.dup2(descriptor, number)
        os.close(descriptor)
    if known:
        return name
    os.environ.clear()
    os.environ.update({**env, **parent})
    threads = env.get("OMP_NUM_THREADS", "")
    if threads.isdigit() and int(threads):
        torch.set_num_threads(int(threads))  # libraries read the variable when they were loaded
    torch.default_generator.seed()  # generators that a script leaves unseeded differ between processes
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    return name


def local_env(rank: int, world: int, living: Living | None) -> dict[str, str]:
    """Return what torchrun would set, and loopback and a fair share of the cores if the user set nothing else.

    living: the devices of an elastic launch, of which the rank is told its own."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    defaults = {
        "OMP_NUM_THREADS": str(max(1, cores // world)),
        "GLOO_SOCKET_IFNAME": "lo" if os.uname().sysname == "Linux" else "lo0",
        **HUGE_PAGES,
    }
    return {name: value for name, value in defaults.items() if name not in os.environ} | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank if living is None else living.devices[rank]),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        PARENT_VARIABLE: str(os.getpid()),
        **({} if living is None else {DEVICES_VARIABLE: living.text()}),
    }


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
