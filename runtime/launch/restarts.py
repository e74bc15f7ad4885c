"""Start all ranks again after one of them failed: one fleet of processes, with a store of its own, per generation."""

from __future__ import annotations

import logging
import time
from typing import Any

from autopart.ir.errors import AutopartError, UsageError
from autopart.runtime.launch.reasons import Death
from autopart.runtime.launch.supervise import Fleet

PAUSE_S = 0.1
"""Seconds before the first restart; doubled each time that the ranks failed soon after their start."""
LONGEST_PAUSE_S = 30.0
SOON_S = 60.0
"""A generation that lived for so many seconds was healthy: the pauses begin anew."""

_log = logging.getLogger("autopart")


def run_generations(world: int, call: bytes, name: str, deadline: float | None, restarts: int) -> list[Any]:
    """Run a pickled call on `world` new processes and return the results by rank; after a failure start all of them
    again, at most `restarts` times.

    A process that died may do better next time.  An error that was raised may not: the same error at the same place
    twice ends the run at once, and so does an error of usage.  Raises what the last generation failed with, with a note
    that names the first failures of the generations before.  deadline: in time.monotonic() seconds, over all of them.
    """
    failures: list[AutopartError] = []
    soon = 0
    while True:
        started = time.monotonic()
        fleet: Fleet | None = None
        try:
            fleet = Fleet(world, deadline, generation=len(failures))
            return fleet.run(call, name, deadline)
        except AutopartError as error:
            died = fleet is not None and isinstance(fleet.cause, Death)
            again = not died and any(_same(error, before) for before in failures[-1:])
            failures.append(error)
            pause = min(LONGEST_PAUSE_S, PAUSE_S * 2.0 ** min(soon, 20))
            over = deadline is not None and time.monotonic() + pause >= deadline
            if over or again or isinstance(error, UsageError) or len(failures) > restarts:
                _tell(failures, again)
                raise
            _log.warning("restart %d of %d in %.1f s: %s", len(failures), restarts, pause, _line(error))
        finally:
            if fleet is not None:
                fleet.close()
        soon = 0 if time.monotonic() - started >= SOON_S else soon + 1
        time.sleep(pause)


def _same(error: AutopartError, other: AutopartError) -> bool:
    return (type(error), error.what, error.where) == (type(other), other.what, other.where)


def _tell(failures: list[AutopartError], again: bool) -> None:
    """Add to the last failure how often the ranks were restarted, and what ended the generations before."""
    *earlier, last = failures
    if not earlier:
        return
    lines = [f"after {len(earlier)} restart(s)" + (": the same error twice is not tried again" if again else "")]
    lines += [f"  start {number}: {_line(error)}" for number, error in enumerate(earlier)]
    last.add_note("\n".join(lines))


def _line(error: AutopartError) -> str:
    return f"{error.what} ({error.where})" if error.where else error.what
