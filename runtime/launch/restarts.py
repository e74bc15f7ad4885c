"""Start all ranks again after one of them failed: one fleet of processes, with a store of its own, per generation.

A launcher that is asked to stop passes that on to its ranks, and starts none again.
"""

from __future__ import annotations

import logging
import signal
import sys
import time
from typing import Any

from autopart.ir.errors import AutopartError, UsageError
from autopart.runtime.launch.reasons import Death
from autopart.runtime.launch.supervise import Fleet
from autopart.runtime.watch.stop_signals import StopSignals

PAUSE_S = 0.1
"""Seconds before the first restart; doubled each time that the ranks failed soon after their start."""
LONGEST_PAUSE_S = 30.0
LOOK_S = 0.25
SOON_S = 60.0
"""A generation that lived for so many seconds was healthy: the pauses begin anew."""

_log = logging.getLogger("autopart")


def run_generations(
    world: int, call: bytes, name: str, deadline: float | None, restarts: int, grace_s: float = 30.0
) -> list[Any]:
    """Run a pickled call on `world` new processes and return the results by rank; after a failure start all of them
    again, at most `restarts` times.

    A process that died may do better next time.  An error that was raised may not: the same error at the same place
    twice ends the run at once, and so does an error of usage.  Raises what the last generation failed with, with a note
    that names the first failures of the generations before.  deadline: in time.monotonic() seconds, over all of them.

    SIGTERM and SIGUSR1 are passed on to the ranks, which have `grace_s` seconds to end after the first SIGTERM; a
    second one ends all processes now, by SystemExit.  Nothing is started again after either.
    """
    stop = StopSignals(again=lambda: sys.exit(128 + signal.SIGTERM), after_s=LOOK_S)
    stop.enter()
    try:
        return _run_generations(world, call, name, deadline, restarts, stop, grace_s)
    except AutopartError as error:
        if stop.asked:
            error.add_note(f"the launcher was asked to stop by {signal.Signals(stop.asked).name}: no restart")
        raise
    finally:
        stop.leave()


def _run_generations(
    world: int, call: bytes, name: str, deadline: float | None, restarts: int, stop: StopSignals, grace_s: float
) -> list[Any]:
    failures: list[AutopartError] = []
    soon = 0
    while True:
        started = time.monotonic()
        fleet: Fleet | None = None
        try:
            fleet = Fleet(world, deadline, generation=len(failures), stop=stop, grace_s=grace_s)
            return fleet.run(call, name, deadline)
        except AutopartError as error:
            died = fleet is not None and isinstance(fleet.cause, Death)
            again = not died and any(_same(error, before) for before in failures[-1:])
            failures.append(error)
            pause = min(LONGEST_PAUSE_S, PAUSE_S * 2.0 ** min(soon, 20))
            over = deadline is not None and time.monotonic() + pause >= deadline
            if over or again or stop.asked or isinstance(error, UsageError) or len(failures) > restarts:
                _tell(failures, again)
                raise
            _log.warning("restart %d of %d in %.1f s: %s", len(failures), restarts, pause, _line(error))
        finally:
            if fleet is not None:
                fleet.close()
        soon = 0 if time.monotonic() - started >= SOON_S else soon + 1
        _pause(pause, stop)
        if stop.asked:
            raise failures[-1]


def _pause(seconds: float, stop: StopSignals) -> None:
    """Wait, but not on when the launcher is asked to stop."""
    end = time.monotonic() + seconds
    while not stop.asked and (left := end - time.monotonic()) > 0:
        time.sleep(min(left, LOOK_S))


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
