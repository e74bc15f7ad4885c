"""Cost sources: by name or as a function, and what is refused of a user's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.extending.own_cost_source import by_module
from torch import nn

import autopart
from autopart.capture import Captured
from autopart.costs import sources
from autopart.costs.sources import CostedGraph, register_cost_source
from autopart.ir.cluster import Device
from autopart.ir.errors import UsageError


def net() -> nn.Module:
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.Tanh())))


OPTIONS: dict[str, Any] = {"loss_fn": nn.functional.mse_loss, "optimizer": "sgd", "stages": 2, "micro_batches": 4}


def planned(model: nn.Module | None = None, **options: Any) -> autopart.Plan:
    return autopart.plan(model or net(), "cpu:2", sample=(torch.ones(8, 8), torch.ones(8, 8)), **{**OPTIONS, **options})


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The registry of cost sources, as it was afterwards."""
    known = dict(sources.COST_SOURCES)
    yield sources.COST_SOURCES
    sources.COST_SOURCES.clear()
    sources.COST_SOURCES.update(known)


def test_a_registered_source_goes_by_its_name(registry: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"(?s)unknown costs 'by hand'.*auto, measured, analytic"):
        planned(costs="by hand")
    register_cost_source("by hand", by_module)
    own, named = planned(costs=by_module), planned(costs="by hand")
    assert named.provenance == replace(own.provenance, costs="by hand")
    assert (named.decision, named.outlook) == (own.decision, own.outlook)
    register_cost_source("by hand", by_module)
    with pytest.raises(UsageError, match="already"):
        register_cost_source("analytic", by_module)


def test_without_weights_and_by_default_costs_are_analytic() -> None:
    with torch.device("meta"):
        model = net()
    assert planned(model).provenance.costs == "analytic"
    assert planned().provenance.costs == "measured"


def no_graph(captured: Captured, device: Device) -> Any:
    return captured.graph


def another_program(captured: Captured, device: Device) -> CostedGraph:
    return CostedGraph(replace(captured.graph, ops=captured.graph.ops[:-1]))


def no_time(captured: Captured, device: Device) -> CostedGraph:
    first, *others = captured.graph.ops
    return CostedGraph(replace(captured.graph, ops=(replace(first, cost=replace(first.cost, fwd_ns=-1)), *others)))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (no_graph, "no_graph returned a Graph"),
        (another_program, "another_program changed the program"),
        (no_time, r"(?s)no_time gave op \w+ an impossible cost.*linear.*fwd_ns is -1"),
        (7, "unknown costs 7"),
    ],
)
def test_a_source_that_gives_no_costs_of_the_program_is_refused(source: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        planned(costs=source)
