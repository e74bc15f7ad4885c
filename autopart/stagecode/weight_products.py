"""Products with a weight in the code of a stage, put in the form that adds the weight's gradient into `.grad`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import fx

from autopart.runtime.stages.products import are_faster, kernel_of
from autopart.runtime.stages.stage_module import RecomputedGroup, StageModule
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


def accumulate_in_place(
    code: StageModule, tensors: Mapping[str, torch.Tensor], *, deferrable: bool = False, eager: bool = True
) -> StageModule:
    """Let products with a large trainable parameter, or a cast of one, add its gradient into `.grad`; return the code.

    Other uses of a parameter, and parameters with another layout than that of their gradient, stay as they are.
    tensors: the model's, by name.  deferrable: whether a backward of weights is to compute these products: then small
    parameters count too, since what is not rewritten runs in the backward of inputs.  eager: whether other products
    take the faster kernel too, as costs expect; a compiler has its own.  O(nodes).
    """
    least = 0 if deferrable else LEAST_ELEMENTS
    given = code.module.graph.find_nodes(op="placeholder")
    weights = {
        node
        for node, name in zip(given, code.params, strict=False)
        if _is_weight(tensors[code.casts[name][0] if name in code.casts else name], least)
    }
    _rewrite(code.module, weights, eager=eager)
    return code


def _is_weight(tensor: torch.Tensor, least: int) -> bool:
    return (
        isinstance(tensor, torch.nn.Parameter)
        and tensor.dim() == 2
        and tensor.is_floating_point()
        and tensor.is_contiguous()
        and tensor.numel() >= least
    )


def _rewrite(module: fx.GraphModule, weights: Collection[fx.Node], *, eager: bool) -> None:
    for node in list(module.graph.nodes):
        if node.op == "call_module":
            group = module.get_submodule(str(node.target))
            assert isinstance(group, RecomputedGroup)
            inner = group.body.graph.find_nodes(op="placeholder")
            inside = {own for own, arg in zip(inner, node.args, strict=True) if arg in weights}
            _rewrite(group.body, inside, eager=eager)
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
