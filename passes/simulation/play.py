"""The event loop of the simulator: workers, ports and messages in time.

What plays is a worker: the ranks that run the same stages do the same at the same time, each on its share of the rows,
so they have one clock.  Where replicas take micro-batches in turn, each is a worker of its own.  A message between two
stages waits until all ports on its way are free, keeps each busy for its bytes there, and arrives a latency after the
slowest (`traffic`); so do the sums of gradients.  Workers that meet begin when the last of them is there: replicas in
turn of a stage, and stages that share parameters, which are summed one after the other.  Ports serve in the order of
posting.

Assumed, and wrong where: computes take the same time for every micro-batch (slices have their own); a compute and a
transfer do not slow each other down (on CPU they share cores); replicas with other shares wait for the slowest;
posting takes no time; collectives that `CHARGED` does not name take no time and wait for nobody.  Of these, new values
of parameters are charged behind the optimizer's step, where steps follow each other, and the agreement of all ranks is
a few numbers, which are there when the slowest rank has ended its step.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import product
from typing import NamedTuple

from autopart.ir.errors import ProgramError
from autopart.ir.program import (
    ACTIONS,
    BACKWARD,
    BUCKET_BYTES,
    COMPUTE,
    FIRST_BUCKET_BYTES,
    FORWARD,
    OPTIMIZER,
    Action,
)
from autopart.ir.timeline import Span
from autopart.passes.simulation.traffic import PortLoad, PortUse

Message = tuple[int, int, str]
"""(source stage, destination stage, way)."""


@dataclass(frozen=True, slots=True)
class SliceWork:
    """What one slice of a micro-batch's sequences takes.  fwd_ns, bwd_ns, held_bytes: of each stage.  sizes: bytes of
    its messages."""

    fwd_ns: tuple[int, ...]
    bwd_ns: tuple[int, ...]
    held_bytes: tuple[int, ...]
    sizes: Mapping[Message, int]


@dataclass(frozen=True, slots=True)
class Work:
    """What the simulator has to know of a plan.  Tuples have an entry for each stage.

    fwd_ns, bwd_ns: of F and B.  held_bytes: activations per micro-batch in flight.  messages: bytes of each message,
    and its loads, that of micro-batch m at m modulo their number; one that is missing takes no time.  tied: for each
    tied parameter in order, the stages that share it, its bytes and the load of its sum.  turns: replicas that take
    micro-batches in turn, 1 where none do; empty: nowhere.
    reduce: bytes and load of the sum of gradients over replicas.  optimizer_ns: the optimizer's step.  overlap: sums
    over replicas run beside the last backward, bucket by bucket (`ir.program`), instead of after it.  gather: bytes and
    load of the new values of parameters, which replicas that share the optimizer's state send each other behind its
    step.  bucket_bytes: summed at once (`Decision`).  summing_ns: what sums take from the cores that compute, on CPUs;
    empty: nothing.  slices: of each slice, in order, where sequences are cut; what is
    said of micro-batches here is then of no use but for the loads."""

    fwd_ns: tuple[int, ...]
    bwd_ns: tuple[int, ...]
    held_bytes: tuple[int, ...]
    messages: Mapping[Message, tuple[int, tuple[PortLoad, ...]]]
    tied: tuple[tuple[tuple[int, ...], int, PortLoad], ...] = ()
    reduce: tuple[tuple[int, PortLoad], ...] = ()
    optimizer_ns: tuple[int, ...] = ()
    overlap: bool = False
    gather: tuple[tuple[int, PortLoad], ...] = ()
    slices: tuple[SliceWork, ...] = ()
    turns: tuple[int, ...] = ()
    bucket_bytes: int = BUCKET_BYTES
    summing_ns: tuple[int, ...] = ()

    def held(self, stage: int, piece: int) -> int:
        """Bytes that a micro-batch, or one slice of it, holds on a stage."""
        return (self.slices[piece] if self.slices else self).held_bytes[stage]

    def phase(self, message: Message, micro: int, piece: int) -> int:
        """Which of the wires of a message one of a micro-batch, or of a slice of it, takes."""
        loads = len(self.messages[message][1]) if message in self.messages else 1
        return piece * loads + micro % loads

    @property
    def alternates(self) -> bool:
        """Whether replicas of any stage take turns."""
        return max(self.turns, default=1) > 1


# ---- programs as numbers -------------------------------------------------------------------------------------------

SUM_TIED, SUM_REPLICAS = "T", "R"
CHARGED = (SUM_TIED, SUM_REPLICAS, OPTIMIZER)
"""What happens once a step and takes time: `Work` says how much."""

_COMPUTE, _BACKWARD, _SEND, _RECEIVE, _UPDATE, _MEET = range(6)
"""What a step does; computes come first."""


class Wire(NamedTuple):
    """How a message or a sum travels.  total_ns: from start to arrival.  ways: (way, nanoseconds that it is busy) of
    each; without ways it takes no time."""

    total_ns: int
    ways: tuple[tuple[int, int], ...]


_NOWHERE = Wire(0, ())


class Step(NamedTuple):
    """One thing that a worker does.  op: one of the six above.  what: the nanoseconds of a compute or of the
    optimizer's step, or the number of a channel or meeting."""

    op: int
    what: int
    wire: Wire = _NOWHERE


