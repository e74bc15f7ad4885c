"""Costs of ranges against sums over ops."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from support.oracles.planner_oracle import Problem, problems

from autopart.capture import CaptureCache
from autopart.capture.batch.batch import flatten
from autopart.ir.cluster import Device
from autopart.ir.size import Size
from autopart.passes.graph import chain as line_module
from autopart.passes.graph.atoms import atoms
from autopart.passes.graph.chain import BlockChain
from autopart.passes.graph.coarsen import coarsen
from autopart.passes.ops.analytic_costs import analytic_costs
from autopart.passes.ops.cost_model import CostModel


def ranges(n: int) -> list[tuple[int, int]]:
    return [(a, b) for a in range(n) for b in range(a + 1, n + 1)]


@settings(max_examples=40)
@given(problems())
def test_ranges_are_sums_over_the_blocks(p: Problem) -> None:
    rows = max(p.request.micro_rows[0])
    space, graph = p.space, p.costs_at(rows, 0)
    costs, blocks = space.chain.range_costs(Size(rows)), space.chain.blocks
    size = {v.name: v.size_bytes for v in graph.values}
    cost = {op.name: op.cost for op in graph.ops}
    for a, b in ranges(space.chain.n):
        ops = blocks.ops[a:b]
        own = {w for op in ops for w in op.writes} | (set(blocks.inputs) if a == 0 else set())
        parts = [cost[part] for op in ops for part in op.parts]
        for field in ("fwd_ns", "bwd_ns", "saved_bytes", "flops"):
            assert costs.ranges(field)[a, b] == sum(getattr(part, field) for part in parts)
        assert costs.scratch[a, b] == max(part.scratch_bytes for part in parts)
        assert costs.heaviest[a, b] == max(sum(cost[x].saved_bytes for x in op.parts) for op in ops)
        assert costs.enters[a, b] == sum(size[r] for r in {r for op in ops for r in op.reads} - own)
        assert costs.kept[a, b] == sum(costs.crossing[a + 1 : b])
        used = {name for op in ops for name in op.params}
        assert space.chain.weights[a, b] == sum(q.size_bytes for q in blocks.params if q.name in used)
        assert space.chain.trained[a, b] == sum(q.size_bytes for q in blocks.params if q.name in used and q.trainable)


@settings(max_examples=20)
@given(problems())
def test_line_as_a_graph_has_the_costs_of_its_blocks(p: Problem) -> None:
    line = p.space.chain
    for rows in {max(rows) for rows in p.request.micro_rows}:
        graph = line.graph(Size(rows))
        assert sum(op.cost.total_ns for op in graph.ops) == sum(op.cost.total_ns for op in p.costs_at(rows, 0).ops)
        sizes = {v.name: v.size_bytes for v in p.costs_at(rows, 0).values}
        assert all(v.size_bytes == sizes[v.name] for v in graph.values)


def test_between_powers_of_two_costs_lie_on_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPT-2: at most 2 % off in time, exact in bytes."""
    from support.models.zoo import CASES

    case = CASES["gpt2"]
    capturer, batch = CaptureCache(case.model()), flatten(case.data(16))
    device = Device("cpu", 1 << 34, 10**11, 10**10)
    first, other = capturer(batch, Size(2)).graph, capturer(batch, Size(4)).graph
    graph = analytic_costs(first, device)
    cost_model = CostModel(graph, other, (device,))
    blocks = coarsen(atoms(graph), blocks=64)
    exact = BlockChain(blocks, graph, cost_model, 16)
    monkeypatch.setattr(line_module, "EXACT_OPS", 0)
    between = BlockChain(blocks, graph, cost_model, 16)
    for rows in (3, 5, 6, 7, 9, 11, 13, 15):
        one, two = exact.range_costs(Size(rows)), between.range_costs(Size(rows))
        assert (one.sizes == two.sizes).all() and (one.enters == two.enters).all()
        for field in ("fwd_ns", "bwd_ns"):
            total = one.sums(field)[-1]
            assert abs(int(two.sums(field)[-1]) - int(total)) <= 0.02 * total
        assert two.sums("saved_bytes")[-1] == pytest.approx(one.sums("saved_bytes")[-1], rel=0.001)
