"""Adding gradients to those of earlier micro-batches: what is charged is what runs, by types of weight and product."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from autopart.batch.batch import flatten
from autopart.capture import capture
from autopart.ir.cluster import Device
from autopart.ir.graph import Cost, Graph
from autopart.passes.ops.analytic_costs import Pricing, analytic_costs
from autopart.passes.ops.cost_model import CostModel
from autopart.runtime.stages.stage_module import _cast
from autopart.runtime.stages.weight_gradients import product

GPU = Device("cuda", 80 << 30, 10**15, 10**12)
SLOW = Device("cuda", 80 << 30, 10**6, 10**12)
SIZE = 64


class Passed(TorchDispatchMode):
    """Counts the bytes that additions into a gradient read and write."""

    size_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.add_.Tensor:
            self.size_bytes += 2 * args[0].nbytes + args[1].nbytes
        return func(*args, **(kwargs or {}))


def model_of(dtype: torch.dtype, autocast: bool = False) -> nn.Module:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(SIZE, SIZE, bias=False)
            self.norm = nn.LayerNorm(SIZE)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                return self.norm(self.inner(x)).float().square().mean()

    return Model().to(dtype)


def graph_of(model: nn.Module, *inputs: torch.Tensor) -> Graph:
    return capture(model, flatten(tuple(inputs))).graph


@pytest.mark.parametrize(
    ("weight", "factors"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16)],
)
def test_what_a_product_adds_is_charged_by_the_types_that_it_meets(weight: torch.dtype, factors: torch.dtype) -> None:
    leaf = nn.Parameter(torch.randn(SIZE, SIZE, dtype=weight))
    leaf.grad_dtype = torch.float32
    leaf.grad = torch.zeros(SIZE, SIZE)
    used = leaf if weight == factors else _cast(("w", factors), {"w": leaf}, {})
    made = product(torch.randn(4, SIZE, dtype=factors), used, None, True)
    with Passed() as passed:
        made.sum().backward()
    model, autocast = model_of(weight, autocast=weight != factors), weight != factors
    pricing = Pricing(graph := graph_of(model, torch.randn(4, SIZE, dtype=weight)), graph)
    (added,) = [a for a, part in zip(pricing.additions, pricing.weight_parts, strict=True) if part.weight]
    assert added.own == passed.size_bytes
    assert added.inside == (SIZE * SIZE * 4 if not passed.size_bytes else 0)
    assert any(not each.flows for each in pricing.additions) is autocast  # no gradient passes the cast


def test_half_precision_costs_a_backward_ten_bytes_an_element_more() -> None:
    """Beside the product, which takes longer than its own passes over memory here, whatever the dtype."""
    graphs = [graph_of(model_of(dtype), torch.randn(4, SIZE, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16)]
    wide, half = (next(op for op in analytic_costs(g, SLOW).ops if "linear" in op.target) for g in graphs)
    assert half.cost.bwd_ns - wide.cost.bwd_ns == -(-SIZE * SIZE * 10 // 1000)  # at 1e12 bytes/s


def test_the_part_that_can_wait_holds_the_additions_whatever_the_source_of_costs() -> None:
    graph = graph_of(model_of(torch.bfloat16), torch.randn(4, SIZE, dtype=torch.bfloat16))
    known = {op.name: op.cost for op in CostModel(analytic_costs(graph, GPU), None, (GPU,)).graph(graph.size, 0).ops}
    (name,) = [op.name for op in graph.ops if "linear" in op.target]
    assert known[name].weight_ns > known[name].bwd_ns * 0.7  # x needs no gradient: all but nothing waits
    ops = tuple(replace(op, cost=Cost(100, 1000)) for op in graph.ops)
    measured = CostModel(replace(graph, ops=ops), None, (GPU,)).graph(graph.size, 0)
    assert next(op.cost.weight_ns for op in measured.ops if op.name == name) == 1000


@pytest.mark.parametrize("queries", [32, 64])
def test_causal_attention_computes_what_it_sees(queries: int) -> None:
    class Model(nn.Module):
        def __init__(self, causal: bool) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(8))
            self.causal = causal

        def forward(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(q * self.w, k, k, is_causal=self.causal).sum()

    given = torch.randn(2, 2, queries, 8), torch.randn(2, 2, 64, 8)
    whole, causal = (
        next(op.cost for op in analytic_costs(graph_of(Model(causal), *given), SLOW).ops if "attention" in op.target)
        for causal in (False, True)
    )
    seen = sum(range(1, queries + 1)) / (queries * 64)
    assert causal.flops == whole.flops  # as everybody counts them
    assert causal.fwd_ns / whole.fwd_ns == pytest.approx(seen, rel=1e-3)
    assert causal.bwd_ns / whole.bwd_ns == pytest.approx(seen, rel=1e-3)
