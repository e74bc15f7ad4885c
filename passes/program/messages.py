"""The proof that the messages and sums of a program pass where posting one may block, as under NCCL."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from autopart.ir.errors import ProgramError
from autopart.ir.program import COLLECTIVE, RECEIVE, SUM_REPLICAS, SUM_TIED, Action, Program
from autopart.ir.shares import copies_of
from autopart.ir.turns import Turn, talking_pairs, turns
from autopart.passes.program.nccl_rules import RECEIVED, SENT, Collective, Comm, Compute, Item, Op, Post, Wait, play

_COMPUTE = Compute()


def check_messages(program: Program) -> Program:
    """The program, when its messages and sums pass under NCCL from the first communicator on; else ProgramError.

    What is checked is what the runtime issues: the bring-up of every pair and group, then each rank's part, messages
    posted at their turns.  Where the replicas of all stages are multiples of one number, so many copies of a smaller
    program run side by side, row for row, and one of them is checked.  O(order * ranks of a stage).
    """
    queues, members = issued(one_copy(program))
    stuck = play(queues, members, strict=True)
    if stuck:
        some = play(queues, members, strict=False)
        raise ProgramError(
            "the messages of this program can hang under NCCL",
            where="; ".join(stuck[:4]),
            why="both ends of some message are never at the front of their ranks at the same time"
            if some
            else "they pass only where communicators of one device run side by side, which nobody promises",
        )
    return program


def one_copy(program: Program) -> Program:
    """The first of the copies that a program consists of, when ranks have one stage each; else the program.

    Every copy does the same in the same order, and all meet in the sums alone, so that they get on together or hang
    together.
    """
    widths = [len(ranks) for ranks in program.stage_ranks]
    copies = copies_of([program.division(stage) for stage in range(len(widths))])
    if copies == 1 or len({rank for ranks in program.stage_ranks for rank in ranks}) < sum(widths):
        return program
    first = tuple(ranks[: len(ranks) // copies] for ranks in program.stage_ranks)
    number = {rank: i for i, rank in enumerate(sorted(rank for ranks in first for rank in ranks))}
    placed = tuple(tuple(number[rank] for rank in ranks) for ranks in first)
    return replace(program, world=len(number), stage_ranks=placed, divisions=())


def _name(send: Action) -> tuple[object, ...]:
    """What both ends call a message; cheaper to compare than its text."""
    return send.slot.micro, send.kind, send.slot.stage, send.peer, send.slot.slice


def issued(
    program: Program, posted: Mapping[int, Sequence[Turn]] | None = None
) -> tuple[list[list[Item]], dict[Comm, tuple[int, ...]]]:
    """What each rank issues in its first step, bring-up included, and the members of each communicator.

    posted: the turns of each rank, by default those at which the runtime posts.
    """
    pairs = talking_pairs(program)
    sums = [("tied", name, _ranks(program, stages)) for name, stages in program.tied]
    groups = [ranks for _, _, ranks in sums if len(ranks) > 1]
    groups += [ranks for ranks in program.stage_ranks if len(ranks) > 1]
    members: dict[Comm, tuple[int, ...]] = {("pair", *pair): pair for pair in pairs}
    members |= {("group", *ranks): ranks for ranks in groups}
    queues: list[list[Item]] = [[] for _ in range(program.world)]
    for a, b in pairs:
        for rank, peer in ((a, b), (b, a)):
            queues[rank].append(Post(("pair", a, b), (Op(SENT, peer, "hello"), Op(RECEIVED, peer, "hello"))))
    for ranks in dict.fromkeys(groups):
        for rank in ranks:
            queues[rank].append(Collective(("group", *ranks), "opening"))
    turned = turns(program) if posted is None else posted
    for rank, part in enumerate(program.parts(range(program.world))):
        queues[rank] += _part(program, rank, part, turned[rank])
    return queues, members


def _ranks(program: Program, stages: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted({rank for stage in stages for rank in program.stage_ranks[stage]}))


def _part(program: Program, rank: int, part: Sequence[Action], posted: Sequence[Turn]) -> list[Item]:
    """One rank's part of a step, each of its turns where it is posted."""
    found: list[Item] = []
    last_tied = next((action for action in reversed(part) if action.kind == SUM_TIED), None)
    waiting, done = deque(posted), 0

    def post() -> None:
        while waiting and waiting[0].after <= done:
            turn = waiting.popleft()
            ops = [Op(SENT, turn.peer, _name(a)) for a in turn.sends]
            ops += [Op(RECEIVED, turn.peer, _name(a)) for a in turn.receives]
            found.append(Post(("pair", *sorted((rank, turn.peer))), tuple(ops)))

    post()
    for action in part:
        if action.is_a.role == RECEIVE:
            send = action.other_end
            sources = [part.src_rank for part in program.transfers(send) if part.dst_rank == rank]
            found += [
                Wait(("pair", *sorted((rank, source))), source, _name(send)) for source in sources if source != rank
            ]
            continue
        if action == last_tied:
            found += [
                Collective(("group", *ranks), f"sum of {name}")
                for name, stages in program.tied
                if len(ranks := _ranks(program, stages)) > 1 and rank in ranks
            ]
        elif action.kind == SUM_REPLICAS and len(ranks := program.stage_ranks[action.stage]) > 1:
            found.append(Collective(("group", *ranks), str(action)))
        elif action.is_a.role != COLLECTIVE:
            found.append(_COMPUTE)
        done += 1
        post()
    return found
