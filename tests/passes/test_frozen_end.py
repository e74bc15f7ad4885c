"""Where the frozen layers end, against brute force over all ops."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from support.languages.graphs import frozen, graph, graphs

from autopart.ir.graph import Graph
from autopart.passes.graph.prefixes import frozen_end


def rows_of(g: Graph) -> Graph:
    """Return the graph with rows on axis 0 of its inputs."""
    return replace(g, values=tuple(replace(v, rows_axis=0) if v.name in g.inputs else v for v in g.values))


def before(g: Graph, op: str) -> set[str]:
    """Return an op and all ops that it depends on."""
    ops, writer = g.op_map(), g.writer()
    found, todo = set[str](), [op]
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo.extend(writer[read] for read in ops[name].reads if read in writer)
    return found


@given(graphs(), st.integers(0, 8))
def test_the_end_is_what_learning_ops_read_of_frozen_ones(g: Graph, count: int) -> None:
    g = rows_of(frozen(g, count))
    ops, learning = g.op_map(), g.learning_ops()
    still = {name for name in ops if not before(g, name) & learning}
    ends, expected = {*g.outputs, *(value for _, value in g.updates)}, set[str]()
    for name in still:
        own = [ops[other] for other in before(g, name)]
        counts = any(op.params for op in own) and any(set(op.reads) & set(g.inputs) for op in own)
        for value in ops[name].writes:
            leaves = any(value in op.reads for op in g.ops if op.name not in still) or value in ends
            expected |= {value} if counts and leaves else set()
    assert set(frozen_end(g)) == expected


@given(graphs(), st.integers(0, 8))
def test_a_step_behind_the_end_runs_no_frozen_op_that_depends_on_rows_and_weights(g: Graph, count: int) -> None:
    g = rows_of(frozen(g, count))
    end = frozen_end(g)
    ends = {*g.outputs, *(value for _, value in g.updates)}
    behind, whole = g.ops_between(end, ends), g.ops_between((), ends)
    assert behind <= whole and g.learning_ops() & whole <= behind
    assert whole == behind | (g.ops_between((), end) & whole)


def test_the_end_of_two_frozen_layers() -> None:
    g = rows_of(frozen(graph("a +p <- x; b +q <- a; c +r <- b a; d +s <- c"), 2))
    assert frozen_end(g) == ("a", "b")
    assert g.ops_between(("a", "b"), g.outputs) == {"c", "d"} and g.ops_between(("a",), ("b",)) == {"b"}
