"""One rank's watch over the ranks it waits for.

Four times a second a thread finds out whether this rank waits, for which rank in the end, and whether that rank can
still go on (`states`).  It looks at the ranks that decide this (`states.looked_at`); what another one finds, it learns
as the cause of a failure.  If waiting is pointless, the thread breaks the connections in which the main thread waits,
which then raises the reason.  If nothing can be broken (the process group is being opened), it prints the reason and
ends the process.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

from autopart.ir.errors import AutopartError, WorkerError
from autopart.runtime import activity
from autopart.runtime.activity import AWAY, EVERYONE, JOINING, NOBODY, PATIENT
from autopart.runtime.watch.effects import first_line, is_effect
from autopart.runtime.watch.heart import STORE_S, Heart
from autopart.runtime.watch.processes import (
    STOPPED_S,
    end_process,
    sibling,
    state_of,
    this_machine,
    watch_launcher,
)
from autopart.runtime.watch.states import RankState, held_up_by, looked_at, state_of_rank, verdict

TICK_S = 0.25
LOOK_S = 0.5  # shorter waits are ignored
SEEK_S = 1.0  # between two searches for a process that has not come
QUIET_S = 5.0  # a rank whose last heartbeat is older is not believed to wait, since its thread may be blocked
SILENT_S = 10.0  # a rank of another machine without a heartbeat for this long is taken for dead
DEAF_S = 60.0  # as is one of this machine whose process runs
NOTE_S = 10.0  # a rank that blocks others for longer is named in the log
GRACE_S = 5.0  # for the main thread to raise once its connections are broken
CAUSE_S = 5.0  # for the rank that failed first to report it
TELL_S = 0.5  # for a store to take that
NEAR = 32  # ranks before and behind, which are read for a message, and to find which process has ended

_log = logging.getLogger("autopart")


class Monitor:
    """The watch of one rank, until `stop`; `attach` sets the store, `enter` the group whose failures count."""

    def __init__(self, rank: int, size: int, limit_s: float) -> None:
        self.rank, self.size, self.limit_s, self.planning_s = rank, size, limit_s, math.inf
        self.verdict: WorkerError | None = None
        self._breakers: list[Callable[[], None]] = []
        self._heart: Heart | None = None
        self._rank0_has_store = self._told = False
        self._machine, self._pid = this_machine(), os.getpid()
        self._wait_key, self._wait_from = (-1, NOBODY), 0.0
        self._stopped_from: dict[int, float] = {}
        self._siblings: dict[int, int] = {}
        self._sought_at = 0.0
        self._near = False
        self._verdict_at, self._note_s, self._looked_at = 0.0, NOTE_S, time.monotonic()
        watch_launcher()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="autopart-watch", daemon=True)
        self._thread.start()
        atexit.register(self.stop)

    # -- for the main thread ---------------------------------------------------------------------------------------

    def attach(self, store: Store, *, rank0_has_store: bool, life: int = 0) -> None:
        """Send heartbeats through this store.  rank0_has_store: whether it ends with rank 0, not with the launcher.
        life: as for `Heart`."""
        self._rank0_has_store = rank0_has_store
        self._heart = Heart(store, self.rank, self.size, life)

    def opening(self, group: str) -> None:
        """Report and read failures of a group while it is opened."""
        if self._heart is not None:
            self._heart.enter(group)

    def enter(self, group: str, breaker: Callable[[], None]) -> None:
        """Watch a group that was opened; `breaker` breaks it."""
        self.verdict = None
        self._breakers.append(breaker)
        self.opening(group)

    def failed(self) -> bool:
        """Whether a rank of the group has reported a failure; asks the store."""
        return self.verdict is not None or (self._heart is not None and self._heart.failed())

    def require(self) -> None:
        """Raise WorkerError if waiting has become pointless."""
        if self.verdict is not None:
            raise self.verdict

    def tell(self, error: BaseException) -> None:
        """Tell the other ranks why this one failed."""
        self._told = True
        if self._heart is not None:
            self._heart.tell(_report(self.rank, error, known=error is self.verdict or is_effect(error)))

    def explained(self, error: BaseException) -> BaseException:
        """Return the error that happened first, if `error` only follows from another."""
        if not is_effect(error):
            return error
        if self._heart is not None and not self._heart.lost:  # what is known of the others may be of long ago
            self._heart.wanted = self._with_near(self._heart.wanted)
            self._heart.hurry()
            self._heart.failed()
        pause_s = max(0.02, self.size * STORE_S)
        end = time.monotonic() + max(CAUSE_S, 3 * pause_s)
        while self.verdict is None and time.monotonic() < end:
            if self._heart is not None:
                self._heart.hurry()
                cause = self._heart.cause
                if cause is not None and cause["rank"] != self.rank:
                    self.verdict = _told(cause)
                    break
            ended = [state for state in self._states(time.monotonic()).values() if state.dead]
            if ended:
                what = f"{ended[0].name} {ended[0].dead}"
                self.verdict = WorkerError(what, where=ended[0].doing, why=first_line(error))
            time.sleep(pause_s)
        return self.verdict if self.verdict is not None else error

    def stop(self) -> None:
        """Announce that this rank left, and end the watch."""
        if os.getpid() != self._pid:  # a forked child that ends is no rank
            return
        atexit.unregister(self.stop)
        self._ending.set()
        activity.leave()
        heart, self._heart = self._heart, None
        if heart is not None:
            with suppress(Exception):  # of its store
                heart.stop()
                if self.rank == 0 and self._rank0_has_store and self.verdict is None and not self._told:
                    heart.await_others()

    # -- in its own thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._ending.wait(TICK_S):
            self._look()

    def _look(self) -> None:
        now = time.monotonic()
        if now - self._looked_at > 10 * TICK_S:  # this process was itself stopped, or starved
            self._stopped_from.clear()
            self._wait_from += now - self._looked_at
        self._looked_at = now
        heart, status = self._heart, activity.current()
        if heart is not None and heart.cause is not None and heart.cause["rank"] != self.rank:
            self._decide(_told(heart.cause), now)
        key = (status.changes, status.waits)
        if key != self._wait_key:
            self._wait_key, self._wait_from, self._note_s, self._near = key, now, NOTE_S, False
        waited = now - self._wait_from
        if heart is not None:
            heart.curious = status.waits != NOBODY and waited >= LOOK_S
        if status.waits == NOBODY or waited < LOOK_S:
            return
        if self.verdict is not None:
            if now - max(self._verdict_at, self._wait_from) > GRACE_S:
                end_process(str(self.verdict))
            return
        states = self._states(now)
        if key == (status.changes, status.waits):  # else the main thread went on meanwhile
            self._judge(states, waited, now)

    def _judge(self, states: Mapping[int, RankState], waited: float, now: float) -> None:
        """End the waiting if it is pointless; log it if it takes long."""
        heart = self._heart
        states, whole = self._relevant(states, waited)
        found = verdict(self.rank, states, waited, self.limit_s, self.planning_s, whole=whole)
        if found is None and (waited < self._note_s or not (whole or held_up_by(self.rank, states))):
            self._near = False
        elif not self._near and heart is not None and not heart.lost and heart.stuck_s() < SILENT_S:
            self._near = True  # a message also says what the ranks around do, from the next reading on
        elif found is not None:
            if heart is not None:  # before its effects come, here and elsewhere
                heart.tell(_report(self.rank, found, known=True), TELL_S)
            self._decide(found, now)
        else:
            self._note(states, waited)

    def _relevant(self, states: Mapping[int, RankState], waited: float) -> tuple[Mapping[int, RankState], bool]:
        """Return the states that decide whether this rank can go on, and whether they are all; read these ranks."""
        limit_s = min(self.limit_s, self.planning_s)
        ranks, whole = looked_at(self.rank, states, self.size, late=waited >= limit_s)
        if self._near:
            ranks = self._with_near(ranks)
        if self._rank0_has_store:  # all depend on it
            ranks = {*ranks, 0}
        heart = self._heart
        if heart is not None:
            grown, heart.wanted = not set(ranks) <= {self.rank, *heart.wanted}, ranks
            if grown:
                heart.hurry()
        return {rank: state for rank, state in states.items() if rank in ranks}, whole

    def _with_near(self, ranks: Collection[int]) -> Collection[int]:
        """Return these ranks and those around this one."""
        return {*ranks, *range(max(0, self.rank - NEAR), min(self.size, self.rank + NEAR + 1))}

    def _decide(self, why: WorkerError, now: float) -> None:
        if self.verdict is not None:
            return
        self.verdict, self._verdict_at = why, now
        for breaker in self._breakers:
            breaker()

    def _note(self, states: Mapping[int, RankState], waited: float) -> None:
        """Log, on one rank, which ranks block the others for long."""
        self._note_s *= 4
        roots = held_up_by(self.rank, states)
        if self.rank > min(rank for rank, state in states.items() if state.waiting):
            return
        if any(root.phase == PATIENT for root in roots):
            return
        who = ", ".join(root.line() for root in roots) or "the ranks wait for each other"
        _log.warning("autopart: rank %d has waited for %.0f s (%s); held up by %s", self.rank, waited,
                     states[self.rank].doing, who)  # fmt: skip

    # -- what is known of each rank --------------------------------------------------------------------------------

    def _states(self, now: float) -> dict[int, RankState]:
        """Return the states of this rank and of those whose heartbeat is read, in the order of ranks."""
        heart, waits = self._heart, activity.current().waits
        if heart is not None:
            read = [r for r in heart.wanted if r != self.rank and heart.knows(r)]
        else:  # not connected to the store yet
            read = [waits - 1] if waits not in (NOBODY, EVERYONE, self.rank + 1) else []
        mine = state_of_rank(self.rank, activity.current())
        return {r: mine if r == self.rank else self._other(r, now) for r in sorted([self.rank, *read])}

    def _other(self, rank: int, now: float) -> RankState:
        heart = self._heart
        seen = heart.seen.get(rank) if heart is not None else None
        if heart is None or seen is None:
            return RankState(rank, doing="has not come yet", dead=self._dead_unseen(rank, now))
        beat, phase = seen.beat, seen.beat["phase"]
        here = beat["machine"] == self._machine
        silent = heart.silent_s(rank)
        pid, joining = beat["pid"] if here else None, activity.current().phase == JOINING
        if phase != AWAY:
            dead = self._dead(rank, pid, silent, now)
        else:  # it sends no heartbeats; a rank that opens the group waits for it to come back
            dead = f"has left: its process {pid} is gone" if joining and pid and state_of(pid) == "gone" else ""
        if not dead and rank == 0 and self._rank0_has_store and heart.stuck_s() > SILENT_S:
            dead = f"does not answer: {_silence(heart.stuck_s(), runs=False)}"
        doing, waits = beat["note"], beat["waits"]
        if not dead and phase != AWAY and silent >= QUIET_S:
            doing, waits = f"{doing}; {_silence(silent, runs=bool(pid))}", NOBODY
        if dead and phase != AWAY:
            doing += ", in its last heartbeat"
        return RankState(rank, beat["label"], doing, phase, waits, max(0.0, now - seen.same_at), dead)

    def _dead(self, rank: int, pid: int | None, silent: float, now: float) -> str:
        """Return why a rank cannot go on, or ""."""
        state = state_of(pid) if pid is not None else ""
        if state == "gone":
            return f"ended: its process {pid} is gone"
        if state != "stopped":
            self._stopped_from.pop(rank, None)
        elif now - self._stopped_from.setdefault(rank, now) >= STOPPED_S:
            return f"is stopped: process {pid}, by a signal"
        if silent >= (DEAF_S if state else SILENT_S):
            return f"does not answer: {_silence(silent, runs=bool(state))}"
        return ""

    def _dead_unseen(self, rank: int, now: float) -> str:
        """Return why a rank that sent no heartbeat yet cannot go on; only processes of this launcher can be found."""
        if rank not in self._siblings and self._wait_key[1] - 1 == rank and now - self._sought_at >= SEEK_S:
            self._sought_at, found = now, sibling(rank)
            if found is not None:
                self._siblings[rank] = found
        return self._dead(rank, self._siblings[rank], 0.0, now) if rank in self._siblings else ""


def _silence(seconds: float, *, runs: bool) -> str:
    """Describe a missing heartbeat.  runs: whether the process is known to run."""
    why = (
        "its process runs: native code that holds the GIL?"
        if runs
        else "its process is stopped, or its machine is gone"
    )
    return f"no sign of life for {seconds:.0f} s, {why}"


def _told(cause: Mapping[str, Any]) -> WorkerError:
    """Return the error for a failure that another rank reported."""
    error = WorkerError(**cause["error"])
    error.told_by = cause["rank"]
    return error


def _report(rank: int, error: BaseException, *, known: bool) -> dict[str, Any]:
    """Describe a failure for other ranks.  known: whether it is about another rank, so that all report the same."""
    parts = {"what": first_line(error), "where": "", "why": "", "fix": ""}
    if isinstance(error, AutopartError):
        parts = {"what": error.what, "where": error.where, "why": error.why, "fix": error.fix}
    if not known:
        name, what = type(error).__name__, parts["what"]
        what = f"rank {rank} failed first: {name}" + (f": {what}" if what else "")
        parts |= {"what": what, "fix": f"see the error of rank {rank}; this one only follows from it"}
    return {"rank": rank, "error": parts}
