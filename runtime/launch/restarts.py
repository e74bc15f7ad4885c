"""Start all ranks again after one of them failed: one fleet of processes, with a store of its own, per generation.

A launcher that is asked to stop passes that on to its ranks, and starts none again.  Under an elastic launch the next
generation has the devices that are left, or that came back (`members`).
"""

from __future__ import annotations

import logging
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from autopart.ir.errors import AutopartError, UsageError
from autopart.launcher import RESCUE_VARIABLE, Living
from autopart.runtime.launch.members import Members
from autopart.runtime.launch.memory import folder_in_memory
from autopart.runtime.launch.reasons import Death
from autopart.runtime.launch.starting import forked
from autopart.runtime.launch.supervise import Fleet
from autopart.runtime.watch.stop_signals import StopSignals

PAUSE_S = 0.1
"""Seconds before the first restart; doubled each time that the ranks failed soon after their start."""
LONGEST_PAUSE_S = 30.0
LOOK_S = 0.25
SOON_S = 60.0
"""A generation that lived for so many seconds was healthy: the pauses begin again."""

_log = logging.getLogger("autopart")


def run_generations(
    world: int,
    call: bytes,
    name: str,
    deadline: float | None,
    restarts: int,
    grace_s: float = 30.0,
    members: Members | None = None,
) -> list[Any]:
    """Run a pickled call on `world` new processes and return the results by rank; after a failure start all of them
    again, at most `restarts` times.

    A process that died may do better next time.  An error that was raised may not: the same error at the same place
    twice ends the run at once, and so does an error of usage.  Raises what the last generation failed with, with a note
    that names the first failures of the generations before.  deadline: in time.monotonic() seconds, over all of them.

    members: of an elastic launch.  After a death those that are left start at once, which does not count as a restart;
    when a device comes back the ranks are asked to stop, and all start together.  Ranks that live may keep their state
    in a folder in memory, which is deleted at the end.

    SIGTERM and SIGUSR1 are passed on to the ranks, which have `grace_s` seconds to end after the first SIGTERM; a
    second one ends all processes now, by SystemExit.  Nothing is started again after either.
    """
    stop = StopSignals(again=lambda: sys.exit(128 + signal.SIGTERM), after_s=LOOK_S)
    stop.enter()
    try:
        with _shared(members) as shared:
            return _Generations(world, deadline, restarts, stop, grace_s, members, shared).run(call, name)
    except AutopartError as error:
        if stop.asked:
            error.add_note(f"the launcher was asked to stop by {signal.Signals(stop.asked).name}: no restart")
        raise
    finally:
        stop.leave()


@contextmanager
def _shared(members: Members | None) -> Iterator[dict[str, Any]]:
    """Yield what all generations of an elastic launch are given: a folder in memory, and how ranks start."""
    if members is None:
        yield {}
        return
    with folder_in_memory() as memory:
        yield {"env": {RESCUE_VARIABLE: memory}, "start": forked}


class _Generations:
    """One fleet after another, until one has run to its end or no more may be started."""

    def __init__(
        self,
        world: int,
        deadline: float | None,
        restarts: int,
        stop: StopSignals,
        grace_s: float,
        members: Members | None,
        shared: Mapping[str, Any],
    ) -> None:
        self._shared = shared
        self._world, self._deadline, self._restarts, self._members = world, deadline, restarts, members
        self._stop, self._grace_s = stop, grace_s
        self._failures: list[AutopartError] = []
        self._number = self._soon = 0

    def run(self, call: bytes, name: str) -> list[Any]:
        """Return the results of the generation that ended the run."""
        while True:
            began = time.monotonic()
            living = self._members.living(began) if self._members is not None else None
            fleet: Fleet | None = None
            try:
                fleet = self._started(living)
                results = fleet.run(call, name, self._deadline)
                if not fleet.heeded or self._stop.asked:
                    return results
                _log.warning("the ranks have stopped so that others can join")
                pause = 0.0
            except AutopartError as error:
                pause = self._pause_after(error, fleet, living)
            finally:
                if fleet is not None:
                    fleet.close()
            self._number += 1
            self._soon = 0 if time.monotonic() - began >= SOON_S else self._soon + 1
            _pause(pause, self._stop)
            if self._stop.asked and self._failures:
                raise self._failures[-1]

    def _started(self, living: Living | None) -> Fleet:
        if self._members is None or living is None:
            return Fleet(self._world, self._deadline, **self._around())
        return Fleet(
            len(living.devices), self._deadline, living=living, join_at=self._members.join_at(living), **self._around()
        )

    def _around(self) -> dict[str, Any]:
        return {"generation": self._number, "stop": self._stop, "grace_s": self._grace_s, **self._shared}

    def _pause_after(self, error: AutopartError, fleet: Fleet | None, living: Living | None) -> float:
        """Return the seconds to wait before the ranks are started again after an error; raise it if they are not."""
        if fleet is not None and living is not None and not self._stop.asked and self._lose(error, fleet, living):
            return PAUSE_S
        died = fleet is not None and isinstance(fleet.cause, Death) and fleet.cause.rank in fleet.lost
        again = not died and any(_same(error, before) for before in self._failures[-1:])
        self._failures.append(error)
        pause = min(LONGEST_PAUSE_S, PAUSE_S * 2.0 ** min(self._soon, 20))
        over = self._deadline is not None and time.monotonic() + pause >= self._deadline
        exhausted = len(self._failures) > self._restarts
        if over or again or self._stop.asked or isinstance(error, UsageError) or exhausted:
            _tell(self._failures, again)
            raise error
        _log.warning("restart %d of %d in %.1f s: %s", len(self._failures), self._restarts, pause, _line(error))
        return pause

    def _lose(self, error: AutopartError, fleet: Fleet, living: Living) -> bool:
        """Leave out the devices whose ranks died, and return whether enough are left to go on without them."""
        assert self._members is not None
        lost, now = [living.devices[rank] for rank in fleet.lost], time.monotonic()
        if not lost or not self._members.lose(lost, now):
            return False
        left, which = len(self._members.living(now).devices), ", ".join(map(str, lost))
        _log.warning("device %s is lost, %d ranks go on: %s", which, left, _line(error))
        return True


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
