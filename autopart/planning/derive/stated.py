"""A numeric test of the user's statement about an opaque loss: how the losses of parts combine to the whole loss.

The captured program runs on all rows and on disjoint parts of them; losses and gradients of the parts, weighted as
stated, must equal those of the whole.  Tried on the user's rows and weights, then on random rows drawn from them with
random weights, in which no gate is closed.  Gradients are
compared for an incoming gradient of 1 and of 0.  The second reveals a backward that does not scale the incoming
gradient (RWKV's L2Wrap), however small its part is.

Assumes that a false statement is false for this data too.  Dropout is off.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from autopart.batch.batch import Batch
from autopart.capture.capture import Captured
from autopart.ir.graph import LossReduction
from autopart.planning.derive.probe import TOLERANCE, gradients, near, run
from autopart.planning.derive.trial_data import Weights, data_of_turn, rows_of, weights_of_turn

_TURNS = 4
"""Batches that are tried; the first has the user's rows."""
_LEAST_TOLD = 2


def refuted(small: Captured, large: Captured, reduction: LossReduction, batch: Batch) -> str:
    """Return why the losses of parts do not combine to the whole loss as `reduction` says; "" if they do.

    small, large: one model captured at two numbers of rows, the larger a multiple of the smaller.  Only "sum", "rows"
    and counts of elements that are not ignored can be tried.  Cost: a few forward and backward passes.
    """
    told = 0
    for turn in range(_TURNS):
        data = data_of_turn(large, batch, turn)
        try:
            why = _difference(small, large, reduction, data, weights_of_turn(large, turn))
        except (RuntimeError, IndexError) as error:  # random numbers may be out of the range that an op takes
            why = None if turn else f"it cannot be tried: {(str(error) or type(error).__name__).splitlines()[0]}"
        if why:
            return why
        told += why is not None
    return "" if told >= _LEAST_TOLD else "it cannot be tried: on rows like these the loss is no finite number"


def _difference(
    small: Captured, large: Captured, reduction: LossReduction, batch: Batch, weights: Weights
) -> str | None:
    """Return what differs between the whole and its parts; "" if nothing, None if this data cannot show it."""
    rows, part = large.graph.rows, small.graph.rows

    def ran(captured: Captured, place: int) -> tuple[torch.Tensor, float]:
        size = captured.graph.rows
        with torch.enable_grad():
            asked = {captured.graph.outputs[0], *reduction.counted()}
            found = run(captured, rows_of(batch, place, size), asked, weights)
        weight = float(size)
        if reduction.value is not None and reduction.ignore is not None:
            weight = float(found[reduction.value].ne(reduction.ignore).sum())
        return found[captured.graph.outputs[0]], weight

    try:
        loss, total = ran(large, 0)
        known = [(piece, weight) for piece, weight in (ran(small, at) for at in range(0, rows, part)) if weight]
    except KeyError:  # random numbers that cannot be taken out
        return None
    if not bool(torch.isfinite(loss)) or not total:
        return None
    shown = reduction.value is None or total != math.prod(large.graph.value_map()[reduction.value].shape)
    if not shown and (reduction.ignore or 0) >= 0:
        return f"no element of {reduction.value} is {reduction.ignore}"
    shares = [1.0 if reduction.kind == "sum" else weight / total for _, weight in known]
    sums = torch.stack([piece.detach().double() * share for (piece, _), share in zip(known, shares, strict=True)])
    size = max(float(loss.detach().double().abs()), float(sums.abs().sum()))
    if not float((sums.sum() - loss.detach().double()).abs()) <= 4 * TOLERANCE.get(loss.dtype, 3e-2) * size:
        return f"the loss of {rows} rows is {loss.item():.6g}, its parts of {part} rows make {sums.sum():.6g}"
    return _gradient_difference(small, large, (loss, [piece for piece, _ in known]), shares, weights)


def _gradient_difference(
    small: Captured,
    large: Captured,
    losses: tuple[torch.Tensor, Sequence[torch.Tensor]],
    shares: Sequence[float],
    weights: Weights,
) -> str:
    loss, pieces = losses
    names = [name for name, tensor in large.tensors.items() if tensor.requires_grad]
    for seed in (0.0, 1.0):
        whole = _gradients(large, names, loss, seed, weights)
        total = [torch.zeros_like(g) for g in whole]
        for piece, share in zip(pieces, shares, strict=True):
            parts = _gradients(small, names, piece, seed * share, weights)
            total = [t + g for t, g in zip(total, parts, strict=True)]
        for name, found, expected in zip(names, total, whole, strict=True):
            if seed == 0 and not (found.any() or expected.any()):
                continue
            if not near(found, expected, whole if seed else [expected]):
                unscaled = ": a backward in it is not scaled by the gradient that comes in" if seed == 0 else ""
                return f"the gradients of parts do not add up to the gradient of the whole ({name}){unscaled}"
    return ""


def _gradients(
    captured: Captured, names: Sequence[str], loss: torch.Tensor, seed: float, weights: Weights
) -> list[torch.Tensor]:
    return [g.nan_to_num() for g in gradients(captured, names, [loss], [torch.full_like(loss, seed)], weights)]
