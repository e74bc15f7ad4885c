"""The simulator: when each action of a program would start and end.

Stages are the actors; the replicas of a stage do the same at the same time, each on its share of the rows, so a stage
has one clock.  A bundle of messages between two stages waits until all its ports are free, keeps each busy for its
bytes there, and arrives a latency after the slowest (`traffic`); so do the sums of gradients.  Ports serve in the
order of posting.

Assumed, and wrong where: computes take the same time for every micro-batch; a compute and a transfer do not slow each
other down (on CPU they share cores); replicas with unequal shares wait for the largest; posting takes no time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import accumulate

from autopart.ir.errors import ProgramError
from autopart.ir.program import Action, Program
from autopart.ir.timeline import Span, Timeline
from autopart.passes.traffic import Load, Way

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
    messages: Mapping[Message, tuple[int, Load]]
    tied_ns: tuple[int, ...] = ()
    reduce: tuple[tuple[int, Load], ...] = ()
    optimizer_ns: tuple[int, ...] = ()
    overlap: bool = False


def simulate(program: Program, work: Work) -> Timeline:
    """Play the program in time.

    Before: a verified program.  After: F, B, T, R and O span their time on the rank, a send spans its transfer, a
    receive the wait of its rank; peak_bytes is of F done and B not yet (of a forward program: all).  Spans of a stage
    are those of its first rank.  O(actions * log ranks), and the sort of the spans.
    """
    play = _Play(program, work, spans=[])
    play.run()
    peak = [0] * len(program.ranks)
    for stage, rank in enumerate(program.stage_ranks):
        peak[rank] = work.held_bytes[stage] * _most_live(program.ranks[rank])
    spans = sorted(play.spans or (), key=lambda span: (span.start_ns, span.rank))
    return Timeline(tuple(spans), tuple(peak))


def step_ns(program: Program, work: Work) -> int:
    """The end of the step that `simulate` draws, without drawing it."""
    return _Play(program, work, spans=None).run()


def _most_live(actions: tuple[Action, ...]) -> int:
    """Micro-batches in flight at most."""
    change = ((a.kind == "F") - (a.kind == "B") for a in actions)
    return max(accumulate(change, initial=0))


@dataclass(slots=True)
class _Play:
    """Clocks of the ranks, when each way is free, and when the messages under way arrive."""

    program: Program
    work: Work
    spans: list[Span] | None
    busy: dict[Message, tuple[int, tuple[Way, ...], tuple[int, ...]]] = field(default_factory=dict)
    free: dict[Way, int] = field(default_factory=dict)
    arrivals: dict[tuple[int, int], deque[int]] = field(default_factory=dict)
    parked: dict[tuple[int, int], int] = field(default_factory=dict)
    clock: list[int] = field(default_factory=list)
    end: int = 0

    def run(self) -> int:
        """The end of the step in nanoseconds.  The rank whose clock is behind acts next: so ports serve in order."""
        ranks = self.program.ranks
        stage_of = {rank: stage for stage, rank in enumerate(self.program.stage_ranks)}
        self.clock, done = [0] * len(ranks), [0] * len(ranks)
        last_ns = [0] * len(ranks)  # how long the last backward took, for sums that overlap it
        queue = [(0, rank) for rank in range(len(ranks)) if ranks[rank]]
        while queue:
            now, rank = heappop(queue)
            if done[rank] == len(ranks[rank]):
                self._finish(stage_of[rank], rank, now - last_ns[rank] * self.work.overlap)
                continue
            action = ranks[rank][done[rank]]
            woken = self._act(rank, action, now)
            if woken is None:
                continue  # parked until its message is sent
            done[rank] += 1
            if action.kind == "B":
                last_ns[rank] = self.clock[rank] - now
            heappush(queue, (self.clock[rank], rank))
            if woken >= 0:
                heappush(queue, (self.clock[woken], woken))
        for rank, actions in enumerate(ranks):
            if done[rank] < len(actions):
                raise ProgramError(f"{actions[done[rank]]} waits for ever", where=f"rank {rank}", why="verify it first")
        return self.end

    def _act(self, rank: int, action: Action, now: int) -> int | None:
        """Do an action: the rank it wakes, -1 for none, or None while its message has not been sent."""
        work, kind, stage, peer = self.work, action.kind, action.stage, action.peer
        if peer is None:
            times = work.fwd_ns if kind == "F" else work.bwd_ns if kind == "B" else work.tied_ns
            self.clock[rank] = now + (times[stage] if times else 0)
            self._span(rank, action, now, self.clock[rank])
            return -1
        if kind[0] == "S":
            start, arrival = self._transfer((stage, peer, kind[1]), now)
            self.arrivals.setdefault((stage, peer), deque()).append(arrival)
            self._span(rank, action, start, arrival)
            return self.parked.pop((stage, peer), -1)
        messages = self.arrivals.get((peer, stage))
        if not messages:
            self.parked[peer, stage] = rank
            return None
        self.clock[rank] = max(now, messages.popleft())
        self._span(rank, action, now, self.clock[rank])
        return -1

    def _transfer(self, message: Message, now: int) -> tuple[int, int]:
        """(start, arrival) of a message that is posted now."""
        known = self.busy.get(message)
        if known is None:
            size, load = self.work.messages.get(message, (0, None))
            sent = size > 0 and load is not None and bool(load.ways)
            known = (load.latency_ns, load.ways, load.busy_ns(size)) if load is not None and sent else (0, (), ())
            self.busy[message] = known
        return self._occupy(*known, now)

    def _occupy(self, latency: int, ways: tuple[Way, ...], busy: tuple[int, ...], now: int) -> tuple[int, int]:
        if not ways:
            return now, now
        free = self.free
        start = now
        for way in ways:
            if free.get(way, 0) > start:
                start = free[way]
        for way, taken in zip(ways, busy, strict=True):
            free[way] = start + taken
        return start, start + latency + max(busy)

    def _finish(self, stage: int, rank: int, ready: int) -> None:
        """Sum over replicas and optimizer, after the last action."""
        now = self.clock[rank]
        if self.work.reduce:
            size, load = self.work.reduce[stage]
            if size and load.ways:
                start, end = self._occupy(load.latency_ns, load.ways, load.busy_ns(size), ready)
                now = max(now, end)
                self._span(rank, Action("R", stage), start, now)
        if self.work.optimizer_ns and self.work.optimizer_ns[stage]:
            self._span(rank, Action("O", stage), now, now + self.work.optimizer_ns[stage])
            now += self.work.optimizer_ns[stage]
        self.end = max(self.end, now)

    def _span(self, rank: int, action: Action, start: int, end: int) -> None:
        self.end = max(self.end, end)
        if self.spans is not None:
            self.spans.append(Span(rank, action, start, end))
