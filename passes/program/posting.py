"""The order in which messages are posted where posting may block: both ends at their place in the program's order.

A rank that posts all its receives before its first action waits for ever under NCCL, where a receive blocks everything
that is issued behind it until its message arrives.  So every rank posts each message, sent or received, at the place
where the message stands in the order that all ranks share.  Of all messages that have not passed, the first then has
both ends at the front: it passes, however little is buffered and however many queues there are.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

from autopart.ir.actions import SEND, Action
from autopart.ir.program import Exchange, Program


def with_posting(program: Program) -> Program:
    """Add to a program the exchanges of each rank in the order in which it posts them (`Program.posting`).

    After: exchanges of the same messages stand in one order at both ends: the order of the program, pairs of ranks
    within a group of messages ascending.  O(order * ranks of a stage).
    """
    found: list[list[Exchange]] = [[] for _ in range(program.world)]
    done = [0] * program.world
    for group in _groups(program):
        for action in group:
            for rank in program.players(action):
                done[rank] += 1
        if group[0].is_a.role == SEND:
            for (low, high), messages in sorted(_by_pair(program, group).items()):
                for rank, peer in ((low, high), (high, low)):
                    own = tuple(action for source, action in messages if source == rank)
                    others = tuple(action for source, action in messages if source == peer)
                    found[rank].append(Exchange(peer, done[rank], own, others))
    return replace(program, posting=tuple(map(tuple, found)))


def _groups(program: Program) -> list[list[Action]]:
    """Return the order in groups: successive messages between the same two stages are one group."""

    def key(numbered: tuple[int, Action]) -> object:
        place, action = numbered
        return {action.stage, action.peer} if action.is_a.role == SEND else place

    return [[action for _, action in group] for _, group in groupby(enumerate(program.order), key)]


def _by_pair(program: Program, group: list[Action]) -> dict[tuple[int, int], list[tuple[int, Action]]]:
    """Return by pair of different ranks the messages between them, each with its sender."""
    found: dict[tuple[int, int], list[tuple[int, Action]]] = {}
    for action in group:
        for part in program.transfers(action):
            a, b = part.src_rank, part.dst_rank
            if a != b:
                found.setdefault((min(a, b), max(a, b)), []).append((a, action))
    return found
