"""A model of the strictest NCCL: one queue per rank, no buffering, and every message or sum blocks until all its ranks
arrive.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopart.ir.actions import ALL, COLLECTIVE, COMPUTE, LOCAL, RECEIVE, SEND, TIED, UPDATE, Action
from autopart.ir.program import Program

Item = tuple[str, tuple[int, ...]]
"""(operation, ranks that must reach it at the same time)."""


def issued(program: Program) -> list[list[Item]]:
    """Return the queue of each rank with both ends of every message at its position in the global order."""
    return _queues(program, [program.order] * program.world)


def received_late(program: Program) -> list[list[Item]]:
    """Return the queue of each rank with each receive posted only where its message is needed."""
    return _queues(program, program.parts(range(program.world)))


def _queues(program: Program, orders: Sequence[Sequence[Action]]) -> list[list[Item]]:
    late = any(action.is_a.role == RECEIVE for order in orders for action in order)
    queues: list[list[Item]] = []
    for rank, order in enumerate(orders):
        queue: list[Item] = []
        for action in order:
            item = _item(program, action, rank)
            own = rank in program.players(action)
            if action.is_a.role == SEND and late and not own:
                continue
            if rank in item[1] and (own or action.is_a.role == SEND) and item not in queue[-1:]:
                queue.append(item)
        queues.append(queue)
    return queues


def _item(program: Program, action: Action, rank: int) -> Item:
    """Return the operation of an action.  Messages within a rank have no peers; a sum counts once per rank; in a
    compute the ranks meet that have parts of the same rows."""
    ranks = program.stage_ranks
    role = action.is_a.role
    if role in (SEND, RECEIVE):
        send = action if role == SEND else action.other_end
        parts = [(part.src_rank, part.dst_rank) for part in program.transfers(send)]
        return str(send), tuple(sorted({rank for pair in parts if pair[0] != pair[1] for rank in pair}))
    if action.is_a.meets == ALL:
        return str(action), tuple(range(program.world))
    if action.is_a.meets == TIED:
        group = next(group for group in program.groups(TIED) if action.stage in group)
        return f"sum of stages {group}", tuple(sorted({rank for stage in group for rank in ranks[stage]}))
    assert role in (COMPUTE, COLLECTIVE, LOCAL, UPDATE)
    own, count = ranks[action.stage], program.division(action.stage).shards
    if role == COMPUTE and count > 1 and rank in own:
        first = own.index(rank) // count * count
        return str(action), own[first : first + count]
    return str(action), own if role in (COLLECTIVE, UPDATE) else ()


def hangs(queues: list[list[Item]]) -> list[str]:
    """Return the operations at which the ranks hang, or an empty list when all queues complete."""
    at = [0] * len(queues)

    def front(rank: int) -> Item | None:
        return queues[rank][at[rank]] if at[rank] < len(queues[rank]) else None

    moved = True
    while moved:
        moved = False
        for rank in range(len(queues)):
            item = front(rank)
            while item is not None and all(front(other) == item for other in item[1]):
                for other in set(item[1]) | {rank}:
                    at[other] += 1
                moved, item = True, front(rank)
    return [str(item[0]) for item in map(front, range(len(queues))) if item is not None]
