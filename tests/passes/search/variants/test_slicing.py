"""Slices in plans: those that are asked for, and those that the planner proposes, or leaves."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from support.languages.graphs import cluster, graph, source

from autopart.ir.plan import Plan
from autopart.passes.pipeline import build
from autopart.passes.search.space import PlanRequest
from autopart.passes.search.variants.slicing import NothingSaved
from autopart.passes.tokens.recipe import TokenAxis

MODEL = "; ".join(f"v{i}:8000000 +w{i} #64 <- {f'v{i - 1}' if i else 'x'}" for i in range(8))
AXIS = TokenAxis(1024, behind=("v2", "v6"))


def planned(micros: int, axis: TokenAxis = AXIS, **asked: Any) -> Plan:
    """Eight layers of 8 ms forward and 16 back on two devices, sequences of 1024."""
    request = PlanRequest(micro_rows=((1,) * micros,), token_axis=axis, **asked)
    c, g = cluster(2), graph(MODEL)
    return build(source(g, c), c, request)


def test_one_micro_batch_is_sliced_and_many_are_not() -> None:
    whole, sliced = planned(1), planned(1, token_slices="auto")
    assert whole.decision.token_slices == () and sum(sliced.decision.token_slices) == 1024
    assert len(sliced.stages) == 2 and sliced.step_ns < 0.7 * whole.step_ns
    assert sliced.outlook.optimality is not None and 0 < sliced.outlook.optimality.lower_bound < sliced.step_ns
    assert "slices of" in sliced.explain()
    only_even = replace(AXIS, behind=())  # nothing to save by leaving out what masks hide
    request = PlanRequest(micro_rows=((1,) * 64,), token_axis=only_even, token_slices="auto")
    c, g = cluster(2), graph(MODEL)
    assert build(source(g, c), c, request).decision.token_slices == ()


@pytest.mark.parametrize("micros", [1, 2, 4, 8, 64])
def test_a_search_for_slices_alone_finds_the_same_plan_in_slices_or_that_they_save_nothing(micros: int) -> None:
    axis = replace(AXIS, behind=())
    free, alone = (
        partial(planned, micros, token_slices="auto", axis=axis, only_slices=only_slices)
        for only_slices in (False, True)
    )
    if not free().decision.token_slices:
        with pytest.raises(NothingSaved):
            alone()
    else:
        assert alone().decision == free().decision and alone().step_ns == free().step_ns
        assert free().outlook.alternatives and not alone().outlook.alternatives


def test_slices_that_are_asked_for_are_taken() -> None:
    plan = planned(2, token_slices=(512, 256, 256))
    assert plan.decision.token_slices == (512, 256, 256)


def test_slices_are_planned_with_recomputation_for_what_runs() -> None:
    """Memory for half of what all ops keep of four sequences."""
    c, g = cluster(2, memory=10_000), graph(MODEL.replace("#64", "#64 ^1000"))
    asked = PlanRequest(micro_rows=((1,) * 4,), token_axis=AXIS, token_slices=(512, 512), schedule="gpipe")
    plan = build(source(g, c), c, asked)
    assert plan.decision.token_slices == (512, 512) and all(stage.recompute for stage in plan.stages)


@pytest.mark.slow
def test_batch_and_tokens_are_cut_together() -> None:
    """As good as the best of all numbers of micro-batches, each planned alone."""
    c, g, splits = cluster(4), graph(MODEL), tuple((8 // micros,) * micros for micros in (1, 2, 4, 8))
    asked = PlanRequest(micro_rows=splits, token_axis=AXIS, token_slices="auto", replicas=1)
    joint = build(source(g, c), c, asked)
    alone = [build(source(g, c), c, replace(asked, micro_rows=(split,))).step_ns for split in splits]
    assert joint.step_ns <= 1.01 * min(alone)
