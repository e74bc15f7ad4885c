"""The certificate of a plan: below every placement of its blocks on its stages, in time, and only when asked for."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from random import Random

import pytest
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st
from support.languages.graphs import cluster, graph, layers, plan_of, source
from support.oracles.planner_oracle import Kind, Problem, assignments, candidates, fitting_ns, planned, problem

from autopart.ir.errors import UsageError
from autopart.ir.plan import Decision, Stage
from autopart.passes.pipeline import build
from autopart.passes.proof.certificate import certified, lower_bound_ns, model_of, settles
from autopart.passes.search.evaluation import Evaluation, evaluate
from autopart.passes.search.space import PlanRequest

KIND = Kind(least=2, most=6, devices=3)


def evaluation_of(p: Problem, random: Random) -> Evaluation | None:
    """One of the plans of a problem that fit."""
    space = p.space
    pool = list(candidates(space))
    evaluations = (evaluate(space, candidate) for candidate in random.sample(pool, len(pool)))
    return next((evaluation for evaluation in evaluations if evaluation.fits), None)


def steps(evaluation: Evaluation) -> list[int]:
    """Simulated steps of all placements of the evaluation's blocks on its stages that fit, under each schedule, without
    recomputation and with all of it."""
    space, plan = evaluation.space, evaluation.decision
    found = []
    for ops in assignments(space.chain.blocks, len(plan.stages)):
        for again in (False, True)[: 1 + space.request.may_recompute]:
            for schedule in space.request.schedules:
                stages = tuple(
                    Stage(names, stage.ranks, (names,) * again) for names, stage in zip(ops, plan.stages, strict=True)
                )
                found.append(fitting_ns(Decision(plan.world, stages, plan.micro_rows, schedule), space.costs))
    return [step for step in found if step is not None]


@settings(max_examples=80)
@given(st.randoms(use_true_random=True))
def test_no_placement_on_the_same_stages_is_faster(random: Random) -> None:
    p = problem(random, KIND)
    evaluation = evaluation_of(p, random)
    assume(evaluation is not None and evaluation.space.chain.n <= 6)
    assert evaluation is not None
    found, known = certified(evaluation, 20), steps(evaluation)
    event(f"{len(evaluation.decision.stages)} stages, {'several orders' if len(known) > 2 else 'few orders'}")
    assert found.proved
    assert found.bound_ns <= min([evaluation.step_ns, *known])
    assert certified(evaluation, 20) == found
    without = certified(evaluation, 0)
    assert without.bound_ns <= found.bound_ns and not without.proved


@settings(max_examples=40)
@given(st.randoms(use_true_random=True), st.integers(1, 3))
def test_what_is_proved_is_never_above_the_plan(random: Random, stages: int) -> None:
    p = problem(random, replace(KIND, replicas=False, mixed=False, roomy=True))
    assume(stages <= min(p.cluster.world, p.space.chain.n))
    request = replace(p.request, stages=stages, micro_rows=p.request.micro_rows[:1], replicas=1)
    p = replace(p, request=request)
    plain, proven = planned(p), planned(replace(p, request=replace(request, prove_seconds=20.0)))
    assume(plain is not None)
    assert plain is not None and proven is not None and plain.outlook.optimality and proven.outlook.optimality
    assert proven.stages == plain.stages and proven.notes[:-1] == plain.notes and "CP-SAT" in proven.notes[-1]
    assert plain.outlook.optimality.lower_bound <= proven.outlook.optimality.lower_bound <= proven.step_ns
    evaluation = next(
        v
        for v in (evaluate(p.space, candidate) for candidate in candidates(p.space))
        if v.fits and [s.ranks for s in v.decision.stages] == [s.ranks for s in proven.stages]
    )
    bound = certified(evaluation, 20).bound_ns
    assert bound <= proven.step_ns  # of itself, not because it is cut off there
    if settles(request, p.cluster):
        assert proven.outlook.optimality.lower_bound == max(plain.outlook.optimality.lower_bound, bound)


BRANCHES = "a:4 #0 <- x; " + "; ".join(f"{n}:{t} #0 <- a" for n, t in zip("bcdef", (3, 7, 5, 1, 6), strict=True))
BRANCHES += "; z:2 #0 <- b c d e f"


def test_branches_that_the_line_cannot_part_better_are_proved() -> None:
    """The bound of the work and the path leaves a gap that the certificate closes further."""
    c = cluster(3)
    request = PlanRequest(((1,) * 4,), stages=3, replicas=1)
    g = graph(BRANCHES, input_bytes=0)
    plain, proven = (build(source(g, c), c, r) for r in (request, replace(request, prove_seconds=20.0)))
    assert plain.outlook.optimality and proven.outlook.optimality and proven.step_ns == plain.step_ns
    assert plain.outlook.optimality.lower_bound < proven.outlook.optimality.lower_bound <= proven.step_ns
    assert proven.notes[-1].startswith("CP-SAT: no placement of the 7 blocks on these 3 stages, in any order, takes")
    assert f"(gap {proven.outlook.optimality.gap:.1%})" in proven.notes[-1]


@pytest.mark.parametrize(
    "left_open",
    [
        {"stages": None}, {"micro_rows": ((2, 2), (1,) * 4)}, {"replicas": None},
    ],
)  # fmt: skip
def test_a_request_that_leaves_more_open_keeps_its_own_bound(left_open: dict[str, object]) -> None:
    c = cluster(3)
    request = PlanRequest(((1,) * 4,), stages=3, replicas=1)
    assert settles(request, c) and settles(replace(request, replicas=(1, 1, 1)), c)
    wider = replace(request, **left_open)  # type: ignore[arg-type]
    assert not settles(wider, c) and not settles(request, cluster(3, memory=(9, 8, 9)))
    g = graph(BRANCHES, input_bytes=0)
    plain, proven = (build(source(g, c), c, r) for r in (wider, replace(wider, prove_seconds=20.0)))
    assert proven.outlook.optimality == plain.outlook.optimality and "CP-SAT" in proven.notes[-1]


def test_the_hint_is_the_plan_itself() -> None:
    p = Problem(layers(3), cluster(3), PlanRequest(((1,) * 4,)))
    evaluation = evaluation_of(p, Random(1))
    assert evaluation is not None
    home = {name: s for s, stage in enumerate(evaluation.decision.stages) for name in stage.ops}
    where = [home[op.name] for op in evaluation.space.chain.blocks.ops]
    assert certified(evaluation, 20).bound_ns <= lower_bound_ns(model_of(evaluation), where) <= evaluation.step_ns


def test_it_ends_in_time() -> None:
    random = Random(3)
    lines = [f"v{i}:{random.randint(50, 999)} #0 <- {f'v{random.randrange(i)}' if i else 'x'}" for i in range(60)]
    g, c = graph(";".join(lines), input_bytes=0), cluster(8)
    request = PlanRequest(((1,) * 16,), stages=8, replicas=1)
    certified(
        evaluation_of(Problem(graph("a:1 <- x"), cluster(1), PlanRequest(((1,),))), random) or pytest.fail(), 1
    )  # load
    began = time.monotonic()
    build(source(g, c), c, request)
    alone = time.monotonic() - began
    began = time.monotonic()
    plan = build(source(g, c), c, replace(request, prove_seconds=1.0))
    assert time.monotonic() - began < 2 * alone + 1.0 + 5.0
    assert plan.outlook.optimality and plan.outlook.optimality.lower_bound <= plan.step_ns


def test_only_the_size_that_is_asked_for_is_proved() -> None:
    request = {"prove_seconds": 5.0, "stages": 2}
    assert "CP-SAT" in plan_of(layers(2), cluster(2), prove_rows=1, **request).notes[-1]
    assert not plan_of(layers(2), cluster(2), prove_rows=2, **request).notes


def test_nothing_is_proved_about_steps_that_overlap() -> None:
    with pytest.raises(UsageError, match="nothing can be proved about schedule 'pipedream'"):
        plan_of(
            layers(2),
            cluster(2),
            schedule="pipedream",
            prove_seconds=1.0,
        )


@pytest.mark.parametrize(("seconds", "loaded"), [(0.0, False), (1.0, True)])
def test_the_solver_is_loaded_only_when_asked(seconds: float, loaded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "autopart.passes.proof.exact", raising=False)
    plan_of(layers(3), cluster(2), prove_seconds=seconds)
    assert ("autopart.passes.proof.exact" in sys.modules) == loaded
