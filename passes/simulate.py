"""The simulator: when each action of a program would start and end.

Assumed, and wrong where: computes take the same time for every micro-batch; a compute and a transfer do not slow each
other down (on CPU they share cores); a link carries one message at a time in each direction, for its latency plus its
bytes, and links of different rank pairs never share a wire; posting a send or a receive takes no time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

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
    on the rank, a send spans its transfer on the link, a receive the wait of its rank.  Each rank has its own clock
    and a message its time of arrival, so ranks can be played in any order that the messages allow, without a queue of
    events: O(actions), and the sort of the spans.
    """
    clock = [0] * len(program.ranks)
    done = [0] * len(program.ranks)
    link_free: dict[tuple[int, int], int] = {}
    arrivals: dict[tuple[int, int], deque[int]] = {}
    live, peak = [0] * len(program.ranks), [0] * len(program.ranks)
    times = {"F": fwd_ns, "B": bwd_ns, "T": tied_ns or (0,) * len(program.stage_ranks)}
    spans: list[Span] = []

    def send(rank: int, action: Action, peer: int) -> Span:
        size = message_bytes.get((action.stage, peer, action.kind[1]), 0)
        pair = (rank, program.stage_ranks[peer])
        start = max(clock[rank], link_free.get(pair, 0))
        end = start + (cluster.link(*pair).transfer_ns(size) if size else 0)
        link_free[pair] = end
        arrivals.setdefault((action.stage, peer), deque()).append(end)
        return Span(rank, action, start, end)

    def compute(rank: int, action: Action) -> Span:
        start = clock[rank]
        clock[rank] += times[action.kind][action.stage]
        if action.kind != "T":
            live[rank] += 1 if action.kind == "F" else -1
            peak[rank] = max(peak[rank], live[rank] * activation_bytes[action.stage])
        return Span(rank, action, start, clock[rank])

    ready = deque(range(len(program.ranks)))
    while ready:
        rank = ready.popleft()
        for action in program.ranks[rank][done[rank] :]:
            if action.peer is None:
                spans.append(compute(rank, action))
            elif action.kind[0] == "S":
                spans.append(send(rank, action, action.peer))
                ready.append(program.stage_ranks[action.peer])
            else:
                channel = arrivals.get((action.peer, action.stage))
                if not channel:
                    break
                start, clock[rank] = clock[rank], max(clock[rank], channel.popleft())
                spans.append(Span(rank, action, start, clock[rank]))
            done[rank] += 1
    for rank, actions in enumerate(program.ranks):
        if done[rank] < len(actions):
            raise ProgramError(f"{actions[done[rank]]} waits for ever", where=f"rank {rank}", why="verify it first")
    return Timeline(tuple(sorted(spans, key=lambda span: (span.start_ns, span.rank))), tuple(peak))
