"""Local processes: the same function on every rank, results by rank, one error if something fails.

Under torchrun (RANK and WORLD_SIZE are set) no process is started.  Otherwise `launch` and `Workers` start processes on
this machine that see the variables that torchrun sets.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from autopart.ir.errors import ClusterError, UsageError
from autopart.launcher import adopt_task, torchrun_line
from autopart.runtime.launch.supervise import Fleet, name_of, pickle_call, refuse_while_importing


def launch(
    fn: Callable[..., Any], world: int, *args: Any, timeout: float | None = None, local: int | None = None
) -> list[Any]:
    """Run fn(*args) on `world` ranks and return their results by rank.

    Under torchrun, srun or mpirun this process is one of the ranks: fn is called here and the list holds its result
    alone.  Otherwise `world` local processes are started; fn, args and results are pickled.  timeout: seconds for
    everything but planning, None for no limit.  local: ranks on each host of the cluster, for messages.
    Raises UsageError (fn cannot be sent, or the script has no __main__ guard), ClusterError (torchrun runs another
    number of ranks), WorkerError (a process died, raised or ran out of time), or the AutopartError of the first rank
    that failed, with its rank and stage in `where`.
    """
    refuse_while_importing()
    adopt_task(os.environ)
    if under_torchrun():
        running = os.environ["WORLD_SIZE"]
        if running != str(world):
            raise ClusterError(
                f"{running} ranks run, but {world} were asked for", where="WORLD_SIZE", fix=torchrun_line(world, local)
            )
        return [fn(*args)]
    with Workers(world, timeout=timeout) as workers:
        return workers.run(fn, *args)


def under_torchrun(env: Mapping[str, str] = os.environ) -> bool:
    """Whether a launcher already started the ranks: RANK and WORLD_SIZE are set."""
    return "RANK" in env and "WORLD_SIZE" in env


class Workers:
    """`world` local processes that stay alive between calls; a context manager.

    Processes start with the first `run` and again after a failure that ended them.  A torch.distributed group that a
    function leaves open is still open in the next `run`; once all have left it, the next `run` has a new store.
    Not safe for use by several threads at once.
    """

    def __init__(self, world: int, *, timeout: float | None = 300.0) -> None:
        """timeout: seconds for each `run`, start of processes included; None for no limit."""
        if not isinstance(world, int) or isinstance(world, bool) or world < 1:
            raise UsageError(f"the number of ranks is {world!r}", why="it must be an integer of at least 1")
        self.world, self.timeout = world, timeout
        self._fleet: Fleet | None = None

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Run fn(*args) on every rank; return the results by rank, or raise as `launch` does.

        Processes stay alive after an exception only if every rank raised the same one.
        """
        refuse_while_importing()
        call = pickle_call(fn, args)
        deadline = None if self.timeout is None else time.monotonic() + self.timeout
        if self._fleet is None or not self._fleet.members:
            self._fleet = Fleet(self.world, deadline)
        return self._fleet.run(call, name_of(fn), deadline)

    @property
    def pids(self) -> list[int]:
        """Process ids by rank; empty before the first run and after a failure that ended the processes."""
        members = self._fleet.members if self._fleet else []
        return [m.process.pid for m in members if m.process.pid is not None]

    def close(self) -> None:
        """End the processes; those that do not exit by themselves within seconds are killed."""
        fleet, self._fleet = self._fleet, None
        if fleet is not None:
            fleet.close()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close()
