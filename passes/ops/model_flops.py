"""The FLOPs that a training step of a model needs, however it is run: what utilisation (MFU) counts.

As in Chowdhery et al., "PaLM", 2022, appendix B: a forward, and for each of its operands that learns, or leads to what
learns, as much again; what is recomputed does not count.  So a layer that learns counts three times its forward, frozen
layers count once before all that learns, and twice behind it.
"""

from __future__ import annotations

from collections.abc import Mapping

from autopart.ir.graph import Graph, Op, Param, Value
from autopart.passes.ops.flops import flops
from autopart.passes.ops.row import MATMUL
from autopart.passes.ops.table import row_of


def model_flops(graph: Graph) -> dict[str, int]:
    """Return the FLOPs of forward and backward of a graph at its size, by the dtype in which they are computed.
    O(ops)."""
    values, params = graph.value_map(), graph.param_map()
    found: dict[str, int] = {}
    for op in graph.ops:
        if op.writes:
            dtype = values[op.writes[0]].dtype
            found[dtype] = found.get(dtype, 0) + flops(op, values, params) * _passes(op, values, params)
    return found


def _passes(op: Op, values: Mapping[str, Value], params: Mapping[str, Param]) -> int:
    """Return how many times the work of its forward an op takes in forward and backward."""
    if not any(values[name].grad for name in op.writes):
        return 1
    row = row_of(op.target)
    if row.family != MATMUL or row.hidden == "attention":
        return 3
    factors = sum(values[name].grad for name in op.reads)
    factors += sum(params[name].trainable and len(params[name].shape) > 1 for name in op.params)
    return 1 + min(2, max(1, factors))
