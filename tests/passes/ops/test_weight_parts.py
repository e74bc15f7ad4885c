"""The part of a backward that can wait: products with a trainable matrix, in time and in bytes kept."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.languages.graphs import graph

from autopart.ir.cluster import Device
from autopart.ir.graph import Cost, Graph, Size
from autopart.passes.graph.chain import BlockChain
from autopart.passes.ops.analytic_costs import analytic_costs
from autopart.passes.ops.cost_model import CostModel
from autopart.passes.ops.storage import storage
from autopart.passes.ops.weight_parts import weight_parts

DEVICE = Device("cpu", 1 << 34, 10**12, 10**10)


def two_products(
    *, trainable: bool = True, target: str = "aten.linear.default", shape: tuple[int, ...] = (8, 8)
) -> Graph:
    """a and b are products of one input with weights of their own, behind an op that is none."""
    g = graph("x0:1 #64 +g:8 <- x; a:4 #64 +wa:64 <- x0; b:4 #64 +wb:64 <- x0; c:1 #64 <- a b")
    params = tuple(replace(p, shape=shape, trainable=trainable) if p.name.startswith("w") else p for p in g.params)
    ops = tuple(
        replace(op, target=target, attrs=(("input", "%x0"), ("weight", f"%w{op.name}"))) if op.name in "ab" else op
        for op in g.ops
    )
    return replace(g, params=params, ops=ops)


def parts_of(g: Graph) -> dict[str, tuple[int, tuple[str, ...]]]:
    return {op.name: tuple(part)[:2] for op, part in zip(g.ops, weight_parts(g, storage(g)), strict=True)}  # type: ignore


def test_half_of_a_products_backward_can_wait_and_a_shared_input_is_kept_once() -> None:
    nothing = (0, ())
    assert parts_of(two_products()) == {"x0": nothing, "a": (1, ("x0", "a")), "b": (1, ("b",)), "c": nothing}


@pytest.mark.parametrize(
    "other",
    [{"trainable": False}, {"target": "aten.mul.Tensor"}, {"shape": (64,)}],
    ids=["frozen", "no product", "1-D"],
)
def test_other_ops_run_whole_with_the_gradients_of_inputs(other: dict[str, object]) -> None:
    assert set(parts_of(two_products(**other)).values()) == {(0, ())}  # type: ignore[arg-type]


def test_all_of_the_backward_can_wait_where_the_input_needs_no_gradient() -> None:
    g = two_products()
    values = tuple(replace(v, grad=v.grad and v.name != "x0") for v in g.values)
    assert parts_of(replace(g, values=values))["a"][0] == 2


def test_measured_times_are_divided_too_and_blocks_add_up() -> None:
    analytic = analytic_costs(two_products(), DEVICE)
    measured = replace(analytic, ops=tuple(replace(op, cost=Cost(5, 100, 7)) for op in analytic.ops))
    model = CostModel(measured, None, (DEVICE,))
    costs = [op.cost for op in model.graph(measured.size, 0).ops]
    assert [cost.weight_ns for cost in costs] == [0, 50, 50, 0]
    chain = BlockChain(measured, measured, model)
    whole = chain.range_costs(Size(measured.rows))
    assert whole.ranges("weight_ns")[0, chain.n] == 100
    assert whole.ranges("weight_bytes")[0, chain.n] == sum(cost.weight_bytes for cost in costs) > 0
