"""Start all ranks again after one of them failed: one fleet of processes, with a store of its own, per generation.

A launcher that is asked to stop passes that on to its ranks, and starts none again.  Under an elastic launch the next
generation has the devices that are left, or that came back (`Members`), and ranks may keep their state in a folder in
memory that outlives them.
"""

from __future__ import annotations

import fcntl
import logging
import math
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autopart.ir.errors import AutopartError, UsageError
from autopart.launcher import RESCUE_VARIABLE, Living
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
LONGEST_S = 3600.0
"""Longest time in which a device that is lost again and again is left alone."""
MEMORY = Path("/dev/shm")
_PREFIX = "autopart-memory-"

_log = logging.getLogger("autopart")


@dataclass
class Members:
    """The devices of a cluster of `of` devices, and which of them may have a rank.  Times: of time.monotonic().

    least, most: the smallest and the largest number of ranks of the run.  rejoin_s: seconds after which a lost device
    is used again; they double each time that it is lost within ten times that time of coming back.  inf: never.
    """

    of: int
    least: int
    most: int
    rejoin_s: float
    back_at: dict[int, float] = field(default_factory=dict)
    """When a device that was lost comes back."""
    unfit: set[int] = field(default_factory=set)
    """Numbers of ranks that the script cannot run with, such as those that its `tensor_parallel=` does not divide."""
    _waited_s: dict[int, float] = field(default_factory=dict)

    def living(self, now: float) -> Living:
        """Return the devices that have ranks in a generation that starts now: the first of those that are there, at
        most `most`, and as many as the script can run with."""
        there = [device for device in range(self.of) if self.back_at.get(device, -math.inf) <= now][: self.most]
        count = next((count for count in range(len(there), self.least - 1, -1) if count not in self.unfit), len(there))
        return Living(tuple(there[:count]), self.of)

    def misfit(self, living: Living) -> bool:
        """Note that the script cannot run with so many ranks, and return whether it may with fewer."""
        count = len(living.devices)
        self.unfit.add(count)
        return not self.unfit.issuperset(range(self.least, count))

    def lose(self, devices: Collection[int], now: float) -> bool:
        """Leave devices alone for a while; return False, and forget all losses, if too few are left then."""
        for device in devices:
            before = self._waited_s.get(device, 0.0)
            again = before and now - self.back_at.get(device, -math.inf) < 10 * before
            self._waited_s[device] = min(LONGEST_S, 2 * before) if again else self.rejoin_s
            self.back_at[device] = now + self._waited_s[device]
        if len(self.living(now).devices) >= self.least:
            return True
        self.back_at.clear()
        return False

    def join_at(self, living: Living) -> float:
        """Return when a generation on these devices could have more ranks; inf if never."""
        times = sorted(at for device, at in self.back_at.items() if device not in living.devices)
        return next((at for at in times if len(self.living(at).devices) > len(living.devices)), math.inf)


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
    when a device comes back the ranks are asked to stop, and all start together.  An error of usage on fewer ranks than
    at first is tried with fewer still, which does not count either, unless it stays the same.  Ranks that live may keep
    their state in a folder in memory, which is deleted at the end.

    SIGTERM and SIGUSR1 are passed on to the ranks, which have `grace_s` seconds to end after the first SIGTERM; a
    second one ends all processes now, by SystemExit.  Nothing is started again after either.
    """
    stop = StopSignals(again=lambda: sys.exit(128 + signal.SIGTERM), after_s=LOOK_S)
    stop.enter()
    try:
        with folder_in_memory() if members is not None else nullcontext() as memory:
            around: dict[str, Any] = {"stop": stop, "grace_s": grace_s}
            if members is not None:
                around |= {"env": {RESCUE_VARIABLE: memory}, "start": forked}
            return _Generations(world, deadline, restarts, members, stop, around).run(call, name)
    except AutopartError as error:
        if stop.asked:
            error.add_note(f"the launcher was asked to stop by {signal.Signals(stop.asked).name}: no restart")
        raise
    finally:
        stop.leave()


@dataclass
class _Generations:
    """One fleet after another, until one has run to its end or no more may be started.

    around: what every fleet is given.  soon: how many generations in a row did not live long.  misfit: the last error
    after which fewer ranks were tried."""

    world: int
    deadline: float | None
    restarts: int
    members: Members | None
    stop: StopSignals
    around: Mapping[str, Any]
    failures: list[AutopartError] = field(default_factory=list)
    soon: int = 0
    misfit: AutopartError | None = None

    def run(self, call: bytes, name: str) -> list[Any]:
        """Return the results of the generation that ended the run."""
        number = 0
        while True:
            began = time.monotonic()
            world, given, living = self.world, {**self.around, "generation": number}, None
            if self.members is not None:
                living = self.members.living(began)
                world = len(living.devices)
                given |= {"living": living, "join_at": self.members.join_at(living)}
            fleet: Fleet | None = None
            try:
                fleet = Fleet(world, self.deadline, **given)
                results = fleet.run(call, name, self.deadline)
                if not fleet.heeded or self.stop.asked:
                    return results
                _log.warning("the ranks have stopped so that others can join")
                pause = 0.0
            except AutopartError as error:
                pause = self._pause_after(error, fleet, living)
            finally:
                if fleet is not None:
                    fleet.close()
            self.soon = 0 if time.monotonic() - began >= SOON_S else self.soon + 1
            _pause(pause, self.stop)
            if self.stop.asked and self.failures:
                raise self.failures[-1]
            number += 1

    def _pause_after(self, error: AutopartError, fleet: Fleet | None, living: Living | None) -> float:
        """Return the seconds to wait before the ranks are started again after an error; raise it if they are not, with
        a note how often they were restarted, and what ended the generations before."""
        if fleet is not None and living is not None and not self.stop.asked and self._lose(error, fleet, living):
            return PAUSE_S
        if living is not None and not self.stop.asked and self._fits_fewer(error, living):
            return 0.0
        died = fleet is not None and isinstance(fleet.cause, Death) and fleet.cause.rank in fleet.lost
        again = not died and any(_alike(error, each) for each in self.failures[-1:])
        pause = min(LONGEST_PAUSE_S, PAUSE_S * 2.0 ** min(self.soon, 20))
        over = self.deadline is not None and time.monotonic() + pause >= self.deadline
        earlier, self.failures = self.failures, [*self.failures, error]
        exhausted = len(self.failures) > self.restarts
        if over or again or self.stop.asked or isinstance(error, UsageError) or exhausted:
            if earlier:
                why = ": the same error twice is not tried again" if again else ""
                lines = [f"  start {number}: {_line(each)}" for number, each in enumerate(earlier)]
                error.add_note("\n".join([f"after {len(earlier)} restart(s){why}", *lines]))
            raise error
        _log.warning("restart %d of %d in %.1f s: %s", len(self.failures), self.restarts, pause, _line(error))
        return pause

    def _lose(self, error: AutopartError, fleet: Fleet, living: Living) -> bool:
        """Leave out the devices whose ranks died, and return whether enough are left to go on without them."""
        assert self.members is not None
        lost, now = [living.devices[rank] for rank in fleet.lost], time.monotonic()
        if not lost or not self.members.lose(lost, now):
            return False
        left, which = len(self.members.living(now).devices), ", ".join(map(str, lost))
        _log.warning("device %s is lost, %d ranks go on: %s", which, left, _line(error))
        return True

    def _fits_fewer(self, error: AutopartError, living: Living) -> bool:
        """Leave out this number of ranks after an error of usage that it may be the reason of, since there were more
        before, and return whether fewer may do: options may fit some numbers alone."""
        assert self.members is not None
        fewer = isinstance(error, UsageError) and len(living.devices) < self.members.most
        if not fewer or (self.misfit is not None and _alike(error, self.misfit)) or not self.members.misfit(living):
            return False
        self.misfit = error
        left = len(self.members.living(time.monotonic()).devices)
        _log.warning("the script cannot run on %d ranks, %d go on: %s", len(living.devices), left, _line(error))
        return True


def _alike(error: AutopartError, other: AutopartError) -> bool:
    """Return whether two errors are of the same type, and say the same of the same place, whichever rank said it: of
    ranks that all meet an error, the first one's is raised."""
    return (type(error), error.what, _place(error)) == (type(other), other.what, _place(other))


