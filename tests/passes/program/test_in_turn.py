"""Replicas that take micro-batches in turn, or have other shares of the rows: programs, their proof, and their time."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.languages.graphs import cluster, graph, source
from support.languages.parse import parse_decision
from support.languages.text import decision_text

from autopart.ir.plan import Decision, Stage, check_decision
from autopart.ir.program import Program
from autopart.passes.program.messages import check_messages
from autopart.passes.program.named import FAMILY
from autopart.passes.program.orders import Shape
from autopart.passes.program.routing import edges, route, tied
from autopart.passes.program.schedules import find, in_flight, most_held
from autopart.passes.program.verify import check_program
from autopart.passes.simulation.estimate import estimate, simulated_ns, stage_estimates, timeline_of
from autopart.passes.simulation.stage_costs import Estimator

MODEL = graph("a:600 #60 +w <- x; b:100 #40 +v <- a; c:100 #4 +w <- a b", input_bytes=24)
OPS = ("a", "b", "c")
SCHEDULES = (*FAMILY, "zb-h1", "zb-h2")


def estimator(world: int) -> Estimator:
    c = cluster(world)
    return Estimator(c, source(MODEL, c).cost_model, overlap=True)


def proven(decision: Decision) -> Program:
    """The program, under the rules of both transports."""
    return check_messages(check_program(route(check_decision(decision, MODEL), MODEL), decision.schedule))


@st.composite
def decisions(draw: st.DrawFn) -> Decision:
    count = draw(st.integers(1, 3))
    stages, world = [], 0
    for s in range(count):
        ops = OPS[s : s + 1] if s < count - 1 else OPS[s:]
        ranks = tuple(range(world, world := world + draw(st.integers(1, 4))))
        policy = draw(st.sampled_from(["split", "turn"]))
        shares = draw(st.one_of(st.just([]), st.lists(st.integers(1, 4), min_size=len(ranks), max_size=len(ranks))))
        stages.append(Stage(ops, ranks, (), tuple(shares) if policy == "split" else (), policy))
    micros = draw(st.integers(1, 7))
    lengths = tuple(draw(st.sampled_from([(), (3, 1), (2, 2, 1)])))
    rows = (draw(st.integers(1, 5)),) * micros
    return Decision(world, tuple(stages), rows, draw(st.sampled_from(SCHEDULES)), token_slices=lengths)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_slices_wait_for_no_micro_batch_of_a_replica_that_comes_later(schedule: str) -> None:
    """The second stage is the one that takes every third micro-batch."""
    stages = Stage(("a",), (0,)), Stage(("b",), (1, 2, 3), policy="turn"), Stage(("c",), (4,))
    for micros in range(1, 9):
        proven(Decision(5, stages, (1,) * micros, schedule, token_slices=(3, 1)))


@settings(max_examples=60)
@given(decisions())
def test_every_program_is_proven_and_simulated_as_it_is_played(decision: Decision) -> None:
    program = proven(decision)
    assert parse_decision(decision_text(decision)) == decision
    for rank in range(decision.world):
        stage = next(iter(decision.stages_of_rank(rank)), None)
        assert stage is not None
        divided, replica = decision.stages[stage].division, decision.stages[stage].ranks.index(rank)
        mine = [a.micro for a in program.part(rank) if a.kind == "F" and not a.slot.slice]
        assert mine == [m for m in range(program.micros) if divided.player(m) in (None, replica)]
    here = estimator(decision.world)
    links, shared = edges(decision, MODEL), tied(decision, MODEL)
    estimates = stage_estimates(decision, links, here)
    step_ns = simulated_ns(decision, estimates, links, shared, here, whole=False)
    assert estimate(decision, program, here).step_ns == step_ns
    assert max(span.end_ns for span in timeline_of(decision, program, here).spans) == step_ns


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.integers(1, 12),
    st.integers(1, 3),
    st.sampled_from(FAMILY),
)
def test_a_replica_holds_what_its_schedule_promises(turns: list[int], micros: int, slices: int, name: str) -> None:
    schedule, shape = find(name), Shape(len(turns), micros, slices, tuple(turns))
    for stage in range(len(turns)):
        held = in_flight(schedule, stage, shape)
        assert held == most_held(schedule, stage, shape)
        if name == "1f1b" and slices == 1:  # PipeDream's count (SOSP 2019, section 3.2)
            assert held == min(-(-micros // turns[stage]), -(-sum(turns[stage:]) // turns[stage]))


def test_replicas_in_turn_work_side_by_side() -> None:
    alone = parse_decision("schedule 1f1b, micro-batches of 2 2 2 2 2 2 rows, world 2; stage on 0: a; stage on 1: b c")
    both = parse_decision(
        "schedule 1f1b, micro-batches of 2 2 2 2 2 2 rows, world 3; stage on 0 1 in turn: a; stage on 2: b c"
    )
    one, two = (estimate(d, proven(d), estimator(d.world)).step_ns for d in (alone, both))
    assert two < 0.75 * one
    assert [str(a) for a in proven(both).part(1) if a.kind in "FB"] == ["0F1", "0F3", "0B1", "0F5", "0B3", "0B5"]


def test_each_message_goes_to_the_replica_whose_turn_it_is() -> None:
    program = proven(
        parse_decision("schedule gpipe, micro-batches of 1 1 1 1 rows, world 5; stage on 0 1 in turn: a; "
                       "stage on 2 3 4 in turn: b c")
    )  # fmt: skip
    found = {(send.micro, t.src_rank, t.dst_rank) for send in program.order if send.kind == "SF"
             for t in program.transfers(send)}  # fmt: skip
    assert found == {(0, 0, 2), (1, 1, 3), (2, 0, 4), (3, 1, 2)}
    assert len(program.channels(0, 1)) == 4
