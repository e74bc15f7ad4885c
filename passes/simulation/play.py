"""The event loop of the simulator: workers, ports and messages in time.

The ranks that run the same stages do the same at the same time, each on its share of the rows, so they count as one
worker with one clock.  Replicas that take micro-batches in turn are workers of their own.  A message between two stages
waits until all ports on its way are free, keeps each busy for its bytes there, and arrives a latency after the slowest
(`traffic`); so do the sums of gradients.  Workers that meet begin when the last of them arrives: replicas in turn of a
stage, and stages that share parameters, which are summed one after the other.  Ports serve in the order of posting.

Assumed, and wrong where: computes take the same time for every micro-batch (slices have their own); a compute and a
transfer do not slow each other down (on a CPU they share cores); replicas with unequal shares wait for the slowest; a
host spends the same on every compute and message (`HostCosts`); collectives without a time (`simulate.CHARGED`) wait
for nobody.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

from autopart.ir.actions import Action
from autopart.ir.cluster import UNMEASURED, HostCosts
from autopart.ir.errors import ProgramError
from autopart.ir.timeline import Span

RUNS, RUNS_BACK, SENDS, RECEIVES, UPDATES, MEETS = range(6)
"""The kinds of a worker's steps: a forward, a backward, both ends of a message, the optimizer, a sum of gradients."""


class Wire(NamedTuple):
    """How a message or a sum travels.

    total_ns: from start to arrival.  ways: (port, nanoseconds that it is busy); without any it takes no time.
    """

    total_ns: int
    ways: tuple[tuple[int, int], ...]


NO_WIRE = Wire(0, ())


class WorkerStep(NamedTuple):
    """One step of a worker.

    kind: one of the six above.  what: the nanoseconds of a compute or of the optimizer, or the number of a channel or a
    meeting.  wire: of a message, and of what follows the optimizer.
    """

    kind: int
    what: int
    wire: Wire = NO_WIRE


@dataclass(slots=True)
class Lane:
    """The steps of a worker, and how far it is.

    rank: the first of its ranks.  actions: the actions of the program that the steps stand for, to draw spans.  at: the
    number of finished steps.  clock: when the last one ended.  last_ns: the time of the last backward.
    """

    rank: int
    stages: tuple[int, ...]
    steps: list[WorkerStep]
    actions: tuple[Action, ...] = ()
    at: int = 0
    clock: int = 0
    last_ns: int = 0


@dataclass(slots=True)
class Meeting:
    """Sums of gradients in which workers meet.

    stages: those whose workers meet.  sums: stages and wire of each tied parameter, in order, or of the one sum over
    the replicas of a stage.  over_replicas: whether it is the latter; then first is the share of the last backward
    after which the first bucket is complete, last_ns the time of the last bucket, and summing_ns the time that the sum
    takes from the cores that compute.  here: ranks that have arrived.
    """

    stages: tuple[int, ...]
    sums: list[tuple[tuple[int, ...], Wire]]
    over_replicas: bool = False
    first: float = 0.0
    last_ns: int = 0
    summing_ns: int = 0
    here: set[int] = field(default_factory=set)


