"""Extending autopart from outside: what a user adds in a few lines, used end to end."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.extending import own_op
from support.workers import Workers

import autopart
from autopart.batch.batch import flatten
from autopart.capture import Captured, capture
from autopart.ir.graph import LossReduction, Size
from autopart.passes.loss.derive import UnprovenRows, derive_loss_weight
from autopart.passes.ops.analytic_costs import saved_values
from autopart.passes.ops.flops import flops
from autopart.planning.derive.family import mark_rows


@pytest.fixture(scope="module")
def captures() -> tuple[Captured, Captured]:
    batch, model = flatten(own_op.batch()), own_op.Projections()
    return capture(model, batch, size=Size(3)), capture(model, batch, size=Size(2))


def test_a_row_makes_an_op_known_to_the_loss_analysis_and_to_costs(captures: tuple[Captured, Captured]) -> None:
    graph, other = mark_rows(captures[0].graph, captures[1].graph), captures[1].graph
    assert derive_loss_weight(graph, other) == LossReduction("rows")
    op = next(op for op in graph.ops if op.target.startswith("own.project"))
    assert flops(op, graph.value_map(), graph.param_map()) == 2 * 3 * 3 * 6 * 6
    assert saved_values(op, graph.value_map(), graph.param_map()) == op.reads

    def without_row(captured: Captured) -> tuple[str, ...]:
        return tuple(op.target.replace("own.project", "own.unknown") for op in captured.graph.ops)

    unknown = (
        replace(g, ops=tuple(replace(op, target=t) for op, t in zip(g.ops, without_row(captures[0]), strict=True)))
        for g in (graph, other)
    )
    with pytest.raises(UnprovenRows, match="no rule"):
        derive_loss_weight(*unknown)


def test_a_model_of_an_own_op_is_planned_simulated_and_run_as_in_one_process(pair: Workers) -> None:
    plan = autopart.plan(own_op.Projections(), "cpu:2", sample=own_op.batch(), costs="analytic", stages=2)
    assert len(plan.stages) == 2 and plan.step_ns > 0
    assert pair.run(own_op.verified, 2) == [(True, 2, 4)] * 2
