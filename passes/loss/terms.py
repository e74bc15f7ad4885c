"""Losses that are sums of terms with different reductions: two token means, a sum and a mean, a sum and a regulariser.

A value is TERMS if it is a linear combination, with constant factors, of values with different reductions.  Each term
is then weighed by its own share where it is added, and the sums of the micro-batches add up.
"""

from __future__ import annotations

from collections.abc import Mapping

from autopart.ir.graph import Graph, Op
from autopart.passes.ops.context import OpContext
from autopart.passes.ops.letters import added_operands
from autopart.passes.ops.placement import CONSTANT, COUPLED, PARTIAL, REPLICATE, TERMS, RowPlacement, coupled
from autopart.passes.ops.table import op_name, row_of

_JOINS = ("cat", "stack")
_FLOATING = ("float", "bfloat", "complex")


def of_terms(context: OpContext) -> RowPlacement:
    """The placement of an op with an operand that is TERMS: TERMS if it is linear, else COUPLED."""
    if context.differing() or not _is_linear(context):
        raise coupled("it is not linear in a sum of terms with different reductions")
    return RowPlacement(TERMS)


def _is_linear(context: OpContext) -> bool:
    row, refs = context.row, context.tensors()
    placements = [context.placement(ref) for ref in refs]
    others = [placement for placement in placements if placement.tag != TERMS]
    if _adds(context.op):
        return all(placement.tag in (PARTIAL, REPLICATE) for placement in others)
    constant = len(others) == len(refs) - 1 and all(p.tag == REPLICATE and p.plain for p in others)
    if context.name in ("div", "true_divide"):
        divided = context.placement(context.arg("self")).tag == TERMS
        return constant and divided and context.arg("rounding_mode") is None
    if row.linear == "product":
        return constant and not added_operands(row)
    if row.linear in ("each", "mean") or row.same_elements:
        return constant and placements[0].tag == TERMS and context.out.dtype.startswith(_FLOATING)
    return False


def _adds(op: Op) -> bool:
    return op_name(op.target) in _JOINS or row_of(op.target).linear == "sum"


def summands(graph: Graph, placements: Mapping[str, RowPlacement], loss: str) -> list[tuple[str, str]] | RowPlacement:
    """The terms of the loss, which is TERMS: (op that adds, value or parameter that it adds).

    COUPLED where weighing the terms would change another value.  O(ops).
    """
    found, sums = dict[tuple[str, str], None](), {loss}
    for op in reversed(graph.ops):
        if sums.isdisjoint(op.writes):
            continue
        numbers = [value for key, value in op.attrs if key in ("self", "other") and isinstance(value, (int, float))]
        if _adds(op) and any(numbers):
            why = "it adds a term that does not depend on the batch to a sum over the batch"
            return RowPlacement(COUPLED, why=why, op=op.name)
        for operand in (*op.reads, *op.params):
            if placements.get(operand, CONSTANT).tag == TERMS:
                sums.add(operand)
            elif _adds(op):
                found[op.name, operand] = None
    for op in graph.ops:
        if not sums.isdisjoint(op.reads):
            sums.update(op.writes)
    for buffer, value in graph.updates:
        if value in sums:
            why = f"buffer {buffer} keeps a sum of terms with different reductions"
            return RowPlacement(COUPLED, why=why, op=graph.writer()[value])
    return list(found)


def without_weight(graph: Graph, dropped: frozenset[tuple[str, str]]) -> frozenset[str]:
    """The values that do not reach the loss without these reads, (op, value).  O(reads)."""
    reached = {graph.outputs[0]}
    for op in reversed(graph.ops):
        if not reached.isdisjoint(op.writes):
            reached.update(read for read in op.reads if (op.name, read) not in dropped)
    return frozenset(value.name for value in graph.values) - reached
