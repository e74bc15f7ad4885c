"""What adds bytes or time to a stage is one function: an entry of `CHARGES`."""

from __future__ import annotations

import pytest
from support.languages.graphs import cluster, layers, plan_of

from autopart.passes.simulation import charges
from autopart.passes.simulation.charges import Amounts, Share

RESERVED = 500


def reserve(share: Share) -> Amounts:
    """Charge every device memory that a library takes, and every op of a stage a nanosecond more."""
    return {"workspace_bytes": RESERVED, "fwd_ns": len(share.stage.ops)}


def test_a_new_entry_is_charged_and_planned_with(monkeypatch: pytest.MonkeyPatch) -> None:
    g, c = layers(6), cluster(3, memory=1600)
    without = plan_of(g, c, micros=6, stages=3)
    assert all(not stage.recompute for stage in without.stages)
    monkeypatch.setattr(charges, "CHARGES", (reserve, *charges.CHARGES))
    reserved = plan_of(g, c, micros=6, stages=3)
    assert max(e.peak_bytes for e in reserved.estimates) <= 1600 and any(stage.recompute for stage in reserved.stages)
    assert all(e.workspace_bytes >= RESERVED for e in reserved.estimates)
    roomy = plan_of(g, cluster(3), micros=6, stages=3)
    assert sum(e.fwd_ns for e in roomy.estimates) == sum(op.cost.fwd_ns for op in g.ops) + len(g.ops)


def test_a_charge_that_is_left_out_is_not_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    left = tuple(charge for charge in charges.CHARGES if charge is not charges.optimizer)
    monkeypatch.setattr(charges, "CHARGES", left)
    plan = plan_of(layers(4), cluster(2), micros=4)
    assert all(e.optimizer_bytes == e.optimizer_ns == 0 < e.state_bytes for e in plan.estimates)
