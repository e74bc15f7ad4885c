"""Programs over slices of sequences: what passes between stages, what is proved of them, and what they hold."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.languages.graphs import graph
from support.languages.parts import parse_actions
from support.languages.programs import program
from support.oracles.strict import hangs, issued

from autopart.ir.errors import ProgramError
from autopart.ir.plan import Decision, Stage
from autopart.ir.program import Edge
from autopart.passes.program.messages import check_messages
from autopart.passes.program.named import FAMILY as SCHEDULES
from autopart.passes.program.routing import edges, route
from autopart.passes.program.verify import check_program, forward_program


def test_what_has_no_gradient_passes_once() -> None:
    g = graph("a <- x; b <- a; c <- b y")
    p = Decision(3, tuple(Stage((name,), (s,)) for s, name in enumerate("abc")), (1,), "1f1b", token_slices=(5, 3))
    assert edges(p, g) == (
        Edge(0, 1, ("a",), ("a",)),
        Edge(0, 2, ("y",), (), ("y",)),
        Edge(1, 2, ("b",), ("b",)),
    )
    program = check_program(route(p, g), "1f1b")
    assert program.slices == 2
    assert [str(action) for action in program.part(2)][:9] == [
        "2RF0<0", "2RF0<1", "2F0", "2RF0.1<1", "2F0.1", "2B0.1", "2SB0.1>1", "2B0", "2SB0>1",
    ]  # fmt: skip
    assert program.edges[1].names("forward", 1) == () and program.edges[1].names("forward") == ("y",)


def test_whole_sequences_have_the_programs_that_they_had() -> None:
    text = "0F0 0SF0>1 0F1 0SF1>1 1F0 1B0 1SB0>0 0B0 1F1 1B1 1SB1>0 0B1 0A 0O 1O"
    g = graph("a <- x; b <- a")
    p = Decision(2, (Stage(("a",), (0,)), Stage(("b",), (1,))), (1, 1), "1f1b")
    assert str(route(p, g)) == text and route(p, g).edges == (Edge(0, 1, ("a",), ("a",)),)


@settings(max_examples=40)
@given(
    st.sampled_from(SCHEDULES),
    st.sampled_from(["a b c d", "a | b c d", "a b | c d", "a | b | c | d"]),
    st.integers(1, 4),
    st.integers(2, 5),
)
def test_every_program_runs_whatever_the_transport(schedule: str, stages: str, micros: int, slices: int) -> None:
    p = check_program(program(schedule, micros, stages, slices=slices), schedule)
    check_messages(p)
    assert hangs(issued(p)) == []
    assert parse_actions(str(p)) == p.order
    check_program(forward_program(p), backward=False)


@pytest.mark.parametrize(
    ("order", "what"),
    [
        ("0F0.1 0F0 0B0.1 0B0 0O", "0F0.1 runs before slice 0"),
        ("0F0 0F0.1 0B0 0B0.1 0O", "0B0 runs before slice 1"),
        ("0F0 0F0.1 0B0.1 0O 0B0", "0O stands before the last backward"),
        ("0F0 0F0.1 0F0.2 0B0.1 0B0 0O", "there is no stage 0, micro-batch 0, slice 2"),
        ("0F0 0F0.1 0B0.1 0B0", "0O is missing"),
    ],
)
def test_orders_that_break_the_states_are_refused(order: str, what: str) -> None:
    p = replace(program(micros=1, stages="a b c d", slices=2), order=parse_actions(order))
    with pytest.raises(ProgramError, match=what):
        check_program(p, "1f1b")


def test_a_stage_that_holds_too_many_slices_is_found() -> None:
    p = program("gpipe", micros=4, slices=2)
    with pytest.raises(ProgramError, match="puts 6 slices in flight on stage 0"):
        check_program(p, "1f1b")
