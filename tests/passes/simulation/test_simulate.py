"""The simulator against formulas, and the physics that any timeline obeys."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.languages.graphs import cluster, clusters, graph, graphs, plan_of, source
from support.languages.parts import parse_actions
from support.oracles.simulated import chain, check_path, drawn, ending, memory, play, work_of

from autopart.ir.actions import BACKWARD, FORWARD, SEND, SENDS, Action
from autopart.ir.cluster import Cluster, Level, Link
from autopart.ir.errors import ProgramError
from autopart.ir.graph import Graph, Size
from autopart.ir.plan import Decision, Stage
from autopart.ir.program import BUCKET_BYTES, Program
from autopart.ir.timeline import Timeline
from autopart.passes.program.named import FAMILY as SCHEDULES
from autopart.passes.program.orders import Order, Shape
from autopart.passes.program.routing import route
from autopart.passes.program.schedules import find, in_flight, pattern, register
from autopart.passes.program.verify import check_program
from autopart.passes.simulation.charges import summing_ns
from autopart.passes.simulation.estimate import simulated_ns, stage_estimates
from autopart.passes.simulation.estimate import work_of as work_of_plan
from autopart.passes.simulation.simulate import Work, ordered_ns, simulate, step_ns
from autopart.passes.simulation.stage_costs import Estimator, message_bytes
from autopart.passes.simulation.traffic import p2p_load, ring_load


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


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_messages_that_are_not_told_take_no_time(schedule: str) -> None:
    program = chain(3, 4, schedule)
    assert step_ns(program, Work((2,) * 3, (3,) * 3, (0,) * 3, {})) == (3 + 4 - 1) * (2 + 3)


@given(st.integers(1, 6), st.integers(1, 8), st.integers(0, 9), st.integers(0, 9))
def test_equal_stages_take_what_the_partition_minimises(stages: int, micros: int, fwd: int, bwd: int) -> None:
    for schedule in SCHEDULES:
        timeline = play(chain(stages, micros, schedule), (fwd,) * stages, (bwd,) * stages, cluster(stages))
        assert timeline.step_ns == (stages + micros - 1) * (fwd + bwd)


def test_transfers_delay_as_drawn() -> None:
    """Two stages, one micro-batch; F takes 2, B takes 3, a message 1 + 4 (latency and bytes)."""
    timeline = play(chain(2, 1, "1f1b"), (2, 2), (3, 3), cluster(2, latency_ns=1), size=4)
    assert drawn(timeline) == [
        (0, "0F0", 0, 2),
        (1, "1RF0<0", 0, 7),
        (0, "0SF0>1", 2, 7),
        (0, "0RB0<1", 2, 17),
        (1, "1F0", 7, 9),
        (1, "1B0", 9, 12),
        (1, "1SB0>0", 12, 17),
        (0, "0B0", 17, 20),
    ]


@pytest.mark.parametrize("latency", [0, 100])
def test_slow_link_sets_the_pace_by_its_bytes_alone(latency: int) -> None:
    """A port is free again when the bytes have left; they arrive a latency later."""
    timeline = play(chain(2, 4, "gpipe"), (1, 1), (0, 0), cluster(2, latency_ns=latency), size=10)
    sends = [(s.start_ns, s.end_ns - latency) for s in timeline.spans if str(s.action).startswith("0SF")]
    assert sends == [(1, 11), (11, 21), (21, 31), (31, 41)]


def test_deep_1f1b_hides_slow_messages_behind_more_micro_batches() -> None:
    """Messages as long as a stage: 1F1B waits for each to go there and come back."""
    plain, deep = (
        play(chain(2, 16, name), (1, 1), (1, 1), cluster(2, latency_ns=2), size=1).step_ns
        for name in ("1f1b", "1f1b-deep")
    )
    assert deep < plain


# ---- ports ---------------------------------------------------------------------------------------------------------

CROSSING = parse_actions("0F0 0SF0>2 1F0 1SF0>3 2F0 3F0")
"""Ranks 0 and 1 send to ranks 2 and 3 at the same time."""


def nodes(bytes_per_s: int = 10**9, latency_ns: int = 3) -> Cluster:
    """Two nodes of two devices; inside a node messages are fast."""
    fast, slow = Link(0, 10**12), Link(latency_ns, bytes_per_s)
    return Cluster(cluster(4).devices, (Level(2, fast), Level(4, slow)))


def sent(program: Program, c: Cluster, size: int) -> list[tuple[int, int]]:
    timeline = play(program, (1,) * 4, (0,) * 4, c, size)
    return [(s.start_ns, s.end_ns) for s in timeline.spans if s.action.is_a.role == SEND]


def alone(order: tuple[Action, ...], micros: int = 1, stages: int = 1) -> Program:
    """A program of so many stages, each on a rank of its own."""
    return Program(micros, stages, tuple((s,) for s in range(stages)), order)


def test_messages_through_one_nodes_port_wait_for_each_other() -> None:
    assert sent(alone(CROSSING, stages=4), nodes(), 10) == [(1, 14), (11, 24)]


def test_messages_through_different_ports_do_not_wait() -> None:
    assert sent(alone(CROSSING, stages=4), cluster(4, latency_ns=3), 10) == [(1, 14), (1, 14)]


def test_the_two_directions_of_a_port_do_not_disturb_each_other() -> None:
    both_ways = parse_actions("0F0 0SF0>2 2F0 3F0 3SF0>1 1F0")
    assert sent(alone(both_ways, stages=4), nodes(), 10) == [(1, 14), (1, 14)]


def test_two_senders_wait_at_the_port_of_their_receiver() -> None:
    to_one = parse_actions("0F0 0SF0>2 1F0 1SF0>2 2F0")
    assert sent(alone(to_one, stages=3), cluster(3), 10) == [(1, 11), (11, 21)]


def test_messages_inside_a_node_leave_its_port_alone() -> None:
    """Rank 0 sends to its neighbour, rank 1 to the other node: the slow port is used once."""
    beside = parse_actions("0F0 0SF0>1 1F1 1SF1>2 1F0 2F1")
    timeline = play(alone(beside, micros=2, stages=3), (1, 1, 1), (0,) * 3, nodes(), 1000)
    assert [(s.start_ns, s.end_ns) for s in timeline.spans if s.action.kind == "SF"] == [(1, 2), (1, 1004)]


def test_replicas_send_their_shares_at_once() -> None:
    """Two to two, each half of the rows over its own port; over one node's port the halves add up."""
    assert p2p_load(cluster(4, latency_ns=3), (0, 1), (2, 3)).alone_ns(10) == 3 + 5
    assert p2p_load(nodes(), (0, 1), (2, 3)).alone_ns(10) == 3 + 10