@dataclass(slots=True)
class Lane:
    """What a worker does.  actions: the same as actions of the program, for spans.

    at: the number of them that are over.  clock: when.  last_ns: how long the last backward took.
    """

    rank: int
    stages: tuple[int, ...]
    steps: list[Step]
    actions: tuple[Action, ...] = ()
    at: int = 0
    clock: int = 0
    last_ns: int = 0


@dataclass(slots=True)
class Meeting:
    """Sums of gradients in which workers meet.

    stages: those whose workers come.  sums: stages and wire of each tied parameter, in order, or of the one sum over
    the replicas of a stage.  tied: whether it is of tied parameters.  here: ranks that have come.
    """

    stages: tuple[int, ...]
    sums: list[tuple[tuple[int, ...], Wire]]
    tied: bool
    here: set[int] = field(default_factory=set)


class StepCode:
    """Actions as steps.

    groups: stages that share parameters, which meet.  A channel is a pair of stages where messages are received in the
    order in which they are sent, else every message is one.
    """

    def __init__(self, work: Work, groups: Sequence[tuple[int, ...]], *, in_order: bool) -> None:
        self._work, self._in_order = work, in_order and not work.alternates
        self._wires = wires = _wires(work)
        self.meetings = [Meeting(group, [], True) for group in groups]
        self._meetings = {(SUM_TIED, stage): number for number, group in enumerate(groups) for stage in group}
        for place, (stages, _, _) in enumerate(work.tied):
            meeting = self.meetings[self._meetings[SUM_TIED, stages[0]]]
            meeting.sums.append((stages, wires.get((SUM_TIED, place), _NOWHERE)))
        for stage in range(len(work.fwd_ns)):
            self._meetings[SUM_REPLICAS, stage] = len(self.meetings)
            wire = wires.get((SUM_REPLICAS, stage), _NOWHERE)
            self.meetings.append(Meeting((stage,), [((stage,), wire)], False))
        self.buckets = [_buckets(size, load, work.bucket_bytes) for size, load in work.reduce]
        self.summing_ns = work.summing_ns or (0,) * len(work.reduce)
        self._channels: dict[tuple[int, int, Hashable], int] = {}
        self._times = [{FORWARD: part.fwd_ns, BACKWARD: part.bwd_ns} for part in work.slices or (work,)]

    def local(self, kind: str, stage: int, piece: int = 0, *, leads: bool = True) -> Step:
        """A compute (of a slice), or what happens once a step.  leads: of the replicas that take turns, the first."""
        if ACTIONS[kind].role == COMPUTE:
            way = ACTIONS[kind].way
            return Step(_BACKWARD if way == BACKWARD else _COMPUTE, self._times[piece][way][stage])
        if kind == OPTIMIZER:
            taken = self._work.optimizer_ns[stage] if self._work.optimizer_ns else 0
            return Step(_UPDATE, taken, self._wires.get((kind, stage), _NOWHERE) if leads else _NOWHERE)
        return Step(_MEET, self._meetings[kind, stage]) if kind in CHARGED else Step(_COMPUTE, 0)

    def send(self, message: Message, slot: Hashable, micro: int, piece: int = 0) -> Step:
        """A message leaves.  slot: its micro-batch, and slice."""
        phase = self._work.phase(message, micro, piece)
        return Step(_SEND, self._channel(message, slot), self._wires.get((*message, phase), _NOWHERE))

    def receive(self, message: Message, slot: Hashable) -> Step:
        """A message is waited for."""
        return Step(_RECEIVE, self._channel(message, slot))

    def _channel(self, message: Message, slot: Hashable) -> int:
        key = message[0], message[1], None if self._in_order else slot
        return self._channels.setdefault(key, len(self._channels))


