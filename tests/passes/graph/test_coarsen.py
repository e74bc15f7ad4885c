"""Coarsening: convex blocks that cover the graph, cut where little flows."""

from __future__ import annotations

import networkx as nx
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.languages.graphs import graph, graphs, layers

from autopart.ir.errors import UsageError
from autopart.ir.graph import Cost, Graph, check
from autopart.passes.graph.atoms import atoms
from autopart.passes.graph.coarsen import coarsen, nested
from autopart.passes.graph.cuts import forced_bounds, segments

SIZES = st.integers(1, 12)


def dag(g: Graph) -> nx.DiGraph:
    writer = g.writer()
    result = nx.DiGraph()
    result.add_nodes_from(op.name for op in g.ops)
    result.add_edges_from((writer[r], op.name) for op in g.ops for r in op.reads if r in writer)
    return result


def parts(g: Graph) -> list[str]:
    return [" ".join(op.parts) for op in g.ops]


@given(graphs(most=30, free=False), SIZES)
def test_blocks_are_convex_and_the_line_is_topological(g: Graph, size: int) -> None:
    blocks = check(coarsen(g, blocks=size))
    assert nx.is_directed_acyclic_graph(dag(blocks))
    below = {name: nx.descendants(dag(g), name) for name in dag(g)}
    for block in blocks.ops:
        inside = set(block.parts)
        for outside in set(below) - inside:  # on a path that leaves the block and comes back?
            assert not (any(outside in below[x] for x in inside) and below[outside] & inside)


@given(graphs(most=30), SIZES)
def test_blocks_cover_every_op_within_the_number_and_can_run(g: Graph, size: int) -> None:
    fine = atoms(g)
    blocks = coarsen(fine, blocks=size)
    assert len(blocks.ops) <= size
    assert {part for op in blocks.ops for part in op.parts} == {op.name for op in g.ops}
    assert sum((op.cost for op in blocks.ops), Cost()) == sum((op.cost for op in g.ops), Cost())
    ops, homes = g.op_map(), {}
    for block in blocks.ops:
        ready = set(block.reads)
        for part in block.parts:
            assert set(ops[part].reads) <= ready
            ready.update(ops[part].writes)
        assert set(block.params) == {p for part in block.parts for p in ops[part].params}
        assert block.random == any(ops[part].random for part in block.parts)
        homes.update((name, block.name) for name in block.parts if name in fine.op_map())
    assert set(homes) == set(fine.op_map())


@given(graphs(most=30, free=False), SIZES)
def test_a_block_writes_what_others_read_and_the_results(g: Graph, size: int) -> None:
    blocks = coarsen(g, blocks=size)
    ops = g.op_map()
    results = {*g.outputs, *(value for _, value in g.updates)}
    for block in blocks.ops:
        inside = {w for part in block.parts for w in ops[part].writes}
        outside = {r for op in g.ops if op.name not in block.parts for r in op.reads}
        assert set(block.writes) == inside & (outside | results)
        assert set(block.reads) == {r for part in block.parts for r in ops[part].reads} - inside


@given(graphs(least=4, most=30, free=False), SIZES, st.data())
def test_no_block_spans_a_cut(g: Graph, size: int, data: st.DataObject) -> None:
    modules = sorted({op.module for op in g.ops[1:]} - {g.ops[0].module})
    assume(modules)
    cuts = tuple(data.draw(st.lists(st.sampled_from(modules), min_size=1, max_size=3, unique=True)))
    try:
        blocks = coarsen(g, blocks=size, cuts=cuts)
    except UsageError as error:
        assert "buffer run" in str(error)
        return
    segment = dict(zip((op.name for op in g.ops), segments(g, cuts), strict=True))
    kinds = [{segment[part] for part in block.parts} for block in blocks.ops]
    assert all(len(kind) == 1 for kind in kinds)
    line = [min(kind) for kind in kinds]
    assert line == sorted(line)
    assert len(forced_bounds(blocks, g, cuts)) == len(cuts)


@given(graphs(most=30, free=False), SIZES)
def test_uses_of_an_updated_buffer_stand_in_one_block(g: Graph, size: int) -> None:
    blocks = coarsen(g, blocks=size)
    writer = g.writer()
    for buffer, value in g.updates:
        users = {op.name for op in g.ops if buffer in op.params} | {writer[value]}
        assert sum(not users.isdisjoint(block.parts) for block in blocks.ops) == 1


def test_small_graph_stays_as_it_is() -> None:
    g = graph("a:3; b:5 <- a; c:2 <- a b")
    assert parts(coarsen(g)) == ["a", "b", "c"]


def test_expensive_cut_goes_first() -> None:
    g = graph("a:3 #1 <- x; b:3 #100 <- a; c:3 #1 <- b; d:3 <- c")
    assert parts(coarsen(g, blocks=3)) == ["a", "b c", "d"]


def test_branches_of_a_diamond_are_not_closed_around_an_op_outside() -> None:
    g = graph("a:1 <- x; b:9 <- a; c:1 <- a; d:1 <- b c")
    for size in (2, 3):
        assert nx.is_directed_acyclic_graph(dag(check(coarsen(g, blocks=size))))


def test_pairs_that_close_a_cycle_together_are_not_both_made() -> None:
    """a-c and b-d are each fine; together a-c needs q of b-d, which needs p of a-c."""
    g = graph("a,p:1 <- x; b,q:1 <- x; c:1 <- a q; d:1 <- b p")
    blocks = check(coarsen(g, blocks=2))
    assert len(blocks.ops) == 2 and nx.is_directed_acyclic_graph(dag(blocks))


def test_layers_are_cut_at_the_residual_stream() -> None:
    blocks = coarsen(layers(8), blocks=10)
    assert {"n2 u2 d2 s2", "n3 u3 d3 s3", "n4 u4 d4 s4"} <= set(parts(blocks))


@given(graphs(most=30, free=False), SIZES, SIZES)
def test_nested_blocks_are_ranges_of_the_finer_line(g: Graph, size: int, more: int) -> None:
    coarse, fine = nested(coarsen(g, blocks=size + more), blocks=size)
    assert check(fine) and parts(coarse) == parts(coarsen(coarsen(g, blocks=size + more), blocks=size))
    assert [part for op in coarse.ops for part in op.parts] == [part for op in fine.ops for part in op.parts]


def test_parameters_are_spread_even_when_they_take_no_time() -> None:
    tables = ";".join(f"t{i}:0 +w{i}:100 <- x" for i in range(16))
    blocks = coarsen(graph(f"{tables}; loss:9 <- {' '.join(f't{i}' for i in range(16))}"), blocks=8)
    assert max(len(op.params) for op in blocks.ops) <= 4


def test_buffer_parted_from_its_update_by_a_cut_is_refused() -> None:
    g = graph("a @one ~run <- x; b @two =run <- a; c @two <- b")
    with pytest.raises(UsageError, match="buffer run"):
        coarsen(g, cuts=("two",))


def test_six_thousand_ops_keep_the_balance() -> None:
    g = layers(1500)
    blocks = coarsen(g, blocks=64)
    total = sum(op.cost.total_ns for op in g.ops)
    assert len(blocks.ops) <= 64
    assert max(op.cost.total_ns for op in blocks.ops) <= 4 * total / 64
