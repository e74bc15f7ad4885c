"""Rules of the loss analysis for loss functions: what they average over."""

from __future__ import annotations

from collections.abc import Callable

from autopart.passes.loss.context import OpContext, aligned
from autopart.passes.loss.math_rules import broadcast
from autopart.passes.loss.placement import PARTIAL, REPLICATE, SHARD, Count, Placement, coupled, need_plain, unproven

Rule = Callable[[OpContext], Placement | list[Placement]]
NONE, MEAN, SUM = 0, 1, 2
"""torch.nn._reduction's numbers."""


def elementwise(site: OpContext) -> Placement:
    """mse_loss and others: a pointwise function of its operands, then a mean or sum over all elements."""
    found = [(site.kind(r), len(site.shape(r))) for r in site.tensors()]
    need_plain([k for k, _ in found])
    return reduced(site, found, max(n for _, n in found))


def per_row(site: OpContext) -> Placement:
    """triplet_margin_loss and others: a function of vectors along the last axis, then a mean or sum."""
    found = [(site.kind(r), len(site.shape(r))) for r in site.tensors()]
    need_plain([k for k, _ in found])
    if any(k.tag == SHARD and k.axis != 0 for k, _ in found):
        raise unproven("the rows of the batch are not its axis 0")
    if any(site.is_tensor(site.arg(key)) for key in ("weight",)):
        raise unproven("it weighs classes")
    return reduced(site, found, 0, outer_axis=0)


def reduced(site: OpContext, found: list[tuple[Placement, int]], ndim: int, outer_axis: int | None = None) -> Placement:
    """Apply `reduction` to a value whose rows come from `found`."""
    rows = [k for k, _ in found if k.tag == SHARD]
    if not rows:
        return Placement(REPLICATE)
    reduction = site.number("reduction", MEAN)
    if reduction == NONE:
        return broadcast(site, found) if outer_axis is None else Placement(SHARD, axis=0, outer=rows[0].outer)
    if outer_axis is None:
        aligned(found, ndim)
    return Placement(PARTIAL, -1 if reduction == MEAN else 0)


def cross_entropy(site: OpContext) -> Placement | list[Placement]:
    """cross_entropy_loss, nll_loss: with class numbers, the mean is over the targets that are not ignored."""
    logits, target = site.argument_kind("self"), site.argument_kind("target")
    shape, target_shape = site.shape(site.arg("self")), site.shape(site.arg("target"))
    need_plain([logits, target])
    if not (logits.tag == SHARD or target.tag == SHARD):
        return Placement(REPLICATE)
    classes = 0 if len(shape) == 1 else 1
    if logits.tag == SHARD and logits.axis == classes:
        raise coupled("its classes are the rows of the batch")
    numbers = shape != target_shape or "int" in site.dtype(site.arg("target"))
    _check_weight(site, numbers)
    # class numbers lack the class axis: rows of the logits along axis a >= 2 are along a - 1 in the target
    if numbers:
        place = logits.axis - (logits.axis > classes) if logits.tag == SHARD else target.axis
        logits_here = Placement(SHARD, axis=place, outer=logits.outer) if logits.tag == SHARD else logits
        found = [(logits_here, len(target_shape)), (target, len(target_shape))]
    else:
        found = [(logits, len(shape)), (target, len(shape))]
    axis, outer = aligned(found, found[0][1])
    reduction = site.number("reduction", MEAN)
    if reduction == NONE:
        return Placement(SHARD, axis=axis - (not numbers and axis > classes), outer=outer)
    if reduction == SUM:
        return Placement(PARTIAL)
    if not numbers:
        return Placement(PARTIAL, -1)
    if target.tag != SHARD:
        raise unproven("its targets do not depend on the batch")
    name = site.arg("target")
    assert isinstance(name, str)
    return Placement(PARTIAL, 0, Count(name[1:], site.number("ignore_index", -100)))


def _check_weight(site: OpContext, numbers: bool) -> None:
    weight = site.arg("weight")
    if not site.is_tensor(weight):
        return
    need_plain([site.kind(weight)])
    if site.kind(weight).tag != REPLICATE:
        raise unproven("its class weights depend on the batch")
    if numbers and site.number("reduction", MEAN) == MEAN:
        raise coupled(
            "it averages with class weights, and what the weights of a micro-batch add up to is not in the graph"
        )


_ELEMENTWISE = """mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy kl_div soft_margin_loss
    binary_cross_entropy_with_logits poisson_nll_loss hinge_embedding_loss margin_ranking_loss"""
_PER_ROW = "cosine_embedding_loss triplet_margin_loss multi_margin_loss multilabel_margin_loss"

TERM_RULES: dict[str, Rule] = {
    **dict.fromkeys(_ELEMENTWISE.split(), elementwise),
    **dict.fromkeys(_PER_ROW.split(), per_row),
    **dict.fromkeys(("cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d"), cross_entropy),
}
"""Op name -> rule.  Every rule may rely on: no operand is COUPLED or UNPROVEN."""
