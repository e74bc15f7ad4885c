"""Rules of the loss analysis for ops that letters do not describe enough: what moves, joins, indexes, creates or
averages."""

from __future__ import annotations

import math
from dataclasses import replace

from autopart.ir.graph import LossReduction, Op
from autopart.passes.ops.context import OpContext, around_indices
from autopart.passes.ops.letters import added_operands, bound, ints
from autopart.passes.ops.placement import (
    INDEX,
    PARTIAL,
    REPLICATE,
    SHARD,
    TERMS,
    RowPlacement,
    added,
    coupled,
    need_plain,
    same_stride,
    unproven,
)
from autopart.passes.ops.propagation import Rule, any_function, by_letters, combined, divide, spread, without_rows
from autopart.passes.ops.row import CREATION, VIEW
from autopart.passes.ops.table import op_name, row_of

_NONE, _MEAN = 0, 1
"""torch.nn._reduction's numbers."""


def reshape(context: OpContext) -> RowPlacement:
    """Row-major order is kept: the axes before the rows must have the same number of elements on both sides."""
    ref, placement = context.first()
    if not placement.has_rows:
        return without_rows(context, placement)
    axis = context.out.rows_axis
    if axis is None:
        raise coupled("the axis that holds the rows is gone")
    before = math.prod(context.shape(ref)[: placement.axis]) * max(1, placement.stride_factor)
    rest = math.prod(context.out.shape[:axis])
    if before % rest:
        raise unproven("the rows of the batch are no longer in order")
    stride = before // rest
    untouched = stride == 1 and context.out.shape[axis] == context.shape(ref)[placement.axis]
    return placement.along(axis, placement.stride_factor if untouched else stride)


def broadcast_tensors(context: OpContext) -> list[RowPlacement]:
    """Each operand is spread to the common shape."""
    placements = [context.placement(ref) for ref in context.tensors()]
    names = [str(axis) for axis in range(len(context.out.shape))]
    shapes = [context.shape(ref) for ref in context.tensors()]
    operands = [(p, names[-len(shape) :] if shape else (), shape) for p, shape in zip(placements, shapes, strict=True)]
    rows = combined(operands, names)
    found = placements
    if rows.tag == SHARD:
        found = [p.along(rows.axis) if p.has_rows else spread(context, p, rows.axis) for p in placements]
    if len(found) != len(context.op.writes):  # some result is not used: shapes do not show which one
        if len({(p.tag, p.factor, p.stride_factor) for p in found}) > 1:
            raise unproven("it cannot be told which of its results are used")
        found = found[: len(context.op.writes)]
    return found


def repeat(context: OpContext) -> RowPlacement:
    """repeat, tile: along the rows, each row is then in several places."""
    ref, placement = context.first()
    ndim, out = len(context.shape(ref)), context.out
    counts = ints(context.arg("repeats", context.arg("dims")))
    counts = (1,) * (ndim - len(counts)) + counts
    if placement.tag == REPLICATE and out.rows_axis is not None:
        return RowPlacement(SHARD, placement.scale, placement.count, out.rows_axis, 1)
    if not placement.has_rows:
        return spread(context, placement)
    axis = placement.axis + len(counts) - ndim
    copies = counts[axis]
    return placement.along(axis, placement.stride_factor if copies == 1 else max(1, placement.stride_factor) * copies)


def repeat_interleave(context: OpContext) -> RowPlacement:
    """Each element is repeated in place: rows stay in order."""
    placement = context.first()[1]
    known = isinstance(context.arg("repeats"), int) and isinstance(context.arg("dim"), int)
    if not known or not placement.has_rows:
        raise unproven("its result is not known to keep the rows in order")
    return placement.along(placement.axis)


def take_axis(context: OpContext) -> RowPlacement | list[RowPlacement]:
    """slice, select, split, chunk, unbind, narrow: of the rows only whole blocks of a concatenation of batches."""
    ref, placement = context.first()
    dim = context.axis("dim", len(context.shape(ref)))
    if dim != placement.axis and any(context.differs(key) for key in ("start", "end", "length", "index")):
        raise coupled("the place it takes from changes with the size of the batch")
    along_rows = placement.has_rows and dim == placement.axis
    if not along_rows or context.name in ("select", "unbind") or context.out.shape == context.shape(ref):
        return by_letters(context)
    return _whole_blocks(context, ref, placement)


