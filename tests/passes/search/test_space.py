"""What the user asks for is what the plan has, and nothing faster within it was left out."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from support.languages.graphs import cluster, graph
from support.oracles.planner_oracle import Kind, Problem, compare, planned, problem, says

from autopart.ir.errors import InfeasibleError, UsageError
from autopart.ir.plan import Plan
from autopart.passes.pipeline import build
from autopart.passes.search.space import PlanRequest, SearchSpace

CHAIN = "a:9 @m.0 <- x; b:5 @m.1 <- a; c:7 @m.2 <- b; d:2 @m.3 <- c; e:8 @m.4 <- d; f:3 @m.5 <- e"


def asked(p: Problem, random: Random) -> Problem:
    """A problem with one to three wishes."""
    paths = [op.module for op in p.model.ops]
    stages = random.randint(1, max(1, min(len(paths), p.cluster.world)))
    wishes: dict[str, object] = {}
    for wish in random.sample(["stages", "cuts", "together", "pins", "replicas"], random.randint(1, 3)):
        if wish == "stages":
            wishes["stages"] = stages
        elif wish == "cuts" and len(paths) > 1:
            wishes["cuts"] = (random.choice(paths[1:]),)
        elif wish == "together":
            wishes["together"] = (tuple(random.sample(paths, min(2, len(paths)))),)
        elif wish == "pins":
            wishes["pins"] = {random.choice(paths): random.randrange(stages)}
        elif wish == "replicas":
            wishes["replicas"] = random.choice([1, 2, tuple(random.randint(1, 2) for _ in range(stages))])
    return replace(p, request=replace(p.request, **wishes))  # type: ignore[arg-type]


@st.composite
def wishes(draw: st.DrawFn) -> Problem:
    random = draw(st.randoms(use_true_random=True))
    return asked(problem(random, Kind(least=2, most=6, recompute=False)), random)


def honours(plan: Plan, p: Problem) -> None:
    """Check a plan against the request, by the names of its ops."""
    request, ops = p.request, p.model.op_map()
    home = {ops[name].module: s for s, stage in enumerate(plan.stages) for name in stage.ops}
    assert request.stages in (None, len(plan.stages))
    assert all(home[path] == stage for path, stage in request.pins.items())
    assert all(len({home[path] for path in group}) == 1 for group in request.together)
    for cut in request.cuts:  # captured before the cut: in an earlier stage than all from it on
        place = next(i for i, op in enumerate(p.model.ops) if op.module == cut)
        before = {home[op.module] for op in p.model.ops[:place]}
        assert max(before) < min(home[op.module] for op in p.model.ops[place:])
    if request.replicas is not None:
        counts = tuple(len(stage.ranks) for stage in plan.stages)
        assert counts == request.replicas_of(len(plan.stages))


@settings(max_examples=30)
@given(wishes())
def test_wishes_are_kept_or_refused(p: Problem) -> None:
    try:
        plan = build(p.source, p.cluster, p.request)
    except (UsageError, InfeasibleError) as error:
        event(type(error).__name__)
        assert str(error)
        return
    honours(plan, p)
    event("planned")


@settings(max_examples=12)
@given(wishes())
def test_what_is_left_open_is_chosen_as_exhaustive_search_would(p: Problem) -> None:
    try:
        event(says(compare(p)))
    except UsageError:
        event("refused")


# ---- the space itself ----------------------------------------------------------------------------------------------


def space(**request: object) -> SearchSpace:
    options = PlanRequest(((1, 1),), **request)  # type: ignore[arg-type]
    return Problem(graph(CHAIN), cluster(4), options).space


def legal(s: SearchSpace, stage: int | None = None) -> set[tuple[int, int]]:
    mask = s.legal if stage is None else s.legal_at(stage)
    return {(a, b) for a in range(7) for b in range(7) if mask[a, b]}


def test_without_wishes_every_range_is_legal() -> None:
    assert legal(space()) == {(a, b) for a in range(7) for b in range(7) if a < b}


def test_no_stage_spans_a_cut() -> None:
    s = space(cuts=("m.2", "m.4"))
    assert s.forced == (2, 4)
    assert legal(s) == {(a, b) for a, b in legal(space()) if not (a < 2 < b or a < 4 < b)}


def test_no_stage_ends_inside_what_stays_together() -> None:
    s = space(together=(("m.1", "m.3"),))
    assert s.spans == [(1, 4)]
    assert legal(s) == {(a, b) for a, b in legal(space()) if not {a, b} & {2, 3}}


def test_pinned_stage_holds_its_module_and_others_do_not() -> None:
    s = space(pins={"m.2": 1}, stages=3)
    assert legal(s, 1) == {(a, b) for a, b in legal(space()) if a <= 2 < b}
    assert legal(s, 0) == legal(s, 2) == {(a, b) for a, b in legal(space()) if not a <= 2 < b}


def test_group_over_a_cut_cannot_be_and_says_so() -> None:
    p = Problem(graph(CHAIN), cluster(4), PlanRequest(((1,),), cuts=("m.2",), together=(("m.1", "m.3"),)))
    with pytest.raises((UsageError, InfeasibleError)):
        build(p.source, p.cluster, p.request)


def test_pins_in_the_wrong_order_cannot_be_and_says_so() -> None:
    p = Problem(graph(CHAIN), cluster(4), PlanRequest(((1,),), pins={"m.1": 1, "m.3": 0}, stages=2))
    with pytest.raises((UsageError, InfeasibleError)):
        build(p.source, p.cluster, p.request)


def test_stages_of_a_request_are_taken_even_when_fewer_are_faster() -> None:
    p = Problem(graph(CHAIN), cluster(4), PlanRequest(((1,),), stages=4))
    plan = planned(p)
    assert plan is not None and len(plan.stages) == 4
    ends = [len(stage.ops) for stage in plan.stages]
    assert all(a <= b for a, b in pairwise([0, *ends]) if a == 0) and sum(ends) == 6


def test_unknown_module_is_named() -> None:
    for request in (PlanRequest(((1,),), pins={"n.7": 0}), PlanRequest(((1,),), together=(("n.7", "m.1"),))):
        with pytest.raises(UsageError, match=r"n\.7"):
            build(Problem(graph(CHAIN), cluster(4), request).source, cluster(4), request)


def test_replicas_for_another_number_of_stages_are_refused_or_left_out() -> None:
    """Numbers of replicas fix the number of stages, whether it is said or not."""
    p = Problem(graph(CHAIN), cluster(4), PlanRequest(((2,),), replicas=(2,)))
    plan = planned(p)
    assert plan is not None and [len(stage.ranks) for stage in plan.stages] == [2]


def test_cuts_alone_ask_for_one_stage_more_and_numbers_of_replicas_for_as_many() -> None:
    asked = PlanRequest(((2,),), cuts=("m.2",))
    for fixed, stages in ((None, 2), (1, 2), ((1, 2, 1), 3)):
        p = Problem(graph(CHAIN), cluster(4), replace(asked, replicas=fixed))
        plan = planned(p)
        assert plan is not None and len(plan.stages) == stages
        honours(plan, p)
