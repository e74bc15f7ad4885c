"""Rules of the loss analysis for ops that look up or write by an index."""

from __future__ import annotations

from dataclasses import replace

from autopart.passes.loss.context import OpContext
from autopart.passes.loss.letter_rules import Operand, Rule, by_letters, combined
from autopart.passes.loss.placement import (
    INDEX,
    PARTIAL,
    REPLICATE,
    SHARD,
    Placement,
    coupled,
    same_stride,
    unproven,
)


def embedding(context: OpContext) -> Placement | list[Placement]:
    """Rows of a table by number."""
    if context.arg("scale_grad_by_freq") is True:
        raise coupled("it scales gradients by how often an index stands in the whole batch")
    return by_letters(context)


def index(context: OpContext) -> Placement:
    """x[i, j, ...] with tensors: exact when the rows are not indexed, or are indexed by arange(rows).

    What is picked lies where the indices lie, if those are next to each other, else in front.
    """
    placement, picks = context.argument("self"), context.arg("indices")
    assert isinstance(picks, tuple)
    used = {axis: pick for axis, pick in enumerate(picks) if isinstance(pick, str)}
    axes = list(used)
    found = {axis: context.placement(pick) for axis, pick in used.items()}
    if placement.tag == PARTIAL or any(p.tag == PARTIAL or not p.plain for p in found.values()):
        raise coupled("it indexes with, or into, a sum or mean over the rows of the batch")
    if placement.tag == INDEX or any(context.dtype(pick) in ("bool", "uint8") for pick in used.values()):
        raise unproven("it indexes with a mask, or into row numbers")
    ndim = max(len(context.shape(pick)) for pick in used.values())
    adjacent = axes == list(range(axes[0], axes[0] + len(axes)))
    start = axes[0] if adjacent else 0
    names = [str(axis) for axis in range(ndim)]
    by_row_number = placement.tag == SHARD and placement.axis in axes
    if by_row_number:
        _check_row_number(context, placement, found[placement.axis])
        found = {a: replace(p, tag=SHARD) if p.tag == INDEX else p for a, p in found.items()}
    if any(p.tag == INDEX for p in found.values()):
        raise unproven("it looks up by the number of the row in the micro-batch")
    shapes = {axis: context.shape(pick) for axis, pick in used.items()}
    picked = combined([Operand(p, names[ndim - len(shapes[a]) :], shapes[a]) for a, p in found.items()], names)
    if placement.tag == REPLICATE and picked.tag == REPLICATE:
        return placement
    if placement.tag == REPLICATE or by_row_number:
        return Placement(SHARD, *placement.factor, start + picked.axis, picked.stride_factor)
    if picked.tag != REPLICATE:
        raise coupled("it picks, for every row, from every row of the batch")
    before = sum(1 for axis in range(placement.axis) if axis not in axes)
    return placement.along(before + ndim if not adjacent or placement.axis > start else before)


def _check_row_number(context: OpContext, placement: Placement, number: Placement) -> None:
    """x[arange(rows), ...]: the row number must index exactly the rows."""
    rows = context.shape(context.arg("self"))[placement.axis]
    if number.tag != INDEX or placement.stride_factor > 1 or rows != context.rows:
        raise unproven("it reorders the rows of the batch by an index")


def index_select(context: OpContext) -> Placement:
    """Along another axis than the rows, by a constant; or from a constant, by rows."""
    ref, placement = context.first()
    dim = context.axis("dim", len(context.shape(ref)))
    pick = context.argument("index")
    if placement.tag == SHARD and pick.tag == REPLICATE and dim != placement.axis:
        return placement
    if placement.tag == REPLICATE and pick.tag == SHARD and pick.plain:
        return Placement(SHARD, *placement.factor, dim, pick.stride_factor)
    raise unproven("it picks rows of the batch by an index")


def scatter_add(context: OpContext) -> Placement | list[Placement]:
    """Rows added up by an index of each row; from nothing, that is a sum over the rows."""
    if not context.first()[1].zero:
        return by_letters(context)
    operands = [context.argument("index"), context.argument("src")]
    dim = context.axis("dim", max(1, len(context.out.shape)))
    if not all(p.tag == SHARD and p.plain and p.axis == dim for p in operands):
        raise unproven("it adds up rows of the batch by an index")
    same_stride(operands)
    return Placement(PARTIAL)


INDEX_RULES: dict[str, Rule] = {
    "embedding": embedding,
    **dict.fromkeys(("index", "_unsafe_index"), index),
    "index_select": index_select,
    "scatter_add": scatter_add,
}
"""Op name -> rule.  Every rule may rely on: no operand is COUPLED or UNPROVEN."""
