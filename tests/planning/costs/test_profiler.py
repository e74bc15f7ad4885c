"""Costs inside the running program: every op, what they add up to, the cache, and the programs that are left alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support.models.zoo import CASES
from torch import nn

from autopart.batch.batch import flatten
from autopart.capture import Captured, capture
from autopart.costs import measure, profiler
from autopart.costs.profiler import profile_costs
from autopart.costs.sources import costed
from autopart.ir.cluster import Device
from autopart.ir.graph import Graph, check_cost
from autopart.passes.ops.analytic_costs import analytic_costs

DEVICE = Device("cpu", 1 << 34, 100_000_000_000, 20_000_000_000)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AUTOPART_CACHE", str(tmp_path / "deep"))
    return tmp_path / "deep" / "costs.json"


class Heavy(nn.Module):
    """A small and a large layer, and one that no gradient reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.large, self.still = nn.Linear(256, 256), nn.Linear(256, 16384), nn.Linear(256, 16384)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.small(x))
        with torch.no_grad():
            still = self.still(x)
        return (self.large(x) * still).square().mean()


def heavy(rows: int = 256) -> Captured:
    return capture(Heavy(), flatten(torch.ones(rows, 256)))


def tried(captured: Captured, budget_s: float) -> tuple[Graph, tuple[str, ...]] | None:
    with mock.patch.object(measure, "BUDGET_S", budget_s):
        return profile_costs(captured, DEVICE)


def profiled(captured: Captured, path: Path, budget_s: float = 3.0) -> tuple[Graph, tuple[str, ...]]:
    found = tried(captured, budget_s)
    assert found is not None
    return found


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("t5", "mixtral")]


@pytest.mark.parametrize("name", ["gpt2", "resnet", *SLOW])
def test_every_op_of_a_real_model_gets_a_cost(name: str, path: Path) -> None:
    model = CASES[name].model(dropout=0.1)
    captured = capture(model, flatten(CASES[name].data(4)))
    graph, _ = profiled(captured, path, budget_s=60)
    counted = analytic_costs(captured.graph, DEVICE)
    for op, other in zip(graph.ops, counted.ops, strict=True):
        check_cost(op.cost)
        assert (op.cost.saved_bytes, op.cost.flops) == (other.cost.saved_bytes, other.cost.flops)
    assert all(op.cost.fwd_ns > 0 for op in graph.ops)
    assert sum(op.cost.bwd_ns for op in graph.ops) > 0


def test_time_is_charged_to_the_op_that_takes_it(path: Path) -> None:
    captured = heavy()
    graph, _ = profiled(captured, path, budget_s=60)
    costs = {op.module: op.cost for op in graph.ops if op.target.startswith("aten.linear")}
    assert costs["large"].fwd_ns > costs["small"].fwd_ns
    assert costs["large"].bwd_ns > costs["small"].bwd_ns
    assert costs["still"].bwd_ns == 0 and costs["still"].fwd_ns > costs["small"].fwd_ns


