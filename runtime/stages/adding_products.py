"""Which products of a program add the gradient of their weight into `.grad` by themselves (`weight_gradients`).

The code of stages is rewritten so, and the program in which costs are measured, so that what is timed is what runs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import fx

from autopart.runtime.stages.products import are_faster, kernel_of
from autopart.runtime.stages.recomputation import RecomputedGroup
from autopart.runtime.stages.weight_gradients import product

_aten = torch.ops.aten
_PRODUCTS: Mapping[Any, tuple[int, int, int | None, bool]] = {
    _aten.linear.default: (0, 1, 2, True),
    _aten.addmm.default: (1, 2, 0, False),
    _aten.mm.default: (0, 1, None, False),
    _aten.matmul.default: (0, 1, None, False),
}
"""By op, the places of (x, weight, bias) among its arguments, and whether it takes the weight transposed."""

LEAST_ELEMENTS = 1 << (15 if are_faster() else 19)
"""Of a weight; with smaller ones the calls from autograd into Python take longer than what they save: an addition, and
where there is a faster kernel (`stages.products`) half of the product."""


def is_weight(tensor: torch.Tensor, least: int) -> bool:
    """Return whether products with a tensor add its gradient: a trainable matrix of so many elements."""
    return (
        isinstance(tensor, torch.nn.Parameter)
        and tensor.dim() == 2
        and tensor.is_floating_point()
        and tensor.is_contiguous()
        and tensor.numel() >= least
    )


def let_products_add(module: fx.GraphModule, weights: Collection[fx.Node], *, eager: bool = True) -> None:
    """Let the products of a program with any of these parameters add its gradient into `.grad`, in place.

    weights: placeholders, each of a tensor that `is_weight`.  eager: whether other products take the faster kernel too,
    as costs expect; a compiler has its own.  O(nodes).
    """
    for node in list(module.graph.nodes):
        if node.op == "call_module":
            group = module.get_submodule(str(node.target))
            if not isinstance(group, RecomputedGroup):
                continue
            inner = group.body.graph.find_nodes(op="placeholder")
            inside = {own for own, arg in zip(inner, node.args, strict=True) if arg in weights}
            let_products_add(group.body, inside, eager=eager)
        elif node.target in _PRODUCTS and not node.kwargs:
            _replace(node, weights)
            node.target = kernel_of(node.target, node.kwargs) if eager else node.target
    module.recompile()


def _replace(node: fx.Node, weights: Collection[fx.Node]) -> None:
    """Let a product call `product` if it is one with a weight, or with a transposed view of one."""
    x, place, bias, transposed = _PRODUCTS[node.target]
    read = node.args[place]
    weight = read.args[0] if isinstance(read, fx.Node) and _transposes(read) else read
    if weight not in weights:
        return
    added = node.args[bias] if bias is not None and bias < len(node.args) else None
    node.target = product
    node.args = (node.args[x], weight, added, transposed is (weight is read))
    if isinstance(read, fx.Node) and read.op == "call_function" and not read.users:
        node.graph.erase_node(read)


def _transposes(node: fx.Node) -> bool:
    """Return whether this op swaps the axes of a matrix."""
    if node.target is _aten.t.default:
        return True
    if node.target is _aten.transpose.int:
        return sorted(axis % 2 for axis in node.args[1:]) == [0, 1]  # type: ignore[operator]
    return node.target is _aten.permute.default and [axis % 2 for axis in node.args[1]] == [1, 0]  # type: ignore
