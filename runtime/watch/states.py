"""Who holds up whom, from what every rank says about itself; and when waiting has become pointless.

A rank that computes is never called dead: it beats.  What ends a wait is a rank that cannot go on (it ended, was
stopped, or gives no sign of life), one that has left, and the time limit, which does not run while the rank that is
waited for plans or captures.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopart.ir.errors import WorkerError
from autopart.runtime.activity import EVERYONE, NOBODY, Phase

LEFT_S = 2.0
"""What a rank sent before it left may take so long to arrive."""


@dataclass(frozen=True, slots=True)
class RankState:
    """A rank as another sees it.

    doing: its last note.  waits: as in `SharedStatus`.  still_s: for how long it has done the same.  dead: why it
    cannot go on, "" while it can.
    """

    rank: int
    label: str = ""
    doing: str = ""
    phase: Phase = Phase.BUSY
    waits: int = NOBODY
    still_s: float = 0.0
    dead: str = ""

    @property
    def name(self) -> str:
        """ "rank 1 (stage 1)", or "rank 1" while it has no label."""
        return f"rank {self.rank} ({self.label})" if self.label else f"rank {self.rank}"

    @property
    def waiting(self) -> bool:
        """Whether it can go on, but waits for others."""
        return self.waits != NOBODY and not self.dead and self.phase is not Phase.AWAY

    def line(self) -> str:
        """One line for a list of all ranks."""
        state = self.dead or self.doing or "no note"
        if self.phase is Phase.AWAY and not self.dead:
            state = f"has left; the last it did: {self.doing or 'no note'}"
        return f"{self.name}: {state}" + (f", {self.waited_for}" if self.waiting else "")

    @property
    def waited_for(self) -> str:
        """For whom it waits, in words."""
        return "waits for the others" if self.waits == EVERYONE else f"waits for rank {self.waits - 1}"


def held_up_by(me: int, states: Mapping[int, RankState]) -> list[RankState]:
    """The ranks for which `me` really waits: those at the ends of the chains of waiting ranks.

    A rank that waits is never blamed where one is found that does not; empty when they wait for each other in a circle.
    """
    found, seen, ahead = [], {me}, [me]
    while ahead:
        state = states[ahead.pop()]
        for rank in _others(state, states):
            if rank not in seen:
                seen.add(rank)
                if states[rank].waiting:
                    ahead.append(rank)
                else:
                    found.append(states[rank])
    return sorted(found, key=lambda state: state.rank)


def _others(state: RankState, states: Mapping[int, RankState]) -> Sequence[int]:
    if state.waits == NOBODY:
        return ()
    return list(states) if state.waits == EVERYONE else [state.waits - 1]


def verdict(
    me: int, states: Mapping[int, RankState], waited_s: float, limit_s: float, planning_s: float = math.inf
) -> WorkerError | None:
    """Return why waiting is pointless, or None while it is not.

    me: a rank that has waited for `waited_s` seconds.  limit_s: seconds after which a rank that does not go on is
    blamed; planning_s: the same for one that plans or captures.
    """
    roots = held_up_by(me, states)
    for root in roots:
        if root.dead:
            return WorkerError(f"{root.name} {root.dead}", where=root.doing, why=_all_lines(states))
    for root in roots:
        away = root.phase is Phase.AWAY and states[me].phase is not Phase.JOINING  # between two pipes all are away
        if away and min(waited_s, root.still_s) >= LEFT_S:
            return _left(root, states[me], states)
    planning = any(root.phase is Phase.PATIENT for root in roots)
    limit_s = planning_s if planning else limit_s
    late = [root for root in roots if root.still_s >= limit_s]
    if waited_s >= limit_s and (late or not roots):
        return _too_late(late, limit_s, states)
    return None


def _left(root: RankState, me: RankState, states: Mapping[int, RankState]) -> WorkerError:
    return WorkerError(
        f"{root.name} has left, and rank {me.rank} waits for it",
        where=me.doing,
        why=_all_lines(states),
        fix="let every rank make the same calls in the same order; close the pipe on all ranks",
    )


def _too_late(late: Sequence[RankState], limit_s: float, states: Mapping[int, RankState]) -> WorkerError:
    if late:
        who = " and ".join(root.name for root in late)
        what = f"{who} did not go on for {limit_s:g} s, and the others wait for that"
    else:
        what = f"the ranks have waited for each other for {limit_s:g} s"
    return WorkerError(
        what,
        where=late[0].doing if late else "",
        why=_all_lines(states),
        fix="where that is only slow, allow more time: timeout= of compile, in seconds, or AUTOPART_TIMEOUT_S",
    )


def _all_lines(states: Mapping[int, RankState]) -> str:
    return "last known of each rank:" + "".join(f"\n    {states[rank].line()}" for rank in sorted(states))
