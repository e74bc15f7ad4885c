"""Which rank holds up which, by the status of every rank, and whether waiting has become pointless.

A rank that computes is never called dead, since it sends heartbeats.  A wait ends for a rank that cannot go on (it
ended, was stopped, or is silent), for one that has left, and at the time limit, which does not run while the rank that
is waited for plans or captures.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice

from autopart.ir.errors import WorkerError
from autopart.runtime.activity import AWAY, BUSY, EVERYONE, JOINING, NOBODY, PATIENT, SharedStatus, text_of

LEFT_S = 2.0
"""Seconds that a message of a rank which has left may take to arrive."""
REJOINS_S = 20.0
"""Seconds after which a rank that opens a group has left the one in which others wait for it; opening takes less."""


@dataclass(frozen=True, slots=True)
class RankState:
    """A rank as another sees it.

    doing: its last activity.  phase, waits: as in `SharedStatus`.  still_s: for how long it has done the same.  dead:
    why it cannot go on, or "".
    """

    rank: int
    label: str = ""
    doing: str = ""
    phase: int = BUSY
    waits: int = NOBODY
    still_s: float = 0.0
    dead: str = ""

    @property
    def name(self) -> str:
        """ "rank 1 (stage 1)", or "rank 1" without a label."""
        return f"rank {self.rank} ({self.label})" if self.label else f"rank {self.rank}"

    @property
    def waiting(self) -> bool:
        """Whether it can go on, but waits for others."""
        return self.waits != NOBODY and not self.dead and self.phase != AWAY

    def line(self) -> str:
        """Return one line for a list of all ranks."""
        state = self.dead or self.doing or "no note"
        if self.phase == AWAY and not self.dead:
            state = f"has left; the last it did: {self.doing or 'no note'}"
        if self.waiting:
            state += ", waits for the others" if self.waits == EVERYONE else f", waits for rank {self.waits - 1}"
        return f"{self.name}: {state}"


def state_of_rank(rank: int, status: SharedStatus) -> RankState:
    """Read the status of a rank, also after it was killed."""
    return RankState(rank, text_of(status.label), text_of(status.note), status.phase, status.waits)


def looked_at(
    me: int, states: Mapping[int, RankState], size: int, *, late: bool = False
) -> tuple[Collection[int], bool]:
    """Return the ranks that `me` has to look at, and whether the states of all that can hold it up are known.

    It follows whom it waits for, and whom those wait for.  Where it waits for all, it looks at the ranks behind it, in
    a ring, up to the next one that waits for all: that one looks further, and what it finds becomes the cause of all.
    So each rank is looked at, by few.  states: of the ranks that were looked at before.  late: whether it has waited
    for too long; the last of those that wait for all then looks at everybody, since they may wait for each other."""
    found, whole = dict.fromkeys((me,)), True
    ahead = [me]
    for rank in ahead:
        state = states.get(rank)
        if state is None or (state.waits == EVERYONE and state.waiting and rank != me):
            whole = False
        elif state.waits == EVERYONE and state.waiting:
            behind, whole = _behind(me, states, size, late=late)
            found |= dict.fromkeys(behind)
        elif state.waiting and state.waits - 1 not in found:
            found[state.waits - 1] = None
            ahead.append(state.waits - 1)
    return found.keys(), whole


def _behind(me: int, states: Mapping[int, RankState], size: int, *, late: bool) -> tuple[Sequence[int], bool]:
    """Return the ranks behind one that waits for all, up to the next that does, and whether these are all and known."""
    passed: list[int] = []
    ring = chain(range(me + 1, size), range(me))
    for rank in ring:
        state = states.get(rank)
        passed.append(rank)
        if state is None:
            return [*passed, *islice(ring, len(passed) - 1)], False
        if state.waiting and state.waits == EVERYONE and not (late and rank < me):
            return passed, False
    return passed, True


def held_up_by(me: int, states: Mapping[int, RankState]) -> list[RankState]:
    """Return the ranks at the ends of the chains of waiting ranks that begin at `me`, as far as states are known.

    Empty if the ranks wait for each other in a circle.
    """
    found, seen, ahead = [], {me}, [me]
    while ahead:
        state = states[ahead.pop()]
        everyone = state.waits == EVERYONE  # who waits for nobody, waits for rank -1, of which nothing is known
        for rank in states if everyone else (state.waits - 1,):
            if rank not in seen and rank in states:
                seen.add(rank)
                if states[rank].waiting:
                    ahead.append(rank)
                else:
                    found.append(states[rank])
    return sorted(found, key=lambda state: state.rank)


def verdict(
    me: int,
    states: Mapping[int, RankState],
    waited_s: float,
    limit_s: float,
    planning_s: float = math.inf,
    *,
    whole: bool = True,
) -> WorkerError | None:
    """Return why waiting is pointless, or None.

    me: a rank that has waited for `waited_s` seconds.  whole: whether no other rank can hold it up.  limit_s: seconds
    after which a rank that does not go on is blamed; planning_s: the limit for a rank that plans or captures.
    """
    roots = held_up_by(me, states)
    for root in roots:
        if root.dead:
            return WorkerError(f"{root.name} {root.dead}", where=root.doing, why=_all_lines(states.values()))
    for root in roots:
        away = root.phase == AWAY and states[me].phase != JOINING  # between two pipes all are away
        if away and min(waited_s, root.still_s) >= LEFT_S:
            return WorkerError(
                f"{root.name} has left, and rank {me} waits for it",
                where=states[me].doing,
                why=_all_lines(states.values()),
                fix="let every rank make the same calls in the same order; close the pipe on all ranks",
            )
    if states[me].phase != JOINING and not roots:
        elsewhere = [state for state in states.values() if state.phase == JOINING and state.still_s >= REJOINS_S]
        if elsewhere and waited_s >= REJOINS_S:
            return WorkerError(
                f"{elsewhere[0].name} has left the group and opens another one, and rank {me} waits for it",
                where=states[me].doing,
                why=_all_lines(states.values()),
                fix="close the pipe on all ranks before the model is compiled again on any of them",
            )
    planning = any(root.phase == PATIENT for root in roots)
    limit_s = planning_s if planning else limit_s
    late = [root for root in roots if root.still_s >= limit_s]
    if waited_s >= limit_s and (late or (whole and not roots)):
        return _too_late(late, limit_s, states)
    return None


def _too_late(late: Sequence[RankState], limit_s: float, states: Mapping[int, RankState]) -> WorkerError:
    if late:
        who = " and ".join(root.name for root in late)
        what = f"{who} made no progress for {limit_s:g} s, and the others wait for that"
    else:
        what = f"the ranks have waited for each other for {limit_s:g} s"
    return WorkerError(
        what,
        where=late[0].doing if late else "",
        why=_all_lines(states.values()),
        fix="if the ranks are only slow, allow more time: timeout= of compile, in seconds, or AUTOPART_TIMEOUT_S",
    )


def no_answer(states: Sequence[RankState], answered: Collection[int], doing: str) -> WorkerError:
    """Return the error for a time limit that is over: it names the ranks that hold up the others."""
    known = {
        state.rank: replace(state, phase=BUSY, waits=NOBODY, doing="finished") if state.rank in answered else state
        for state in states
    }
    late = [state for state in known.values() if state.rank not in answered]
    blamed = {root.rank: root for state in late if state.waiting for root in held_up_by(state.rank, known)}
    blamed |= {state.rank: state for state in late if not state.waiting}
    named = [state for rank, state in sorted(blamed.items()) if rank not in answered] or late
    what = f"no answer in time from {', '.join(state.name for state in named)} while {doing}"
    return WorkerError(what, why=_all_lines(known.values()))


def _all_lines(states: Collection[RankState]) -> str:
    ordered = sorted(states, key=lambda state: state.rank)
    return "last known of each rank:" + "".join(f"\n    {state.line()}" for state in ordered)
