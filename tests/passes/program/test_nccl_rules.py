"""What hangs under NCCL is found before anything runs, and what the compiler makes never does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_nccl_jobs import all_receives_first
from support.nccl_programs import CASES, FINE, HANG, WRONG, Case
from support.programs import program

from autopart.ir.errors import ProgramError
from autopart.ir.program import split_rows
from autopart.ir.turns import talking_pairs, turns
from autopart.passes.program.messages import check_messages, issued, one_copy
from autopart.passes.program.nccl_rules import play
from autopart.passes.program.schedules import AUTOMATIC as SCHEDULES
from autopart.passes.program.verify import forward_program


def verdict(case: Case, *, strict: bool) -> str:
    opened = case.members if case.connected else ()
    found = play(case.queues, case.members, strict=strict, opened=opened, connected=case.connected)
    if not found:
        return FINE
    return HANG if "stands at" in found[0] or "left over" in found[0] else WRONG


@pytest.mark.parametrize("name", CASES)
def test_each_program_does_what_nccl_does(name: str) -> None:
    case = CASES[name]
    assert (verdict(case, strict=True), verdict(case, strict=False)) == (case.strict, case.relaxed)


RANKS = {
    "a | b | c | d": ((0,), (1,), (2,), (3,)),
    "a | b c | d": ((0, 1), (2,), (3, 4, 5)),
    "a b | c | d": ((0,), (1, 2), (3,)),
    "a | b | c d": ((2,), (1,), (0,)),
}


@given(st.sampled_from(SCHEDULES), st.integers(1, 5), st.sampled_from(list(RANKS)))
def test_no_program_of_ours_hangs_whatever_takes_turns(schedule: str, micros: int, stages: str) -> None:
    p = program(schedule, micros, stages, RANKS[stages])
    assert check_messages(p) is p
    check_messages(forward_program(p))
    queues, members = issued(p)
    assert play(queues, members, strict=False) == []


def test_of_copies_that_run_side_by_side_one_is_checked() -> None:
    p = program("1f1b", 3, "a | b c | d", ((0, 1, 2, 3), (4, 5), (6, 7, 8, 9, 10, 11)))
    assert one_copy(p).stage_ranks == ((0, 1), (2,), (3, 4, 5)) and one_copy(p).world == 6
    assert {(t.src_rank, t.dst_rank) for t in split_rows((0, 1), (2,))} == {(0, 2), (1, 2)}
    uneven = program("1f1b", 3, "a | b c | d", ((0, 1), (2, 3), (4,)))
    assert one_copy(uneven) is uneven
    check_messages(p)


def test_receives_posted_before_the_first_action_hang() -> None:
    p = program("1f1b", 2, "a b | c d", ((0,), (1,)))
    queues, members = issued(p, all_receives_first(p))
    assert "stands at: receive" in play(queues, members, strict=True)[0]
    check_messages(p)


def test_a_hang_is_named_with_the_fronts_of_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopart.passes.program.messages.turns", all_receives_first)
    with pytest.raises(ProgramError, match="can hang under NCCL") as caught:
        check_messages(program("1f1b", 2, "a b | c d", ((0,), (1,))))
    fronts = ("rank 0 stands at: receive 1SB0>0 from rank 1", "rank 1 stands at: receive 0SF0>1 from rank 0")
    assert caught.value.where == "; ".join(fronts)


def test_both_ends_post_the_same_messages_in_the_same_order() -> None:
    p = program("1f1b", 4, "a | b | c | d", ((0,), (1,), (2,), (3,)))
    posted = turns(p)
    assert talking_pairs(p) == ((0, 1), (0, 2), (1, 2), (1, 3), (2, 3))
    for a, b in talking_pairs(p):
        one = [(turn.sends, turn.receives) for turn in posted[a] if turn.peer == b]
        other = [(turn.receives, turn.sends) for turn in posted[b] if turn.peer == a]
        assert one == other and one
    assert turns(p, [1]) == {1: posted[1]}
    afters = [turn.after for turn in posted[1]]
    assert afters == sorted(afters) and afters[0] == 0
