"""Recomputation: bought when memory is short, only then, and only for ops of the stage."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import event, given, settings
from support.languages.graphs import cluster, graph
from support.oracles.planner_oracle import Kind, Problem, fits, planned, problems

from autopart.ir.errors import InfeasibleError
from autopart.passes.pipeline import build
from autopart.passes.search.space import PlanRequest

TEXT = "; ".join(f"v{i}:10 #1 ^100 @m.{i} <- {f'v{i - 1}' if i else 'x'}" for i in range(4))


def ask(recompute: str, memory: int, *, stages: int = 1, micros: int = 2) -> Problem:
    request = PlanRequest(((1,) * micros,), stages=stages, recompute=recompute, replicas=1)
    return Problem(graph(TEXT, input_bytes=1), cluster(stages, memory=memory), request)


def test_fits_with_recomputation_where_it_does_not_without() -> None:
    tight = ask("off", 320)
    with pytest.raises(InfeasibleError):
        build(tight.source, tight.cluster, tight.request)
    plan = planned(ask("auto", 320))
    assert plan is not None and fits(plan.stages, plan.estimates, cluster(1, memory=320))
    again = [name for stage in plan.stages for group in stage.recompute for name in group]
    assert 0 < len(again) < 4  # a part of the model is enough
    assert plan.estimates[0].recompute_ns == 10 * len(again)
    roomy = planned(ask("auto", 1 << 40))
    assert roomy is not None and plan.step_ns == roomy.step_ns + 2 * plan.estimates[0].recompute_ns


def test_nothing_is_recomputed_where_all_fits_and_all_where_it_is_asked_for() -> None:
    roomy, always = planned(ask("auto", 1 << 40)), planned(ask("all", 1 << 40, stages=2))
    assert roomy is not None and always is not None
    assert not any(stage.recompute for stage in roomy.stages)
    for stage, e in zip(always.stages, always.estimates, strict=True):
        assert {name for group in stage.recompute for name in group} == set(stage.ops)
        assert e.recompute_ns == e.fwd_ns


@settings(max_examples=40)
@given(problems(Kind(least=2, most=6, devices=3, recompute=False)))
def test_whatever_fits_without_recomputation_fits_with_it(p: Problem) -> None:
    without, both = planned(p), planned(replace(p, request=replace(p.request, recompute="auto")))
    if without is not None:
        assert both is not None and both.step_ns <= without.step_ns * 1.05
    event(f"without {without is not None}, with {both is not None}")


@settings(max_examples=40)
@given(problems(Kind(least=2, most=6, devices=3, recompute=True)))
def test_groups_hold_ops_of_their_stage_each_once(p: Problem) -> None:
    plan = planned(p)
    if plan is None:
        return
    assert fits(plan.stages, plan.estimates, p.cluster)
    cost = {op.name: op.cost for op in p.costs_at(1, 0).ops}
    for stage, e in zip(plan.stages, plan.estimates, strict=True):
        again = [name for group in stage.recompute for name in group]
        assert len(again) == len(set(again)) and set(again) <= set(stage.ops)
        assert (e.recompute_ns > 0) == any(cost[name].fwd_ns for name in again)
    event(f"recomputed: {any(stage.recompute for stage in plan.stages)}")


@settings(max_examples=20)
@given(problems(Kind(most=6, recompute=True, roomy=True)))
def test_nothing_is_recomputed_with_memory_without_end(p: Problem) -> None:
    plan = planned(p)
    assert plan is not None and not any(stage.recompute for stage in plan.stages)
