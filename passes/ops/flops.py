"""Floating point operations of one op, forward and backward, from its row of the table.

A multiply-add counts as 2, as in torch.utils.flop_counter, which gives the same numbers for matrix products,
convolutions and attention.  Attention counts the whole square, causal or not; kernels compute less (`seen_share`).
Views and creation of constants count 0, reductions, norms and losses one per element read, all others one per element
written, which is right up to a small factor for pointwise ops; their time depends on memory traffic anyway.

A training step of a model needs, however it is run, what utilisation (MFU) counts (`model_flops`), as in Chowdhery et
al., "PaLM", 2022, appendix B: a forward, and for each of its operands that learns, or leads to what learns, as much
again; what is recomputed does not count.  So a layer that learns counts three times its forward, frozen layers count
once before all that learns, and twice behind it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from autopart.ir.graph import Graph, Literal, Op, Param, Value
from autopart.passes.ops.letters import Shape, letters
from autopart.passes.ops.row import MATMUL
from autopart.passes.ops.table import row_of


def flops(op: Op, values: Mapping[str, Value], params: Mapping[str, Param]) -> int:
    """FLOPs of the forward of `op`.  values and params: by name, as `Graph.value_map` and `param_map`."""
    row = row_of(op.target)
    if row.flops == "none":
        return 0
    written = sum(math.prod(values[w].shape) for w in op.writes)
    if row.flops == "written":
        return written
    if row.flops == "read":
        return max([written] + [math.prod(values[r].shape) for r in op.reads])
    shapes = [shape_of(ref, values, params) or () for ref in operands(op)]
    if row.flops == "weights":
        steps = math.prod(shapes[0][:-1])
        return 2 * steps * sum(math.prod(params[p].shape) for p in op.params if len(params[p].shape) > 1)
    result = values[op.writes[0]].shape
    found = letters(row, dict(op.attrs), shapes, result)
    if found is None:
        inner = shapes[0][-1] if shapes and shapes[0] else 1
        return 2 * written * inner
    sizes = dict(
        zip(found.results[0], result, strict=False)
    )  # of a letter: in the last factor with it, else in the result
    for place, (names, shape) in enumerate(zip(found.operands, shapes, strict=False)):
        if place not in found.added:
            sizes.update((name, size) for name, size in zip(names, shape, strict=True) if name)
    if row.flops == "equation":  # all indices of a pair multiplied, operands contracted from left to right
        return 2 * math.prod(sizes.values()) * max(1, len(shapes) - 1)
    products = (math.prod(sizes[name] for name in sizes if name and name[0] in term) for term in row.flops.split("+"))
    return 2 * sum(products)


def backward_flops(op: Op, values: Mapping[str, Value], params: Mapping[str, Param]) -> int:
    """FLOPs of the backward of `op`, 0 if no gradient reaches it.

    Of a matrix product those of the forward for each operand that needs a gradient (at most twice), of attention 5/2
    (it recomputes its scores), of all else once.
    """
    if not any(values[w].grad for w in op.writes):
        return 0
    forward, row = flops(op, values, params), row_of(op.target)
    if row.hidden == "attention":
        return forward * 5 // 2
    return forward if row.family != MATMUL else forward * _learning_factors(op, values, params)


def _learning_factors(op: Op, values: Mapping[str, Value], params: Mapping[str, Param]) -> int:
    """The operands of a matrix product that need a gradient: one or two."""
    factors = sum(values[r].grad for r in op.reads)
    factors += sum(params[p].trainable and len(params[p].shape) > 1 for p in op.params)
    return min(2, max(1, factors))


def model_flops(graph: Graph) -> dict[str, int]:
    """Return the FLOPs of forward and backward of a graph at its size, by the dtype in which they are computed.
    O(ops)."""
    values, params = graph.value_map(), graph.param_map()
    found: dict[str, int] = {}
    for op in graph.ops:
        if op.writes:
            row, dtype, passes = row_of(op.target), values[op.writes[0]].dtype, 1
            if any(values[name].grad for name in op.writes):
                factor = row.family == MATMUL and row.hidden != "attention"
                passes += _learning_factors(op, values, params) if factor else 2
            found[dtype] = found.get(dtype, 0) + flops(op, values, params) * passes
    return found


def seen_share(op: Op, values: Mapping[str, Value], params: Mapping[str, Param], device_kind: str) -> float:
    """Return the share of its operations that an op computes.

    Causal attention skips the blocks of keys behind its queries; one with a mask computes all, whatever the mask hides.
    With dropout a CPU has no kernel that skips.
    """
    attrs = dict(op.attrs)
    if row_of(op.target).hidden != "attention" or attrs.get("is_causal") is not True:
        return 1.0
    query, key = (shape_of(attrs.get(name), values, params) for name in ("query", "key"))
    if query is None or key is None or (op.random and device_kind == "cpu"):
        return 1.0
    queries, keys = query[-2], key[-2]
    rows = min(queries, keys)
    return (rows * (rows + 1) / 2 + (queries - rows) * keys) / max(1, queries * keys)


def operands(op: Op) -> list[str]:
    """Every tensor argument in order, those in lists too, as "%name"."""
    found: list[str] = []

    def collect(value: Literal) -> None:
        if isinstance(value, tuple):
            for item in value:
                collect(item)
        elif isinstance(value, str) and value.startswith("%"):
            found.append(value)

    for _, value in op.attrs:
        collect(value)
    return found


def shape_of(ref: Literal, values: Mapping[str, Value], params: Mapping[str, Param]) -> Shape | None:
    """The shape of the operand "%name"; None for other arguments."""
    if not isinstance(ref, str) or not ref.startswith("%"):
        return None
    name = ref[1:]
    if name in values:
        return values[name].shape
    return params[name].shape if name in params else None
