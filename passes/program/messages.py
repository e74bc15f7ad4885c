"""Messages where posting one may block, as under NCCL: the order of posting, and the proof that they pass.

A rank that posts all its receives before its first action waits for ever under NCCL, where a receive blocks everything
that is issued behind it until its message arrives.  So every rank posts each message, sent or received, at the place
where the message stands in the order that all ranks share.  Of all messages that have not passed, the first then has
both ends at the front: it passes, however little is buffered and however many queues there are.

What ranks exchange inside of a compute (`ir.program.inside`) stands in the proof as one collective for each of their
groups, in the communicator of that group.  One is enough.  The members run the same code, and post nothing else between
its first and its last exchange; so a compute puts k collectives side by side into the queues of all members, and into
no other queue.  Where the one passes, all members stand at it, and the k pass before any of them goes on; where k is 0
nobody waits, and what passes with more waiting passes with less.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from autopart.ir.actions import ALL, COLLECTIVE, COMPUTE, OWNERS, RECEIVE, REPLICAS, SEND, TIED, UPDATE, Action
from autopart.ir.errors import ProgramError
from autopart.ir.program import Exchange, Program, inside
from autopart.ir.shares import copies_of, division
from autopart.passes.program.nccl_rules import RECEIVED, SENT, Collective, Comm, Item, MessageEnd, Post, Wait, play

_Comm = tuple[str | int, ...]
"""The purpose of a communicator, and its ranks."""
HOST: _Comm = ("host",)
"""The communicator of collectives of all ranks: numbers on the hosts, over which the ranks wait for each other."""


def check_messages(program: Program, rank: int | None = None) -> Program:
    """Return the program with its posting order, of one rank or of all, if its messages and collectives pass under NCCL
    from the first communicator on (`prove_messages`); else raise ProgramError."""
    prove_messages(program)
    return with_posting(program, rank)


def with_posting(program: Program, rank: int | None = None) -> Program:
    """Add to a program the exchanges of each rank in the order in which it posts them (`Program.posting`).

    rank: the only one whose exchanges are wanted.
    After: exchanges of the same messages stand in one order at both ends: the order of the program, pairs of ranks
    within a group of messages ascending.  O(order * ranks of a stage), for one rank O(order + its part * these).
    """
    here = {stage for stage, ranks in enumerate(program.stage_ranks) if rank is None or rank in ranks}

    def between(numbered: tuple[int, Action]) -> object:
        """Group successive messages between the same two stages; every other action stands alone."""
        place, action = numbered
        return {action.stage, action.peer} if action.is_a.role == SEND else place

    found: list[list[Exchange]] = [[] for _ in range(program.world)]
    done = [0] * program.world
    for _, group in groupby(enumerate(program.order), between):
        pairs: dict[tuple[int, int], list[tuple[int, Action]]] = {}  # of different ranks: messages and their senders
        for _, action in group:
            if action.is_a.meets != ALL and here.isdisjoint((action.stage, action.peer)):
                continue
            for player in program.players(action):
                done[player] += 1
            for part in program.transfers(action) if action.is_a.role == SEND else ():
                a, b = part.src_rank, part.dst_rank
                if a != b and rank in (None, a, b):
                    pairs.setdefault((min(a, b), max(a, b)), []).append((a, action))
        for (low, high), messages in sorted(pairs.items()):
            for one, peer in ((low, high), (high, low)):
                own = tuple(action for source, action in messages if source == one)
                others = tuple(action for source, action in messages if source == peer)
                if rank in (None, one):
                    found[one].append(Exchange(peer, done[one], own, others))
    return replace(program, posting=tuple(map(tuple, found)))


def prove_messages(program: Program) -> None:
    """Raise ProgramError if messages or collectives of a program can hang under NCCL.

    The queues checked are those that the runtime issues: the bring-up of every pair and group, then each rank's part,
    with messages posted at their places.  Where the replicas of all stages are multiples of one number, that number of
    copies of a smaller program run side by side, row for row, and one of them is checked.
    O(order * ranks of a stage of one copy).
    """
    queues, members = issued(with_posting(one_copy(program)))
    stuck = play(queues, members)
    if stuck:
        raise ProgramError(
            "the messages of this program can hang under NCCL",
            where="; ".join(stuck[:4]),
            why="both ends of some message are never at the front of their ranks at the same time",
        )


def one_copy(program: Program) -> Program:
    """Return the first of the copies that a program consists of; the program itself if there is one.

    Every copy does the same in the same order, and all meet in the sums alone, so they all pass or all hang.  Stages
    that share a rank have to list the same ranks in the same order, else their copies would be others.
    """
    copies = copies_of([program.division(stage) for stage in range(len(program.stage_ranks))])
    beside: dict[int, tuple[int, ...]] = {}
    alike = all(beside.setdefault(rank, ranks) == ranks for ranks in program.stage_ranks for rank in ranks)
    if copies == 1 or not alike:
        return program
    first = tuple(ranks[: len(ranks) // copies] for ranks in program.stage_ranks)
    number = {rank: i for i, rank in enumerate(sorted({rank for ranks in first for rank in ranks}))}
    placed = tuple(tuple(number[rank] for rank in ranks) for ranks in first)
    every = [program.division(stage) for stage in range(len(placed))]
    divisions = tuple(division(each.count // copies, shards=each.shards) for each in every)
    divided = divisions if any(each.shards > 1 for each in divisions) else ()
    return replace(program, world=len(number), stage_ranks=placed, divisions=divided, posting=())


def _name(send: Action) -> tuple[object, ...]:
    """Return the name of a message on both ends; cheaper to compare than its text."""
    return send.slot.micro, send.kind, send.slot.stage, send.peer, send.slot.slice


def issued(program: Program) -> tuple[list[list[Item]], dict[Comm, tuple[int, ...]]]:
    """Return the items that each rank issues in its first step, bring-up included, and the members of communicators.

    Before: the program has its posting order (`with_posting`).
    """
    pairs = program.talking_pairs
    groups = {comm: comm[1:] for action in program.order for comm, _ in _collectives(program, action) if comm != HOST}
    members: dict[Comm, tuple[int, ...]] = {("pair", *pair): pair for pair in pairs}
    members |= {comm: tuple(int(rank) for rank in ranks) for comm, ranks in groups.items()}
    members[HOST] = tuple(range(program.world))
    queues: list[list[Item]] = [[] for _ in range(program.world)]
    for a, b in pairs:
        for rank, peer in ((a, b), (b, a)):
            queues[rank].append(
                Post(("pair", a, b), (MessageEnd(SENT, peer, "hello"), MessageEnd(RECEIVED, peer, "hello")))
            )
    for comm in groups:
        for rank in members[comm]:
            queues[rank].append(Collective(comm, "opening"))
    for rank, part in enumerate(program.parts(range(program.world))):
        queues[rank] += _part(program, rank, part)
    return queues, members


def _collectives(program: Program, action: Action) -> list[tuple[_Comm, str]]:
    """Return the communicator and the name of each collective of an action, in order.

    The sum of tied gradients is one for each parameter, over the ranks that hold it; a group of one rank has none.
    """
    kind, label = action.is_a, str(action)
    if kind.role == COMPUTE:
        return [((purpose, *ranks), label) for purpose, ranks in inside(program, action)]
    if kind.meets == ALL:
        return [(HOST, label)]
    if kind.meets == TIED:
        linked = program.group(action)
        own = [(n, r) for n, stages in program.tied if stages[0] in linked for r in program.tied_ranks(n, stages)]
        return [(("group", *ranks), f"{action.kind} of {name}") for name, ranks in own if len(ranks) > 1]
    ranks, divided = program.members(action), program.division(action.stage)
    found: list[tuple[_Comm, str]] = [(("group", *ranks), label)] if len(ranks) > 1 else []
    if kind.meets in (REPLICAS, OWNERS) and min(divided.shards, divided.count) > 1:  # pieces, then buffers
        placed = program.stage_ranks[action.stage]
        alike = [tuple(sorted(placed[n :: divided.shards])) for n in range(divided.shards)]
        found += [(("pieces", *own), label) for own in alike]
        found += [(("group", *ranks), f"{label} of buffers")] * (kind.meets == REPLICAS)
    return found


def _part(program: Program, rank: int, part: Sequence[Action]) -> list[Item]:
    """Return the items of one rank's part of a step, with its exchanges where they are posted."""
    found: list[Item] = []
    waiting, done = deque(program.posting[rank]), 0

    def post() -> None:
        while waiting and waiting[0].after <= done:
            exchange = waiting.popleft()
            ends = [MessageEnd(SENT, exchange.peer, _name(send)) for send in exchange.sends]
            ends += [MessageEnd(RECEIVED, exchange.peer, _name(send)) for send in exchange.receives]
            found.append(Post(("pair", *sorted((rank, exchange.peer))), tuple(ends)))

    post()
    for action in part:
        role = action.is_a.role
        if role == RECEIVE:
            send = action.other_end
            sources = [part.src_rank for part in program.transfers(send) if part.dst_rank == rank]
            found += [
                Wait(("pair", *sorted((rank, source))), source, _name(send)) for source in sources if source != rank
            ]
            continue
        if role == COMPUTE or (role in (COLLECTIVE, UPDATE) and program.joins(rank, action)):
            comms = _collectives(program, action)
            found += [Collective(comm, name) for comm, name in comms if comm == HOST or rank in comm]
        done += 1
        post()
    return found
