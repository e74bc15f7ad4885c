"""Bytes over cuts against their definition, and where module paths cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from support.languages.graphs import graph, graphs, layers

from autopart.ir.errors import UsageError
from autopart.ir.graph import Graph
from autopart.passes.graph.coarsen import coarsen
from autopart.passes.graph.cuts import crossing_bytes, entering_bytes, forced_bounds, holding_bytes, segments


def reads_of(g: Graph, a: int, b: int) -> set[str]:
    """Values that places a..b-1 read and do not write; the first stage has the inputs."""
    stage = g.ops[a:b]
    own = {w for op in stage for w in op.writes} | (set(g.inputs) if a == 0 else set())
    return {r for op in stage for r in op.reads} - own


@given(graphs(free=False))
def test_entering_bytes_are_those_of_values_read_but_not_written(g: Graph) -> None:
    forward, backward = entering_bytes(g)
    values = g.value_map()
    for a in range(len(g.ops) + 1):
        for b in range(a + 1, len(g.ops) + 1):
            names = reads_of(g, a, b)
            assert forward[a, b] == sum(values[n].size_bytes for n in names)
            back = [n for n in names if values[n].grad and n not in g.inputs]
            assert backward[a, b] == sum(values[n].size_bytes for n in back)


@given(graphs(free=False))
def test_crossing_bytes_are_those_that_the_rest_of_the_line_reads(g: Graph) -> None:
    crossing, n = crossing_bytes(g), len(g.ops)
    values = g.value_map()
    assert crossing[0] == crossing[n] == 0
    for b in range(1, n):
        names = reads_of(g, b, n)
        back = [x for x in names if values[x].grad and x not in g.inputs]
        assert crossing[b] == sum(values[x].size_bytes for x in (*names, *back))


@given(graphs(free=False))
def test_parameters_count_once_in_each_stage_that_uses_them(g: Graph) -> None:
    held = holding_bytes(g, 4)
    for a in range(len(g.ops) + 1):
        for b in range(a + 1, len(g.ops) + 1):
            used = {p for op in g.ops[a:b] for p in op.params}
            assert held[a, b] == sum(p.size_bytes * (4 if p.trainable else 1) for p in g.params if p.name in used)


def test_cut_lies_before_the_first_op_of_the_module_or_below_it() -> None:
    g = graph("a @enc <- x; b @enc.1.fc <- a; c @dec.0 <- b; d @enc.1 <- c; e @enc.10 <- d")
    assert segments(g, ("enc.1",)) == [0, 1, 1, 1, 1]
    assert segments(g, ("dec", "enc.1")) == [0, 1, 2, 2, 2]
    assert segments(g, ("enc.10",)) == [0, 0, 0, 0, 1]


def test_unknown_module_names_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"layer\.1.*\n.*\n.*nearest.*layers\.1"):
        segments(layers(3), ("layer.1",))


def test_cut_at_the_first_op_is_refused() -> None:
    with pytest.raises(UsageError, match="'embed' begins at the first op"):
        segments(layers(3), ("embed",))


def test_two_cuts_at_one_op_are_refused() -> None:
    with pytest.raises(UsageError, match=r"'layers' and 'layers\.0' begin at the same op"):
        segments(layers(3), ("layers", "layers.0"))


def test_forced_bounds_are_where_segments_meet_in_the_blocks() -> None:
    fine = layers(6)
    cuts = ("layers.2", "layers.4")
    blocks = coarsen(fine, blocks=7, cuts=cuts)
    bounds = forced_bounds(blocks, fine, cuts)
    assert [blocks.ops[b].parts[0] for b in bounds] == ["n2", "n4"]
