"""Costs in compiled code: of every op, adding up to the segments; and when they are taken."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import fx, nn

import autopart
from autopart.batch.batch import flatten
from autopart.capture import Captured, capture
from autopart.costs.profiler import Profile, Program
from autopart.costs.sources import measured, source_for
from autopart.extras.compiled import compiled_costs as module
from autopart.extras.compiled.compiled_costs import compiled_costs, saved_by_call
from autopart.extras.compiled.inductor import Inductor, segmented
from autopart.files.caches import OpCost
from autopart.ir.cluster import Device
from autopart.ir.graph import Graph, Size
from autopart.passes.ops.analytic_costs import analytic_costs
from autopart.passes.ops.cost_model import CostModel
from autopart.runtime.stages.compiled_segment import CompiledSegment
from autopart.runtime.stages.stage_module import StageModule

DEVICE = Device("cpu", 1 << 34, 100_000_000_000, 20_000_000_000)


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPART_CACHE", str(tmp_path))


class Net(nn.Module):
    """Two layers, and ops that no segment holds: dropout, and one that makes numbers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = nn.functional.dropout(torch.tanh(layer(x)) * 2 + 1, 0.1)
        return x.square().mean()


def net(rows: int = 64) -> Captured:
    return capture(Net(), flatten(torch.ones(rows, 32)))


def times(graph: Graph) -> list[tuple[int, int]]:
    return [(op.cost.fwd_ns, op.cost.bwd_ns) for op in graph.ops]


def made_up_costs(graph: Graph, forward: int = 7, backward: int = 8, saved: int = 9) -> tuple[OpCost, ...]:
    return ((forward, backward, saved),) * len(graph.ops)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, while its compiler is imported
def test_compiled_code_of_every_op_has_times_that_are_kept() -> None:
    found = compiled_costs(net(), DEVICE)
    assert found.source == "compiled", found.notes
    assert all(op.cost.fwd_ns > 0 for op in found.graph.ops)
    assert times(found.graph) != times(measured(net(), DEVICE).graph)
    again = compiled_costs(net(), DEVICE)
    assert again.graph == found.graph


def test_a_program_that_cannot_be_compiled_has_its_eager_times(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> object:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(module, "_measured", fails)
    found, plain = compiled_costs(net(), DEVICE), measured(net(), DEVICE)
    assert (found.graph, found.source) == (plain.graph, "measured")
    assert "cannot be measured, RuntimeError: no compiler" in found.notes[-1]


def test_a_model_without_weights_is_not_compiled_for_its_costs() -> None:
    with torch.device("meta"):
        model = Net()
    captured = capture(model, flatten(torch.ones(4, 32)))
    assert compiled_costs(captured, DEVICE).source == "analytic"


def test_the_time_of_a_segment_is_divided_among_its_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_segments(inductor: Inductor, code: StageModule, *_: object) -> StageModule:
        paths = {name: op.module for name, op in inductor._ops.items()}
        return replace(code, module=segmented(code.module, paths, lambda body: CompiledSegment(body, lambda *_: None)))

    def of_all(program: Program, budget_s: float) -> Profile:
        return Profile({node.name: (900_000, 1_800_000) for node in program.module.graph.nodes})

    def kept(module: fx.GraphModule, inputs: object) -> dict[str, int]:
        return {node.name: 30_000 for node in module.graph.nodes}

    captured = net()
    plain = measured(captured, DEVICE).graph
    monkeypatch.setattr(Inductor, "compile", in_segments)
    monkeypatch.setattr(module, "profile_code", of_all)
    monkeypatch.setattr(module, "saved_by_call", kept)
    measured_costs, _ = module._measured(captured, plain, torch.device("cpu"))
    found = dict(zip(plain.op_map(), measured_costs, strict=True))
    assert found["native_dropout"] == (900_000, 1_800_000, 30_000)  # random ops stay outside of segments
    assert found["linear"] == (900_000, 1_800_000, 30_000)  # alone in its module
    first = ["tanh", "mul", "add"]
    costs = plain.op_map()
    for phase, whole in enumerate((900_000, 1_800_000, 30_000)):
        assert sum(found[name][phase] for name in first) == pytest.approx(whole, rel=1e-3)
    share = found["mul"][0] / found["tanh"][0]
    assert share == pytest.approx(costs["mul"].cost.fwd_ns / costs["tanh"].cost.fwd_ns, rel=1e-2)
    keeps = {name: costs[name].cost.saved_bytes for name in first}
    assert [name for name in first if found[name][2]] == [name for name in first if keeps[name]] != []


def test_what_is_known_of_a_program_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_measured", lambda _, graph, where: (made_up_costs(graph), ""))
    first = compiled_costs(net(), DEVICE)
    monkeypatch.setattr(module, "_measured", lambda *_: pytest.fail("it was measured again"))
    again = compiled_costs(net(), DEVICE)
    assert again.graph == first.graph
    assert {op.cost.saved_bytes for op in again.graph.ops} == {9}


def test_saved_bytes_that_were_measured_hold_at_other_sizes() -> None:
    captured = net(64)
    plain = analytic_costs(captured.graph, DEVICE)
    half = [replace(op, cost=replace(op.cost, saved_bytes=op.cost.saved_bytes // 2)) for op in plain.ops]
    model = CostModel(replace(plain, ops=tuple(half)), net(32).graph, (DEVICE,))
    other = analytic_costs(net(32).graph, DEVICE)
    found, table = model.graph(Size(32), 0), model.table(Size(32), 0)
    for place, (op, own) in enumerate(zip(found.ops, other.ops, strict=True)):
        assert op.cost.saved_bytes == own.cost.saved_bytes // 2 == table.columns[2, place]


def test_what_was_run_to_count_its_bytes_is_freed() -> None:
    module = fx.symbolic_trace(lambda x: torch.ops.aten.exp(torch.ops.aten.tanh(x)))
    x = torch.ones(10, requires_grad=True)
    alive: list[weakref.ref[object]] = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            alive.append(weakref.ref(ctx))
            return x.clone()

        @staticmethod
        def backward(ctx, grad):  # type: ignore[no-untyped-def]
            return grad

    saved_by_call(module, [Watched.apply(x)])
    gc.collect()
    assert alive[0]() is None


def test_each_storage_that_autograd_keeps_counts_once() -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = torch.ops.aten.tanh(x)  # keeps y
        z = torch.ops.aten.mul(y, w)  # keeps y, which is counted, and w, which is given
        return torch.ops.aten.exp(z)  # keeps its result

    traced = fx.symbolic_trace(program)
    inputs = torch.ones(10, requires_grad=True), torch.ones(10, requires_grad=True)
    assert saved_by_call(traced, inputs) == {"tanh": 40, "exp": 40}


@pytest.mark.parametrize(
    ("source", "backend", "taken"),
    [
        ("auto", "inductor", "compiled"),
        ("measured", "inductor", "compiled"),
        ("analytic", "inductor", "analytic"),
        ("auto", "eager", "auto"),
        (compiled_costs, "inductor", compiled_costs),
    ],
)
def test_compiled_stages_are_planned_with_costs_of_compiled_code(source: object, backend: str, taken: object) -> None:
    assert source_for(source, backend) == taken  # type: ignore[arg-type]


def test_the_source_has_a_name_for_plans_and_the_command_line() -> None:
    model, batch = Net(), torch.ones(8, 32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_measured", lambda _, graph, where: (made_up_costs(graph), ""))
        planned = autopart.plan(model, "cpu:2", sample=batch, backend="inductor", cache=False)
    assert planned.provenance.costs == "compiled"
    assert "in compiled code" in planned.explain()
