"""The order in memory in which the code of a stage reads values, and in which messages bring them.

On all ranks it is that of the captured program on the first one: others may be given batches, or parameters, that lie
otherwise, or none, and both ends of a message must know where each of its numbers is.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from autopart.capture import Captured
from autopart.rng import in_order, keyed, memory_order

Orders = Mapping[str, tuple[int, ...]]
"""Axes in memory order, by name, of the values that do not lie in the order of their axes."""


def orders_of(captured: Captured) -> dict[str, tuple[int, ...]]:
    """Return the memory orders of values that were captured otherwise than in the order of their axes, as in
    channels_last.  O(nodes)."""
    found: dict[str, tuple[int, ...]] = {}
    for node in captured.module.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.layout == torch.strided:
            order = memory_order(value)
            if order != tuple(range(value.dim())):
                found[captured.names.value(node)] = order
    return found


def lay_operands(captured: Captured, orders: Orders) -> None:
    """Let the random ops of code that is cut out of this program from now on read their operands in these orders."""
    for node in captured.module.graph.find_nodes(op="call_function", target=keyed):
        for arg in node.all_input_nodes:
            value = arg.meta.get("val")
            if isinstance(value, torch.Tensor):
                arg.meta["order"] = orders.get(captured.names.value(arg), tuple(range(value.dim())))


def laid_for(node: fx.Node, arg: fx.Node, found: fx.Node) -> fx.Node:
    """Return what a captured op reads; a random op reads it in the order in memory in which it was captured.

    arg: a captured operand.  found: what holds it in the code."""
    value = arg.meta.get("val")
    if node.target is not keyed or arg.op == "placeholder" or not isinstance(value, torch.Tensor) or value.dim() < 2:
        return found
    laid = found.graph.call_function(in_order, (found, arg.meta.get("order", memory_order(value))))
    laid.meta["val"] = value
    return laid
