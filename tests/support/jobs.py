"""Functions that end-to-end tests run on every rank of a worker pool; importable there by name."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import nn

import autopart
from autopart.capture.batch import split_rows
from support.peer_models import PEERS, tokens
from support.pipelines import Difference, gradient_error, gradients_of
from support.small_models import SMALL, Small

ALL = {**SMALL, **PEERS}


def cluster() -> str:
    """All ranks of the pool."""
    torch.set_num_threads(1)
    return f"cpu:{os.environ.get('WORLD_SIZE', '1')}"


def compiled(case: Small, model: nn.Module, sample: Any, **options: Any) -> autopart.Pipe:
    """A pipe over all ranks of the pool."""
    options = {"costs": "analytic", "loss_fn": case.loss_fn, **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", autopart.CaptureWarning)
        return autopart.compile(model, cluster(), sample=sample, **options)


# -- the oracle: plain torch in one process ----------------------------------------------------------------------


def plain_loss(case: Small, model: nn.Module, batch: Any) -> torch.Tensor:
    """What one process computes for a whole batch."""
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


def plain_step(case: Small, model: nn.Module, batch: Any, micros: int) -> torch.Tensor:
    """Loss and gradients of one process; for batch statistics over the same micro-batches in order."""
    if not case.coupled:
        loss = plain_loss(case, model, batch)
        if loss.requires_grad:
            loss.backward()
        return loss.detach()
    pieces = [case_rows(batch, a, b) for a, b in _ranges(rows_of(batch), micros)]
    total = torch.zeros(())
    for piece in pieces:
        loss = plain_loss(case, model, piece) * (rows_of(piece) / rows_of(batch))
        loss.backward()
        total = total + loss.detach()
    return total


def _ranges(rows: int, micros: int) -> list[tuple[int, int]]:
    ends = [0]
    for count in split_rows(rows, micros):
        ends.append(ends[-1] + count)
    return list(pairwise(ends))


def rows_of(batch: Any) -> int:
    return max(leaf.shape[0] for leaf in torch.utils._pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor))


def case_rows(batch: Any, start: int, end: int) -> Any:
    """Some rows of a batch."""
    return torch.utils._pytree.tree_map(lambda t: t[start:end] if isinstance(t, torch.Tensor) else t, batch)


def difference(
    pipe: autopart.Pipe, loss: torch.Tensor, expected_loss: torch.Tensor, reference: nn.Module
) -> Difference | None:
    """Loss, gradients and buffers of a pipe against the plain model; collective, told by rank 0."""
    found, state = pipe.gradients(), pipe.state_dict()
    if pipe.rank != 0:
        return None
    expected = gradients_of(reference)
    error, worst = gradient_error(found, expected)
    buffers = {k: v for k, v in reference.named_buffers() if k in state}
    off = [(state[k].double() - v.double()).abs().max().item() for k, v in buffers.items() if v.numel()]
    scale = abs(expected_loss.item()) or 1.0
    return Difference((loss - expected_loss).item() / scale, error, worst, max(off, default=0.0), len(found))


# -- jobs --------------------------------------------------------------------------------------------------------


def compare(name: str, stages: int | None, schedule: str, micros: int, rows: int, options: Any = None) -> Any:
    """One training step of a small model against one process.  Every rank returns its loss, rank 0 the difference."""
    case = ALL[name]
    model, reference, batch = case.model(), case.model(), case.batch(rows)
    pipe = compiled(case, model, batch, stages=stages, schedule=schedule, micro_batches=micros, **(options or {}))
    loss = pipe.step(batch)
    found = difference(pipe, loss, plain_step(case, reference, batch, micros), reference)
    return loss.item(), found, len(pipe.plan.stages)


def accumulate(name: str, stages: int, schedule: str, micros: int, sizes: list[int]) -> Any:
    """Steps of different sizes without zeroing in between: the sum of all gradients, and the last loss."""
    case = ALL[name]
    model, reference = case.model(), case.model()
    pipe = compiled(case, model, case.batch(sizes[0]), stages=stages, schedule=schedule, micro_batches=micros)
    for rows in sizes:
        loss = pipe.step(case.batch(rows))
        expected = plain_step(case, reference, case.batch(rows), micros)
    return difference(pipe, loss, expected, reference)


def lengths(stages: int, shapes: list[tuple[int, int]]) -> Any:
    """Steps of the tied language model with batches of these (rows, length), one difference each."""
    case = ALL["tied"]
    model, reference = case.model(), case.model()
    found = []
    pipe = None
    for rows, length in shapes:
        batch = tokens(rows, length)
        if pipe is None:
            pipe = compiled(case, model, batch, stages=stages, schedule="1f1b", micro_batches=2)
        for m in (model, reference):
            m.zero_grad()
        loss = pipe.step(batch)
        found.append(difference(pipe, loss, plain_step(case, reference, batch, 2), reference))
    return found


def warned(name: str) -> list[str]:
    """Warnings that compile gives."""
    case = ALL[name]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        autopart.compile(
            case.model(), cluster(), sample=case.batch(8), loss_fn=case.loss_fn, micro_batches=2, costs="analytic"
        )
    return [str(w.message) for w in seen if issubclass(w.category, autopart.CaptureWarning)]


def frozen_gradients(name: str) -> Any:
    """Names with a gradient after a step, and names that need one."""
    case = ALL[name]
    model = case.model()
    pipe = compiled(case, model, case.batch(8), micro_batches=2, stages=4)
    pipe.step(case.batch(8))
    held = {n: (p.requires_grad, p.grad is not None) for n, p in pipe.named_parameters()}
    return held, set(pipe.gradients())
