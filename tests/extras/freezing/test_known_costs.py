"""Costs of one measurement at other sizes and on slower devices: the planner's own extension, and nothing measured."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from autopart.batch.batch import flatten
from autopart.capture import CaptureCache, Captured
from autopart.costs.sources import CostedGraph, analytic
from autopart.extras.freezing.replan import known_costs
from autopart.ir.cluster import Cluster, Device, Level, Link
from autopart.ir.graph import Size

DEVICE = Device("cpu", 10**9, 10**11, 10**10)
(SLOW,) = Cluster((DEVICE,), (Level(1, Link(1, 1)),)).with_speeds([1 / 4]).devices
WIDTH = 512


def captures() -> CaptureCache:
    return CaptureCache(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)), nn.functional.mse_loss
    )


def doubled(captured: Captured, device: Device) -> CostedGraph:
    """Measured costs stand twice as high as the analytic ones."""
    graph = analytic(captured, device).graph
    ops = (replace(op, cost=replace(op.cost, fwd_ns=2 * op.cost.fwd_ns, bwd_ns=2 * op.cost.bwd_ns)) for op in graph.ops)
    return CostedGraph(replace(graph, ops=tuple(ops)), "measured")


def refused(captured: Captured, device: Device) -> CostedGraph:
    raise AssertionError("was measured")


@pytest.mark.parametrize("rows", [64, 256])
@pytest.mark.parametrize("device", [DEVICE, SLOW])
def test_known_costs_are_extended_to_other_sizes_and_slower_devices(rows: int, device: Device) -> None:
    family, batch = captures(), flatten((torch.randn(256, WIDTH), torch.randn(256, WIDTH)), with_target=True)
    known = doubled(family(batch, Size(64)), DEVICE)
    there = family(batch, Size(rows))
    found = known_costs(known, DEVICE, refused)(there, device)
    assert found.source == "measured" and found.graph.size == Size(rows)
    wanted = doubled(there, device).graph
    for op, other in zip(found.graph.ops, wanted.ops, strict=True):
        assert (op.name, op.cost.fwd_ns, op.cost.bwd_ns) == (
            op.name,
            pytest.approx(other.cost.fwd_ns, abs=2),
            pytest.approx(other.cost.bwd_ns, abs=2),
        )


def test_another_program_has_costs_of_its_own() -> None:
    family, batch = captures(), flatten((torch.randn(256, WIDTH), torch.randn(256, WIDTH)), with_target=True)
    known = doubled(family(batch, Size(64)), DEVICE)
    frozen = captures()
    frozen.model[0].requires_grad_(False)
    there = frozen(batch, Size(64))
    assert known_costs(known, DEVICE, analytic)(there, SLOW) == analytic(there, SLOW)