def test_costs_add_up_to_the_unwatched_program(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = (7_000_000_000, 11_000_000_000)
    monkeypatch.setattr(profiler.Program, "run", lambda self: whole)
    graph, _ = profiled(heavy(), path)
    for phase, total in zip(("fwd_ns", "bwd_ns"), whole, strict=True):
        assert sum(getattr(op.cost, phase) for op in graph.ops) == pytest.approx(total, rel=1e-6)


def test_the_model_is_left_as_it_was(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["resnet"]
    model = case.model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    profiled(capture(model, flatten(case.data(4))), path)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())

    def still_watched(*_: Any) -> None:
        raise AssertionError("a hook was left behind")

    monkeypatch.setattr(profiler._TimedRun, "_end", still_watched)
    model(**case.data(4)).loss.backward()


def test_what_was_profiled_is_known_in_the_next_run(path: Path) -> None:
    first, _ = profiled(heavy(), path)
    second, _ = profiled(heavy(), path, budget_s=0)
    assert first == second


def test_a_program_that_is_too_slow_or_too_large_is_left_to_others(path: Path) -> None:
    assert tried(heavy(), 0) is None
    tight = Device("cpu", 1 << 20, DEVICE.flops_per_s, DEVICE.mem_bytes_per_s)
    assert profile_costs(heavy(), tight) is None
    assert not path.exists()


def test_a_program_that_rejects_made_up_inputs_is_left_to_others(path: Path) -> None:
    class Picky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.cholesky(self.linear(x) - 100).sum()  # type: ignore[no-any-return]

    assert profile_costs(capture(Picky(), flatten(torch.eye(4))), DEVICE) is None


def test_the_budget_ends_the_runs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    monkeypatch.setattr(profiler, "affordable", lambda *_: True)
    monkeypatch.setattr(profiler.Program, "run", lambda self: runs.append(1) or (10, 10))
    profiled(heavy(), path, budget_s=0)
    assert len(runs) == 2  # one to warm up, one that counts


class Placed(nn.Module):
    """What it makes in forward() says on which device."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) + torch.arange(4.0, device=x.device)).sum()


def test_a_model_that_stands_elsewhere_runs_on_the_device_that_is_measured() -> None:
    captured = capture(Placed(), flatten(torch.ones(2, 4)))
    assert any(isinstance(x, torch.device) for node in captured.module.graph.nodes for x in node.kwargs.values())
    where = torch.device("meta")  # nothing of the CPU can be computed with there
    inputs = [n.meta["val"].to(where) for n in captured.module.graph.nodes if n.op == "placeholder"]
    assert [result.device for result in profiler._as_in_stages(captured, where)(*inputs)] == [where]


def test_a_disturbed_measurement_is_taken_again_and_one_that_stays_disturbed_is_noted(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured, quiet = heavy(), (7_000_000_000, 11_000_000_000)
    runs = iter([quiet, (70_000_000_000, 11_000_000_000), quiet, quiet])  # the first one warms up
    monkeypatch.setattr(profiler.Program, "run", lambda self: next(runs, quiet))
    graph, notes = profiled(captured, path)
    assert sum(op.cost.fwd_ns + op.cost.bwd_ns for op in graph.ops) == pytest.approx(sum(quiet), rel=1e-6)
    assert len(notes) == 1
    path.unlink()
    growing = iter(range(1, 100))
    monkeypatch.setattr(profiler, "affordable", lambda *_: True)
    monkeypatch.setattr(profiler.Program, "run", lambda self: (10 ** (9 + next(growing)), 1))
    _, notes = profiled(captured, path, budget_s=0.1)
    assert "disagree" in notes[-1] and not path.exists()


def test_equal_ops_of_equal_layers_share_their_samples(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x).relu()
            return x.square().mean()

    graph, _ = profiled(capture(Deep(), flatten(torch.ones(8, 64))), path)
    linear = [op.cost for op in graph.ops if op.target.startswith("aten.linear")]
    assert len({cost.fwd_ns for cost in linear[1:]}) == len({cost.bwd_ns for cost in linear[1:]}) == 1
    assert linear[0].bwd_ns != linear[1].bwd_ns  # its input needs no gradient: it is not equal


def test_costs_of_a_size_that_takes_too_long_to_run_follow_from_those_that_were_measured(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, large = heavy(8), heavy(2048)
    limit = sum(op.cost.total_ns for op in analytic_costs(large.graph, DEVICE).ops) * 1e-9
    monkeypatch.setattr(measure, "BUDGET_S", limit)  # a quarter of it is allowed
    known = costed(small, DEVICE, "measured")
    monkeypatch.setattr(profiler.Program, "run", lambda self: pytest.fail("it was run at a size that takes too long"))
    monkeypatch.setattr(measure, "_measured", lambda *_: pytest.fail("an op was run"))
    found = costed(large, DEVICE, "measured", known)
    assert found.graph.size == large.graph.size and "follow" in found.notes[-1]
    costs = known.graph.op_map()
    for op in found.graph.ops:
        if op.target.startswith("aten.linear"):
            assert 64 < op.cost.fwd_ns / costs[op.name].cost.fwd_ns <= 257  # 256 times the rows, one launch
