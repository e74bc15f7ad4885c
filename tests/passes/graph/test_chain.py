"""Costs of ranges against sums over ops."""

from __future__ import annotations

from hypothesis import given, settings
from support.oracles.planner_oracle import Problem, problems

from autopart.ir.graph import Size


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
        assert costs.largest["scratch_bytes"][a, b] == max(part.scratch_bytes for part in parts)
        assert costs.largest["saved_bytes"][a, b] == max(sum(cost[x].saved_bytes for x in op.parts) for op in ops)
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
