"""Programs of every kind, broken at random: the verifier and ranks that act agree.

With split backwards, several stages a rank, replicas, tied parameters, and asynchronous training with its updates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
from support.languages.broken_programs import ALL, GROUPS, made, mutated
from support.oracles.acted import acted
from support.oracles.strict import hangs, issued

from autopart.ir.errors import ProgramError
from autopart.ir.program import Program
from autopart.passes.program.messages import check_messages, one_copy
from autopart.passes.program.verify import check_program


def refused(program: Program, schedule: str) -> str:
    try:
        check_program(program, schedule)
    except ProgramError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", ALL)
def test_programs_as_they_are_made_are_accepted_and_act(name: str) -> None:
    program, schedule = made(name)
    check_messages(check_program(program, schedule))
    assert acted(program, schedule) == "" and hangs(issued(program)) == []


def compare(count: int, seed: int, names: Sequence[str] = ALL) -> tuple[int, int]:
    """Break programs; return how many are still good, and how many hang or are mixed up."""
    draw, verdicts = Random(seed), [0, 0]
    for number in range(count):
        program, schedule = made(names[number % len(names)])
        broken = mutated(program, draw)
        why, what = refused(broken, schedule), acted(broken, schedule)
        assert bool(why) == bool(what), f"{broken}\nverifier: {why}\nacted: {what}"
        verdicts[bool(what)] += 1
        if not why:
            check_messages(broken)
            assert hangs(issued(broken)) == []
    return verdicts[0], verdicts[1]


def test_the_verifier_refuses_what_hangs_or_is_mixed_up_and_nothing_else() -> None:
    good, bad = compare(60, seed=0)
    assert good >= 5 and bad >= 20


@pytest.mark.slow
def test_the_verifier_refuses_what_hangs_or_is_mixed_up_and_nothing_else_2000_times() -> None:
    good, bad = compare(2000, seed=1)
    assert good >= 200 and bad >= 1000


def test_with_exchanges_inside_of_computes_it_refuses_what_hangs_and_nothing_else() -> None:
    good, bad = compare(30, seed=2, names=GROUPS)
    assert good >= 2 and bad >= 10


@pytest.mark.slow
def test_with_exchanges_inside_of_computes_it_refuses_what_hangs_and_nothing_else_2000_times() -> None:
    good, bad = compare(2000, seed=3, names=GROUPS)
    assert good >= 200 and bad >= 1000


def test_of_copies_of_a_v_one_is_checked() -> None:
    program, _ = made("zb-v, replicas")
    assert one_copy(program).stage_ranks == ((0,), (1,), (1,), (0,)) and one_copy(program).world == 2
    crossed = replace(program, stage_ranks=((0, 1), (2, 3), (3, 2), (0, 1)))
    assert one_copy(crossed) is crossed


def test_actors_see_a_hang_and_a_mix_up() -> None:
    program, schedule = made("zb-v")
    at = {str(action): place for place, action in enumerate(program.order)}
    late = list(program.order)
    late.append(late.pop(at["0SF0>1"]))
    assert "has not got 0SF0>1" in acted(replace(program, order=tuple(late)), schedule)
    replicas, schedule = made("zb-v, replicas")
    sums = [action for action in replicas.order if action.kind == "R"]
    lone = tuple(action for action in replicas.order if action != sums[0])
    assert "steps before" in acted(replace(replicas, order=lone), schedule)
