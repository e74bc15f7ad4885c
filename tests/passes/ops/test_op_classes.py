"""Classes of ops: alike whatever the names, different wherever a shape, an argument or a connection is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.languages.graphs import graph

from autopart.ir.cluster import Device
from autopart.ir.errors import GraphError
from autopart.ir.graph import Graph, Literal, Size
from autopart.passes.ops.analytic_costs import analytic_costs, first_of, op_classes
from autopart.passes.ops.cost_model import FIELDS, CostModel, table_of

DEVICE = Device("cpu", 1 << 34, 10**12, 10**10)


def classes(g: Graph, other: Graph | None = None) -> tuple[int, ...]:
    return op_classes(g, other or g, [()] * len(g.ops), [None] * len(g.ops))


def test_layers_are_alike_and_the_first_of_each_class_stands_for_it() -> None:
    found = classes(graph("a #4 <- x; b #4 <- a; c #4 <- b; d #8 <- c; e #8 <- d; f #4 <- a c; g #4 <- c f"))
    assert found == (0, 1, 1, 2, 3, 4, 4)
    assert first_of(found) == (0, 1, 3, 4, 5)


@pytest.mark.parametrize(
    ("one", "two"), [(("%a",), ("%x",)), (("%a", 1), ("%a", 2)), ((("%a", "%x"),), (("%x", "%a"),))]
)
def test_arguments_count_but_not_their_names(one: Literal, two: Literal) -> None:
    g = graph("a #4 <- x; b #4 <- a x; c #4 <- a x")
    ops = tuple(
        replace(op, attrs=(("k", arg),)) if arg else op for op, arg in zip(g.ops, (None, one, two), strict=True)
    )
    assert classes(replace(g, ops=ops))[1] != classes(replace(g, ops=ops))[2]


def test_what_differs_in_the_other_capture_alone_differs() -> None:
    g = graph("a #4 <- x; b #4 <- x")
    other = replace(g, values=tuple(replace(v, shape=(9, *v.shape[1:])) if v.name == "b" else v for v in g.values))
    assert classes(g) == (0, 0) and classes(g, other) == (0, 1)


def test_measured_costs_are_the_same_as_table_and_as_graph() -> None:
    g = analytic_costs(graph("a #4 <- x; b #4 <- a; c #4 <- b"), DEVICE)
    measured = replace(g, ops=tuple(replace(op, cost=replace(op.cost, fwd_ns=7 * i)) for i, op in enumerate(g.ops)))
    for known in (g, measured):
        devices = (DEVICE, replace(DEVICE, flops_per_s=10**9, mem_bytes_per_s=10**8))
        costs = CostModel(known, None, devices)
        for device_type in (0, 1):
            table, made = costs.table(known.size, device_type), costs.graph(known.size, device_type)
            assert np.array_equal(table.columns, [[getattr(op.cost, f) for op in made.ops] for f in FIELDS])
            assert table.value_bytes == {v.name: v.size_bytes for v in made.values}
            again = table_of(made)
            assert np.array_equal(again.columns, table.columns) and again.value_bytes == table.value_bytes
        for ask in (costs.graph, costs.table):
            with pytest.raises(GraphError, match="the program of 2 rows is not known from that of 1 row"):
                ask(Size(2), 0)