def _buckets(size: int, load: PortLoad, bucket_bytes: int) -> tuple[float, int]:
    """Of a sum of so many bytes: the share of the last backward after which the first bucket is complete, and the
    nanoseconds of the last bucket, which is complete when that backward ends."""
    first = min(FIRST_BUCKET_BYTES, bucket_bytes)
    return min(1.0, first / size) if size else 0.0, load.alone_ns(min(size, bucket_bytes))


_Key = tuple[int, int, str, int] | tuple[str, int]
"""A message and which of its wires, or what ends a step: its kind and its stage or (of tied gradients) its place."""


def _wires(work: Work) -> dict[_Key, Wire]:
    """How each message and each sum of gradients travels, if it takes time.

    Ways that are always busy together and equally long count as one, so replicas cost nothing.  O(ways of all loads).
    """
    loads: list[tuple[_Key, tuple[int, PortLoad]]] = []
    for message, (size, each) in work.messages.items():
        sizes = [part.sizes.get(message, 0) for part in work.slices] or [size]
        wires = product(sizes, each)  # of every slice, micro-batch by micro-batch until it repeats itself
        loads += [((*message, number), wire) for number, wire in enumerate(wires)]
    loads += [((SUM_REPLICAS, stage), load) for stage, load in enumerate(work.reduce)]
    loads += [((OPTIMIZER, stage), load) for stage, load in enumerate(work.gather)]
    loads += [((SUM_TIED, place), (size, load)) for place, (_, size, load) in enumerate(work.tied)]
    users: dict[PortUse, list[tuple[_Key, int]]] = {}
    latency: dict[_Key, int] = {}
    for key, (size, load) in loads:
        if size and load.ways:
            latency[key] = load.latency_ns
            for way, taken in zip(load.ways, load.busy_ns(size), strict=True):
                users.setdefault(way, []).append((key, taken))
    found: dict[_Key, list[tuple[int, int]]] = {key: [] for key in latency}
    for number, used in enumerate(dict.fromkeys(map(tuple, users.values()))):
        for key, taken in used:
            found[key].append((number, taken))
    return {key: Wire(latency[key] + max([taken for _, taken in ways]), tuple(ways)) for key, ways in found.items()}


# ---- the play ------------------------------------------------------------------------------------------------------


