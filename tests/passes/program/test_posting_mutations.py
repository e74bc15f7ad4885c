"""Posting orders broken at random: NCCL's rules and ranks that post at their places agree on what hangs or differs."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from support.languages.broken_programs import ALL, made
from support.oracles.posted import posted

from autopart.ir.program import Exchange, Program
from autopart.passes.program.messages import issued
from autopart.passes.program.nccl_rules import play
from autopart.passes.program.posting import with_posting

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


def compare(count: int, seed: int) -> tuple[int, int]:
    """Break posting orders; return how many still pass, and how many hang or are mixed up."""
    draw, verdicts = Random(seed), [0, 0]
    for number in range(count):
        broken = mutated(with_posting(made(SENT[number % len(SENT)])[0]), draw)
        why, what = play(*issued(broken)), posted(broken)
        assert bool(why) == bool(what), f"{broken.posting}\nrules: {why}\nposted: {what}"
        verdicts[bool(what)] += 1
    return verdicts[0], verdicts[1]


@pytest.mark.parametrize("name", ALL)
def test_messages_posted_at_their_places_pass(name: str) -> None:
    assert posted(with_posting(made(name)[0])) == ""


def test_nccls_rules_refuse_what_hangs_or_is_mixed_up_and_nothing_else() -> None:
    good, bad = compare(60, seed=0)
    assert good >= 5 and bad >= 20


@pytest.mark.slow
def test_nccls_rules_refuse_what_hangs_or_is_mixed_up_and_nothing_else_2000_times() -> None:
    good, bad = compare(2000, seed=1)
    assert good >= 200 and bad >= 1000