# ---- the end of a step ---------------------------------------------------------------------------------------------


def test_sum_of_tied_gradients_takes_its_time() -> None:
    """It begins when the slower of the stages is there, and takes an all-reduce over their ranks."""
    program = Program(
        1, 2, ((0,), (1,)), parse_actions("0F0 0B0 1F0 1B0 0T 1T 0O 1O"), tied=(("w", (0, 1)), ("v", (0, 1)))
    )
    load = ring_load(cluster(2, latency_ns=1), (0, 1), 2)
    assert load.alone_ns(20) == 2 + 20
    tied = (((0, 1), 20, load), ((0, 1), 10, load))
    timeline = simulate(program, Work((1, 4), (2, 5), (5, 6), {}, tied, (), (3, 1)))
    assert drawn(timeline)[-4:] == [(0, "0T", 9, 43), (1, "1T", 9, 43), (0, "0O", 43, 46), (1, "1O", 43, 44)]
    assert timeline.busy_ns(0) == 3 and timeline.peak_bytes == (5, 6)
    check_path(timeline)


def test_sums_of_stages_that_share_nothing_do_not_wait_for_each_other() -> None:
    order = parse_actions("0F0 0B0 1F0 1B0 2F0 2B0 3F0 3B0 0T 1T 2T 3T")
    program = Program(1, 4, tuple((s,) for s in range(4)), order, tied=(("w", (0, 1)), ("v", (2, 3))))
    c = cluster(4)
    tied = tuple((own, 10, ring_load(c, own, 2)) for own in ((0, 1), (2, 3)))
    timeline = simulate(program, Work((1, 1, 7, 1), (0,) * 4, (1,) * 4, {}, tied))
    assert [(s.start_ns, s.end_ns) for s in timeline.spans if s.action.kind == "T"] == [(1, 11)] * 2 + [(7, 17)] * 2


