"""When each message is posted where posting may block: both ends at its place in the one order of the program.

A rank that posts all its receives before its first action waits for ever under NCCL, where a receive holds up what is
issued behind it until its message comes.  So every rank posts each message, sent or received, at the place where the
message stands in the order that all ranks share.  Of all messages that have not passed, the first then has both ends at
the front: it passes, whatever is buffered and however many queues there are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from autopart.ir.program import SEND, Action, Program


@dataclass(frozen=True, slots=True)
class Turn:
    """Messages between a rank and one peer that are posted together: those that follow each other in the order.

    after: how many of the rank's own actions, receives not counted, stand in the order before its end.  sends: this
    rank's; receives: the peer's sends.  Of replicas that share few rows, some may carry nothing in a step: both ends
    know which, and leave them out.
    """

    peer: int
    after: int
    sends: tuple[Action, ...]
    receives: tuple[Action, ...]


def turns(program: Program, ranks: Iterable[int] | None = None) -> dict[int, tuple[Turn, ...]]:
    """The turns of each of these ranks, by default of all, in the order in which they are posted.

    Turns of the same messages at both ends stand in one order of all turns: that of the program, pairs of ranks within
    an exchange ascending.  O(order * ranks of a stage).
    """
    wanted = set(range(program.world) if ranks is None else ranks)
    found: dict[int, list[Turn]] = {rank: [] for rank in wanted}
    done = dict.fromkeys(range(program.world), 0)
    for group in program.exchanges():
        for action in group:
            for rank in program.players(action):
                done[rank] += 1
        if group[0].is_a.role == SEND:
            for (low, high), messages in sorted(_by_pair(program, group).items()):
                for rank, peer in ((low, high), (high, low)):
                    if rank in wanted:
                        own = tuple(action for source, action in messages if source == rank)
                        others = tuple(action for source, action in messages if source == peer)
                        found[rank].append(Turn(peer, done[rank], own, others))
    return {rank: tuple(own) for rank, own in found.items()}


def _by_pair(program: Program, group: tuple[Action, ...]) -> dict[tuple[int, int], list[tuple[int, Action]]]:
    """The messages of an exchange between different ranks, with who sends them, by pair of ranks."""
    found: dict[tuple[int, int], list[tuple[int, Action]]] = {}
    for action in group:
        for part in program.transfers(action):
            a, b = part.src_rank, part.dst_rank
            if a != b:
                found.setdefault((min(a, b), max(a, b)), []).append((a, action))
    return found


def talking_pairs(program: Program) -> tuple[tuple[int, int], ...]:
    """The pairs of ranks between which messages may pass, ascending: what has to be opened before the first step."""
    pairs: set[tuple[int, int]] = set()
    for edge in program.edges:
        pairs.update((min(a, b), max(a, b)) for a, b in program.channels(edge.src, edge.dst) if a != b)
    return tuple(sorted(pairs))