def _whole_blocks(context: OpContext, ref: str, placement: RowPlacement) -> RowPlacement:
    """cat((a, b)) holds two blocks of rows, of which one may be taken back."""
    size, other_size = (values[ref[1:]].shape[placement.axis] for values in (context.values, context.other_values))
    blocks = max(1, placement.stride_factor)
    whole = context.name in ("split", "chunk")
    if context.name == "slice" and context.number("step", 1) == 1:
        start = bound(context.attrs.get("start"), 0, size)
        other_start = bound(context.other_attrs.get("start"), 0, other_size)
        whole = start * blocks % size == 0 and start * other_size == other_start * size
    taken = {context.values[written].shape[placement.axis] * blocks for written in context.op.writes}
    if not whole or any(number % size for number in taken) or len(taken) != 1 or placement.stride_factor == 0:
        raise coupled("it picks some rows of the batch by their place")
    return placement.along(placement.axis, taken.pop() // size)


def join(context: OpContext) -> RowPlacement:
    """cat, stack."""
    refs = [ref for ref in context.tensors() if math.prod(context.shape(ref)) or len(context.shape(ref)) != 1]
    operands = [context.placement(ref) for ref in refs]
    tags = {placement.tag for placement in operands}
    if PARTIAL in tags:
        if tags - {PARTIAL, REPLICATE}:
            raise coupled("it joins rows with a sum or mean over the rows")
        return added(operands)
    if len({placement.factor for placement in operands}) > 1:
        raise coupled("it joins values that scale differently with the size of the batch")
    if tags == {REPLICATE}:
        if context.out.rows_axis is not None:
            raise unproven("its result grows with the batch and the rules do not say how")
        return operands[0]
    if len(tags) > 1 or len({placement.axis for placement in operands}) > 1:
        raise coupled("it joins values whose rows lie along different axes")
    first, axis = operands[0], operands[0].axis
    dim = context.axis("dim", len(context.out.shape))
    if context.name == "stack":
        return first.along(axis + 1 if dim <= axis else axis, same_stride(operands))
    if dim != axis:
        return first.along(axis, same_stride(operands))
    sizes = {context.shape(ref)[axis] for ref in refs}
    layouts = {max(1, placement.stride_factor) for placement in operands}
    if len(sizes) > 1 or len(layouts) > 1 or tags != {SHARD}:
        raise coupled("it appends values of different sizes along the rows of the batch")
    return first.along(axis, layouts.pop() * len(refs))


def create(context: OpContext) -> RowPlacement:
    """zeros, full, rand, zeros_like: the same in every row (random numbers: of the same distribution)."""
    for key, _ in context.op.attrs:
        if key not in ("size", "fill_value", "s") and context.differs(key):
            raise coupled(f"its argument {key} changes with the size of the batch")
    scale = sum(context.growth(context.arg(key), context.other_attrs.get(key)) for key in ("fill_value", "s"))
    axis = context.out.rows_axis
    if axis is None:
        return RowPlacement(REPLICATE, scale, zero=is_zero(context))
    return RowPlacement(SHARD, scale, axis=axis, stride_factor=0)


def is_zero(context: OpContext) -> bool:
    """Whether the result is a created tensor of zeros, or a view or cast of one."""
    if context.name in ("zeros", "new_zeros", "zeros_like"):
        return True
    if context.row.family == VIEW or context.row.same_elements:
        return bool(context.tensors()) and context.first()[1].zero
    return context.row.family == CREATION and context.arg("fill_value", context.arg("s")) == 0


def arange(context: OpContext) -> RowPlacement:
    """arange(k * rows) counts the rows, k numbers for each; the rules know no other range that grows with the batch."""
    if context.out.rows_axis is None:
        if any(context.differs(key) for key in ("start", "end", "step")):
            raise coupled("its numbers change with the size of the batch")
        return RowPlacement(REPLICATE)
    if "int" not in context.out.dtype:
        raise coupled("it makes numbers that grow with the batch")
    if context.out.shape[0] % context.rows or context.arg("start", 0) != 0 or context.arg("step", 1) != 1:
        raise unproven("it makes numbers that grow with the batch")
    return RowPlacement(INDEX, axis=0, stride_factor=1)


def embedding(context: OpContext) -> RowPlacement | list[RowPlacement]:
    """Rows of a table, by number."""
    if context.arg("scale_grad_by_freq") is True:
        raise coupled("it scales gradients by how often an index occurs in the whole batch")
    return by_letters(context)


def index(context: OpContext) -> RowPlacement:
    """x[i, j, ...] with tensors: the rows are not indexed, or are indexed by x[arange(n), ...], n the size of their
    axis."""
    ref, placement = context.first()
    used = context.picks(len(context.shape(ref)))
    found = {axis: context.placement(pick) for axis, pick in used.items()}
    if placement.tag == PARTIAL or any(p.tag == PARTIAL or not p.plain for p in found.values()):
        raise coupled("it indexes with, or into, a sum or mean over the rows of the batch")
    if placement.tag == INDEX or any(context.dtype(pick) in ("bool", "uint8") for pick in used.values()):
        raise unproven("it indexes with a mask, or into row numbers")
    ndim = max(len(context.shape(pick)) for pick in used.values())
    start, moved = around_indices(list(used), ndim)
    names = [str(axis) for axis in range(ndim)]
    by_row_number = placement.tag == SHARD and placement.axis in used
    if by_row_number:
        number, size = found[placement.axis], context.shape(ref)[placement.axis]
        counts = number.tag == INDEX and context.shape(used[placement.axis])[number.axis] == size
        if placement.stride_factor > 1 or not counts:
            raise unproven("it reorders the rows of the batch by an index")
        found = {a: replace(p, tag=SHARD) if p.tag == INDEX else p for a, p in found.items()}
    if any(p.tag == INDEX for p in found.values()):
        raise unproven("it looks up by the number of the row in the micro-batch")
    shapes = {axis: context.shape(pick) for axis, pick in used.items()}
    picked = combined([(p, names[ndim - len(shapes[a]) :], shapes[a]) for a, p in found.items()], names)
    if placement.tag == REPLICATE and picked.tag == REPLICATE:
        return placement
    if placement.tag == REPLICATE or by_row_number:
        return RowPlacement(SHARD, *placement.factor, start + picked.axis, picked.stride_factor)
    if picked.tag != REPLICATE:
        raise coupled("it picks, for every row, from every row of the batch")
    return placement.along(moved(placement.axis))


def scatter_add(context: OpContext) -> RowPlacement | list[RowPlacement]:
    """Rows are added up by an index; added to zeros, they are a sum over the rows."""
    if not context.first()[1].zero:
        return by_letters(context)
    operands = [context.argument("index"), context.argument("src")]
    dim = context.axis("dim", max(1, len(context.out.shape)))
    if not all(p.tag == SHARD and p.plain and p.axis == dim for p in operands):
        raise unproven("it adds up rows of the batch by an index")
    same_stride(operands)
    return RowPlacement(PARTIAL)


def masked_scatter(context: OpContext) -> RowPlacement:
    """Exact if each row of the mask has as many places as that row of the source has elements, which capture checks in
    every batch, and if all three hold the rows in order along their first axis."""
    operands = [context.argument(name) for name in ("self", "mask", "source")]
    if context.arg("by_rows") is not True:
        raise coupled(
            "it fills the places of a mask over all rows, of which some rows have more or fewer than their source"
        )
    if not all(p.tag == SHARD and p.plain and p.axis == 0 and p.stride_factor <= 1 for p in operands):
        raise unproven("it fills places with values that are not known to lie in the order of the rows")
    return RowPlacement(SHARD, axis=0, stride_factor=1)


def unfold(context: OpContext) -> RowPlacement:
    """Windows along one axis; a new last axis holds the elements of each."""
    ref, placement = context.first()
    axes = len(context.shape(ref))
    if placement.has_rows and context.axis("dimension", max(1, axes)) == placement.axis:
        raise unproven("it takes windows along the rows of the batch")
    return placement


def index_put(context: OpContext) -> RowPlacement:
    """x[mask] = c, x[:, places] = c, and x[arange(rows), places] = c, where c is the same for every row."""
    ref, placement = context.first()
    picks = context.picks(len(context.shape(ref)))
    found = {axis: context.placement(pick) for axis, pick in picks.items()}
    value = context.argument("values")
    if not (placement.tag == SHARD and placement.plain and placement.stride_factor <= 1):
        raise unproven("it writes into a tensor that is not known to hold the rows in order")
    if value.tag != REPLICATE or not value.plain or not all(p.plain for p in found.values()):
        raise unproven("it writes values that are not known to be the same for every row")
    if any(context.dtype(pick) in ("bool", "uint8") for pick in picks.values()):
        by_mask = list(picks) == [0] and found[0].tag == SHARD and found[0].axis == placement.axis == 0
        if not by_mask or found[0].stride_factor > 1:
            raise unproven("it writes by a mask that is not known to hold the rows in order")
    elif placement.axis not in picks:
        if any(p.tag != REPLICATE for p in found.values()):
            raise coupled("it writes into every row by indices from other rows")
    else:  # row i of the indices has to pick row i, and its own places in it
        flat = all(len(context.shape(pick)) == 1 for pick in picks.values())
        by_number = context.shape(ref)[placement.axis] == context.rows and found.pop(placement.axis).tag == INDEX
        if not by_number or not flat or any(p.tag not in (SHARD, REPLICATE) for p in found.values()):
            raise unproven("it writes into rows of the batch by an index")
    return placement


def averaged(context: OpContext) -> RowPlacement | list[RowPlacement]:
    """The rule for loss functions of single elements or vectors, with a mean or sum over all of them."""
    if context.row.averages == "classes":
        return cross_entropy(context)
    found = any_function(context)[0]
    mean = found.tag == PARTIAL and context.number("reduction", _MEAN) == _MEAN
    return replace(found, scale=-1) if mean else found


def cross_entropy(context: OpContext) -> RowPlacement:
    """The rule for cross_entropy_loss, nll_loss: with class numbers, the mean is over targets that are not ignored."""
    logits, target = context.argument("self"), context.argument("target")
    shape, target_shape = context.shape(context.arg("self")), context.shape(context.arg("target"))
    need_plain([logits, target])
    if SHARD not in (logits.tag, target.tag):
        return RowPlacement(REPLICATE)
    classes = 0 if len(shape) == 1 else 1
    names = [str(axis) for axis in range(len(shape))]
    others = names[:classes] + names[classes + 1 :]
    if logits.tag == SHARD and logits.axis == classes:
        raise coupled("its classes are the rows of the batch")
    numbers = shape != target_shape or "int" in context.dtype(context.arg("target"))
    reduction = context.number("reduction", _MEAN)
    weights = context.arg("weight")
    if context.is_tensor(weights):
        need_plain([context.placement(weights)])
        if context.placement(weights).tag != REPLICATE:
            raise unproven("its class weights depend on the batch")
    operands = [(logits, names, shape), (target, others if numbers else names, target_shape)]
    found = combined(operands, others if reduction == _NONE else ())
    if reduction != _MEAN:
        return found
    if not numbers:
        return RowPlacement(PARTIAL, -1)
    if target.tag != SHARD:
        raise unproven("its targets do not depend on the batch")
    weight, ignore = context.ref("weight"), context.number("ignore_index", -100)
    smoothed = weight is not None and context.arg("label_smoothing", 0.0) != 0
    return RowPlacement(PARTIAL, 0, LossReduction("tokens", context.ref("target"), ignore, weight, smoothed))


def of_terms(context: OpContext) -> RowPlacement:
    """The placement of an op with an operand that is TERMS: TERMS if it is linear, else COUPLED.

    Losses may be sums of terms with different reductions: two token means, a sum and a mean, a sum and a regulariser.
    """
    if context.differing() or not _is_linear(context):
        raise coupled("it is not linear in a sum of terms with different reductions")
    return RowPlacement(TERMS)


def _is_linear(context: OpContext) -> bool:
    row, refs = context.row, context.tensors()
    placements = [context.placement(ref) for ref in refs]
    others = [placement for placement in placements if placement.tag != TERMS]
    if adds(context.op):
        return all(placement.tag in (PARTIAL, REPLICATE) for placement in others)
    constant = len(others) == len(refs) - 1 and all(p.tag == REPLICATE and p.plain for p in others)
    if context.name in ("div", "true_divide"):
        divided = context.placement(context.arg("self")).tag == TERMS
        return constant and divided and context.arg("rounding_mode") is None
    if row.linear == "product":
        return constant and not added_operands(row)
    if row.linear in ("each", "mean") or row.same_elements:
        return constant and placements[0].tag == TERMS and context.out.dtype.startswith(("float", "bfloat", "complex"))
    return False


def adds(op: Op) -> bool:
    """Whether an op adds or joins its operands."""
    return op_name(op.target) in ("cat", "stack") or row_of(op.target).linear == "sum"


RULES: dict[str, Rule] = {
    **dict.fromkeys(
        ("reshape", "view", "_unsafe_view", "unsqueeze", "squeeze", "flatten", "unflatten", "view_as"), reshape
    ),
    "broadcast_tensors": broadcast_tensors,
    **dict.fromkeys(("repeat", "tile"), repeat),
    "repeat_interleave": repeat_interleave,
    **dict.fromkeys(("slice", "select", "split", "split_with_sizes", "chunk", "unbind", "narrow"), take_axis),
    **dict.fromkeys(("cat", "stack"), join),
    "arange": arange,
    "embedding": embedding,
    **dict.fromkeys(("index", "_unsafe_index", "index_select"), index),
    "scatter_add": scatter_add,
    "masked_scatter": masked_scatter,
    "unfold": unfold,
    "index_put": index_put,
    **dict.fromkeys(("div", "true_divide"), divide),
}
"""Op name -> rule.  A rule may rely on: no operand is COUPLED or UNPROVEN."""
NO_RULE = frozenset(("linspace", "eye", "tril_indices", "triu_indices", "randperm"))
"""Ops that create tensors whose elements differ by their place."""
