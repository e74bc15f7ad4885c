"""The simulator: when each action of a program would start and end.

Assumed, and wrong where: computes take the same time for every micro-batch; a compute and a transfer do not slow each
other down (on CPU they share cores); a link carries one message at a time in each direction, for its latency plus its
bytes, and links of different rank pairs never share a wire; posting a send or a receive takes no time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate

from autopart.ir.cluster import Cluster
from autopart.ir.errors import ProgramError
from autopart.ir.program import Action, Program
from autopart.ir.timeline import Span, Timeline


def simulate(
    program: Program,
    *,
    fwd_ns: tuple[int, ...],
    bwd_ns: tuple[int, ...],
    cluster: Cluster,
    message_bytes: Mapping[tuple[int, int, str], int],
    activation_bytes: tuple[int, ...],
    tied_ns: tuple[int, ...] = (),
) -> Timeline:
    """Play the program in time.

    Before: a verified program.  fwd_ns, bwd_ns, activation_bytes (per micro-batch in flight), tied_ns (of T): one for
    each stage.  message_bytes: by (source stage, destination stage, "F" or "B").  After: an F, B or T spans its time
    on the rank, a send spans its transfer on the link, a receive the wait of its rank; peak_bytes is of F done and B
    not yet (of a forward program: all).  Each rank has its own clock and a message its time of arrival, so ranks can
    be played in any order that the messages allow, without a queue of events: O(actions), and the sort of the spans.
    """
    times = {"F": fwd_ns, "B": bwd_ns, "T": tied_ns or (0,) * len(program.stage_ranks)}
    world = _World(program, cluster, message_bytes, times)
    done = [0] * len(program.ranks)
    ready = deque(range(len(program.ranks)))
    while ready:
        rank = ready.popleft()
        for action in program.ranks[rank][done[rank] :]:
            span = world.act(rank, action)
            if span is None:
                break
            world.spans.append(span)
            done[rank] += 1
            if action.kind in ("SF", "SB") and action.peer is not None:
                ready.append(program.stage_ranks[action.peer])
    for rank, actions in enumerate(program.ranks):
        if done[rank] < len(actions):
            raise ProgramError(f"{actions[done[rank]]} waits for ever", where=f"rank {rank}", why="verify it first")
    peak = [0] * len(program.ranks)
    for stage, rank in enumerate(program.stage_ranks):
        peak[rank] = activation_bytes[stage] * _most_live(program.ranks[rank])
    return Timeline(tuple(sorted(world.spans, key=lambda span: (span.start_ns, span.rank))), tuple(peak))


def _most_live(actions: tuple[Action, ...]) -> int:
    """Micro-batches in flight at most."""
    change = ((a.kind == "F") - (a.kind == "B") for a in actions)
    return max(accumulate(change, initial=0))


@dataclass(slots=True)
class _World:
    """Clocks of the ranks, when each link is free, and when the messages under way arrive."""

    program: Program
    cluster: Cluster
    message_bytes: Mapping[tuple[int, int, str], int]
    times: dict[str, tuple[int, ...]]
    clock: dict[int, int] = field(default_factory=dict)
    link_free: dict[tuple[int, int], int] = field(default_factory=dict)
    arrivals: dict[tuple[int, int], deque[int]] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)

    def act(self, rank: int, action: Action) -> Span | None:
        """The span of an action, or None while its message has not been sent."""
        now, peer = self.clock.get(rank, 0), action.peer
        if peer is None:
            self.clock[rank] = now + self.times[action.kind][action.stage]
            return Span(rank, action, now, self.clock[rank])
        if action.kind[0] == "S":
            size = self.message_bytes.get((action.stage, peer, action.kind[1]), 0)
            pair = rank, self.program.stage_ranks[peer]
            start = max(now, self.link_free.get(pair, 0))
            self.link_free[pair] = start + (self.cluster.link(*pair).transfer_ns(size) if size else 0)
            self.arrivals.setdefault((action.stage, peer), deque()).append(self.link_free[pair])
            return Span(rank, action, start, self.link_free[pair])
        messages = self.arrivals.get((peer, action.stage))
        if not messages:
            return None
        self.clock[rank] = max(now, messages.popleft())
        return Span(rank, action, now, self.clock[rank])
