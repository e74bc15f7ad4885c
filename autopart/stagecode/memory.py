"""The order in memory in which the code of a stage reads values."""

from __future__ import annotations

import torch
from torch import fx

from autopart.rng import in_order, keyed, memory_order


def laid_for(node: fx.Node, arg: fx.Node, found: fx.Node) -> fx.Node:
    """Return what a captured op reads; a random op reads it in the order in memory in which it was captured.

    arg: a captured operand.  found: what holds it in the code."""
    value = arg.meta.get("val")
    if node.target is not keyed or arg.op == "placeholder" or not isinstance(value, torch.Tensor) or value.dim() < 2:
        return found
    laid = found.graph.call_function(in_order, (found, memory_order(value)))
    laid.meta["val"] = value
    return laid
