"""Rules of the loss analysis for ops that fill places one after another, or look at places in windows."""

from __future__ import annotations

from autopart.passes.ops.context import OpContext
from autopart.passes.ops.placement import INDEX, REPLICATE, SHARD, RowPlacement, coupled, unproven
from autopart.passes.ops.propagation import Rule


def masked_scatter(context: OpContext) -> RowPlacement:
    """Exact where each row of the mask has as many places as the source has elements in that row, which capture asks
    every batch, and where all three hold the rows in order along their first axis."""
    operands = [context.argument(name) for name in ("self", "mask", "source")]
    if context.arg("by_rows") is not True:
        raise coupled(
            "it fills the places of a mask over all rows, and not every row has as many as the source has for it"
        )
    if not all(p.tag == SHARD and p.plain and p.axis == 0 and p.stride_factor <= 1 for p in operands):
        raise unproven("what it fills places with is not known to lie in the order of the rows")
    return RowPlacement(SHARD, axis=0, stride_factor=1)


def unfold(context: OpContext) -> RowPlacement:
    """Windows along one axis; a new last axis holds what is in each."""
    ref, placement = context.first()
    axes = len(context.shape(ref))
    if placement.has_rows and context.axis("dimension", max(1, axes)) == placement.axis:
        raise unproven("it takes windows along the rows of the batch")
    return placement


def index_put(context: OpContext) -> RowPlacement:
    """x[mask] = c, x[:, places] = c, and x[arange(rows), places] = c, where c is the same for every row."""
    ref, placement = context.first()
    indices = context.arg("indices")
    assert isinstance(indices, tuple)
    picks = {axis: pick for axis, pick in enumerate(indices) if isinstance(pick, str)}
    found = {axis: context.placement(pick) for axis, pick in picks.items()}
    value = context.argument("values")
    if not (placement.tag == SHARD and placement.plain and placement.stride_factor <= 1):
        raise unproven("what it writes into is not known to hold the rows in order")
    if value.tag != REPLICATE or not value.plain or not all(p.plain for p in found.values()):
        raise unproven("what it writes is not known to be the same for every row")
    if any(context.dtype(pick) in ("bool", "uint8") for pick in picks.values()):
        by_mask = list(picks) == [0] and found[0].tag == SHARD and found[0].axis == placement.axis == 0
        if not by_mask or found[0].stride_factor > 1:
            raise unproven("it writes where a mask says, which is not known to hold the rows in order")
    elif placement.axis not in picks:
        if any(p.tag != REPLICATE for p in found.values()):
            raise coupled("it writes, into every row, where other rows say")
    elif context.shape(ref)[placement.axis] != context.rows or not _one_place_each(
        context, placement.axis, picks, found
    ):
        raise unproven("it writes into rows of the batch by an index")
    return placement


def _one_place_each(context: OpContext, rows_axis: int, picks: dict[int, str], found: dict[int, RowPlacement]) -> bool:
    """Whether row i of the indices picks row i and places of its own."""
    flat = all(len(context.shape(pick)) == 1 for pick in picks.values())
    others = (p for axis, p in found.items() if axis != rows_axis)
    return flat and found[rows_axis].tag == INDEX and all(p.tag in (SHARD, REPLICATE) for p in others)


PLACE_RULES: dict[str, Rule] = {"masked_scatter": masked_scatter, "unfold": unfold, "index_put": index_put}
"""Op name -> rule, as `move_rules.MOVE_RULES`."""
