"""What hangs under NCCL is found before anything runs, and what the compiler makes never does."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.jobs.fake_nccl_jobs import all_receives_first
from support.languages.graphs import graph
from support.languages.nccl_programs import CASES, FINE, HANG, WRONG, Case
from support.languages.programs import program

from autopart.ir.errors import ProgramError
from autopart.ir.plan import Decision, Stage
from autopart.ir.program import Program
from autopart.ir.shares import split_rows
from autopart.passes.program.messages import check_messages, issued, one_copy, with_posting
from autopart.passes.program.named import FAMILY as SCHEDULES
from autopart.passes.program.nccl_rules import Collective, play
from autopart.passes.program.routing import route
from autopart.passes.program.schedules import register
from autopart.passes.program.verify import forward_program


def verdict(case: Case) -> str:
    found = play(case.queues, case.members, connected=case.connected)
    if not found:
        return FINE
    return HANG if "stands at" in found[0] else WRONG


@pytest.mark.parametrize("name", CASES)
def test_each_program_does_what_nccl_does(name: str) -> None:
    assert verdict(CASES[name]) == CASES[name].outcome


RANKS = {
    "a | b | c | d": ((0,), (1,), (2,), (3,)),
    "a | b c | d": ((0, 1), (2,), (3, 4, 5)),
    "a b | c | d": ((0,), (1, 2), (3,)),
    "a | b | c d": ((2,), (1,), (0,)),
}


@given(st.sampled_from(SCHEDULES), st.integers(1, 5), st.sampled_from(list(RANKS)))
def test_no_program_of_ours_hangs_whatever_takes_turns(schedule: str, micros: int, stages: str) -> None:
    p = program(schedule, micros, stages, RANKS[stages])
    assert check_messages(p) == with_posting(p)
    check_messages(forward_program(p))


def test_of_copies_that_run_side_by_side_one_is_checked() -> None:
    p = program("1f1b", 3, "a | b c | d", ((0, 1, 2, 3), (4, 5), (6, 7, 8, 9, 10, 11)))
    assert one_copy(p).stage_ranks == ((0, 1), (2,), (3, 4, 5)) and one_copy(p).world == 6
    assert {(t.src_rank, t.dst_rank) for t in split_rows((0, 1), (2,))} == {(0, 2), (1, 2)}
    uneven = program("1f1b", 3, "a | b c | d", ((0, 1), (2, 3), (4,)))
    assert one_copy(uneven) is uneven
    check_messages(p)


def test_receives_posted_before_the_first_action_hang() -> None:
    p = program("1f1b", 2, "a b | c d", ((0,), (1,)))
    queues, members = issued(all_receives_first(p))
    assert "stands at: receive" in play(queues, members)[0]
    check_messages(p)


def test_a_hang_is_named_with_the_fronts_of_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopart.passes.program.messages.with_posting", all_receives_first)
    with pytest.raises(ProgramError, match="can hang under NCCL") as caught:
        check_messages(program("1f1b", 2, "a b | c d", ((0,), (1,))))
    fronts = ("rank 0 stands at: receive 1SB0>0 from rank 1", "rank 1 stands at: receive 0SF0>1 from rank 0")
    assert caught.value.where == "; ".join(fronts)


def test_both_ends_post_the_same_messages_in_the_same_order() -> None:
    p = program("1f1b", 4, "a | b | c | d", ((0,), (1,), (2,), (3,)))
    posted = with_posting(p).posting
    assert p.talking_pairs == ((0, 1), (0, 2), (1, 2), (1, 3), (2, 3))
    for a, b in p.talking_pairs:
        one = [(exchange.sends, exchange.receives) for exchange in posted[a] if exchange.peer == b]
        other = [(exchange.receives, exchange.sends) for exchange in posted[b] if exchange.peer == a]
        assert one == other and one
    afters = [exchange.after for exchange in posted[1]]
    assert afters == sorted(afters) and afters[0] == 0


def pair_of_replicas() -> Program:
    """Two stages, both on the same two replicas: their sums pass through one communicator."""
    g = graph("a +w <- x; b +v <- a")
    schedule = register(lambda stages, micros: [["0F0", "1F0", "1B0", "0B0"]], name="both_stages")
    placed = (Stage(("a",), (0, 1)), Stage(("b",), (0, 1)))
    return with_posting(route(Decision(2, placed, (1,), schedule.name, zero=1), g))


def test_two_sums_swapped_on_one_rank_are_refused() -> None:
    queues, members = issued(pair_of_replicas())
    assert play(queues, members) == []
    labels = [item.label if isinstance(item, Collective) else "" for item in queues[1]]
    for one, other in (("0R", "1R"), ("0G", "1G")):
        swapped = list(queues[1])
        a, b = labels.index(one), labels.index(other)
        swapped[a], swapped[b] = swapped[b], swapped[a]
        found = play([queues[0], swapped], members)
        assert found == [f"rank 0 meets in {one}; rank 1 meets in {other}"]


def test_a_rank_in_a_sum_of_which_it_is_not_a_member_is_refused() -> None:
    queues = [[Collective("S", "0R")], [Collective("S", "0R")], [Collective("S", "0R")]]
    found = play(queues, {"S": (0, 1)})
    assert found == ["rank 2: 0R over S, of which it is not a member"]


def test_the_proof_sees_gathers_the_agreement_and_sums_inside_computes() -> None:
    p = replace(pair_of_replicas(), statistics=(1,))
    queues, members = issued(p)
    seen = [str(item) for item in queues[0] if isinstance(item, Collective) and item.label != "opening"]
    group, statistics = "('group', 0, 1)", "('statistics', 0, 1)"
    assert seen == [
        *(f"{stage}G over {group}" for stage in range(2)),
        *(f"{action} over {statistics}" for action in ("1F0", "1B0")),
        *(f"{stage}R over {group}" for stage in range(2)),
        "0A over ('host',)",
    ]
    assert play(queues, members) == []
    queues[1] = [item for item in queues[1] if getattr(item, "label", "") != "1B0"]
    assert "rank 0 stands at: 1B0" in play(queues, members)[0]
