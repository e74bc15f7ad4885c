"""Long programs are judged by short ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.languages.graphs import cluster, layers, plan_of, source

from autopart.passes.program.routing import route
from autopart.passes.simulation import simulate
from autopart.passes.simulation.estimate import simulated_ns
from autopart.passes.simulation.stage_costs import Estimator


def test_the_pace_of_a_long_program_is_not_above_that_of_its_busiest_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a slow first stage sends ahead of its backwards keeps the others busy in both short programs."""
    g, c, micros = layers(4), cluster(4), 80
    plan = plan_of(g, c, micros=micros, stages=4, replicas=1, schedule="1f1b-deep")
    program, estimator = route(plan.decision, g), Estimator(c, source(g, c).cost_model)
    first, *rest = plan.estimates
    slow = replace(first, bwd_ns=3 * first.bwd_ns // 2), *rest

    def step() -> int:
        return simulated_ns(plan.decision, slow, program.edges, program.tied, estimator, whole=False)

    exact = step()
    monkeypatch.setattr(simulate, "LONG", 0)
    assert simulate.played(4, micros, "1f1b-deep") == (8, 16)
    assert micros * (slow[0].fwd_ns + slow[0].bwd_ns) <= step() <= exact
