"""Token slices combined with every other option of a plan, on every rank of a worker pool."""

from __future__ import annotations

import functools
from typing import Any

import torch

from autopart.capture import CaptureCache
from support.jobs.step_jobs import compiled
from support.models.decoder import Shape, decoder
from support.oracles.one_process import Difference, Expected, difference, plain_step

DTYPE = torch.float64
PLAIN: dict[str, Any] = {"stages": 1, "replicas": 1}
"""Options that run everything on one device and leave the others idle."""


@functools.cache
def _captures(shape: Shape) -> tuple[CaptureCache, dict[str, torch.Tensor]]:
    model = decoder(shape).model(DTYPE)
    return CaptureCache(model), {name: value.clone() for name, value in model.state_dict().items()}


def _step(shape: Shape, rows: int, options: dict[str, Any]) -> tuple[Any, ...]:
    """Take one step and return loss, gradients, state, plan and whether this is rank 0."""
    captures, first = _captures(shape)
    captures.model.load_state_dict(first)
    captures.model.zero_grad()
    case = decoder(shape)
    batch = case.data(rows, DTYPE)
    with compiled(case, captures, batch, seed=5, **options) as pipe:
        loss = pipe.step(batch).item()
        return loss, pipe.gradients(), pipe.state_dict(), pipe.plan, pipe.rank == 0


def compare_with_whole(
    shape: Shape, rows: int, lengths: tuple[int, ...], options: dict[str, Any]
) -> tuple[float, Difference | None, Any]:
    """Compare a step in token slices with a step over whole sequences.

    The reference is one process, or with dropout a pipe on one device, which draws the same random numbers for the same
    number of micro-batches. Every rank returns its loss and the decision, rank 0 also the difference.
    """
    loss, found, state, plan, leads = _step(shape, rows, {**options, "token_slices": lengths})
    assert plan.decision.token_slices == lengths
    if shape.dropout:
        micros = {key: options[key] for key in ("micro_batches",) if key in options}
        whole, gradients, buffers, _, _ = _step(shape, rows, {**PLAIN, **micros})
        expected = Expected(whole, gradients, buffers)
    elif leads:
        case = decoder(shape)
        model = case.model(DTYPE)
        expected = Expected.of(plain_step(case, model, case.data(rows, DTYPE), 1), model)
    return loss, difference(loss, found, state, expected, DTYPE) if leads else None, plan.decision