def test_a_rank_with_both_stages_of_a_sum_comes_once() -> None:
    order = parse_actions("0F0 0B0 1F0 1B0 0T 1T")
    program = Program(1, 1, ((0,), (0,)), order, tied=(("w", (0, 1)),))
    load = ring_load(cluster(1), (0,), 2)
    timeline = simulate(program, Work((1, 1), (2, 2), (3, 4), {}, (((0, 1), 10, load),)))
    assert timeline.step_ns == 6 and timeline.peak_bytes == (4,)


def test_gradients_are_summed_behind_the_last_backward_and_then_comes_the_optimizer() -> None:
    assert drawn(ending(overlap=False))[-2:] == [(0, "0R", 14, 36), (0, "0O", 36, 43)]


def test_gradients_of_a_single_bucket_hide_nothing() -> None:
    """It is complete when the backward ends, beside which the sum stands."""
    assert drawn(ending(overlap=True))[-3:] == [(0, "0B1", 9, 14), (0, "0R", 9, 36), (0, "0O", 36, 43)]


@pytest.mark.parametrize(
    ("backward_ns", "end_ns"),
    [
        (200, 200 + 25),  # all but the last bucket is hidden
        (100, 100 + 25),
        (50, 1 + 100),  # the sum begins with the first bucket, and is the longer
    ],
)
def test_what_a_sum_has_left_behind_the_last_backward_is_charged(backward_ns: int, end_ns: int) -> None:
    """A sum of 100 units of time in buckets of 25, the first of 1."""
    unit, size = BUCKET_BYTES // 25, 4 * BUCKET_BYTES
    load = ring_load(cluster(2, bytes_per_s=10**9 * unit), (0, 1), 2)  # a unit takes a nanosecond
    program = Program(1, 2, ((0, 1),), parse_actions("0F0 0B0 0R"))
    hidden, behind = (
        step_ns(program, Work((2,), (backward_ns,), (1,), {}, (), ((size, load),), (), flag)) for flag in (True, False)
    )
    assert abs(hidden - 2 - end_ns) <= 1 and behind == 2 + backward_ns + 100


def test_sums_of_two_stages_share_the_ports_of_their_nodes() -> None:
    """Replicas of both stages stand on both nodes: one sum waits for the other."""
    c = nodes(latency_ns=0)
    ranks = ((0, 2), (1, 3))
    reduce = tuple((20, ring_load(c, own, 2)) for own in ranks)
    program = Program(1, 4, ranks, parse_actions("0F0 0B0 1F0 1B0 0R 1R"))
    timeline = simulate(program, Work((1, 1), (1, 1), (1, 1), {}, (), reduce))
    assert [(s.start_ns, s.end_ns) for s in timeline.spans if s.action.kind == "R"] == [(2, 22), (22, 42)]


def test_an_optimizer_of_no_time_ends_the_step_at_once() -> None:
    timeline = simulate(alone(parse_actions("0F0 0B0 0O")), Work((1,), (1,), (1,), {}))
    assert [(str(s.action), s.end_ns) for s in timeline.spans] == [("0F0", 1), ("0B0", 2), ("0O", 2)]


def test_a_sum_that_not_all_come_to_is_an_error_not_a_hang() -> None:
    program = replace(alone(parse_actions("0F0 0B0 1F0 1B0 0T"), stages=2), tied=(("w", (0, 1)),))
    with pytest.raises(ProgramError, match="0T waits for ever"):
        simulate(program, Work((1, 1), (1, 1), (1, 1), {}))


def test_stages_of_a_rank_with_other_replicas_are_refused() -> None:
    program = Program(1, 2, ((0, 1), (1,)), parse_actions("0F0 0B0 1F0 1B0"))
    with pytest.raises(ProgramError, match="different replicas"):
        simulate(program, Work((1, 1), (1, 1), (1, 1), {}))


# ---- several stages on a rank, and orders of a user ----------------------------------------------------------------