class Play:
    """Clocks of the workers, when each way is free, and when the messages under way arrive."""

    def __init__(self, lanes: list[Lane], code: StepCode, *, overlap: bool, spans: list[Span] | None = None) -> None:
        """spans: where to note them, if at all."""
        self._lanes = {lane.rank: lane for lane in lanes}
        self._meetings, self._buckets, self._overlap, self._spans = code.meetings, code.buckets, overlap, spans
        self._summing_ns = code.summing_ns
        self._free: defaultdict[int, int] = defaultdict(int)
        self._end = 0
        self._ranks_of: dict[int, list[int]] = {}
        for lane in lanes:
            for stage in lane.stages:
                self._ranks_of.setdefault(stage, []).append(lane.rank)

    def run(self) -> int:
        """The end of the step in nanoseconds.  The rank whose clock is behind acts next: so ports serve in order.

        A rank acts on without a turn through the queue as long as it would be the next in it.
        """
        lanes, spans = self._lanes, self._spans
        arrivals: defaultdict[int, deque[int]] = defaultdict(deque)
        parked: dict[int, Lane] = {}  # by channel: who waits for a message that was not sent
        queue = [(0, rank) for rank in sorted(lanes)]
        while queue:
            now, rank = heappop(queue)
            lane = lanes[rank]
            steps, at = lane.steps, lane.at
            while at < len(steps):
                op, what, wire = steps[at]
                begin = now
                if op == _SEND:
                    begin, end = self._occupy(wire, now) if wire.ways else (now, now)
                    other = parked.pop(what, None)
                    if other is None:
                        arrivals[what].append(end)
                    else:  # it waits since an earlier time, so it would be the next: it receives at once
                        heappush(queue, (self._resumed(other, end), other.rank))
                elif op == _RECEIVE:
                    if not arrivals[what]:
                        parked[what] = lane
                        break
                    end = now = max(now, arrivals[what].popleft())
                elif op <= _BACKWARD:
                    end = now = now + what
                    if op == _BACKWARD:
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
        """A rank that waited goes on behind what it waited for, which is there at `when`: its clock."""
        begin, lane.clock = lane.clock, max(lane.clock, when)
        self._note(lane, begin)
        return lane.clock

    def _occupy(self, wire: Wire, now: int) -> tuple[int, int]:
        """(start, arrival) of what is posted now."""
        free, start = self._free, now
        for way, _ in wire.ways:
            if free[way] > start:
                start = free[way]
        for way, taken in wire.ways:
            free[way] = start + taken
        return start, start + wire.total_ns

    def _once(self, lane: Lane, queue: list[tuple[int, int]]) -> tuple[int, int] | None:
        """(start, end) of the sum or the optimizer's step that a rank has come to, or None when it has to wait for
        others."""
        op, what, wire = lane.steps[lane.at]
        if op == _UPDATE:
            end = lane.clock + what
            return lane.clock, self._occupy(wire, end)[1] if wire.ways else end
        meeting = self._meetings[what]
        ranks = {rank for stage in meeting.stages for rank in self._ranks_of[stage]}
        if meeting.here == ranks:  # a rank with several of the stages comes once, and all its sums are over then
            return lane.clock, lane.clock
        meeting.here.add(lane.rank)
        if meeting.here != ranks:
            return None
        lanes = [self._lanes[rank] for rank in sorted(ranks)]
        began = self._meet(meeting, lanes) if meeting.tied else self._reduce(meeting, lanes)
        for other in sorted(began.keys() - {lane.rank}):
            self._note(self._lanes[other], began[other])
            heappush(queue, (self._lanes[other].clock, other))
        return began[lane.rank], lane.clock

    def _reduce(self, meeting: Meeting, lanes: list[Lane]) -> dict[int, int]:
        """A sum over replicas: when it begins on each of these ranks; their clocks go to its end.

        Beside the last backward, whose gradients are taken to come about evenly: it cannot begin before the first
        bucket is complete, nor end before the last one, which waits for the end of that backward, is summed.  What it
        takes from the cores that compute comes on top: it makes that backward longer.
        """
        now = max(lane.clock for lane in lanes)
        begins = {lane.rank: now for lane in lanes}
        ((stage,), wire), end = meeting.sums[0], now
        if wire.ways and not self._overlap:
            start, end = self._occupy(wire, now)
            begins = dict.fromkeys(begins, start)
        elif wire.ways:
            first, last_ns = self._buckets[stage]
            begins = {lane.rank: lane.clock - lane.last_ns for lane in lanes}
            ready = max(begins[lane.rank] + int(first * lane.last_ns) for lane in lanes)
            end = max(now + last_ns, self._occupy(wire, ready)[1])
        for lane in lanes:
            lane.clock = end + (self._summing_ns[stage] if wire.ways else 0)
        return begins

    def _meet(self, meeting: Meeting, lanes: list[Lane]) -> dict[int, int]:
        """All that share parameters are there: their sums, one after the other, and when each rank's first began."""
        began: dict[int, int] = {}
        for stages, wire in meeting.sums:
            users = [self._lanes[rank] for stage in stages for rank in self._ranks_of[stage]]
            start = max(user.clock for user in users)
            end = start
            if wire.ways:
                start, end = self._occupy(wire, start)
            for user in users:
                user.clock = end
                began.setdefault(user.rank, start)
        return {lane.rank: began.get(lane.rank, lane.clock) for lane in lanes}

    def _note(self, lane: Lane, begin: int) -> None:
        """What a rank waited for is over, at its clock."""
        self._end = max(self._end, lane.clock)
        if self._spans is not None:
            self._spans.append(Span(lane.rank, lane.actions[lane.at], begin, lane.clock))
        lane.at += 1
