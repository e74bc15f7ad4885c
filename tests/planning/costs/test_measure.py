"""Measured costs: distinct ops once, the cache on disk and every way it can be broken, the time budget."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from autopart.batch.batch import flatten
from autopart.capture import Captured, capture
from autopart.costs import measure
from autopart.costs.measure import environment, measure_costs
from autopart.files.caches import CacheWarning, read_kept, write_kept
from autopart.ir.cluster import Device
from autopart.ir.graph import Graph, check_cost
from autopart.passes.ops.analytic_costs import analytic_costs

DEVICE = Device("cpu", 1 << 34, 100_000_000_000, 20_000_000_000)


def cost_of(captured: Captured, device: Device, *, budget_s: float) -> tuple[Graph, tuple[str, ...]]:
    with mock.patch.object(measure, "BUDGET_S", budget_s):
        return measure_costs(captured, device)


class Net(nn.Module):
    """Equal layers, dropout, an embedding, a loss."""

    def __init__(self, layers: int = 3, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.drop = nn.Dropout(0.1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + self.drop(torch.relu(layer(x)))
        return nn.functional.cross_entropy(x.flatten(0, 1), ids.flatten())


def net(device: str = "cpu", **options: Any) -> Captured:
    return capture(Net(**options).to(device), flatten(torch.arange(12).reshape(3, 4) % 10))


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AUTOPART_CACHE", str(tmp_path / "deep"))
    return tmp_path / "deep" / "costs.json"


def times(graph: Graph) -> dict[str, tuple[int, int]]:
    return {op.name: (op.cost.fwd_ns, op.cost.bwd_ns) for op in graph.ops}


def test_every_op_gets_a_cost_and_equal_layers_the_same_one(path: Path) -> None:
    captured = net()
    graph, notes = cost_of(captured, DEVICE, budget_s=60)
    found = times(graph)
    for op in graph.ops:
        check_cost(op.cost)
        assert op.cost.fwd_ns > 0
        assert (op.cost.bwd_ns > 0) == any(graph.value_map()[w].grad for w in op.writes), op
    assert found["linear"] == found["linear_1"] == found["linear_2"]
    distinct = {op.target for op in graph.ops} - {"aten.reshape.default"}
    assert notes == (f"costs: {len(distinct)} distinct ops measured, 0 known from earlier runs",)
    counted = analytic_costs(captured.graph, DEVICE)
    for op, other in zip(graph.ops, counted.ops, strict=True):
        assert (op.cost.saved_bytes, op.cost.flops) == (other.cost.saved_bytes, other.cost.flops)


def test_a_larger_op_takes_longer(path: Path) -> None:
    small, large = (
        dict(times(cost_of(net(layers=1, width=width), DEVICE, budget_s=60)[0]))["linear"] for width in (16, 2048)
    )
    assert large[0] > 2 * small[0] and large[1] > 2 * small[1]


def test_what_was_measured_is_known_in_the_next_run(path: Path) -> None:
    first, _ = cost_of(net(), DEVICE, budget_s=60)
    second, notes = cost_of(net(), DEVICE, budget_s=0)
    assert times(first) == times(second) and "0 distinct ops measured" in notes[0]
    content = json.loads(read_kept(path, str) or "")
    assert list(content["times"]) == [environment(DEVICE)]
    assert not list(path.parent.glob("*.tmp"))


def test_without_time_costs_are_counted_and_it_is_said(path: Path) -> None:
    captured = net()
    graph, notes = cost_of(captured, DEVICE, budget_s=0)
    assert graph == analytic_costs(captured.graph, DEVICE)
    assert "no time to measure" in notes[-1] and not path.exists()


def test_what_is_left_is_scaled_like_what_was_measured(path: Path) -> None:
    captured = net()
    counted = analytic_costs(captured.graph, DEVICE)
    cost_of(captured, DEVICE, budget_s=60)
    content = json.loads(read_kept(path, str) or "")
    kept = dict(list(content["times"][environment(DEVICE)].items())[:1])
    (key,) = kept
    content["times"][environment(DEVICE)] = {key: [7_000_000, 0]}
    write_kept(path, json.dumps(content))
    graph, _ = cost_of(captured, DEVICE, budget_s=0)
    known = [op.name for op in graph.ops if op.cost.fwd_ns == 7_000_000]
    measured = sum(7_000_000 for _ in known)
    before = times(counted)
    factor = measured / sum(before[name][0] for name in known)
    other = next(op for op in graph.ops if op.name not in known and "embedding" in op.target)
    assert other.cost.fwd_ns == int(before[other.name][0] * factor)


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("AUTOPART_CACHE", str(blocked))
    with pytest.warns(CacheWarning, match="Not a directory"):
        graph, _ = cost_of(net(layers=1), DEVICE, budget_s=60)
    assert all(op.cost.fwd_ns for op in graph.ops)


def test_a_model_without_weights_is_measured_and_random_state_is_left_alone(path: Path) -> None:
    captured = net(device="meta")
    before = torch.get_rng_state()
    graph, notes = cost_of(captured, DEVICE, budget_s=60)
    assert torch.equal(before, torch.get_rng_state())
    assert len(notes) == 1 and all(op.cost.fwd_ns for op in graph.ops)


def test_ops_that_are_too_large_or_fail_alone_are_counted(path: Path) -> None:
    captured = net()
    tiny = Device("cpu", 1_000, DEVICE.flops_per_s, DEVICE.mem_bytes_per_s)
    _, notes = cost_of(captured, tiny, budget_s=60)
    assert "cannot be measured alone" in notes[1]
