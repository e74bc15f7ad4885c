"""Rules of the loss analysis for loss functions, by what they average over."""

from __future__ import annotations

from dataclasses import replace

from autopart.ir.graph import LossReduction
from autopart.passes.ops.context import OpContext
from autopart.passes.ops.placement import PARTIAL, REPLICATE, SHARD, RowPlacement, coupled, need_plain, unproven
from autopart.passes.ops.propagation import any_function, combined

NONE, MEAN, SUM = 0, 1, 2
"""torch.nn._reduction's numbers."""


def averaged(context: OpContext) -> RowPlacement | list[RowPlacement]:
    """The rule for loss functions of single elements or vectors, with a mean or sum over all of them."""
    if context.row.averages == "classes":
        return cross_entropy(context)
    found = any_function(context)[0]
    mean = found.tag == PARTIAL and context.number("reduction", MEAN) == MEAN
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
    reduction = context.number("reduction", MEAN)
    _check_class_weights(context)
    operands = [(logits, names, shape), (target, others if numbers else names, target_shape)]
    found = combined(operands, others if reduction == NONE else ())
    if reduction != MEAN:
        return found
    if not numbers:
        return RowPlacement(PARTIAL, -1)
    if target.tag != SHARD:
        raise unproven("its targets do not depend on the batch")
    weight, ignore = context.ref("weight"), context.number("ignore_index", -100)
    smoothed = weight is not None and context.arg("label_smoothing", 0.0) != 0
    return RowPlacement(PARTIAL, 0, LossReduction("tokens", context.ref("target"), ignore, weight, smoothed))


def _check_class_weights(context: OpContext) -> None:
    weight = context.arg("weight")
    if not context.is_tensor(weight):
        return
    need_plain([context.placement(weight)])
    if context.placement(weight).tag != REPLICATE:
        raise unproven("its class weights depend on the batch")
