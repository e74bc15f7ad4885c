"""The simulator: when each action of a program would start and end.

Stages are the actors; the replicas of a stage do the same at the same time, each on its share of the rows, so a stage
has one clock.  A bundle of messages between two stages waits until all its ports are free, keeps each busy for its
bytes there, and arrives a latency after the slowest (`traffic`); so do the sums of gradients.  Ports serve in the
order of posting.

Assumed, and wrong where: computes take the same time for every micro-batch; a compute and a transfer do not slow each
other down (on CPU they share cores); replicas with unequal shares wait for the largest; posting takes no time.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate, chain

from autopart.ir.errors import ProgramError
from autopart.ir.program import Action, Program
from autopart.ir.timeline import Span, Timeline
from autopart.passes.program.routing import CommTemplate
from autopart.passes.simulation.traffic import PortLoad, PortUse

Message = tuple[int, int, str]
"""(source stage, destination stage, "F" or "B")."""


@dataclass(frozen=True, slots=True)
class Work:
    """What the simulator has to know of a plan.  Tuples have an entry for each stage.

    fwd_ns, bwd_ns, tied_ns: of F, B and T.  held_bytes: activations per micro-batch in flight.  messages: bytes and
    load of each message.  reduce: bytes and load of the sum of gradients over replicas.  optimizer_ns: its step.
    overlap: the sum of gradients may start with the last backward instead of after it.
    """

    fwd_ns: tuple[int, ...]
    bwd_ns: tuple[int, ...]
    held_bytes: tuple[int, ...]
    messages: Mapping[Message, tuple[int, PortLoad]]
    tied_ns: tuple[int, ...] = ()
    reduce: tuple[tuple[int, PortLoad], ...] = ()
    optimizer_ns: tuple[int, ...] = ()
    overlap: bool = False


def simulate(program: Program, work: Work) -> Timeline:
    """Play the program in time: starts and ends in nanoseconds, memory in bytes.

    Before: a verified program.  After: F, B, T, R and O span their time on the rank, a send spans its transfer, a
    receive the wait of its rank; peak_bytes is of F done and B not yet (of a forward program: all).  Spans of a stage
    are those of its first rank.  O(actions * log ranks), and the sort of the spans.
    """
    spans: list[Span] = []
    code = _Code(work)
    _Play(_lanes(program, code), code, spans).run()
    peak = [0] * len(program.ranks)
    for stage, rank in enumerate(program.stage_ranks):
        peak[rank] = work.held_bytes[stage] * _most_live(program.ranks[rank])
    return Timeline(tuple(sorted(spans, key=lambda span: (span.start_ns, span.rank))), tuple(peak))


def step_ns(program: Program, work: Work) -> int:
    """Nanoseconds of the step that `simulate` draws, without drawing it."""
    code = _Code(work)
    return _Play(_lanes(program, code), code).run()


def ordered_ns(orders: Sequence[str], acts: Sequence[CommTemplate], ranks: Sequence[int], work: Work) -> int:
    """`step_ns` of the program in which each stage, on its rank, does its acts (`route.around`) in this order
    (`order`); the program is not made."""
    code = _Code(work)
    lanes = []
    for stage, (text, own) in enumerate(zip(orders, acts, strict=True)):
        steps = {kind: [code.of(action) for action in actions] for kind, actions in own.items()}
        whole = [*chain.from_iterable([steps[kind] for kind in text]), *steps["T"]]
        lanes.append(_Lane(ranks[stage], stage, whole))
    return _Play(lanes, code).run()


def _most_live(actions: tuple[Action, ...]) -> int:
    """Micro-batches in flight at most."""
    change = ((a.kind == "F") - (a.kind == "B") for a in actions)
    return max(accumulate(change, initial=0))


# ---- programs as numbers -------------------------------------------------------------------------------------------

_COMPUTE, _BACKWARD, _SEND, _RECEIVE = range(4)
_Wire = tuple[int, tuple[tuple[int, int], ...]]
"""(nanoseconds from start to arrival, (way, nanoseconds that it is busy) of each); no ways: it takes no time."""
_Step = tuple[int, int, _Wire]
"""(one of the four above; nanoseconds of a compute, or the number of a channel; how a send travels)."""


@dataclass(slots=True)
class _Lane:
    """What a rank does for its stage.  actions: the same in words, for spans.

    at: how many of them are done.  clock: when.  last_ns: how long the last backward took.
    """

    rank: int
    stage: int
    steps: list[_Step]
    actions: tuple[Action, ...] = ()
    at: int = 0
    clock: int = 0
    last_ns: int = 0


class _Code:
    """Actions as steps, one for each kind, stage and peer."""

    def __init__(self, work: Work) -> None:
        self.work, self.wires = work, _wires(work)
        self._channels: dict[tuple[int, int], int] = {}
        self._known: dict[tuple[str, int, int | None], _Step] = {}

    def of(self, action: Action) -> _Step:
        """The step of an action, whatever its micro-batch."""
        key = action.kind, action.stage, action.peer
        step = self._known.get(key)
        if step is None:
            step = self._known[key] = self._made(*key)
        return step

    def _made(self, kind: str, stage: int, peer: int | None) -> _Step:
        if peer is None:
            work = self.work
            times = work.fwd_ns if kind == "F" else work.bwd_ns if kind == "B" else work.tied_ns
            return _BACKWARD if kind == "B" else _COMPUTE, times[stage] if times else 0, (0, ())
        sends = kind[0] == "S"
        channel = self._channels.setdefault((stage, peer) if sends else (peer, stage), len(self._channels))
        return _SEND if sends else _RECEIVE, channel, self.wires.get((stage, peer, kind[1]), (0, ()))


def _lanes(program: Program, code: _Code) -> list[_Lane]:
    stage_of = {rank: stage for stage, rank in enumerate(program.stage_ranks)}
    return [
        _Lane(rank, stage_of[rank], [code.of(action) for action in actions], actions)
        for rank, actions in enumerate(program.ranks)
        if actions
    ]


def _wires(work: Work) -> dict[Message | int, _Wire]:
    """How each message travels, and (by stage) each sum of gradients, if it takes time.

    Ways that are always busy together and equally long count as one, so replicas cost nothing.  O(ways of all loads).
    """
    users: dict[PortUse, list[tuple[Message | int, int]]] = {}
    latency: dict[Message | int, int] = {}
    loads: list[tuple[Message | int, tuple[int, PortLoad]]] = [*work.messages.items(), *enumerate(work.reduce)]
    for key, (size, load) in loads:
        if size and load.ways:
            latency[key] = load.latency_ns
            for way, taken in zip(load.ways, load.busy_ns(size), strict=True):
                users.setdefault(way, []).append((key, taken))
    found: dict[Message | int, list[tuple[int, int]]] = {key: [] for key in latency}
    for number, used in enumerate(dict.fromkeys(map(tuple, users.values()))):
        for key, taken in used:
            found[key].append((number, taken))
    return {key: (latency[key] + max([taken for _, taken in ways]), tuple(ways)) for key, ways in found.items()}


# ---- the play ------------------------------------------------------------------------------------------------------


class _Play:
    """Clocks of the ranks, when each way is free, and when the messages under way arrive."""

    def __init__(self, lanes: list[_Lane], code: _Code, spans: list[Span] | None = None) -> None:
        """spans: where to note them, if at all."""
        self._lanes = {lane.rank: lane for lane in lanes}
        self._work, self._wires, self._spans = code.work, code.wires, spans
        self._free: defaultdict[int, int] = defaultdict(int)
        self._end = 0

    def run(self) -> int:
        """The end of the step in nanoseconds.  The rank whose clock is behind acts next: so ports serve in order.

        A rank acts on without a turn through the queue as long as it would be the next in it.
        """
        lanes, spans = self._lanes, self._spans
        arrivals: defaultdict[int, deque[int]] = defaultdict(deque)
        parked: dict[int, _Lane] = {}  # by channel: who waits for a message that was not sent
        queue = [(0, rank) for rank in sorted(lanes)]
        while queue:
            now, rank = heappop(queue)
            lane = lanes[rank]
            steps, at = lane.steps, lane.at
            while at < len(steps):
                kind, what, wire = steps[at]
                begin = now
                if kind == _SEND:
                    begin, end = self._occupy(wire, now) if wire[1] else (now, now)
                    other = parked.pop(what, None)
                    if other is None:
                        arrivals[what].append(end)
                    else:  # it waits since an earlier time, so it would be the next: it receives at once
                        heappush(queue, (self._received(other, end), other.rank))
                elif kind == _RECEIVE:
                    if not arrivals[what]:
                        parked[what] = lane
                        break
                    end = now = max(now, arrivals[what].popleft())
                else:
                    end = now = now + what
                    if kind == _BACKWARD:
                        lane.last_ns = what
                self._end = max(self._end, end)
                if spans is not None:
                    spans.append(Span(rank, lane.actions[at], begin, end))
                at += 1
                if queue and queue[0] < (now, rank):
                    heappush(queue, (now, rank))
                    break
            else:
                self._finish(lane, now)
            lane.at, lane.clock = at, now
        for lane in lanes.values():
            if lane.at < len(lane.steps):
                stuck = lane.actions[lane.at] if lane.actions else f"stage {lane.stage}"
                raise ProgramError(f"{stuck} waits for ever", where=f"rank {lane.rank}", why="verify it first")
        return self._end

    def _received(self, lane: _Lane, arrival: int) -> int:
        """A parked rank goes on: its clock."""
        begin, lane.clock = lane.clock, max(lane.clock, arrival)
        self._span(lane, lane.actions[lane.at] if lane.actions else None, begin, lane.clock)
        lane.at += 1
        return lane.clock

    def _occupy(self, wire: _Wire, now: int) -> tuple[int, int]:
        """(start, arrival) of what is posted now."""
        free, start = self._free, now
        for way, _ in wire[1]:
            if free[way] > start:
                start = free[way]
        for way, taken in wire[1]:
            free[way] = start + taken
        return start, start + wire[0]

    def _finish(self, lane: _Lane, now: int) -> None:
        """Sum over replicas and optimizer, after the last action."""
        if lane.stage in self._wires:
            ready = now - lane.last_ns * self._work.overlap
            start, end = self._occupy(self._wires[lane.stage], ready)
            now = max(now, end)
            self._span(lane, Action("R", lane.stage), start, now)
        if self._work.optimizer_ns and self._work.optimizer_ns[lane.stage]:
            begin, now = now, now + self._work.optimizer_ns[lane.stage]
            self._span(lane, Action("O", lane.stage), begin, now)
        self._end = max(self._end, now)

    def _span(self, lane: _Lane, action: Action | None, start: int, end: int) -> None:
        self._end = max(self._end, end)
        if self._spans is not None and action is not None:
            self._spans.append(Span(lane.rank, action, start, end))
