"""Plans with split backwards and several stages a rank: proven, within memory, and chosen where they are worth it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
from support.grids import sampled
from support.languages.graphs import cluster, graph, layers, plan_of, source
from support.oracles.drawn_clusters import drawn, found_for

from autopart.ir.cluster import DEVICE_KINDS
from autopart.ir.errors import UsageError
from autopart.ir.graph import Graph
from autopart.ir.plan import Plan, check_decision
from autopart.passes.program.orders import LOOP, placed
from autopart.passes.program.routing import edges, route
from autopart.passes.program.verify import check_program
from autopart.passes.search.evaluation import Candidate
from autopart.passes.search.layout import Layout
from autopart.passes.search.requests import check_request
from autopart.passes.search.space import PlanRequest
from autopart.passes.search.variants import ordered, several
from autopart.passes.search.variants.ordered import shortest_way
from autopart.passes.simulation.estimate import excess_of
from autopart.passes.simulation.stage_costs import Estimator, stage_contexts


def slow_layers(count: int) -> Graph:
    """Layers of milliseconds, so that an order can be worth its further computes; half of a backward can wait."""
    g = layers(count)
    ops = [
        replace(op, cost=replace(op.cost, fwd_ns=op.cost.fwd_ns * 10**7, bwd_ns=op.cost.bwd_ns * 10**7)) for op in g.ops
    ]
    return replace(g, ops=tuple(replace(op, cost=replace(op.cost, weight_ns=op.cost.bwd_ns // 2)) for op in ops))


def proven(plan: Plan, g: Graph) -> Plan:
    check_decision(plan.decision, g)
    check_program(route(plan.decision, g), plan.schedule)
    return plan


@pytest.mark.parametrize(
    ("schedule", "per_rank"),
    [("zb-h1", 1), ("zb-h2", 1), ("interleaved", 2), ("interleaved", 4), ("zb-v", 2), ("searched", 1), ("searched", 2)],
)
def test_a_named_order_has_its_stages_and_is_faster_than_1f1b(schedule: str, per_rank: int) -> None:
    g, c = slow_layers(8), cluster(2)
    whole = plan_of(g, c, micros=4, schedule="1f1b", stages=2, replicas=1)
    asked = {} if schedule == "zb-v" else {"stages_per_rank": per_rank}
    plan = proven(plan_of(g, c, micros=4, schedule=schedule, stages=2 * per_rank, replicas=1, **asked), g)
    assert plan.schedule == schedule
    homes = [stage.ranks[0] for stage in plan.stages]
    assert sorted(set(homes)) == [0, 1]
    assert len(homes) == 2 * per_rank
    if schedule == "zb-v":
        assert homes == list(placed("v", 4, 2))
    assert bool(plan.decision.order) == (schedule == "searched")
    assert plan.step_ns <= whole.step_ns
    busy_ns = 4 * sum(e.fwd_ns + e.bwd_ns for e in plan.estimates)
    assert plan.outlook.bubble == pytest.approx(1 - busy_ns / (2 * plan.step_ns))


def test_auto_takes_another_order_where_it_is_worth_it_and_says_what_others_would_take() -> None:
    g, c = slow_layers(8), cluster(4)
    plan = proven(plan_of(g, c, micros=4, replicas=1), g)
    family = plan_of(g, c, micros=4, replicas=1, schedule="1f1b")
    assert plan.schedule not in ("1f1b", "1f1b-deep", "gpipe")
    assert plan.step_ns < 0.98 * family.step_ns
    assert any(other.name.startswith("schedule ") for other in plan.outlook.alternatives)
    assert plan.outlook.optimality is not None
    assert plan.outlook.optimality.lower_bound <= plan.step_ns
    kept = plan_of(g, c, micros=4, replicas=1, orders=False)
    assert kept.schedule in ("1f1b", "1f1b-deep", "gpipe")


def test_an_order_is_no_slower_than_with_even_cuts_which_1f1b_alone_may_not_like() -> None:
    text = "; ".join(f"v{i}:{1 + i * i % 7}000000 #64 @l.{i} +w{i} <- {f'v{i - 1}' if i else 'x'}" for i in range(40))
    g = graph(text)
    g = replace(g, ops=tuple(replace(op, cost=replace(op.cost, weight_ns=op.cost.bwd_ns // 2)) for op in g.ops))
    done = list(accumulate(op.cost.fwd_ns for op in g.ops))
    ends = [min(range(40), key=lambda i: abs(done[i] - done[-1] * part / 8)) for part in range(1, 8)]
    asked: dict[str, Any] = {"micros": 6, "replicas": 1, "stages": 8, "schedule": "zb-h2"}
    even = plan_of(g, cluster(8), cuts=tuple(f"l.{end + 1}" for end in ends), **asked)
    assert proven(plan_of(g, cluster(8), **asked), g).step_ns <= even.step_ns


def test_auto_keeps_whole_backwards_where_computes_are_short() -> None:
    plan = plan_of(layers(8), cluster(4), micros=8)
    assert plan.schedule in ("1f1b", "1f1b-deep", "gpipe")
    assert all(len(stage.ranks) == 1 for stage in plan.stages)


def test_stages_of_one_rank_share_its_memory() -> None:
    g = slow_layers(8)
    free = plan_of(g, cluster(2), micros=4, schedule="interleaved", stages=4, replicas=1)
    pairs = list(zip(free.estimates, free.stages, strict=True))
    needed = [sum(e.peak_bytes for e, stage in pairs if rank in stage.ranks) for rank in (0, 1)]
    tight = int(0.45 * sum(needed))  # no cuts fit without recomputation
    plan = proven(plan_of(g, cluster(2, memory=tight), micros=4, schedule="interleaved", stages=4, replicas=1), g)
    assert any(stage.recompute for stage in plan.stages)
    assert plan.step_ns >= free.step_ns


def test_only_stages_with_room_split_their_backwards_where_memory_is_short() -> None:
    """W keeps what recomputation has freed: no plan with all backwards split fits, and 1F1B takes longer."""
    g = slow_layers(8)
    g = replace(g, ops=tuple([replace(op, cost=replace(op.cost, weight_bytes=op.cost.saved_bytes)) for op in g.ops]))
    asked: dict[str, Any] = {"micros": 6, "stages": 4, "replicas": 1}
    free = plan_of(g, cluster(4), schedule="1f1b", **asked)
    tight = cluster(4, memory=int(0.85 * max(e.peak_bytes for e in free.estimates)))
    family = proven(plan_of(g, tight, schedule="1f1b", **asked), g)
    plan = proven(plan_of(g, tight, schedule="zb-h1", **asked), g)
    limit = tight.least_memory_bytes((0,))
    assert all(e.peak_bytes <= limit for e in plan.estimates)
    assert 0 < sum(stage.whole_backward for stage in plan.stages) < 4 and any(stage.recompute for stage in plan.stages)
    assert plan.step_ns < family.step_ns
    for stage, e in zip(plan.stages, plan.estimates, strict=True):
        assert bool(e.weight_bytes) == bool(e.weight_ns) == (not stage.whole_backward)
    parted = replace(plan.decision, stages=tuple([replace(s, whole_backward=False) for s in plan.stages]))
    estimator = Estimator(tight, source(g, tight).cost_model)
    assert max(excess_of(parted, stage_contexts(parted, edges(parted, g), estimator), estimator)) > 0
    assert max(excess_of(plan.decision, stage_contexts(plan.decision, edges(parted, g), estimator), estimator)) <= 0


@pytest.mark.parametrize("seed", sampled(range(60), every=12))
def test_several_stages_a_rank_are_tried_for_pipelines_of_equal_positions_of_their_own(seed: int) -> None:
    """Whatever 1F1B's family likes best: at most so many, and none that cannot be faster."""
    found = found_for(drawn(seed, devices=8, layers=8, kinds=1))
    candidates = [candidate for _, candidate in several.equal_positions(found)]
    assert all(max(plan.widths) == 1 and len(plan.widths) == plan.layout.depth > 1 for plan in candidates)
    numbers = [(plan.layout.pipeline_replicas, len(plan.micro_rows)) for plan in candidates]
    assert len(numbers) == len(set(numbers))
    assert max(Counter(copies for copies, _ in numbers).values(), default=0) <= several.ALIKE
    loops = {e.candidate.ranks for e in found.fitting.values() if e.candidate.per_rank > 1}
    before = len(found.fitting)
    several.evaluate_several(found, 0)
    assert len(found.fitting) - before <= several.TRIED
    assert loops == {e.candidate.ranks for e in found.fitting.values() if e.candidate.per_rank > 1}


