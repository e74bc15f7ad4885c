"""The whole compiler on graphs without a model: what it returns, refuses and says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.languages.graphs import cluster, clusters, graph, graphs, layers, plan_of, source

from autopart.ir.errors import GraphError, InfeasibleError, UsageError
from autopart.ir.graph import Graph, Size
from autopart.ir.graph import check as check_graph
from autopart.ir.plan import Decision, Estimate, Plan, check
from autopart.passes.graph.atoms import atoms
from autopart.passes.pipeline import LARGEST, _spaces
from autopart.passes.program.named import FAMILY as SCHEDULES
from autopart.passes.program.routing import route
from autopart.passes.program.verify import check_program, forward_program
from autopart.passes.search import finalize as finish
from autopart.passes.search.space import PlanRequest
from autopart.passes.simulation.estimate import excess_of, simulated_ns
from autopart.passes.simulation.stage_costs import Estimator, StageContext, stage_contexts


def ops(p: Plan) -> list[str]:
    return [" ".join(stage.ops) for stage in p.stages]


@given(graphs(), st.data())
def test_any_graph_is_planned_and_its_program_proven(g: Graph, data: st.DataObject) -> None:
    world = data.draw(st.integers(1, 5))
    micros = data.draw(st.integers(1, 5))
    schedule = data.draw(st.sampled_from(("auto", *SCHEDULES)))
    p = plan_of(g, data.draw(clusters(world)), micros=micros, schedule=schedule)
    check(p, g)
    program = check_program(route(p.decision, g), p.schedule)
    check_program(forward_program(program), p.schedule, backward=False)
    place = {op.name: i for i, op in enumerate(g.ops)}
    for stage in p.stages:
        assert list(stage.ops) == sorted(stage.ops, key=place.__getitem__)
    assert len(p.stages) <= world and (len(p.stages) == world or "idle" in p.notes[0])
    assert p.step_ns >= max(e.fwd_ns + e.bwd_ns for e in p.estimates) * micros
    idle = not any(e.fwd_ns or e.bwd_ns for e in p.estimates)  # a drawn graph may take no time at all
    assert 0 <= p.outlook.bubble < 1 or (idle and p.outlook.bubble == 1)


def test_same_request_gives_the_same_plan() -> None:
    assert plan_of(layers(6), cluster(4)).digest() == plan_of(layers(6), cluster(4)).digest()


@pytest.mark.slow
def test_tables_do_not_grow_with_devices_beyond_any_number_of_stages() -> None:
    g, many = layers(1200), cluster(2048)
    request = PlanRequest(((1,) * 4,)).normalized()
    given, estimator = source(g, many), Estimator(many, source(g, many).cost_model, overlap=True)
    coarse, fine = _spaces(given, check_graph(atoms(g)), estimator, request)
    assert coarse.chain.n <= 64 < fine.chain.n <= LARGEST
    _, asked = _spaces(given, check_graph(atoms(g)), estimator, replace(request, stages=LARGEST + 1))
    assert asked.chain.n > LARGEST  # what is asked for can be had


def test_layers_are_cut_between_layers() -> None:
    g = layers(8, size=16)
    p = plan_of(g, cluster(2), micros=8)
    assert p.stages[1].ops[0] == "n4"
    assert [stage.ranks for stage in p.stages] == [(0,), (1,)]
    assert p.provenance.graph_digest == g.shape_digest()


def test_equal_layers_take_what_even_stages_take() -> None:
    g = graph("; ".join(f"v{i}:3 #0 <- {f'v{i - 1}' if i else 'x'}" for i in range(12)), input_bytes=0)
    p = plan_of(g, cluster(4), micros=8)
    assert len(p.stages) == 4 and p.step_ns == (8 + 4 - 1) * 27


def test_bytes_beyond_32_bits_do_not_overflow() -> None:
    huge = 1 << 44
    g = graph(f"a:1 #{huge} <- x; b:1 <- a")
    p = plan_of(g, cluster(2, memory=1 << 50), stages=2, micros=1)
    assert p.estimates[1].in_bytes == huge and p.step_ns >= 2 * huge


def test_clones_stand_in_each_stage_that_needs_them() -> None:
    g = graph("mask-; a:9 <- x mask; b:9 <- a; c:9 <- b mask; d:9 <- c")
    assert ops(plan_of(g, cluster(2), stages=2)) == ["mask a b", "mask c d"]
    assert ops(plan_of(g, cluster(4), stages=4)) == ["mask a", "b", "mask c", "d"]


def test_cuts_say_where_stages_begin() -> None:
    p = plan_of(layers(8), cluster(4), cuts=("layers.1", "head"))
    assert [stage.ops[0] for stage in p.stages] == ["embed", "n1", "loss"]
    assert len(p.notes) == 1 and p.notes[0].startswith("1 of 4 devices idle: ")


def test_stages_beyond_the_cuts_are_cut_by_the_planner() -> None:
    p = plan_of(layers(8), cluster(4), cuts=("layers.1",), stages=4)
    assert len(p.stages) == 4 and "n1" in [stage.ops[0] for stage in p.stages]


def test_one_stage_has_no_messages() -> None:
    p = plan_of(layers(2), cluster(1), micros=2)
    assert str(route(p.decision, layers(2))) == "0F0 0B0 0F1 0B1 0O" and p.notes == ()
    (e,) = p.estimates
    assert p.step_ns == 2 * sum(op.cost.total_ns for op in layers(2).ops) + e.optimizer_ns
    assert p.outlook.bubble == pytest.approx(e.optimizer_ns / p.step_ns)


def test_nothing_to_train_leaves_no_bubble_on_one_device() -> None:
    assert plan_of(graph("a:1 <- x; b:1 <- a"), cluster(1)).outlook.bubble == 0


def test_devices_beyond_the_blocks_idle_and_are_noted() -> None:
    p = plan_of(graph("a:1 <- x; b:1 <- a"), cluster(5), stages=2)
    assert len(p.stages) == 2 and p.decision.world == 5
    assert p.notes == ("3 of 5 devices idle: the model has only 2 blocks",)
    assert route(p.decision, graph("a:1 <- x; b:1 <- a")).world == 5


def test_devices_that_would_not_help_idle_and_are_noted() -> None:
    p = plan_of(graph("a:1 <- x; b:1 <- a"), cluster(5))  # a message takes eight times as long as an op
    assert [stage.ranks for stage in p.stages] == [(0,)]
    assert p.notes == ("4 of 5 devices idle: more would not make the step shorter",)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"stages": 3, "replicas": 1}, "2 of 5 devices idle: 3 stages were asked for"),
        ({"stages": 1, "replicas": 1}, "4 of 5 devices idle: 1 stage was asked for"),
        ({"cuts": ("layers.1",), "replicas": 1}, "3 of 5 devices idle: 2 stages were asked for"),
        ({"stages": 2, "replicas": 2},
         "1 of 5 devices idle: 2 stages and 2 replicas of each stage were asked for"),
        ({"replicas": (2, 1), "stages": 2},
         "2 of 5 devices idle: 2 stages and 2, 1 replicas were asked for"),
        ({"replicas": 4},
         "1 of 5 devices idle: 4 replicas of each stage were asked for, and more stages "
         "would not make the step shorter"),
    ],
)  # fmt: skip
def test_devices_idle_because_of_what_was_asked_for(options: dict[str, Any], reason: str) -> None:
    assert reason in plan_of(layers(8), cluster(5), rows=(4,) * 4, **options).notes


def test_auto_takes_the_faster_and_1f1b_on_a_tie() -> None:
    free_links = graph("; ".join(f"v{i}:3 #0 <- {f'v{i - 1}' if i else 'x'}" for i in range(4)), input_bytes=0)
    assert plan_of(free_links, cluster(4)).schedule == "1f1b"
    slow_links = graph("; ".join(f"v{i}:3 #4 <- {f'v{i - 1}' if i else 'x'}" for i in range(4)))
    for stages in (2, 3, 4):
        each = {name: plan_of(slow_links, cluster(4), stages=stages, schedule=name).step_ns for name in SCHEDULES}
        assert plan_of(slow_links, cluster(4), stages=stages).step_ns == min(each.values())


def test_auto_is_as_good_as_each_schedule_when_stages_are_free_too() -> None:
    slow_links = graph("; ".join(f"v{i}:3 #4 <- {f'v{i - 1}' if i else 'x'}" for i in range(4)))
    each = {name: plan_of(slow_links, cluster(4), schedule=name).step_ns for name in SCHEDULES}
    assert plan_of(slow_links, cluster(4)).step_ns <= min(each.values())


HELD = graph("a:1 ^100 #4 <- x; b:1 ^100 #0 <- a", input_bytes=0)
"""Two ops that keep 100 bytes each; the message has 4 and two are under way at either end."""


def test_activations_in_flight_decide_between_the_schedules() -> None:
    options: dict[str, Any] = {"micros": 8, "stages": 2, "recompute": "off"}
    p = plan_of(HELD, cluster(2, memory=(208, 112)), **options)
    assert p.schedule == "1f1b" and [e.live for e in p.estimates] == [2, 1]
    assert [e.peak_bytes for e in p.estimates] == [2 * 100 + 2 * 4, 100 + 4 + 2 * 4]
    with pytest.raises(InfeasibleError):
        plan_of(HELD, cluster(2, memory=(208, 112)), schedule="gpipe", **options)
    with pytest.raises(InfeasibleError):
        plan_of(HELD, cluster(2, memory=(208, 111)), **options)


def test_one_stage_goes_to_the_device_that_has_room_for_it() -> None:
    assert [s.ranks for s in plan_of(HELD, cluster(2, memory=(200, 104)), micros=8).stages] == [(0,)]


def test_tied_parameter_takes_room_in_each_stage() -> None:
    g = graph("a:1 +w:100 #0 <- x; b:1 +w:100 #0 <- a", input_bytes=0)
    p = plan_of(g, cluster(2), stages=2, micros=1)
    assert [e.peak_bytes for e in p.estimates] == [400, 400]
    with pytest.raises(InfeasibleError):
        plan_of(g, cluster(2, memory=399), stages=2, micros=1)


def test_state_factor_is_the_optimizers() -> None:
    g = graph("a:1 +w:100 #0 <- x", input_bytes=0)
    plans = [plan_of(g, cluster(1), micros=1, state_factor=factor) for factor in (0.0, 1.0, 6.0)]
    assert [p.estimates[0].peak_bytes for p in plans] == [200, 300, 800]
    assert [p.estimates[0].optimizer_bytes for p in plans] == [0, 100, 600]


def test_infeasible_names_the_stage_and_by_how_much() -> None:
    g = graph("a:1 #0 @first <- x; b:1 +w:100 #0 @second <- a", input_bytes=0)
    with pytest.raises(InfeasibleError) as caught:
        plan_of(g, cluster(2, memory=350), stages=2, micros=1, schedule="gpipe")
    text = str(caught.value)
    assert "stage 1 of 2" in text and "400 bytes" in text and "50 bytes too much" in text and "second" in text


def test_estimates_add_up_to_the_graph() -> None:
    g = layers(4)
    p = plan_of(g, cluster(2), stages=2)
    assert sum(e.fwd_ns for e in p.estimates) == sum(op.cost.fwd_ns for op in g.ops)
    assert sum(e.param_bytes for e in p.estimates) == sum(q.size_bytes for q in g.params)
    assert [e.state_bytes for e in p.estimates] == [3 * e.param_bytes for e in p.estimates]
    assert p.estimates[0].out_bytes == p.estimates[1].in_bytes == 8 + 8  # the stream and the labels


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"stages": 9}, "9 stages need 9 devices.*has 4"),
        ({"stages": 0}, "stages=0"),
        ({"schedule": "zigzag"}, r"zigzag(.|\n)*use one of 1f1b, 1f1b-deep, gpipe"),
        ({"cuts": ("layers.1", "head"), "stages": 2}, "2 cuts make 3 stages, but stages=2"),
        ({"replicas": (2, 1), "stages": 3}, r"2 numbers of replicas for 3 stages(.|\n)*stages=2"),
        ({"replicas": (2,), "stages": 2}, r"1 number of replicas for 2 stages(.|\n)*stages=1"),
        ({"replicas": (2, 3), "stages": 2}, r"5 replicas need 5 devices, but the cluster has 4(.|\n)*at most 4"),
        ({"pins": {"head": 2}, "stages": 2}, r"head is pinned to stage 2, which does not exist(.|\n)*0 to 1"),
        ({"cuts": ("layer.1",)}, r"'layer\.1'(.|\n)*layers\.1"),
        ({"cuts": ("layers.0", "layers.1", "head", "embed", "x")}, "6 stages need 6 devices"),
        ({"micros": 0}, "micro-batches"),
    ],
)
def test_bad_option_is_refused(options: dict[str, object], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        plan_of(layers(3), cluster(4), **options)  # type: ignore[arg-type]


def test_more_stages_than_blocks_says_both_numbers() -> None:
    with pytest.raises(UsageError, match="3 stages asked for, but the model has only 2 blocks"):
        plan_of(graph("a <- x; b <- a"), cluster(4), stages=3)


def test_uneven_micro_batches_differ_by_one_row_at_most() -> None:
    assert plan_of(layers(2), cluster(2), stages=2, rows=(4, 4, 3, 3)).micro_rows == (4, 4, 3, 3)
    with pytest.raises(UsageError, match=r"\[4, 2\]"):
        plan_of(layers(2), cluster(2), stages=2, rows=(4, 2))


def test_broken_graph_is_our_bug_and_said_so() -> None:
    g = layers(1)
    with pytest.raises(GraphError):
        plan_of(Graph(Size(1), g.values, g.params, g.ops[::-1], g.inputs, g.outputs), cluster(2))


@pytest.mark.parametrize("replicas", [3, (3,) * 4])
def test_replicas_that_do_not_divide_the_devices_leave_some_idle(replicas: int | tuple[int, ...]) -> None:
    p = plan_of(layers(6), cluster(14), rows=(6,) * 4, stages=4, replicas=replicas)
    assert [len(stage.ranks) for stage in p.stages] == [3] * 4
    assert any("2 of 14 devices idle: 4 stages" in note for note in p.notes)


def test_a_wish_that_no_division_satisfies_is_told_with_a_way_out() -> None:
    with pytest.raises(InfeasibleError) as caught:
        plan_of(layers(4), cluster(4), rows=(2, 2), stages=1, replicas=3)
    text = str(caught.value)
    assert "replicas=3" in text and "micro-batches of 2 rows" in text and "tried, fits" in text


def test_a_plan_that_its_blocks_flatter_gets_more_recomputation(monkeypatch: pytest.MonkeyPatch) -> None:
    g = graph("; ".join(f"v{i}:9/9 ^100 #1 <- {f'v{i - 1}' if i else 'x'}" for i in range(8)), input_bytes=0)
    options: dict[str, Any] = {"rows": (1,) * 8, "stages": 2, "replicas": 1}
    roomy = plan_of(g, cluster(2), **options)
    limit = max(e.peak_bytes for e in roomy.estimates)
    assert not any(stage.recompute for stage in roomy.stages)

    over_ops: list[StageContext] = []
    stage_of = Estimator.stage

    def contexts_of(*args: Any) -> list[StageContext]:
        found = stage_contexts(*args)
        over_ops.extend(found)
        return found

    def more(estimator: Estimator, context: StageContext) -> Estimate:
        found = stage_of(estimator, context)
        dearer = any(context is each for each in over_ops)
        return replace(found, peak_bytes=found.peak_bytes + 60) if dearer else found

    monkeypatch.setattr(finish, "stage_contexts", contexts_of)
    monkeypatch.setattr(Estimator, "stage", more)
    monkeypatch.setattr(finish, "excess_of", lambda *args: [excess + 60 for excess in excess_of(*args)])
    p = plan_of(g, cluster(2, memory=limit), **options)
    assert max(e.peak_bytes for e in p.estimates) <= limit - 60
    assert 0 < sum(len(stage.recompute) for stage in p.stages) < 8  # no more than it takes


def test_a_plan_that_is_slower_over_ops_than_its_blocks_said_makes_room_for_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    g, c = layers(8, size=64), cluster(4)
    known = plan_of(g, c, micros=8)
    assert len(known.stages) == 4
    others = {a.name: a.step_ns for a in known.outlook.alternatives}

    def dearer(decision: Decision, *args: Any, **how: bool) -> int:
        return simulated_ns(decision, *args, **how) + (10**6 if len(decision.stages) == 4 else 0)

    monkeypatch.setattr(finish, "simulated_ns", dearer)
    p = plan_of(g, c, micros=8)
    assert len(p.stages) != 4
    assert p.step_ns <= others["3 stages"] < known.step_ns + 10**6
    for alternative in p.outlook.alternatives:  # what it was compared with over ops is told as it is there
        assert alternative.step_ns >= p.step_ns or alternative.why.startswith("does not fit")


@pytest.mark.parametrize(("slower", "stages"), [(1.005, 3), (1.02, 4)])
def test_of_plans_about_as_fast_the_one_with_the_fewest_stages_is_taken_and_said_so(
    slower: float, stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    g, c = layers(8, size=64), cluster(4)
    known = plan_of(g, c, micros=8)
    (three_ns,) = [a.step_ns for a in known.outlook.alternatives if a.name == "3 stages"]
    four_ns = int(three_ns / slower)

    def told(decision: Decision, *args: Any, **how: bool) -> int:
        return four_ns if len(decision.stages) == 4 else simulated_ns(decision, *args, **how)

    monkeypatch.setattr(finish, "simulated_ns", told)
    p = plan_of(g, c, micros=8)
    assert len(known.stages) == 4 and len(p.stages) == stages
    said = [a for a in p.outlook.alternatives if a.name == "the fastest, 4 stages"]
    assert p.outlook.optimality is not None and p.outlook.optimality.objective == p.step_ns
    if stages == 4:
        assert not said
        return
    assert said[0].step_ns == four_ns and said[0].why == "the plan is 0.5% slower than 4 stages; fewer stages"
    assert said[0].why in p.explain()
    assert p.outlook.optimality.lower_bound <= four_ns and not p.outlook.optimality.proved


def test_where_no_plan_fits_over_ops_the_excess_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def more(*args: Any) -> list[int]:
        return [excess + (1 << 50) for excess in excess_of(*args)]

    monkeypatch.setattr(finish, "excess_of", more)
    with pytest.raises(InfeasibleError, match=r"[1-9][\d.]* GiB too much"):
        plan_of(layers(4), cluster(2), micros=4)


def test_a_plan_that_does_not_fit_over_ops_is_no_alternative(monkeypatch: pytest.MonkeyPatch) -> None:
    g, c = layers(8, size=64), cluster(4)
    assert "3 stages" in {a.name for a in plan_of(g, c, micros=8, stages=None).outlook.alternatives}

    def more(decision: Decision, *args: Any) -> list[int]:
        extra = 0 if len(decision.stages) == 2 else 1 << 50
        return [excess + extra for excess in excess_of(decision, *args)]

    monkeypatch.setattr(finish, "excess_of", more)
    p = plan_of(g, c, micros=8)
    assert len(p.stages) == 2
    assert all(a.step_ns >= p.step_ns or a.why.startswith("does not fit") for a in p.outlook.alternatives), (
        p.outlook.alternatives
    )


def test_the_cores_of_a_cpu_copy_messages_and_a_gpu_does_not() -> None:
    """1000 bytes there and back, each copied twice, read and written, at 100 bytes per nanosecond."""
    g = graph("a:100 #1000 <- x; b:100 <- a", input_bytes=0)
    c = cluster(2)
    gpus = replace(c, devices=tuple(replace(device, kind="cuda") for device in c.devices))
    for machines, copied in ((c, 40), (gpus, 0)):
        p = plan_of(g, machines, stages=2)
        assert [(e.fwd_ns, e.bwd_ns) for e in p.estimates] == [(100 + copied, 200 + copied)] * 2


@pytest.mark.parametrize(("count", "size", "stages"), [(24, 400, 4), (60, 400, 3), (60, 64, 6)])
def test_no_plan_is_slower_than_as_many_layers_for_each_stage(count: int, size: int, stages: int) -> None:
    """More ops than blocks: the cheap cuts at the residual stream have to survive coarsening."""
    g, c = layers(count, size=size), cluster(stages)
    cuts = tuple(f"layers.{count * k // stages}" for k in range(1, stages))
    by_hand = plan_of(g, c, micros=2 * stages, schedule="1f1b", cuts=cuts)
    assert plan_of(g, c, micros=2 * stages, schedule="1f1b", stages=stages).step_ns <= by_hand.step_ns


def test_more_stages_times_replicas_than_devices_are_refused_with_the_numbers() -> None:
    with pytest.raises(UsageError, match="20 stages of 4 replicas need 80 devices, but the cluster has 64"):
        plan_of(layers(30), cluster(64), rows=(6,) * 4, stages=20, replicas=4)
