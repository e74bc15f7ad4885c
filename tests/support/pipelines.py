"""Runs on every rank of a worker pool: a pipeline beside the plain model in one process, and how far they differ."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from autopart.capture import CaptureCache
from autopart.capture.batch import split_rows
from autopart.files.clusters import parse_cluster
from autopart.options import read_options
from autopart.session.pipe import Pipe
from support.models import CASES, Case

ROWS = 12
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
NEGLIGIBLE = {torch.float32: 1e-7, torch.float64: 1e-14}  # of the global norm: gradients that are zero in theory


@dataclass(frozen=True)
class Difference:
    """A pipeline against one process.  gradient: worst relative error of one parameter, named by worst."""

    loss: float
    gradient: float
    worst: str
    buffer: float
    parameters: int

    def within(self, dtype: torch.dtype = torch.float32) -> bool:
        tolerance = TOLERANCE[dtype]
        return abs(self.loss) <= tolerance and self.gradient <= tolerance and self.buffer <= tolerance


def gradient_error(
    found: Mapping[str, torch.Tensor | None],
    expected: Mapping[str, torch.Tensor | None],
    dtype: torch.dtype = torch.float32,
) -> tuple[float, str]:
    """Worst ‖g - ref‖ / ‖ref‖ over the parameters, and its name; 0 where the difference is negligible beside the
    gradient of the whole model.  A gradient on one side only is infinitely wrong, unless it is zero."""
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
        difference = (gradient.double() - reference.double()).norm().item()
        size = reference.double().norm().item()
        if difference <= NEGLIGIBLE[dtype] * whole:
            continue
        error = difference / size if size else float("inf")
        if not error <= worst:  # NaN is worst of all
            worst, name = error, key
    return worst, name


def gradients_of(model: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    return {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}


def plain_step(case: Case, model: torch.nn.Module, batch: Mapping[str, torch.Tensor], micros: int) -> torch.Tensor:
    """The oracle: the plain model on the whole batch, or for batch statistics over the same micro-batches in order."""
    if not case.coupled:
        loss = model(**batch).loss
        loss.backward()
        return loss.detach()
    rows = split_rows(len(batch["labels"]), micros)
    total = torch.zeros(())
    for piece, count in zip(torch.arange(sum(rows)).split(list(rows)), rows, strict=True):
        loss = model(**{k: v[piece] for k, v in batch.items()}).loss * (count / sum(rows))
        loss.backward()
        total = total + loss.detach()
    return total


@functools.cache
def _oracle(name: str, dtype: torch.dtype, rows: int, micros: int) -> tuple[float, Any, Any]:
    case = CASES[name]
    model = case.model(dtype=dtype)
    loss = plain_step(case, model, case.data(rows, dtype), micros)
    return loss.item(), gradients_of(model), {k: v.clone() for k, v in model.named_buffers()}


@functools.cache
def _capturer(name: str, dtype: torch.dtype) -> tuple[CaptureCache, dict[str, torch.Tensor]]:
    model = CASES[name].model(dtype=dtype)
    return CaptureCache(model), {k: v.clone() for k, v in model.state_dict().items()}


def compare(name: str, stages: int, schedule: str, micros: int, rows: int = ROWS, dtype_name: str = "float32") -> Any:
    """One training step of a zoo model through `stages` stages; rank 0 returns the difference."""
    torch.set_num_threads(1)
    dtype = getattr(torch, dtype_name)
    case = CASES[name]
    capturer, initial = _capturer(name, dtype)
    model = capturer.model
    model.load_state_dict(initial)
    model.zero_grad()
    batch = case.data(rows, dtype)
    options = read_options(stages=stages, schedule=schedule, micro_batches=micros, costs="analytic")
    world = int(os.environ.get("WORLD_SIZE", "1"))
    pipe = Pipe(capturer, parse_cluster(f"cpu:{world}"), options, batch)
    loss = pipe.step(batch)
    found, state = pipe.gradients(), pipe.state_dict()
    if pipe.rank != 0:
        return None
    assert len(pipe.plan.stages) == stages
    expected_loss, expected, buffers = _oracle(name, dtype, rows, micros if case.coupled else 1)
    error, worst = gradient_error(found, expected, dtype)
    off = [(state[k].double() - v.double()).abs().max().item() for k, v in buffers.items() if k in state]
    relative = (loss.item() - expected_loss) / abs(expected_loss)
    return Difference(relative, error, worst, max(off, default=0.0), len(found))
