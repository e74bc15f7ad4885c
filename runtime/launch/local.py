"""Local processes: the same function on every rank, results by rank, one error if something fails.

Under torchrun (RANK and WORLD_SIZE are set) no process is started.  Otherwise `launch` starts processes on this machine
that see the variables that torchrun sets.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from autopart.ir.errors import ClusterError, UsageError
from autopart.launcher import DEVICES_VARIABLE, Living, adopt_task, torchrun_line
from autopart.runtime.launch.restarts import Members, run_generations
from autopart.runtime.launch.supervise import name_of, pickle_call, refuse_while_importing


def launch(
    fn: Callable[..., Any],
    world: int,
    *args: Any,
    timeout: float | None = None,
    local: int | None = None,
    restarts: int = 0,
    grace: float = 30.0,
    elastic: tuple[int, int] | None = None,
    rejoin: float = math.inf,
) -> list[Any]:
    """Run fn(*args) on `world` ranks and return their results by rank.

    Under torchrun, srun or mpirun this process is one of the ranks: fn is called here and the list holds its result
    alone.  Otherwise `world` local processes are started; fn, args and results are pickled.  timeout: seconds for
    everything but planning, None for no limit.  local: ranks on each host of the cluster, for messages.
    restarts: how often all ranks may be started again after a failure; grace: seconds that they have to end after
    SIGTERM to this process (`restarts.run_generations`).  elastic: the least and the largest number of ranks between
    which the run goes on when processes die; rejoin: seconds after which a lost device is used again (`Members`).
    Raises UsageError (fn cannot be sent, or the script has no __main__ guard), ClusterError (torchrun runs another
    number of ranks), WorkerError (a process died, raised or ran out of time), or the AutopartError of the first rank
    that failed, with its rank and stage in `where`.
    """
    refuse_while_importing()
    adopt_task(os.environ)
    if under_torchrun():
        least, most = elastic or (world, world)
        running = int(os.environ["WORLD_SIZE"])
        if not least <= running <= most:
            asked = f"{least} to {most}" if elastic else f"{world}"
            raise ClusterError(
                f"{running} ranks run, but {asked} were asked for", where="WORLD_SIZE", fix=torchrun_line(world, local)
            )
        if elastic:
            os.environ[DEVICES_VARIABLE] = Living(tuple(range(running)), world).text()
        return [fn(*args)]
    if not isinstance(world, int) or isinstance(world, bool) or world < 1:
        raise UsageError(f"the number of ranks is {world!r}", why="it must be an integer of at least 1")
    call, deadline = pickle_call(fn, args), None if timeout is None else time.monotonic() + timeout
    members = Members(world, *elastic, rejoin) if elastic else None
    return run_generations(world, call, name_of(fn), deadline, restarts, grace, members)


def under_torchrun(env: Mapping[str, str] = os.environ) -> bool:
    """Whether a launcher already started the ranks: RANK and WORLD_SIZE are set."""
    return "RANK" in env and "WORLD_SIZE" in env
