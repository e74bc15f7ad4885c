"""The order in memory in which the code of a stage reads values, and in which messages bring them."""

from __future__ import annotations

import torch
from torch import fx

from autopart.capture import Captured
from autopart.rng import in_order, keyed, memory_order


def orders_of(captured: Captured) -> dict[str, tuple[int, ...]]:
    """Return the axes in memory order, by name, of the values that were captured dense and not in the order of their
    axes, as in channels_last.  O(nodes)."""
    found: dict[str, tuple[int, ...]] = {}
    for node in captured.module.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and not value.is_contiguous():
            order = memory_order(value)
            if value.permute(order).is_contiguous():
                found[captured.names.value(node)] = order
    return found


def laid_for(node: fx.Node, arg: fx.Node, found: fx.Node) -> fx.Node:
    """Return what a captured op reads; a random op reads it in the order in memory in which it was captured.

    arg: a captured operand.  found: what holds it in the code."""
    value = arg.meta.get("val")
    if node.target is not keyed or arg.op == "placeholder" or not isinstance(value, torch.Tensor) or value.dim() < 2:
        return found
    laid = found.graph.call_function(in_order, (found, memory_order(value)))
    laid.meta["val"] = value
    return laid
