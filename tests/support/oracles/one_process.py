"""The reference of every run over stages: a step of torch in one process, and the difference of a run from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autopart.batch.batch import split_rows
from support.models.small_models import Small
from support.models.zoo import Case

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
NEGLIGIBLE = {torch.float32: 1e-7, torch.float64: 1e-14}  # relative to the global norm: rounding of zero gradients


# -- one step in one process ---------------------------------------------------------------------------------------


def plain_loss(case: Small | Case, model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the loss of the whole batch in one process."""
    target = None
    if case.loss_fn is not None:
        batch, target = batch
    if isinstance(batch, Mapping):
        result = model(**batch)
    else:
        result = model(*batch) if isinstance(batch, tuple) else model(batch)
    if case.loss_fn is not None:
        return case.loss_fn(result, target)
    if isinstance(result, Mapping):
        return result["loss"]
    return result[0] if isinstance(result, tuple) else result


def plain_step(case: Small | Case, model: nn.Module, batch: Any, micros: int) -> torch.Tensor:
    """Compute loss and gradients in one process, over the same micro-batches in order for batch statistics."""
    if not case.coupled:
        loss = plain_loss(case, model, batch)
        if loss.requires_grad:
            loss.backward()
        return loss.detach()
    pieces = [case_rows(batch, a, b) for a, b in _ranges(rows_of(batch), micros)]
    total, again = torch.zeros(()), counters_of(model)
    for piece in pieces:
        again()
        loss = plain_loss(case, model, piece) * (rows_of(piece) / rows_of(batch))
        loss.backward()
        total = total + loss.detach()
    return total


def counters_of(model: nn.Module) -> Callable[[], None]:
    """Return what sets the counters of a model to their present values: a step counts once, not each micro-batch."""
    counters = [(b, b.clone()) for name, b in model.named_buffers() if name.endswith(("tracked", "count"))]

    def again() -> None:
        for counter, value in counters:
            counter.copy_(value)

    return again


def _ranges(rows: int, micros: int) -> list[tuple[int, int]]:
    ends = [0]
    for count in split_rows(rows, micros):
        ends.append(ends[-1] + count)
    return list(pairwise(ends))


def rows_of(batch: Any) -> int:
    """Return the rows of a batch: the longest first axis of its tensors."""
    return max(leaf.shape[0] for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor))


def case_rows(batch: Any, start: int, end: int) -> Any:
    """Return some rows of a batch."""
    return pytree.tree_map(lambda t: t[start:end] if isinstance(t, torch.Tensor) else t, batch)


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return a copy of every trainable parameter's gradient."""
    return {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}


# -- differences -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """The difference of a pipeline from one process.

    gradient: largest relative error of a parameter's gradient; worst: its name.
    """

    loss: float
    gradient: float
    worst: str
    buffer: float
    parameters: int

    def within(self, dtype: torch.dtype = torch.float32) -> bool:
        """Return whether all differences are within the rounding tolerance."""
        tolerance = TOLERANCE[dtype]
        return abs(self.loss) <= tolerance and self.gradient <= tolerance and self.buffer <= tolerance


@dataclass(frozen=True)
class Expected:
    """The results of one process: loss, gradients, and buffers after the step."""

    loss: float
    gradients: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor]

    @staticmethod
    def of(loss: torch.Tensor, model: nn.Module) -> Expected:
        """Return the results of a model after a step."""
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        return Expected(loss.item(), gradients_of(model), buffers)


def difference(
    loss: float,
    gradients: Mapping[str, torch.Tensor | None],
    state: Mapping[str, torch.Tensor],
    expected: Expected,
    dtype: torch.dtype = torch.float32,
) -> Difference:
    """Return the difference of loss, gradients and buffers from one process."""
    error, worst = gradient_error(gradients, expected.gradients, dtype)
    buffers = {k: v for k, v in expected.buffers.items() if k in state and v.numel()}
    off = [(state[k].double() - v.double()).abs().max().item() for k, v in buffers.items()]
    scale = abs(expected.loss) or 1.0
    return Difference((loss - expected.loss) / scale, error, worst, max(off, default=0.0), len(gradients))


def gradient_error(
    found: Mapping[str, torch.Tensor | None],
    expected: Mapping[str, torch.Tensor | None],
    dtype: torch.dtype = torch.float32,
) -> tuple[float, str]:
    """Return the largest ‖g - ref‖ / ‖ref‖ of a parameter and its name.

    Differences that are negligible relative to the gradient of the whole model count as 0. A gradient on one side only
    is infinitely wrong unless it is zero.
    """
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    norms = [g.double().norm() for g in expected.values() if g is not None]
    whole = torch.stack(norms).norm().item() if norms else 0.0
    worst, name = 0.0, ""
    for key, reference in expected.items():
        gradient = found[key]
        if gradient is None and reference is None:
            continue
        gradient = torch.zeros_like(reference) if gradient is None else gradient
        reference = torch.zeros_like(gradient) if reference is None else reference
        error = (gradient.double() - reference.double()).norm().item()
        size = reference.double().norm().item()
        if error <= NEGLIGIBLE[dtype] * whole:
            continue
        error = error / size if size else float("inf")
        if not error <= worst:  # NaN counts as worst
            worst, name = error, key
    return worst, name
