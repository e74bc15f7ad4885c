"""The bound of plans with slices: no stages, however blocks are grouped into them, take less."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from support.languages.graphs import cluster, graph, source

from autopart.ir.graph import Cost
from autopart.passes.pipeline import build
from autopart.passes.search.space import PlanRequest
from autopart.passes.simulation.slices import SliceShares, contexts_of
from autopart.passes.tokens.recipe import TokenAxis

TOKENS = 12
MODEL = "; ".join(f"v{i}:8000000 +w{i} #64 <- {f'v{i - 1}' if i else 'x'}" for i in range(8))
AXIS = TokenAxis(1024, behind=("v2", "v6"))


@st.composite
def shares(draw: st.DrawFn) -> SliceShares:
    """Of six ops."""
    names = [f"op{i}" for i in range(6)]
    ns = st.integers(0, 500)
    costs = {name: Cost(draw(ns), draw(ns), 0, 0) for name in names}
    behind, once = draw(st.sets(st.sampled_from(names[:4]))), draw(st.sets(st.sampled_from(names[4:])))
    weights = {name: float(draw(st.integers(0, 50))) for name in draw(st.sets(st.sampled_from(names)))}
    rest = {"hides": draw(st.booleans()), "added_ns": weights, "causal": draw(st.sets(st.sampled_from(names[:4])))}
    return SliceShares(TOKENS, costs, behind, once, draw(st.integers(0, 300)), weights, weights, **rest)


@settings(max_examples=200)
@given(shares(), st.data(), st.booleans())
def test_no_stages_take_less_than_the_bound(known: SliceShares, data: st.DataObject, backward: bool) -> None:
    names = st.sampled_from([*known.costs])
    blocks = [(name, data.draw(names)) for name in known.costs]  # some ops stand in several blocks
    whole = [known.costs[a].bwd_ns if backward else known.costs[a].fwd_ns for a, _ in blocks]
    scale = data.draw(st.sampled_from([0.3, 1.0, 2.5]))
    totals = [int(ns * scale) + data.draw(st.integers(0, 20)) for ns in whole]
    ends = sorted({0, len(blocks), *data.draw(st.sets(st.integers(1, len(blocks) - 1)))})
    cuts = sorted({0, TOKENS, *data.draw(st.sets(st.integers(1, TOKENS - 1), min_size=1))})
    lengths = [b - a for a, b in pairwise(cuts)]
    taken = 0
    for a, b in pairwise(ends):
        ops = {op for block in blocks[a:b] for op in block}
        times = known.stage_ns(ops, sum(totals[a:b]), lengths, contexts_of(lengths), backward=backward)
        taken += int(times.astype(int).sum())
    assert known.least_ns(blocks, totals, lengths, backward=backward)[0] <= taken + 1e-6
    assert known.least_ns(blocks, totals, (), backward=backward)[len(lengths) - 2] <= taken + 1e-6


def test_the_bound_of_a_plan_in_slices_is_near_its_step() -> None:
    c, g = cluster(2), graph(MODEL)
    for asked in ("auto", (512, 256, 256), (128,) * 8):
        plan = build(source(g, c), c, PlanRequest(micro_rows=((1,),), token_axis=AXIS, token_slices=asked))
        assert plan.decision.token_slices and plan.outlook.optimality is not None
        assert 0 < plan.outlook.optimality.gap < 0.4
        assert plan.outlook.optimality.lower_bound > 0


def test_plans_say_what_slices_gain_or_would() -> None:
    c, g = cluster(2), graph(MODEL)
    request = PlanRequest(micro_rows=((1,),), token_axis=AXIS, token_slices="auto")
    plan = build(source(g, c), c, request)
    whole = next(other for other in plan.outlook.alternatives if other.name == "whole sequences")
    assert whole.step_ns > plan.step_ns and whole.why.startswith("+")
    even = TokenAxis(1024)
    plan = build(source(g, c), c, PlanRequest(micro_rows=((1,) * 64,), token_axis=even, token_slices="auto"))
    assert not plan.decision.token_slices
    assert any(other.name.startswith("slices of ") for other in plan.outlook.alternatives)
    assert np.isfinite(plan.step_ns)
