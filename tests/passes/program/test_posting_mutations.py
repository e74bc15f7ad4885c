"""Posting orders broken at random: NCCL's rules and ranks that post at their places agree on what hangs or differs."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import NamedTuple

import pytest
from support.languages.broken_programs import ALL, GROUPS, made

from autopart.ir.program import Exchange, Program
from autopart.passes.program.messages import issued, with_posting
from autopart.passes.program.nccl_rules import Collective, play
from autopart.passes.program.nccl_rules import Item as Issued


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
            ranks, shards = program.stage_ranks[max(0, action.stage)], program.division(max(0, action.stage)).shards
            if shards > 1 and action.is_a.role == "compute":
                first = ranks.index(rank) // shards * shards
                found.append(Meet(str(action), tuple(sorted(ranks[first : first + shards]))))
            done += 1
        while exchanges and exchanges[0].after <= done:
            exchange = exchanges.popleft()
            found.append(Post(exchange.peer, deque(map(str, exchange.sends)), deque(map(str, exchange.receives))))
    return found


# -- tests -----------------------------------------------------------------------------------------------------------


SENT = [name for name in ALL if any(with_posting(made(name)[0]).posting)]


def mutated(program: Program, draw: Random) -> Program:
    """One or two changes of what a rank posts: places, order, messages posted together or apart, left out or twice."""
    posting = [list(own) for own in program.posting]
    for _ in range(draw.choice([1, 1, 2])):
        own = posting[draw.choice([rank for rank, own in enumerate(posting) if own])]
        at, other = draw.randrange(len(own)), draw.randrange(len(own))
        found = own[at]
        match draw.choice(["swap", "near", "place", "first", "apart", "together", "inner", "drop", "double"]):
            case "swap":
                own[at], own[other] = own[other], own[at]
            case "near" if at:
                own[at - 1], own[at] = own[at], own[at - 1]
            case "place":
                own[at] = replace(found, after=max(0, found.after + draw.choice([-3, -1, 1, 3])))
            case "first":
                own.insert(0, replace(own.pop(at), after=0))
            case "apart" if found.sends and found.receives:
                parts = [replace(found, receives=()), replace(found, sends=())]
                own[at : at + 1] = parts if draw.random() < 0.5 else parts[::-1]
            case "together" if at and own[at - 1].peer == found.peer:
                before = own.pop(at - 1)
                sends, receives = before.sends + found.sends, before.receives + found.receives
                own[at - 1] = Exchange(found.peer, found.after, sends, receives)
            case "inner":
                own[at] = replace(found, sends=found.sends[::-1], receives=found.receives[::-1])
            case "drop" if len(own) > 1:
                own.pop(at)
            case "double":
                own.insert(other, found)
    return replace(program, posting=tuple(map(tuple, posting)))


def compare(count: int, seed: int, names: Sequence[str] = SENT) -> tuple[int, int]:
    """Break posting orders; return how many still pass, and how many hang or are mixed up."""
    draw, verdicts = Random(seed), [0, 0]
    for number in range(count):
        broken = mutated(with_posting(made(names[number % len(names)])[0]), draw)
        why, what = play(*issued(broken)), posted(broken)
        assert bool(why) == bool(what), f"{broken.posting}\nrules: {why}\nposted: {what}"
        verdicts[bool(what)] += 1
    return verdicts[0], verdicts[1]


@pytest.mark.parametrize("name", ALL)
def test_messages_posted_at_their_places_pass(name: str) -> None:
    assert posted(with_posting(made(name)[0])) == ""


@pytest.mark.parametrize("name", ALL)
def test_a_rank_finds_its_own_exchanges_as_they_are_among_those_of_all(name: str) -> None:
    program = made(name)[0]
    for rank, own in enumerate(with_posting(program).posting):
        assert with_posting(program, rank).posting == tuple(own if r == rank else () for r in range(program.world))


def test_nccls_rules_refuse_what_hangs_or_is_mixed_up_and_nothing_else() -> None:
    good, bad = compare(60, seed=0)
    assert good >= 5 and bad >= 20


@pytest.mark.slow
def test_nccls_rules_refuse_what_hangs_or_is_mixed_up_and_nothing_else_2000_times() -> None:
    good, bad = compare(2000, seed=1)
    assert good >= 200 and bad >= 1000


@pytest.mark.slow
def test_with_exchanges_inside_of_computes_they_refuse_what_hangs_and_nothing_else_2000_times() -> None:
    good, bad = compare(2000, seed=2, names=GROUPS)
    assert good >= 200 and bad >= 1000


@pytest.mark.parametrize("name", GROUPS)
def test_one_collective_for_each_compute_stands_for_all_that_it_makes(name: str) -> None:
    """Where a compute makes several, the same queues end; where it makes none, more of them."""
    draw = Random(name)
    for _ in range(30):
        queues, members = issued(mutated(with_posting(made(name)[0]), draw))
        ends = not play(queues, members)
        counts = {label: draw.randint(1, 4) for label in _computes(queues)}
        assert ends == (not play([_each(queue, counts) for queue in queues], members))
        none = dict.fromkeys(counts, 0)
        assert not ends or not play([_each(queue, none) for queue in queues], members)


def _computes(queues: Sequence[Sequence[Issued]]) -> list[str]:
    labels = {i.label: None for queue in queues for i in queue if isinstance(i, Collective) and i.comm[0] == "shards"}
    return [label for label in labels if label != "opening"]


def _each(queue: Sequence[Issued], counts: Mapping[str, int]) -> list[Issued]:
    """A queue in which each compute makes so many exchanges."""
    found: list[Issued] = []
    for item in queue:
        count = counts.get(item.label) if isinstance(item, Collective) and item.comm[0] == "shards" else None
        found += [item] if count is None else [replace(item, label=f"{item.label} {n}") for n in range(count)]
    return found