class Play:
    """The clocks of the workers, when each port is free, and when messages under way arrive."""

    def __init__(
        self,
        lanes: list[Lane],
        meetings: list[Meeting],
        *,
        overlap: bool,
        spans: list[Span] | None = None,
        host: HostCosts = UNMEASURED,
    ) -> None:
        """overlap: whether gradients are summed while the last backward runs.  spans: where to note the spans.  host:
        what a rank spends on each end of a message, and before its first step."""
        self._host = host
        self._lanes = {lane.rank: lane for lane in lanes}
        self._meetings, self._overlap, self._spans = meetings, overlap, spans
        self._free: defaultdict[int, int] = defaultdict(int)
        self._end = 0
        self._ranks_of: dict[int, list[int]] = {}
        for lane in lanes:
            for stage in lane.stages:
                self._ranks_of.setdefault(stage, []).append(lane.rank)

    def run(self) -> int:
        """Return the end of the step in nanoseconds.

        The rank whose clock is behind acts next, so that ports serve in order.  A rank goes on without the queue as
        long as it would be the next in it.
        """
        lanes, spans = self._lanes, self._spans
        arrivals: defaultdict[int, deque[int]] = defaultdict(deque)
        parked: dict[int, Lane] = {}  # by channel: the rank that waits for a message that is not sent yet
        handing = self._host.message_ns
        queue = [(self._host.step_ns, rank) for rank in sorted(lanes)]
        while queue:
            now, rank = heappop(queue)
            lane = lanes[rank]
            steps, at = lane.steps, lane.at
            while at < len(steps):
                kind, what, wire = steps[at]
                begin = now
                if kind == SENDS:
                    now += handing
                    begin, end = self._occupy(wire, now) if wire.ways else (now, now)
                    other = parked.pop(what, None)
                    if other is None:
                        arrivals[what].append(end)
                    else:  # it waits since an earlier time, so it would be the next: it receives at once
                        heappush(queue, (self._resumed(other, end), other.rank))
                elif kind == RECEIVES:
                    if not arrivals[what]:
                        parked[what] = lane
                        break
                    end = now = max(now, arrivals[what].popleft()) + handing
                elif kind <= RUNS_BACK:
                    end = now = now + what
                    if kind == RUNS_BACK:
                        lane.last_ns = what
                else:
                    lane.at, lane.clock = at, now
                    span = self._once(lane, queue)
                    if span is None:
                        break
                    begin, end = span
                    now = end
                self._end = max(self._end, end)
                if spans is not None:
                    spans.append(Span(rank, lane.actions[at], begin, end))
                at += 1
                if queue and queue[0] < (now, rank):
                    heappush(queue, (now, rank))
                    break
            lane.at, lane.clock = at, now
        self._check_ended()
        return self._end

    def _check_ended(self) -> None:
        for lane in self._lanes.values():
            if lane.at < len(lane.steps):
                stuck = lane.actions[lane.at] if lane.actions else f"stage {lane.stages[0]}"
                raise ProgramError(f"{stuck} waits for ever", where=f"rank {lane.rank}", why="verify it first")

    def _resumed(self, lane: Lane, when: int) -> int:
        """Let a rank that waited go on when its message arrives, and return its clock."""
        begin, lane.clock = lane.clock, max(lane.clock, when) + self._host.message_ns
        self._note(lane, begin)
        return lane.clock

    def _occupy(self, wire: Wire, now: int) -> tuple[int, int]:
        """Return (start, arrival) of a message or sum that is posted now."""
        free, start = self._free, now
        for way, _ in wire.ways:
            if free[way] > start:
                start = free[way]
        for way, taken in wire.ways:
            free[way] = start + taken
        return start, start + wire.total_ns

    def _once(self, lane: Lane, queue: list[tuple[int, int]]) -> tuple[int, int] | None:
        """Return (start, end) of the sum or the optimizer step that a rank has reached; None if it waits for others."""
        kind, what, wire = lane.steps[lane.at]
        if kind == UPDATES:
            end = lane.clock + what
            return lane.clock, self._occupy(wire, end)[1] if wire.ways else end
        meeting = self._meetings[what]
        ranks = {rank for stage in meeting.stages for rank in self._ranks_of[stage]}
        if meeting.here == ranks:  # a rank with several of the stages arrives once, and all its sums are over then
            return lane.clock, lane.clock
        meeting.here.add(lane.rank)
        if meeting.here != ranks:
            return None
        lanes = [self._lanes[rank] for rank in sorted(ranks)]
        began = self._sum_replicas(meeting, lanes) if meeting.over_replicas else self._sum_tied(meeting, lanes)
        for other in sorted(began.keys() - {lane.rank}):
            self._note(self._lanes[other], began[other])
            heappush(queue, (self._lanes[other].clock, other))
        return began[lane.rank], lane.clock

    def _sum_replicas(self, meeting: Meeting, lanes: list[Lane]) -> dict[int, int]:
        """Sum gradients over replicas: set the clocks to its end and return its start on each rank.

        It overlaps with the last backward, which is taken to release gradients evenly: it begins when the first bucket
        is complete, and ends when the last one, which waits for the end of that backward, is summed.  The time that it
        takes from the cores that compute makes that backward longer.
        """
        now = max(lane.clock for lane in lanes)
        begins = {lane.rank: now for lane in lanes}
        (_, wire), end = meeting.sums[0], now
        if wire.ways and not self._overlap:
            start, end = self._occupy(wire, now)
            begins = dict.fromkeys(begins, start)
        elif wire.ways:
            begins = {lane.rank: lane.clock - lane.last_ns for lane in lanes}
            ready = max(begins[lane.rank] + int(meeting.first * lane.last_ns) for lane in lanes)
            end = max(now + meeting.last_ns, self._occupy(wire, ready)[1])
        for lane in lanes:
            lane.clock = end + (meeting.summing_ns if wire.ways else 0)
        return begins

    def _sum_tied(self, meeting: Meeting, lanes: list[Lane]) -> dict[int, int]:
        """Sum tied gradients one after the other, and return the start of each rank's first sum."""
        began: dict[int, int] = {}
        for stages, wire in meeting.sums:
            users = [self._lanes[rank] for stage in stages for rank in self._ranks_of[stage]]
            start = max(user.clock for user in users)
            end = start
            if wire.ways:
                start, end = self._occupy(wire, start)
            for user in users:
                user.clock = end + (self._host.sum_ns if wire.ways else 0)
                began.setdefault(user.rank, start)
        return {lane.rank: began.get(lane.rank, lane.clock) for lane in lanes}

    def _note(self, lane: Lane, begin: int) -> None:
        """End the step that a rank waited in, at its clock."""
        self._end = max(self._end, lane.clock)
        if self._spans is not None:
            self._spans.append(Span(lane.rank, lane.actions[lane.at], begin, lane.clock))
        lane.at += 1