def in_loops(stages: int, micros: int) -> list[list[str]]:
    """Two workers with every second stage each: all forwards, then all backwards."""
    return [
        [f"{s}F{i}" for i in range(micros) for s in range(worker, stages, 2)]
        + [f"{s}B{i}" for i in range(micros) for s in reversed(range(worker, stages, 2))]
        for worker in range(2)
    ]


def crossed(stages: int, micros: int) -> list[list[str]]:
    """Every second stage takes the micro-batches from the last to the first: messages overtake each other."""
    return [
        [f"{s}{kind}{i}" for kind in "FB" for i in (range(micros) if s % 2 else reversed(range(micros)))]
        for s in range(stages)
    ]


@settings(max_examples=30)
@given(
    st.sampled_from([in_loops, crossed]),
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=4, max_size=4),
    st.integers(0, 9),
)
def test_any_order_takes_as_long_made_into_a_program_as_not(
    order: Order, micros: int, times: list[tuple[int, int]], size: int
) -> None:
    schedule = register(order)
    g = graph("a:1 +w #4 <- x; b:1 #4 <- a; c:1 #4 <- b a; d:1 +w #4 <- c")
    ranks = tuple((s % 2,) for s in range(4)) if order is in_loops else tuple((s,) for s in range(4))
    placed = tuple(Stage((name,), own) for name, own in zip("abcd", ranks, strict=True))
    decision = Decision(4, placed, (1,) * micros, schedule.name)
    program, c = check_program(route(decision, g), schedule.name), cluster(4, latency_ns=2)
    fwd_ns, bwd_ns = zip(*times, strict=True)
    sums = tuple(dict.fromkeys(ranks[0] + ranks[3]))
    work = replace(
        work_of(program, fwd_ns, bwd_ns, c, size),
        tied=(((0, 3), size, ring_load(c, sums, 2)),),
        optimizer_ns=(1, 2, 3, 4),
    )
    timeline = simulate(program, work)
    assert timeline.step_ns == step_ns(program, work)
    short = ordered_ns(pattern(schedule, Shape(4, micros)), program.edges, program.tied, ranks, work)
    assert short == timeline.step_ns
    assert len(timeline.spans) == sum(map(len, program.parts([*{own[0]: None for own in ranks}])))
    check_path(timeline)


def test_messages_that_overtake_each_other_are_told_apart() -> None:
    """Stage 1 waits for 0F1, which is sent behind 0F0."""
    order = parse_actions("0F0 0SF0>1 0F1 0SF1>1 1F1 1F0")
    timeline = play(alone(order, micros=2, stages=2), (1, 1), (0, 0), cluster(2), size=10)
    assert [span for span in drawn(timeline) if span[0] == 1] == [
        (1, "1RF1<0", 0, 21),
        (1, "1F1", 21, 22),
        (1, "1F0", 22, 23),
    ]


