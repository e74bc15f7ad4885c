"""Ranks that post the exchanges of a program at their places, over a transport that buffers nothing: each post, wait
and sum holds up its rank until all of it is over.  Two ends of a pair of ranks meet in the order in which they are
posted; ends posted together run side by side."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from autopart.ir.program import Program


class Post(NamedTuple):
    peer: int
    sends: deque[str]
    receives: deque[str]


class Wait(NamedTuple):
    peer: int
    message: str


class Meet(NamedTuple):
    label: str
    members: tuple[int, ...]


Item = Post | Wait | Meet


def posted(program: Program) -> str:
    """Return what goes wrong, "" if nothing does."""
    queues = [_queue(program, rank) for rank in range(program.world)]
    arrived: set[tuple[int, Wait]] = set()
    moved = True
    while moved:
        moved = False
        for rank, queue in enumerate(queues):
            if not queue:
                continue
            item = queue[0]
            if isinstance(item, Post):
                problem = _exchange(rank, item, queues, arrived)
                if problem:
                    return problem
                over = not item.sends and not item.receives
            elif isinstance(item, Wait):
                over = (rank, item) in arrived
            else:
                fronts = [queues[other][0] if queues[other] else None for other in item.members]
                there = [front for front in fronts if isinstance(front, Meet) and front.members == item.members]
                if len({front.label for front in there}) > 1:
                    return f"ranks {item.members} meet in {' and '.join(front.label for front in there)}"
                if len(there) == len(fronts):
                    for other in item.members:
                        if other != rank:
                            queues[other].popleft()
                over = len(there) == len(fronts)
            if over:
                queue.popleft()
                moved = True
    stuck = [f"rank {rank} at {queue[0]}" for rank, queue in enumerate(queues) if queue]
    return "; ".join(stuck)


def _exchange(rank: int, mine: Post, queues: list[deque[Item]], arrived: set[tuple[int, Wait]]) -> str:
    """Pass what both ends have posted; return how the ends of a message differ, "" if they do not."""
    its = queues[mine.peer][0] if queues[mine.peer] else None
    if not isinstance(its, Post) or its.peer != rank:
        return ""
    ways = ((rank, mine.sends, mine.peer, its.receives), (mine.peer, its.sends, rank, mine.receives))
    for source, sends, target, receives in ways:
        while sends and receives:
            sent, expected = sends.popleft(), receives.popleft()
            if sent != expected:
                return f"rank {target} gets {sent} for {expected}"
            arrived.add((target, Wait(source, sent)))
    return ""


def _queue(program: Program, rank: int) -> deque[Item]:
    found: deque[Item] = deque()
    exchanges, done = deque(program.posting[rank]), 0
    for action in (None, *program.part(rank)):
        if action is not None and action.is_a.role == "receive":
            parts = [part for part in program.transfers(action.other_end) if part.dst_rank == rank != part.src_rank]
            found += [Wait(part.src_rank, str(action.other_end)) for part in parts]
            continue
        if action is not None:
            members = tuple(range(program.world)) if action.is_a.meets == "all" else program.members(action)
            if len(members) > 1 and program.joins(rank, action):
                group = program.group(action) if action.is_a.meets == "tied" else action
                found.append(Meet(f"{action.kind} of {group}", members))
            done += 1
        while exchanges and exchanges[0].after <= done:
            exchange = exchanges.popleft()
            found.append(Post(exchange.peer, deque(map(str, exchange.sends)), deque(map(str, exchange.receives))))
    return found
