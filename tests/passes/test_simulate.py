"""The simulator against formulas, and the physics that any timeline obeys."""

from __future__ import annotations

from itertools import pairwise

import pytest
from graphs import cluster, clusters, graph, graphs
from hypothesis import given
from hypothesis import strategies as st

from autopart.ir.cluster import Cluster
from autopart.ir.errors import ProgramError
from autopart.ir.graph import Graph
from autopart.ir.plan import SCHEDULES, Plan, Stage, in_flight
from autopart.ir.program import Program, parse_actions
from autopart.ir.timeline import Timeline
from autopart.passes.estimate import message_bytes
from autopart.passes.pipeline import build
from autopart.passes.route import route
from autopart.passes.simulate import simulate


def chain(stages: int, micros: int, schedule: str) -> Program:
    """One op a stage, in a row."""
    g = graph("; ".join(f"v{s}:1 #4 <- {f'v{s - 1}' if s else 'x'}" for s in range(stages)))
    plan = Plan("", "", "", stages, tuple(Stage((f"v{s}",), (s,)) for s in range(stages)), (1,) * micros, schedule)
    return route(plan, g)


def play(program: Program, fwd_ns: tuple[int, ...], bwd_ns: tuple[int, ...], c: Cluster, size: int = 0) -> Timeline:
    sizes = {(e.src, e.dst, "F"): size for e in program.edges} | {(e.dst, e.src, "B"): size for e in program.edges}
    held = (1,) * len(fwd_ns)
    return simulate(program, fwd_ns=fwd_ns, bwd_ns=bwd_ns, cluster=c, message_bytes=sizes, activation_bytes=held)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("backward", [1, 2])
@pytest.mark.parametrize(("stages", "micros", "percent"), [(4, 8, 27.3), (8, 32, 17.9)])
def test_bubble_of_equal_stages_is_the_textbook_one(
    stages: int, micros: int, percent: float, backward: int, schedule: str
) -> None:
    timeline = play(chain(stages, micros, schedule), (1,) * stages, (backward,) * stages, cluster(stages))
    bubble = 1 - sum(timeline.busy_ns(r) for r in range(stages)) / (stages * timeline.step_ns)
    assert bubble == pytest.approx((stages - 1) / (micros + stages - 1))
    assert round(100 * bubble, 1) == percent


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=6), st.integers(1, 8))
def test_gpipe_without_transfers_is_two_flow_shops(times: list[tuple[int, int]], micros: int) -> None:
    fwd_ns, bwd_ns = zip(*times, strict=True)
    timeline = play(chain(len(times), micros, "gpipe"), fwd_ns, bwd_ns, cluster(len(times)))
    assert timeline.step_ns == sum(sum(ts) + (micros - 1) * max(ts) for ts in (fwd_ns, bwd_ns))


@given(st.integers(1, 6), st.integers(1, 8), st.integers(0, 9), st.integers(0, 9))
def test_equal_stages_take_what_the_partition_minimises(stages: int, micros: int, fwd: int, bwd: int) -> None:
    for schedule in SCHEDULES:
        timeline = play(chain(stages, micros, schedule), (fwd,) * stages, (bwd,) * stages, cluster(stages))
        assert timeline.step_ns == (stages + micros - 1) * (fwd + bwd)


def test_transfers_delay_as_drawn() -> None:
    """Two stages, one micro-batch; F takes 2, B takes 3, a message 1 + 4 (latency and bytes)."""
    timeline = play(chain(2, 1, "1f1b"), (2, 2), (3, 3), cluster(2, latency_ns=1), size=4)
    assert [(s.rank, str(s.action), s.start_ns, s.end_ns) for s in timeline.spans if s.start_ns < s.end_ns] == [
        (0, "0F0", 0, 2),
        (1, "1RF0<0", 0, 7),
        (0, "0SF0>1", 2, 7),
        (0, "0RB0<1", 2, 17),
        (1, "1F0", 7, 9),
        (1, "1B0", 9, 12),
        (1, "1SB0>0", 12, 17),
        (0, "0B0", 17, 20),
    ]


def test_slow_link_sets_the_pace() -> None:
    timeline = play(chain(2, 4, "gpipe"), (1, 1), (0, 0), cluster(2), size=10)
    sends = [(s.start_ns, s.end_ns) for s in timeline.spans if str(s.action).startswith("0SF")]
    assert sends == [(1, 11), (11, 21), (21, 31), (31, 41)]


def test_sum_of_tied_gradients_takes_its_time() -> None:
    program = Program(1, (0,), parse_actions("0F0 0B0 0T"), tied=(("w", (0,)),))
    timeline = simulate(
        program,
        fwd_ns=(1,),
        bwd_ns=(2,),
        cluster=cluster(1),
        message_bytes={},
        activation_bytes=(5,),
        tied_ns=(7,),
    )
    assert timeline.step_ns == 10 and timeline.busy_ns(0) == 3 and timeline.peak_bytes == (5,)


def test_receive_without_a_send_is_an_error_not_a_hang() -> None:
    with pytest.raises(ProgramError, match="0RB0<1 waits for ever"):
        play(Program(1, (0, 1), parse_actions("0F0 0RB0<1 0B0\n1F0 1B0")), (1, 1), (1, 1), cluster(2))


@given(graphs(least=3), st.data())
def test_timeline_obeys_physics(g: Graph, data: st.DataObject) -> None:
    c = data.draw(clusters(3))
    micros, schedule = data.draw(st.integers(1, 5)), data.draw(st.sampled_from(SCHEDULES))
    plan = build(g, c, stages=None, micro_rows=(1,) * micros, schedule=schedule, torch_version="")
    program = route(plan, g)
    sizes = message_bytes(program, g)
    timeline = simulate(
        program,
        fwd_ns=tuple(e.fwd_ns for e in plan.estimates),
        bwd_ns=tuple(e.bwd_ns for e in plan.estimates),
        cluster=c,
        message_bytes=sizes,
        activation_bytes=tuple(e.activation_bytes for e in plan.estimates),
    )
    assert len(timeline.spans) == sum(len(actions) for actions in program.ranks)
    by_key = {(s.rank, str(s.action)): s for s in timeline.spans}
    for rank, actions in enumerate(program.ranks):
        own = [by_key[rank, str(a)] for a in actions if a.kind[0] != "S"]
        assert all(one.end_ns <= two.start_ns for one, two in pairwise(own))
    for edge in program.edges:
        for kind, src, dst in (("F", edge.src, edge.dst), ("B", edge.dst, edge.src)):
            sends = [by_key[src, str(a)] for a in program.ranks[src] if (a.kind, a.peer) == (f"S{kind}", dst)]
            assert all(one.end_ns <= two.start_ns for one, two in pairwise(sends))
            for send in sends:
                micro = send.action.micro
                assert by_key[src, f"{src}{kind}{micro}"].end_ns <= send.start_ns
                assert send.end_ns - send.start_ns == (
                    c.link(src, dst).transfer_ns(sizes[src, dst, kind]) if sizes[src, dst, kind] else 0
                )
                assert by_key[dst, f"{dst}{kind}{micro}"].start_ns >= send.end_ns
    for s, stage_estimate in enumerate(plan.estimates):
        live = in_flight(schedule, s, len(plan.stages), micros)
        assert timeline.peak_bytes[s] == live * stage_estimate.activation_bytes