def test_stages_of_one_rank_count_once_where_fewer_are_preferred() -> None:
    layout, bounds = Layout(1, 2, 1, (0, 1)), tuple(range(9))
    two, four = (
        Candidate(bounds[: 2 * v + 1], (1, 1), 0, 0, layout, ((1,) * 4), "interleaved", per_rank=v, placement=LOOP)
        for v in (2, 4)
    )
    longer = Candidate(bounds[:9], (1,) * 4, 0, 0, Layout(1, 4, 1, (0, 1, 2, 3)), ((1,) * 4), "interleaved", per_rank=2)
    computes = 4 * (8 - 4) * DEVICE_KINDS["cuda"].compute_ns
    assert four.preference(10**9, "cuda") == pytest.approx(two.preference(10**9 + computes, "cuda"))
    assert longer.preference(10**9, "cuda") == pytest.approx(1.02 * two.preference(10**9, "cuda"))


@pytest.mark.parametrize("seed", sampled(range(60), every=12))
def test_no_bound_leaves_out_the_shortest_way_to_order_a_plan(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However little memory there is: bounds come before recomputation is chosen."""
    problem = drawn(seed, devices=3, layers=6)
    space, tried = problem.space, list[tuple[Candidate, Any]]()
    for found in [e for e in found_for(problem).ranked if e.stages > 1 and not e.candidate.other_order][:6]:
        plan = replace(found.candidate, schedule="searched")
        tried.append((plan, shortest_way(space, plan, 0)))
    for plan, way in tried:
        assert way is None or shortest_way(space, plan, 0, way.step_ns + 1) == way
    monkeypatch.setattr(ordered, "bound_ns", lambda pipeline: 0)
    assert [way for _, way in tried] == [shortest_way(space, plan, 0) for plan, _ in tried]


@pytest.mark.parametrize(
    ("asked", "what"),
    [
        ({"schedule": "1f1b", "stages_per_rank": 2}, "has no order for 2 stages a rank"),
        ({"schedule": "interleaved", "stages_per_rank": 1}, "has no order for 1 stage a rank"),
        ({"stages": 3, "stages_per_rank": 2}, "cannot be divided into 2 a rank"),
        ({"stages": 6, "stages_per_rank": 2}, "need 3 devices"),
        ({"schedule": "zb-h1", "prove_seconds": 1.0}, "nothing can be proved"),
        ({"schedule": "zb-h1", "policy": "turn"}, "in turn"),
    ],
)
def test_requests_that_no_model_can_fulfil_are_refused(asked: dict[str, object], what: str) -> None:
    request = PlanRequest(((1,) * 4,), **asked)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=what):
        check_request(request, cluster(2))