def _place(error: AutopartError) -> str:
    """Return where an error happened, without the rank that it happened on."""
    return ", ".join(part for part in error.where.split(", ") if not part.startswith("rank "))


def _pause(seconds: float, stop: StopSignals) -> None:
    """Wait, but not on when the launcher is asked to stop."""
    end = time.monotonic() + seconds
    while not stop.asked and (left := end - time.monotonic()) > 0:
        time.sleep(min(left, LOOK_S))


def _line(error: AutopartError) -> str:
    return f"{error.what} ({error.where})" if error.where else error.what


@contextmanager
def folder_in_memory() -> Iterator[str]:
    """Yield a new folder that only this user can open, and delete it at the end; "" where the system has none.

    It is locked until then.  That tells other launchers that this one lives: its process id would not, in a container
    that has the same memory and other ids."""
    if not (MEMORY.is_dir() and os.access(MEMORY, os.W_OK)):
        yield ""
        return
    _sweep()
    made = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=MEMORY))
    held = os.open(made, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        made = made.rename(made.with_name(made.name[1:]))  # no other launcher looks at it before it is locked
        yield str(made)
    finally:
        shutil.rmtree(made, ignore_errors=True)
        os.close(held)


def _sweep() -> None:
    """Delete what launchers of this user left that were killed."""
    for left in MEMORY.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            held = os.open(left, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(held).st_uid == os.getuid():
                    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(left, ignore_errors=True)
            finally:
                os.close(held)