# ---- any program ---------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(graphs(least=3), st.data())
def test_timeline_obeys_physics(g: Graph, data: st.DataObject) -> None:
    c = data.draw(clusters(data.draw(st.sampled_from([3, 4]))))
    micros, schedule = data.draw(st.integers(1, 5)), data.draw(st.sampled_from(SCHEDULES))
    stages = data.draw(st.sampled_from([None, 2]))
    plan = plan_of(g, c, micros=micros, schedule=schedule, stages=stages if len(g.ops) > 5 and not g.updates else None)
    program = route(plan.decision, g)
    estimator = Estimator(c, source(g, c).cost_model)
    sizes = message_bytes(program.edges, estimator.graph(Size(max(plan.micro_rows))).values)
    estimates = stage_estimates(plan.decision, program.edges, estimator)
    work = work_of_plan(plan.decision, estimates, program.edges, program.tied, estimator)
    assert estimates == plan.estimates
    timeline = simulate(program, work)
    assert timeline.step_ns == plan.step_ns == step_ns(program, work)
    without_a_program = simulated_ns(plan.decision, estimates, program.edges, program.tied, estimator, whole=False)
    assert timeline.step_ns == without_a_program
    parts = program.parts(range(program.world))
    home = [stage.ranks[0] for stage in plan.stages]
    assert len(timeline.spans) == sum(len(parts[rank]) for rank in set(home))
    by_key = {(s.rank, str(s.action)): s for s in timeline.spans}
    for rank, actions in ((rank, parts[rank]) for rank in set(home)):
        own = [by_key[rank, str(a)] for a in actions if a.is_a.role != SEND]
        assert all(one.end_ns <= two.start_ns for one, two in pairwise(own))
    for edge in program.edges:
        for kind, way, src, dst in (("F", FORWARD, edge.src, edge.dst), ("B", BACKWARD, edge.dst, edge.src)):
            own = parts[home[src]]
            sends = [by_key[home[src], str(a)] for a in own if (a.kind, a.peer) == (SENDS[way], dst)]
            assert all(one.start_ns <= two.start_ns and one.end_ns <= two.end_ns for one, two in pairwise(sends))
            for send in sends:
                micro = send.action.micro
                assert by_key[home[src], f"{src}{kind}{micro}"].end_ns <= send.start_ns
                size = sizes[src, dst, way]
                link = c.link(home[src], home[dst])
                took_ns = link.latency_ns - (-size * 10**9 // link.bytes_per_s)
                assert send.end_ns - send.start_ns == (took_ns if size else 0)
                assert by_key[home[dst], f"{dst}{kind}{micro}"].start_ns >= send.end_ns
    check_ports(timeline, work)
    for s, stage_estimate in enumerate(plan.estimates):
        if plan.stages[s].forward_only:
            assert not timeline.peak_bytes[home[s]]
            continue
        live = in_flight(find(schedule), s, Shape(len(plan.stages), micros))
        peak = timeline.peak_bytes[home[s]]
        assert peak == live * stage_estimate.activation_bytes
        curve = memory(timeline, home[s], stage_estimate.activation_bytes)
        assert curve[0] == (0, 0) and curve[-1][1] == 0 and max(held for _, held in curve) == peak
    check_path(timeline)


def check_ports(timeline: Timeline, work: Work) -> None:
    """No port carries two messages at a time in one direction."""
    taken: dict[object, list[tuple[int, int]]] = {}
    for span in timeline.spans:
        if span.action.is_a.role == SEND and span.end_ns > span.start_ns and span.action.peer is not None:
            size, (load,) = work.messages[span.action.stage, span.action.peer, span.action.is_a.way]
            for way, share, rate in zip(load.ways, load.shares.tolist(), load.rates.tolist(), strict=True):
                busy = load.busy_ns(size)[share, rate]
                taken.setdefault(way, []).append((span.start_ns, span.start_ns + busy))
    for intervals in taken.values():
        assert all(one[1] <= two[0] for one, two in pairwise(sorted(intervals)))


def test_smaller_buckets_leave_less_behind_the_last_backward() -> None:
    unit, size = BUCKET_BYTES // 25, 4 * BUCKET_BYTES
    load = ring_load(cluster(2, bytes_per_s=10**9 * unit), (0, 1), 2)
    program = Program(1, 2, ((0, 1),), parse_actions("0F0 0B0 0R"))
    small, large = (
        step_ns(program, Work((2,), (200,), (1,), {}, (), ((size, load),), (), True, bucket_bytes=size_of))
        for size_of in (5 * unit, 50 * unit)
    )
    assert (small, large) == (2 + 200 + 5, 2 + 200 + 50)


def test_tied_gradients_are_summed_once_over_all_ranks_of_their_stages() -> None:
    """As the runtime does: not over the first ranks alone, nor once more over the replicas of each stage."""
    g, c = graph("a:1 +w:8 <- x; b:1 +w +v:4 <- a"), cluster(4)
    stages = (Stage(("a",), (0, 1)), Stage(("b",), (2, 3)))
    decision = Decision(4, stages, (2, 2), "1f1b")
    estimator = Estimator(c, source(g, c).cost_model)
    program = check_program(route(decision, g), "1f1b")
    estimates = stage_estimates(decision, program.edges, estimator)
    work = work_of_plan(decision, estimates, program.edges, program.tied, estimator)
    assert work.tied == (((0, 1), 8, estimator.loads.ring((0, 1, 2, 3), 2)),)
    assert work.tying_ns == (summing_ns(8, (0, 1, 2, 3), c),)
    plain, longer = (step_ns(program, replace(work, tying_ns=each)) for each in ((), (700,)))
    assert longer - plain == 700
    assert [size for size, _ in work.reduce] == [0, 4]
